"""Records of a run: metrics, layer statistics, validations, events, status.json and the progress line.

This module only writes. It makes no decisions about the run.
"""

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax

from branchnorm_jax.errors import StorageError
from branchnorm_jax.files import write_atomically
from branchnorm_jax.parallel import hosts
from branchnorm_jax.training import logs
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.training.step import Metrics
from branchnorm_jax.workdir import Workdir


class Recorder:
    """Writes the logs of a run from a given step: metrics, layers, validations, TensorBoard and the progress line.

    Of several processes only the first writes.
    """

    def __init__(self, workdir: Workdir, evaluated: int, start: int, total: int, resumed: bool) -> None:
        """Opens the files and drops their lines from step `start` on, because the run repeats those updates.

        Args:
          workdir: the folder of the run.
          evaluated: step of the last validation.
          start: first step of the run, also after a restart or a rollback.
          total: number of updates of the whole run.
          resumed: whether to report the updates that are repeated. A rollback has a message of its own.
        """
        self.workdir = workdir
        self.bar = logs.progress_bar(total, start, "update", "train")
        self.open_files: list[Any] = []
        if hosts.is_first():
            self.metrics = logs.JsonLines(workdir / "metrics.jsonl", start)
            self.layers = logs.JsonLines(workdir / "layers.jsonl", start)
            self.validations = logs.JsonLines(workdir / "validation.jsonl", evaluated + 1)
            self.tensorboard = logs.TensorBoard(workdir / "tensorboard", max(start, evaluated + 1))
            if resumed and (last := self.metrics.end - 1) >= start:
                logs.say(
                    f"step {start}: repeating updates {start} to {last}, which are in the logs and in no checkpoint"
                )
            self.open_files = [self.metrics, self.layers, self.validations, self.tensorboard]
        self.recent: deque[tuple[int, float]] = deque(maxlen=20)
        self.last = time.perf_counter()

    def restart_clock(self) -> None:
        """Excludes the time since the last update from the duration of the next update."""
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last update and restarts the clock."""
        seconds = time.perf_counter() - self.last
        self.restart_clock()
        return seconds

    def log_update(self, step: int, metrics: Metrics, batch: str, seconds: float) -> None:
        """Writes the metrics of an update to metrics.jsonl and TensorBoard. `metrics` has Python numbers."""
        if not self.open_files:
            return
        scalars = metrics._asdict()
        del scalars["layers"]
        line = {"step": step, **scalars, "seconds": seconds, "batch": batch}
        line["target_tokens"] = int(metrics.target_tokens)
        self.metrics.write(line)
        self.tensorboard.write(step, scalars)

    def log_layers(self, step: int, layers: Mapping[str, Any]) -> None:
        """Writes the layer statistics of an update to layers.jsonl."""
        if self.open_files:
            self.layers.write({"step": step, **jax.tree.map(to_json_numbers, layers)})

    def log_validation(self, line: Mapping[str, Any], best: bool) -> None:
        """Writes the results of a validation. The key "pairs" of `line` has the results of each language pair."""
        if self.open_files:
            self._write_validation(line, best)
            try:
                self.workdir.publish()
            except StorageError as error:
                logs.say(f"{error}; the next checkpoint tries again")
        self.restart_clock()

    def _write_validation(self, line: Mapping[str, Any], best: bool) -> None:
        step, pairs = int(line["step"]), line.get("pairs", {})
        self.validations.write(line)
        overall = {name: value for name, value in line.items() if name not in ("step", "pairs")}
        for prefix, values in {"": overall, **{f"{pair}/": values for pair, values in pairs.items()}}.items():
            self.tensorboard.write(step, {f"valid/{prefix}{name}": value for name, value in values.items()})
            text = " ".join(f"{prefix}{name} {value:z.3f}" for name, value in values.items())
            logs.say(f"step {step}: validation {text}" + (" (best)" if best and not prefix else ""))

    def show_progress(self, metrics: Metrics, seconds: float) -> None:
        """Advances the progress line by one update. `metrics` has Python numbers."""
        self.recent.append((int(metrics.target_tokens), seconds))
        rate = sum(tokens for tokens, _ in self.recent) / sum(seconds for _, seconds in self.recent)
        self.bar.set_postfix_str(
            f"loss {metrics.loss:.3f} lr {metrics.learning_rate:.2e} alpha {metrics.alpha:.3f} {rate:,.0f} tok/s",
            refresh=False,
        )
        self.bar.update()

    def show_left_out(self) -> None:
        """Advances the progress line by an update that the run leaves out."""
        self.bar.update()

    def close(self) -> None:
        """Ends the progress line and closes the files."""
        for log in (self.bar, *self.open_files):
            log.close()


def write_event(workdir: Workdir, step: int, kind: str, what: str, **more: Any) -> None:
    """Appends a line to events.jsonl.

    Events are in chronological order. A rollback does not remove events.
    """
    if not hosts.is_first():
        return
    with contextlib.closing(logs.JsonLines(workdir / "events.jsonl", sys.maxsize)) as events:
        events.write({"step": step, "kind": kind, "what": what, **more})


def write_status(workdir: Workdir, fields: Mapping[str, Any], loop_state: LoopState) -> None:
    """Writes status.json: `fields` (how the run ended), then its costs and its environment."""
    if not hosts.is_first():
        return
    seconds = loop_state.train_seconds
    costs = {
        "compile_seconds": loop_state.compile_seconds,
        "compiled_shapes": loop_state.compiled_shapes,
        "skipped_updates": loop_state.skipped,
        "spikes": loop_state.spikes,
        "rollbacks": loop_state.rollbacks,
        "failed_saves": loop_state.failed_saves,
        "left_out": loop_state.left_out,
        "vanishing": loop_state.vanishing,
        "collapsed": loop_state.collapsed,
        "train_seconds": seconds,
        "target_tokens_per_second": loop_state.target_tokens / seconds if seconds else 0.0,
        "peak_memory_bytes": logs.peak_memory_bytes(),
    }
    content = {**fields, **costs, **logs.environment()}
    write_atomically(workdir / "status.json", json.dumps(content, indent=2) + "\n")
    workdir.publish()


def to_json_numbers(values: jax.Array) -> list[float | None]:
    """Rounds each value to four significant digits; None if it is not finite.

    Four digits are enough for plots and halve the size of the file.
    """
    return [float(f"{value:.3e}") if math.isfinite(value) else None for value in values]
