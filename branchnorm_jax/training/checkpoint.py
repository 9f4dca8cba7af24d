"""Asynchronous, atomic checkpoints with checksums.

Orbax writes the files. This module defines the contents of a checkpoint and decides which checkpoints are intact.

A checkpoint of step t has three items:

- params: the parameters for evaluation (the moving average if the run keeps one);
- training: the rest of the train state;
- memory: JSON with the checksums of the other two items, the loop state, alpha, and a checksum of these.

A checkpoint with a wrong checksum is never restored. The checksums are necessary because Orbax does not detect flipped
bits.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import logging
import math
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from branchnorm_jax.errors import StorageError, UserError, one_line
from branchnorm_jax.files import json_checksum
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.model.stack import depth_of
from branchnorm_jax.options import TrainConfig
from branchnorm_jax.parallel import hosts
from branchnorm_jax.training.digests import checksums
from branchnorm_jax.training.state import TrainState

NAMES_ON_DISK = {"hold_steps": "held", "running_stats": "usual"}
"""Fields of `TrainState` that have another name in checkpoints, so that older checkpoints can be restored."""

CONTENTS = {"params": "parameters", "training": "optimiser state"}
"""Items with checksums, and what messages call them."""

_PASSING = """
    EIO EACCES EPERM ESTALE ETIMEDOUT EMFILE ENFILE ENOMEM ENOTCONN EHOSTDOWN EHOSTUNREACH ENETUNREACH
"""
_UNREACHABLE = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED"
    "|^(Permission|Connection|Timeout)"
    rf"|\[(?:OS error |Errno |os_error_code=')(?:{'|'.join(str(getattr(errno, name)) for name in _PASSING.split())})\b"
)
"""Errors of a file system, a network or a lack of memory, which say nothing about the content of a checkpoint.

They are the status codes of the storage library and of the operating system. Further ones are in `_OF_PROCESS`.
"""

_OF_PROCESS = (MemoryError, RuntimeError)
"""Errors of the process that reads, such as "can't start new thread". Damage raises other ones."""

LATE = 60.0
"""Seconds within which a shared folder must show the checkpoints that process 0 sees."""

T = TypeVar("T")

SavedLoopState = dict[str, Any]
"""`LoopState` as JSON."""


class _Manager(ocp.CheckpointManager):
    """A manager for which a checkpoint whose score is damaged has none."""

    def __init__(self, *arguments: Any, warn: Callable[[str], None], **options: Any) -> None:
        self._damaged = set[int]()
        self._warn = warn
        super().__init__(*arguments, **options)

    def metrics(self, step: int) -> dict[str, Any] | None:
        """Returns the score of a checkpoint and its checksum, which old checkpoints lack, or None without a score."""
        try:
            found = super().metrics(step)
            if found is None or found.items() <= _metrics(found["score"], found.get("later")).items():
                return found
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        if step not in self._damaged:
            self._damaged.add(step)
            self._warn(f"checkpoint {step} in {self.directory}: its score is damaged and is ignored")
        return None


def _metrics(score: float, later: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns what a checkpoint says about its validation.

    Args:
      score: the validation score.
      later: what the validation changed, if it was made after the checkpoint was saved: the loop state and the factor
        of the learning rate.
    """
    if later is None:
        return {"score": score, "sum": json_checksum(float(score))}
    return {"score": score, "later": later, "sum": json_checksum([float(score), later])}


def _patiently(read: Callable[[], T]) -> T:
    """Calls `read`, which lists the checkpoints, and repeats it for up to 2 s while a run deletes some of them."""
    for _ in range(20):
        try:
            return read()
        except FileNotFoundError:
            time.sleep(0.1)
    return read()


def _of_all(fault: str) -> str:
    """Returns the first fault that a process of the run has found, or "". All processes must call it."""
    return next(filter(None, hosts.gather(fault)), "")


@dataclasses.dataclass
class _LatestRegular:
    """Keeps the `n` newest checkpoints at multiples of `every`, for rollbacks.

    Best validations also save checkpoints, at other steps, so the newest ones may all be too new.
    """

    n: int
    every: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns for each checkpoint, oldest first, whether to keep it."""
        del context
        kept = [checkpoint.step for checkpoint in checkpoints if checkpoint.step % self.every == 0][-self.n :]
        return [checkpoint.step in kept for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of one workdir."""

    def __init__(
        self, directory: epath.PathLike, train: TrainConfig, warn: Callable[[str], None], *, read_only: bool = False
    ) -> None:
        """Opens `directory`.

        Args:
          directory: the folder of the checkpoints.
          train: the options of checkpoints and rollbacks.
          warn: receives one line for each checkpoint that cannot be used.
          read_only: False only for the training process that holds the lock of the workdir. That process creates the
            folder and deletes temporary directories in it.
        """
        _mute_storage_library()
        folder = epath.Path(directory)
        self._directory = folder if folder.is_absolute() else folder.absolute()  # A URL is absolute.
        self._warn: Callable[[str], None] = lambda line: warn(one_line(line))
        self._read_only = read_only
        self._failed = False  # Whether a save has failed.
        keep: list[preservation_policy.PreservationPolicy] = [preservation_policy.LatestN(train.keep_last)]
        if train.may_roll_back and train.rollback == "batches":
            keep.append(_LatestRegular(train.keep_last, train.checkpoint_every))
        if train.keep_best:
            keep.append(
                preservation_policy.BestN(
                    get_metric_fn=lambda metrics: metrics["score"],
                    n=train.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(keep),
            best_fn=lambda metrics: metrics["score"],  # Without `best_fn` Orbax writes no metrics.
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
        )
        names = ("params", "training", "memory")
        self._manager = _patiently(
            lambda: _Manager(self._directory, options=options, item_names=names, warn=self._warn)
        )

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, oldest first.

        If other processes may save and delete checkpoints, the steps are those on disk now.
        """
        if self._read_only:
            _patiently(self._manager.reload)
        return sorted(self._manager.all_steps())

    def _of_first(self, steps: list[int]) -> list[int]:
        """Returns the steps that process 0 gives, once this process sees these checkpoints, too.

        All processes must call it. Network file systems may show a new checkpoint late.

        Raises:
          StorageError: if this process of a training run does not see them within `LATE` seconds.
        """
        shared: list[int] = json.loads(hosts.gather(json.dumps(steps))[0])
        deadline = time.monotonic() + LATE
        while not hosts.is_first() and (unseen := set(shared) - set(self.steps())):
            if time.monotonic() > deadline:
                if self._read_only:  # The run that trains may have deleted them.
                    break
                raise StorageError(
                    f"{self._directory}: {socket.gethostname()} does not see the checkpoints {sorted(unseen)}, which "
                    "process 0 sees"
                )
            time.sleep(1)
            _patiently(self._manager.reload)
        return shared

    def best_step(self) -> int | None:
        """Returns the step of the checkpoint with the best validation score, or None if none has a score."""
        return next(iter(self._by_score()), None)

    def _by_score(self) -> list[int]:
        """Returns the steps of the validated checkpoints, best first, and among equal scores the latest first."""
        scores = {}
        for step in self.steps():
            if metrics := self._manager.metrics(step):
                scores[step] = metrics["score"]
        return sorted(scores, key=lambda step: (scores[step], step), reverse=True)

    def several(self, which: str) -> list[int]:
        """Returns the steps of the checkpoints that `which` selects, oldest first.

        Args:
          which: "last:n", "best:n" or a list of steps such as "1000,2000,3000".

        Raises:
          UserError: if `which` has another form, or if fewer checkpoints exist than it selects.
        """
        kind, _, number = which.partition(":")
        existing = self.steps()
        if kind in ("last", "best") and number.isdecimal() and int(number):
            selected = (existing[::-1] if kind == "last" else self._by_score())[: int(number)]
            if len(selected) < int(number):
                validated = "validated " if kind == "best" else ""
                raise UserError(
                    f"{self._directory}: average.checkpoints={which}, but the only {validated}checkpoints are "
                    f"{_listed(selected)}; train.keep_{kind} sets how many a run keeps"
                )
            return sorted(selected)
        steps = [part.strip() for part in which.split(",")]
        if not all(step.isdecimal() for step in steps):
            raise UserError(f"config: average.checkpoints={which!r} is neither last:n, nor best:n, nor a list of steps")
        missing = sorted({int(step) for step in steps} - set(existing))
        if missing:
            raise UserError(
                f"{self._directory}: no checkpoint of step {_listed(missing)}; the existing steps are "
                f"{_listed(existing)}"
            )
        return sorted({int(step) for step in steps})

    def save_params(self, step: int, params: Params, alpha: Alpha, memory: SavedLoopState) -> None:
        """Saves parameters without training state and waits until they are on disk.

        Training cannot resume from such a checkpoint. The arguments are as in `save`.

        Raises:
          StorageError: if a checkpoint of this step exists already.
        """
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                memory=_memory(memory, alpha, params=params),
            ),
        )
        self.close()
        if not saved:
            raise StorageError(f"{self._directory}: checkpoint {step} was not written")

    def save(self, state: TrainState, alpha: Alpha, memory: SavedLoopState, score: float | None) -> None:
        """Starts to save the state, after the previous save has finished.

        If a checkpoint of this step exists, it only gets the score that it lacks, and what the validation changed: a
        run that was stopped before a validation makes it after its next start.

        Args:
          state: the train state. The caller may donate it as soon as this method returns.
          alpha: alpha_t of this state, for readers that restore only the parameters.
          memory: the loop state.
          score: validation score of exactly this state (higher is better), or None.

        Raises:
          StorageError: if the previous save failed or this one cannot start.
        """
        step = int(state.step)
        rest = _rest(state)
        saved_memory = _memory(memory, alpha, params=state.eval_params, training=rest)
        self.wait()
        try:
            if step in self._manager.all_steps():
                if score is not None and self._manager.metrics(step) is None:
                    self._add_score(step, _metrics(score, {"memory": memory, "rate_scale": float(state.rate_scale)}))
                return
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.eval_params),
                    training=ocp.args.StandardSave(rest),
                    memory=saved_memory,
                ),
                metrics=None if score is None else _metrics(score),
            )
        except Exception as error:
            self._discard_partial()
            raise self._storage_error(f"checkpoint {step}", error) from error
        if not saved:
            raise StorageError(f"{self._directory}: checkpoint {step} was not written")

    def _add_score(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes the score of a checkpoint that has none, where `CheckpointManager` would have written it."""
        name = ocp.checkpoint_manager.METRIC_ITEM_NAME
        with ocp.Checkpointer(ocp.JsonCheckpointHandler(filename=name)) as checkpointer:
            # A damaged score is replaced.
            checkpointer.save(self._directory / str(step) / name, args=ocp.args.JsonSave(metrics), force=True)
        self._manager.reload()

    def wait(self) -> None:
        """Blocks until the current save, if any, is on disk. Raises `StorageError` if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._discard_partial()
            raise self._storage_error("the last checkpoint", error) from error
        if self._failed:
            self._delete_partial()

    def _discard_partial(self) -> None:
        """Deletes what a failed save has written, and forgets that save."""
        self._failed = True
        self._delete_partial()
        self._manager.reload()

    def _delete_partial(self) -> None:
        """Deletes the temporary folders of failed saves.

        Threads of the storage library may still write to the last one and create it again, so every later `wait` calls
        this, too.
        """
        if jax.process_count() == 1:  # Other processes may still write to the same folder.
            for path in self._directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                with contextlib.suppress(OSError):
                    path.rmtree()

    def close(self) -> None:
        """Waits for the last save and frees the threads."""
        self.wait()
        self._manager.close()

    def restore_latest(self, abstract: TrainState, until: float = math.inf) -> tuple[TrainState, SavedLoopState] | None:
        """Restores the newest intact checkpoint.

        If a checkpoint is damaged, all processes of the run restore the previous one, even if only one has noticed.

        Args:
          abstract: the shapes, dtypes and shardings of the result.
          until: the last step to consider; newer checkpoints are ignored.

        Returns:
          The train state and the saved loop state, or None if there is no checkpoint.

        Raises:
          UserError: if there are checkpoints but all of them are damaged.
          StorageError: if a checkpoint may be intact but cannot be read.
        """
        steps = self._of_first([step for step in self.steps() if step <= until])
        whole = {
            "params": ocp.args.StandardRestore(abstract.eval_params),
            "training": ocp.args.StandardRestore(_rest(abstract)),
        }
        for step in reversed(steps):
            restored, fault = self._restore(step, **whole)
            if not fault:
                state, memory = _joined(restored, abstract), restored["memory"]["memory"]
                if later := self._later(step):
                    scale = jax.device_put(np.float32(later["rate_scale"]), state.rate_scale.sharding)
                    return dataclasses.replace(state, rate_scale=scale), later["memory"]
                return state, memory
            self._warn(f"checkpoint {step} in {self._directory} is damaged ({fault}); trying the previous one")
        if steps:
            raise UserError(
                f"{self._directory}: none of the checkpoints {steps} can be read ({fault}); if config.json or a "
                "variable such as JAX_ENABLE_X64 has changed since they were written, change it back; otherwise move "
                "them away to start over"
            )
        return None

    def _later(self, step: int) -> dict[str, Any] | None:
        """Returns what a later validation has changed, as process 0 reads it. All processes must call this.

        If it cannot be read, the validation is made again.
        """
        found = None
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                found = (self._manager.metrics(step) or {}).get("later")
        shared: dict[str, Any] | None = json.loads(hosts.gather(json.dumps(found))[0])
        return shared

    def named(self, which: str) -> list[int]:
        """Returns the step of the checkpoint `which`, followed by the steps that `restore_params` falls back to.

        Raises `UserError` if there is no such checkpoint.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"{self._directory}: no checkpoint; train first")
        if which.isdecimal():
            if int(which) not in steps:
                raise UserError(
                    f"{self._directory}: no checkpoint of step {which}; the existing steps are {_listed(steps)}"
                )
            return [int(which)]
        if which not in ("best", "last"):
            raise UserError(f"{self._directory}: unknown checkpoint {which!r}; use best, last, average or a step")
        best = self.best_step() if which == "best" else None
        return ([best] if best is not None else []) + [step for step in reversed(steps) if step != best]

    def restore_params(self, which: str, abstract: Params) -> tuple[Params, Alpha, int]:
        """Restores the parameters, alpha and step of one checkpoint.

        Args:
          which: "best" (the last checkpoint if none was validated), "last", or a step.
          abstract: the shapes, dtypes and shardings of the parameters.

        Raises:
          UserError: if there is no such checkpoint, or if it is damaged and there is no other one to fall back to.
          StorageError: if it may be intact but cannot be read.
        """
        damaged = set[int]()
        while shared := self._of_first([step for step in self.named(which) if step not in damaged][:1]):
            (step,) = shared
            restored, fault = self._restore(step, params=ocp.args.StandardRestore(abstract))
            if fault:
                if self._was_deleted(step):
                    self._warn(f"the run that trains here has deleted checkpoint {step} in {self._directory}")
                else:
                    self._warn(f"checkpoint {step} in {self._directory} is damaged ({fault})")
                    damaged.add(step)
                continue
            if damaged:
                self._warn(f"using checkpoint {step} instead")
            # Older checkpoints have a single alpha for all layers.
            saved = restored["memory"]["alpha"]
            values = saved if isinstance(saved, dict) else dict.fromkeys(STACKS, saved)
            alpha = {
                s: jnp.broadcast_to(jnp.float32(values[s]), (depth_of(abstract[s]),)) for s in STACKS if s in abstract
            }
            return restored["params"], alpha, step
        raise UserError(f"{self._directory}: checkpoint {which!r} cannot be read")

    def _was_deleted(self, step: int) -> bool:
        """Returns whether the run has deleted a checkpoint that could not be read. All processes must call it."""
        time.sleep(1)  # The deletion of its files may not have ended.
        gone: bool = json.loads(hosts.gather(json.dumps(step not in self.steps()))[0])
        return gone

    def _restore(self, step: int, **items: Any) -> tuple[Any, str]:
        """Restores items of a checkpoint and its memory, and checks their checksums.

        All processes must call it, and all get the same fault.

        Returns:
          The items, and what is wrong with the checkpoint; "" if it is intact and all processes have read their part.

        Raises:
          StorageError: if the checkpoint may be intact but cannot be read.
        """
        # Each process reads by itself: Orbax would let those that succeed wait for ever for one that fails.
        own = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process {own}"
        )
        options = ocp.CheckpointManagerOptions(read_only=True, create=False, multiprocessing_options=alone)
        names = (*items, "memory")
        restored: Any = None
        fault = ""
        try:
            # Orbax reads the scores of all checkpoints here, too; damaged ones have been reported.
            with _patiently(
                lambda: _Manager(self._directory, options=options, item_names=names, warn=lambda line: None)
            ) as reader:
                restored = reader.restore(step, args=ocp.args.Composite(**items, memory=ocp.args.JsonRestore()))
        except Exception as error:
            fault = self._fault(step, error)
        fault = _of_all(fault)
        if not fault:
            try:
                check_memory(restored["memory"])
                for name in items:
                    _check(CONTENTS[name], restored[name], restored["memory"]["checksums"][name])
            except Exception as error:
                fault = self._fault(step, error)
            fault = _of_all(fault)
        return restored, fault

    def _fault(self, step: int, error: Exception) -> str:
        """Returns what is wrong with a damaged checkpoint.

        Raises:
          StorageError: if the error says nothing about the content. Another attempt may succeed, so the checkpoint must
            neither be deleted nor replaced by another one.
        """
        origin = _origin(error)
        if isinstance(origin, _OF_PROCESS) or _UNREACHABLE.search(f"{type(origin).__name__}: {origin}"):
            raise StorageError(
                f"{self._directory}: checkpoint {step} cannot be read ({_summary(origin)}); it is not deleted"
            ) from error
        return _summary(origin)

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints newer than `step`, so that the run can write them again.

        These checkpoints are damaged, or a rollback has invalidated them.
        """
        for newer in self.steps():
            if newer > step:
                self._manager.delete(newer)

    def _storage_error(self, what: str, error: Exception) -> StorageError:
        """Returns the error that reports a failed save."""
        origin = _origin(error)
        full = getattr(origin, "errno", None) == errno.ENOSPC or "No space" in str(origin)
        reason = "no space left on the device" if full else _summary(origin)
        return StorageError(f"{self._directory}: {what} could not be written: {reason}; earlier checkpoints are kept")


@functools.cache
def _mute_storage_library() -> None:
    """Hides what the storage library's own tasks and threads log and print, from now on.

    They print hundreds of lines about a damaged file or a failed write, also much later. The exception that a save or a
    restore raises says the same.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    report, report_unraisable = sys.excepthook, sys.unraisablehook

    def own(error: BaseException | None) -> bool:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)] if error else []
        return str(error) == "Event loop is closed" or any("orbax" in Path(file).parts for file in files)

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not own(error):
            report(kind, error, trace)

    def unraisablehook(lost: Any) -> None:
        if not own(lost.exc_value):
            report_unraisable(lost)

    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook


def _memory(memory: SavedLoopState, alpha: Alpha, **items: Any) -> ocp.args.JsonSave:
    """Returns what a checkpoint stores beside its arrays: their checksums, the loop state and alpha."""
    sums = {name: checksums(item).tolist() for name, item in items.items()}
    values = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), alpha)
    contents = {"checksums": sums, "memory": memory, "alpha": values}
    return ocp.args.JsonSave(contents | {"sum": json_checksum(contents)})


def check_memory(saved: dict[str, Any]) -> None:
    """Raises an exception if the JSON of a checkpoint is damaged. That of old checkpoints has no checksum."""
    contents = {name: value for name, value in saved.items() if name != "sum"}
    found = json_checksum(contents)
    if set(contents) != {"checksums", "memory", "alpha"} or saved.get("sum", found) != found:
        raise ValueError("the checksum of its memory does not match")


def _rest(state: TrainState) -> dict[str, Any]:
    """Returns the fields of the train state other than `eval_params`. The keys are the names in checkpoints."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    rest = {name: value for name, value in fields.items() if value is not None and value is not state.eval_params}
    return {NAMES_ON_DISK.get(name, name): value for name, value in rest.items()}


def _joined(restored: Any, abstract: TrainState) -> TrainState:
    """Returns the items "params" and "training" of a checkpoint as train state."""
    used = {"params" if abstract.ema is None else "ema": restored["params"]}
    fields = {field: name for name, field in NAMES_ON_DISK.items()}
    training = {fields.get(name, name): value for name, value in restored["training"].items()}
    return TrainState(**training, **used)


def _check(what: str, tree: Any, expected: list[int]) -> None:
    if checksums(tree).tolist() != expected:
        raise ValueError(f"the checksums of its {what} do not match")


def _origin(error: BaseException) -> BaseException:
    """Returns the exception that others were raised from. Those of the storage library only say where it happened."""
    return _origin(error.__cause__) if error.__cause__ else error


def _summary(error: BaseException) -> str:
    """Returns the type and the first line of an exception, with at most 160 characters of that line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"
