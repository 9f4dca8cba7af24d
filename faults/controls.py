"""Negative controls: a restore that forgets a part of the state must be noticed by the comparison of kills.py."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.data.batches import BatchPlan
from branchnorm_jax.training import checkpoint, step
from branchnorm_jax.training.state import TrainState
from faults.kills import TRAINED, digest
from faults.processes import TINY, run
from faults.trial import Family, Outcome, Trial

OPTIONS = (
    *TINY,
    "--config.model.dropout=0.1",
    "--config.model.alpha_steps=40",  # alpha still grows when the run is interrupted
    "--config.train.ema_decay=0.9",
    "--config.train.decay_steps=30",  # by default the length of the run, which trials shorten
)


def forget(**changes: Callable[[TrainState], Any]) -> Callable[[], None]:
    """Returns a function that makes this process restore other values of some fields of the state."""

    def install() -> None:
        join: Any = checkpoint._joined

        def broken(restored: Any, abstract: TrainState) -> TrainState:
            state = join(restored, abstract)
            return state.replace(**{name: change(state) for name, change in changes.items()})

        vars(checkpoint)["_joined"] = broken

    return install


def zeros(tree: Any) -> Any:
    """Returns a tree of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)


def shift_batches() -> None:
    """Makes this process train on each update's successor's batch."""
    batch_at: Any = BatchPlan.batch_at
    vars_of: Any = BatchPlan
    vars_of.batch_at = lambda plan, number, *rest, **kwargs: batch_at(plan, number + 1, *rest, **kwargs)


def other_dropout() -> None:
    """Makes this process draw other dropout masks."""
    vars(step)["DROPOUT_STREAM"] = step.DROPOUT_STREAM + 100


BROKEN: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "the optimiser's state": forget(opt_state=lambda state: zeros(state.opt_state)),
    "the clock of alpha": forget(clock=lambda state: state.clock - 1),
    "the moving average": forget(ema=lambda state: jax.tree.map(jnp.copy, state.params)),
    "the parameters": forget(params=lambda state: jax.tree.map(jnp.copy, state.ema)),
    "the place in the text": shift_batches,
    "the dropout masks": other_dropout,
}
"""What a broken restore forgets, and the function that breaks it."""


def break_restore(name: str) -> None:
    """Breaks the restore of this process."""
    BROKEN[name]()


def prepare(shared: Path, seconds: float) -> Trial:
    """Makes the undisturbed run."""
    cache, undisturbed = shared / "compiled", shared / "undisturbed"
    done = run([*OPTIONS, f"--workdir={undisturbed}"], cache)
    if done.code:
        raise RuntimeError(done.error)
    expected = digest(undisturbed, TRAINED)

    def trial(rng: random.Random, folder: Path) -> Outcome:
        name, at = rng.choice(list(BROKEN)), rng.choice((7, 12, 18, 23))
        workdir = folder / "run"
        stopped = run([*OPTIONS, f"--config.train.steps={at}", f"--workdir={workdir}"], cache)
        done = run([*OPTIONS, f"--workdir={workdir}"], cache, prepared=functools.partial(break_restore, name))
        wrong = stopped.fault or done.fault
        noticed = digest(workdir, TRAINED) != expected
        if not wrong and noticed == (name == "nothing"):
            wrong = "the results differ" if noticed else "the comparison did not notice it"
        said = "noticed" if noticed else ""
        return Outcome(f"a restore that forgets {name}", f"update {at}", said, done.code, wrong=wrong)

    return trial


FAMILY = Family(
    "Negative controls",
    "A run is stopped and started again by a process whose restore is broken. The comparison that the trials with "
    "signals, file calls, damaged files, broken updates and long runs use must notice each of them, and must find no "
    "difference if nothing is broken.",
    prepare,
    20,
)
