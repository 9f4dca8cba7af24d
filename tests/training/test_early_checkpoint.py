"""A checkpoint of an earlier version can be restored and trained further.

early_run.tar.xz has the checkpoint of two updates that revision 038f142 made with the options in its config.json. Only
the text of commit_success.txt was changed, because it named a folder. Orbax checks that this file exists.
"""

import dataclasses
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, abstract_state
from branchnorm_jax.training.step import make_train_step


def test_checkpoint_of_an_earlier_version_is_restored_and_trained_further(tmp_path: Path) -> None:
    """The next update, without dropout, has the loss and norms that revision 038f142 computed for it."""
    with tarfile.open(Path(__file__).parent / "early_run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    config = configs.load(tmp_path / "config.json")
    assert config.model.alpha_order == "equal"
    assert config.plan.compile == "here"
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    model, optimizer = Transformer(config.model, 270, 270), make_optimizer(config.train)
    abstract = abstract_state(model, optimizer, make_mesh(config.parallel))
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.train, pytest.fail, read_only=True)

    restored = checkpoints.restore_latest(abstract)
    assert restored is not None
    state, memory = restored
    assert (int(state.step), int(state.clock), int(state.hold_steps), int(state.running_stats.seen)) == (2, 2, 0, 2)
    assert LoopState(**memory).target_tokens == 850
    params, alpha, step = checkpoints.restore_params("best", abstract.params)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    assert (float(alpha["encoder"][0]), float(alpha["decoder"][0]), step) == (0.5, 0.5, 2)

    batch = Batch(jnp.array([[5, 6, 7, 8, 1], [9, 4, 1, 0, 0]]), jnp.array([[8, 7, 6, 5, 1], [4, 9, 1, 0, 0]]))
    _, metrics = jax.jit(make_train_step(model, optimizer, config))(state, batch)
    numbers = [float(value) for value in (metrics.loss, metrics.grad_norm, metrics.update_norm, metrics.alpha)]
    np.testing.assert_allclose(numbers, [6.4209385, 1.5044979, 0.059239674, 0.5], rtol=1e-5)
