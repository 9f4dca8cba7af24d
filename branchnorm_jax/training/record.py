"""What is written down while a run goes on: figures, events, progress; and what it remembers of itself."""

import contextlib
import dataclasses
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax

from branchnorm_jax.data.batches import TextBatch
from branchnorm_jax.errors import DivergedError
from branchnorm_jax.options import TrainConfig
from branchnorm_jax.training import logs
from branchnorm_jax.training.step import Metrics
from branchnorm_jax.training.watch import check_skipped, largest_update, origin, trouble, vanishing
from branchnorm_jax.workdir import Workdir

OF_THE_PROCESS = (
    *("train_seconds", "target_tokens", "compile_seconds", "compiled_shapes"),
    *("skipped", "spikes", "rollbacks", "left_out"),
)
"""What a rollback does not take back: fields of `Memory`."""


@dataclasses.dataclass
class Memory:
    """What the loop remembers between runs, beside the train state: saved in every checkpoint."""

    train_seconds: float = 0.0
    target_tokens: int = 0
    evaluated: int = -1
    """Step of the last validation."""
    score: float | None = None
    """Its score, more is better."""
    best_score: float | None = None
    since_best: int = 0
    """Validations since the best one."""
    compile_seconds: float = 0.0
    """Of the last process that compiled the update: trace, lower and compile, all shapes."""
    compiled_shapes: int = 0
    recent_scores: list[float] = dataclasses.field(default_factory=list)
    """Of the last validations, oldest first: what `val_decay` looks at."""
    skipped: int = 0
    """Updates that changed nothing because of their figures (`train.nonfinite=skip`, `train.spike=skip`); those that a
    rollback repeated count again."""
    skipped_in_a_row: int = 0
    spikes: int = 0
    rollbacks: int = 0
    troubled: int = -1
    """The update that the last rollback was for."""
    left_out: list[list[int]] = dataclasses.field(default_factory=list)
    """First and last of the updates that change nothing, because a rollback found their batches to blame."""
    vanishing: str = ""
    """Where the gradient vanished when `train.watch_every` last looked, as words."""


class Recorder:
    """The logs of a run from one step on: metrics, layers, validations, TensorBoard and the progress line."""

    def __init__(self, train: TrainConfig, workdir: Workdir, memory: Memory, start: int, total: int) -> None:
        """Opens the files; their lines of `start` and later are dropped, for those updates will be made again.

        Args:
          train: says what is logged how often, and what is done about trouble.
          workdir: where.
          memory: is kept up to date.
          start: step that the run begins with, or begins with again.
          total: step that it ends before.
        """
        self.train, self.workdir, self.memory, self.total = train, workdir, memory, total
        self.metrics = logs.JsonLines(workdir / "metrics.jsonl", start)
        self.layers = logs.JsonLines(workdir / "layers.jsonl", start)
        self.validations = logs.JsonLines(workdir / "validation.jsonl", memory.evaluated + 1)
        self.tensorboard = logs.TensorBoard(workdir / "tensorboard", start)
        self.bar = logs.progress_bar(total, start, "update", "train")
        self.recent: deque[tuple[int, float]] = deque(maxlen=20)
        self.restart_clock()

    def restart_clock(self) -> None:
        """What passed since the last update is not the next one's time."""
        self.last = time.perf_counter()

    def update(self, step: int, metrics: Metrics, batch: TextBatch) -> None:
        """Waits for an update's figures, writes them down, and sees whether they mean trouble.

        Raises:
          DivergedError: if so, and the run must not go on as if nothing had been.
        """
        c, memory = self.train, self.memory
        layers = metrics.layers
        metrics = jax.tree.map(float, jax.device_get(metrics._replace(layers={})))
        seconds = time.perf_counter() - self.last
        self.restart_clock()
        memory.train_seconds += seconds
        memory.target_tokens += int(metrics.target_tokens)
        self.recent.append((int(metrics.target_tokens), seconds))
        kind, what = trouble(metrics, c.spike_deviations)
        last = step == self.total - 1 or bool(kind)
        if c.log_every and (step % c.log_every == 0 or last):
            scalars = metrics._asdict()
            del scalars["layers"]
            line = {"step": step, **scalars, "seconds": seconds, "batch": batch.digest()}
            line["target_tokens"] = int(metrics.target_tokens)
            self.metrics.write(line)
            self.tensorboard.write(step, scalars)
        if c.watch_every and (step % c.watch_every == 0 or last):
            layers = jax.device_get(layers)
            self.layers.write({"step": step, **jax.tree.map(rounded, layers)})
            alpha = {stack: found.get("alpha", 1.0) for stack, found in layers.items()}
            where = vanishing({stack: found["gradient"] for stack, found in layers.items()}, alpha)
            if where and not memory.vanishing:
                logs.say(f"step {step}: the gradient vanishes in {where}: they learn next to nothing")
            memory.vanishing = where
        policy = getattr(c, kind) if kind else ""
        skipped = policy == "skip"
        memory.spikes += kind == "spike"
        memory.skipped += skipped
        memory.skipped_in_a_row = memory.skipped_in_a_row + 1 if skipped else 0
        if kind:
            what += origin(layers) or largest_update(layers)
            if policy in ("stop", "rollback"):
                raise DivergedError(f"at step {step} {what}", step, kind)
            note(self.workdir, step, kind, what, policy=policy)
            logs.say(f"step {step}: {what}" + (": update skipped" if skipped else ""))
        check_skipped(step, memory.skipped_in_a_row, layers)
        rate = sum(tokens for tokens, _ in self.recent) / sum(seconds for _, seconds in self.recent)
        self.bar.set_postfix_str(
            f"loss {metrics.loss:.3f} lr {metrics.learning_rate:.2e} alpha {metrics.alpha:.3f} {rate:,.0f} tok/s",
            refresh=False,
        )
        self.bar.update()

    def left_out(self) -> None:
        """An update that was not made."""
        self.bar.update()

    def validation(self, line: Mapping[str, Any], best: bool) -> None:
        """Figures of a validation, and under "pairs" those of each pair of languages."""
        step, pairs = int(line["step"]), line.get("pairs", {})
        self.validations.write(line)
        figures = {name: value for name, value in line.items() if name not in ("step", "pairs")}
        for pair, found in {"": figures, **{f"{pair}/": found for pair, found in pairs.items()}}.items():
            self.tensorboard.write(step, {f"valid/{pair}{name}": value for name, value in found.items()})
            text = " ".join(f"{pair}{name} {value:.3f}" for name, value in found.items())
            logs.say(f"step {step}: validation {text}" + (" (best)" if best and not pair else ""))
        self.restart_clock()

    def close(self) -> None:
        """Ends the progress line and closes the files."""
        for log in (self.bar, self.metrics, self.layers, self.validations, self.tensorboard):
            log.close()


def note(workdir: Workdir, step: int, kind: str, what: str, **more: Any) -> None:
    """A line in `events.jsonl`, in the order of time; nothing is ever taken back."""
    with contextlib.closing(logs.JsonLines(workdir / "events.jsonl", sys.maxsize)) as events:
        events.write({"step": step, "kind": kind, "what": what, **more})


def rounded(values: jax.Array) -> list[float | None]:
    """For JSON: four digits, more than a picture shows and half the file; null for what is not finite."""
    return [float(f"{value:.3e}") if math.isfinite(value) else None for value in values]
