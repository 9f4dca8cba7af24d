"""--mode=average: averages the parameters of several checkpoints."""

from typing import Any

import jax
import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.options import Config
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir


def average(config: Config, workdir: Workdir) -> None:
    """Writes the mean of the parameters of several checkpoints, computed in float64, to <workdir>/average.

    `decode.checkpoint=average` selects the result. BranchNorm's alpha is averaged in the same way.
    """
    workdir.check_config(config)
    workdir.fetch("average")  # In a bucket, the files of an earlier average would otherwise remain.
    _, model = network(config, workdir)
    checkpoints = Checkpoints(workdir.stored("checkpoints"), config.train, logs.say, read_only=True)
    steps = checkpoints.several(config.average.checkpoints)
    total: Any = None
    for step in steps:
        try:
            restored = restore_model(config, workdir, model, str(step))[:2]
        except UserError as error:
            if step in checkpoints.steps():
                raise
            raise UserError(
                f"{workdir.path}: the run that trains here deleted checkpoint {step} before it was read; average "
                "again, or raise train.keep_last"
            ) from error
        weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), restored)
        total = weights if total is None else jax.tree.map(np.add, total, weights)
    params, alpha = jax.tree.map(lambda leaf: np.asarray(leaf / len(steps), np.float32), total)
    with atomic_directory(workdir / "average") as folder:
        Checkpoints(folder, config.train, logs.say).save_params(steps[-1], params, alpha, {"averaged": steps})
    logs.say(
        f"averaged the checkpoints {', '.join(map(str, steps))}; --config.decode.checkpoint=average selects the average"
    )
    print(workdir / "average")
