"""Retention of checkpoints, selection of the best one, and checkpoints of older revisions."""

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from branchnorm_jax.errors import StorageError, UserError
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig, TrainConfig
from branchnorm_jax.training import checkpoint
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.digests import checksums
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import TrainState, first_state

MODEL = Transformer(ModelConfig(encoder_layers=1, decoder_layers=1, width=4, ffn_width=4, heads=1), 8, 8)
TRAIN = TrainConfig(keep_last=2, keep_best=1)


def state(step: int) -> TrainState:
    """Returns a state in which every parameter equals the step."""
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, float(step)), MODEL.abstract_params())
    return dataclasses.replace(first_state(params, make_optimizer(TRAIN)), step=jnp.int32(step))


def opened(path: Path, **changes: Any) -> Checkpoints:
    return Checkpoints(path, dataclasses.replace(TRAIN, **changes), lambda line: None)


def raised_from(error: Exception, cause: Exception) -> Exception:
    """Returns an error with a cause, as those of Orbax."""
    error.__cause__ = cause
    return error


def save(checkpoints: Checkpoints, scores: dict[int, float | None]) -> None:
    for step, score in scores.items():
        checkpoints.save(state(step), jnp.float32(1.0), {}, score)
    checkpoints.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_best_checkpoint_is_kept_and_found(tmp_path: Path, reopened: bool) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: None, 5: 0.3}
    if reopened:  # like a resumed run, which knows only what is on disk
        for step, score in scores.items():
            save(opened(tmp_path), {step: score})
    else:
        save(opened(tmp_path), scores)
    checkpoints = Checkpoints(tmp_path, TRAIN, lambda line: None, read_only=True)
    assert checkpoints.steps() == [2, 4, 5]
    assert checkpoints.best_step() == 2
    for which, expected in (("best", 2), ("last", 5), ("4", 4)):
        params, _, step = checkpoints.restore_params(which, MODEL.abstract_params())
        assert step == expected
        np.testing.assert_array_equal(params["embedding"]["shared"], expected)
    assert checkpoints.several("best:2") == [2, 5]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"score": "x"}', '{"score": 0.8}', '{"score": 0.9, "sum": 1}', "\0\0"]
)
def test_a_damaged_score_is_ignored_and_said(tmp_path: Path, content: str) -> None:
    save(opened(tmp_path), {1: 0.5, 2: 0.9})
    (tmp_path / "2" / "metrics" / "metrics").write_text(content)
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, TRAIN, said.append)
    if content == '{"score": 0.8}':  # as earlier versions wrote it
        assert (checkpoints.best_step(), said) == (2, [])
    else:
        assert (checkpoints.best_step(), said) == (
            1,
            [f"checkpoint 2 in {tmp_path}: its score is damaged and is ignored"],
        )
    restored = checkpoints.restore_latest(state(0))
    assert restored is not None
    assert restored[0].step == 2


def test_a_saved_step_gets_the_score_of_a_later_validation(tmp_path: Path) -> None:
    """A run that a signal has stopped between two validations is shortened to that step, and validated."""
    for step, score in {1: 0.5, 2: None}.items():
        save(opened(tmp_path), {step: score})
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, TRAIN, said.append)
    checkpoints.save(state(2), jnp.float32(1.0), {}, 0.9)
    assert checkpoints.best_step() == 2
    save(checkpoints, {3: 0.1, 4: 0.2})
    again = Checkpoints(tmp_path, TRAIN, said.append)
    assert (again.steps(), again.best_step(), said) == ([2, 3, 4], 2, [])
    restored = again.restore_latest(state(0), until=2)
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, restored[0].params, state(2).params)


def test_latest_of_equal_scores_is_best(tmp_path: Path) -> None:
    save(opened(tmp_path), {1: 0.5, 2: 0.5, 3: 0.4, 4: 0.2})
    checkpoints = Checkpoints(tmp_path, TRAIN, lambda line: None, read_only=True)
    assert checkpoints.best_step() == 2


def test_best_checkpoints_do_not_replace_those_for_a_rollback(tmp_path: Path) -> None:
    """The best ones are at 5, 15, 25 ..., the regular ones at 10, 20, 30 ..."""
    scores: dict[int, float | None] = {step: float(step) for step in range(5, 40, 5)}
    save(opened(tmp_path / "plain"), scores)
    assert opened(tmp_path / "plain").steps() == [30, 35]
    rolling = {"spike": "rollback", "checkpoint_every": 10}
    save(opened(tmp_path / "rolling", **rolling), scores)
    assert opened(tmp_path / "rolling", **rolling).steps() == [20, 30, 35]


def test_every_flipped_bit_of_the_memory_is_noticed(tmp_path: Path) -> None:
    """The memory has alpha, which translation uses, and the loop state."""
    checkpoints, warnings = opened(tmp_path), list[str]()
    alpha = {stack: jnp.full(1, 0.19999999) for stack in STACKS}
    loop_state = LoopState(left_out=[[2, 3]], recent_scores=[-3.25], best_score=-3.25, vanishing="encoder 1")
    for step in (1, 2):
        checkpoints.save(state(step), alpha, dataclasses.asdict(loop_state), -3.25)
    checkpoints.close()
    path = tmp_path / "2" / "memory" / "metadata"
    intact = path.read_bytes()
    contents, harmless = json.loads(intact), 0
    for bit in range(8 * len(intact)):
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            saved = json.loads(flipped.decode())
            checkpoint.check_memory(saved)
        except (ValueError, KeyError):
            continue
        assert saved == contents
        harmless += 1
    assert harmless < len(intact)  # They change white space, or digits that no float32 needs.

    path.write_bytes(intact.replace(b"0.19999", b"0.99999", 1))
    reader = Checkpoints(tmp_path, TRAIN, warnings.append, read_only=True)
    assert reader.restore_params("last", MODEL.abstract_params())[2] == 1
    assert warnings[0].endswith("is damaged (ValueError: the checksum of its memory does not match)")
    path.write_bytes(intact.replace(b"evaluated", b"evaluatee"))
    restored = opened(tmp_path).restore_latest(jax.eval_shape(lambda: state(0)))
    assert restored is not None and int(restored[0].step) == 1


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes"),
        RuntimeError("can't start new thread"),
    ],
    ids=["memory", "threads"],
)
def test_an_error_of_the_process_is_no_damage(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(opened(tmp_path), {1: 0.5, 2: 0.1})
    checkpoints, original = opened(tmp_path), checkpoint.checksums
    failures = iter([error])

    def failing(tree: Any) -> Any:
        if error := next(failures, None):
            raise error
        return original(tree)

    monkeypatch.setattr(checkpoint, "checksums", failing)
    with pytest.raises(StorageError, match=r"checkpoint 2 cannot be read .*; it is not deleted"):
        checkpoints.restore_latest(state(0))
    assert checkpoints.steps() == [1, 2]


def test_a_checkpoint_that_the_run_deletes_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(opened(tmp_path, keep_last=3), {1: None, 2: None, 3: None})
    restore, said = Checkpoints._restore, list[str]()

    def late(self: Checkpoints, step: int, **items: Any) -> Any:
        """Deletes the checkpoint before it is read, and saves a newer one."""
        if step == 3:
            writer = opened(tmp_path, keep_last=3)
            save(writer, {4: None})
            shutil.rmtree(tmp_path / "3")
        return restore(self, step, **items)

    monkeypatch.setattr(Checkpoints, "_restore", late)
    reader = Checkpoints(tmp_path, TRAIN, said.append, read_only=True)
    assert reader.restore_params("last", MODEL.abstract_params())[2] == 4
    assert said == [f"the run that trains here has deleted checkpoint 3 in {tmp_path}"]


def test_checkpoints_are_listed_again_if_one_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(opened(tmp_path), {1: 0.5, 2: 0.1})
    listed, failures = ocp.CheckpointManager._load_checkpoint_infos, iter([True, True])

    def listing(manager: ocp.CheckpointManager, *arguments: Any, **options: Any) -> Any:
        if next(failures, False):
            raise FileNotFoundError(manager.directory / "3")
        return listed(manager, *arguments, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "_load_checkpoint_infos", listing)
    assert Checkpoints(tmp_path, TRAIN, lambda line: None, read_only=True).steps() == [1, 2]
    assert next(failures, None) is None


def test_a_config_that_does_not_fit_the_checkpoints_is_named_as_a_cause(tmp_path: Path) -> None:
    save(opened(tmp_path), {1: 0.5, 2: 0.1})
    wider = Transformer(dataclasses.replace(MODEL.config, ffn_width=8), 8, 8)
    abstract = jax.eval_shape(lambda: first_state(wider.init(jax.random.key(0)), make_optimizer(TRAIN)))
    checkpoints = opened(tmp_path)
    with pytest.raises(UserError, match=r"none of the checkpoints \[1, 2\] can be read \(.*shape.*config.json"):
        checkpoints.restore_latest(abstract)
    assert checkpoints.steps() == [1, 2]


def test_last_checkpoint_is_used_without_validations(tmp_path: Path) -> None:
    save(opened(tmp_path, keep_best=0), {1: None, 2: None, 3: None})
    checkpoints = Checkpoints(tmp_path, TRAIN, lambda line: None, read_only=True)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.best_step() is None
    assert checkpoints.restore_params("best", MODEL.abstract_params())[2] == 3


@pytest.mark.parametrize("saved", [jnp.float32(0.25), {"encoder": jnp.full(1, 0.25), "decoder": jnp.full(1, 0.25)}])
def test_alpha_of_older_checkpoints_is_restored(saved: Any, tmp_path: Path) -> None:
    """A scalar becomes the alpha of every layer."""
    Checkpoints(tmp_path, TrainConfig(), print).save_params(3, MODEL.init(jax.random.key(0)), saved, {})
    _, alpha, _ = Checkpoints(tmp_path, TrainConfig(), print, read_only=True).restore_params(
        "last", MODEL.abstract_params()
    )
    for stack, layers in zip(STACKS, MODEL.depth, strict=True):
        np.testing.assert_array_equal(alpha[stack], np.full(layers, 0.25, np.float32))


class Usual(NamedTuple):
    """`RunningStats` as of commit 038f142."""

    seen: Any
    mean: Any
    variance: Any


def test_checkpoints_of_an_older_revision_are_restored(tmp_path: Path) -> None:
    """The test writes the checkpoint with Orbax alone, using the names of commit 038f142."""
    now = state(7)
    training = {
        "step": jnp.int32(7),
        "opt_state": now.opt_state,
        "rate_scale": jnp.float32(0.5),
        "clock": jnp.int32(6),
        "held": jnp.int32(3),
        "usual": Usual(jnp.int32(7), jnp.array([3.0, -1.0]), jnp.array([0.2, 0.1])),
    }
    memory: dict[str, Any] = {
        "train_seconds": 2.5,
        "target_tokens": 99,
        "evaluated": 5,
        "score": -3.0,
        "best_score": -3.0,
    }
    memory |= {"since_best": 0, "recent_scores": [-3.0], "skipped": 1, "left_out": [[2, 3]], "vanishing": ""}
    sums = {"params": checksums(now.params).tolist(), "training": checksums(training).tolist()}
    manager = ocp.CheckpointManager(tmp_path, item_names=("params", "training", "memory"))
    manager.save(
        7,
        args=ocp.args.Composite(
            params=ocp.args.StandardSave(now.params),
            training=ocp.args.StandardSave(training),
            memory=ocp.args.JsonSave({"checksums": sums, "memory": memory, "alpha": 1.0}),
        ),
    )
    manager.close()
    restored = opened(tmp_path).restore_latest(jax.eval_shape(lambda: now))
    assert restored is not None
    loaded, saved = restored
    assert (int(loaded.step), int(loaded.clock), int(loaded.hold_steps), float(loaded.rate_scale)) == (7, 6, 3, 0.5)
    np.testing.assert_array_equal(loaded.running_stats.mean, [3.0, -1.0])
    np.testing.assert_array_equal(loaded.params["embedding"]["shared"], 7)
    loop_state = LoopState(**saved)
    assert (loop_state.target_tokens, loop_state.left_out, loop_state.rollbacks) == (99, [[2, 3]], 0)


@pytest.mark.parametrize(
    "error",
    [
        ValueError('PERMISSION_DENIED: Error reading "embedding" [OS error 13: EACCES Permission denied]'),
        ValueError("INTERNAL: Error reading params/d/1 [OS error 5: EIO Input/output error]"),
        ValueError("INTERNAL: Error opening params/d/1 [OS error 24: EMFILE Too many open files]"),
        OSError(116, "Stale file handle"),
        OSError(12, "Cannot allocate memory"),
        MemoryError("no memory"),
        ConnectionResetError("Connection reset by peer"),
        ValueError("UNKNOWN: Error reading params/d/1: Input/output error [os_error_code='5']"),
        raised_from(Exception("while reading array index (1,)"), ValueError("INTERNAL: [OS error 5: EIO]")),
    ],
    ids=lambda error: str(error)[:12],
)
def test_checkpoints_that_cannot_be_read_are_not_given_up(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be intact. So training must not start from an older one and write over them."""
    save(opened(tmp_path), {1: 0.5, 2: 0.1})
    checkpoints = opened(tmp_path)

    def restore(self: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "restore", restore)
    with pytest.raises(StorageError, match=r"checkpoint 2 cannot be read .*; it is not deleted"):
        checkpoints.restore_latest(state(0))
    with pytest.raises(StorageError, match="checkpoint 2 cannot be read"):
        checkpoints.restore_params("last", MODEL.abstract_params())
    assert checkpoints.steps() == [1, 2]


def test_a_process_waits_for_the_checkpoint_that_process_0_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its view of the shared folder is late, as that of a network file system can be."""
    save(opened(tmp_path), {4: None, 8: None})
    (tmp_path / "8").rename(tmp_path / "late")
    checkpoints = opened(tmp_path)
    assert checkpoints.steps() == [4]
    monkeypatch.setattr(checkpoint.hosts, "gather", lambda text: ["[4, 8]" if text == "[4]" else text, text])
    monkeypatch.setattr(checkpoint.hosts, "is_first", lambda: False)

    appears = threading.Timer(0.5, lambda: (tmp_path / "late").rename(tmp_path / "8"))
    appears.start()
    restored = checkpoints.restore_latest(jax.eval_shape(lambda: state(0)))
    assert restored is not None and int(restored[0].step) == 8

    (tmp_path / "8").rename(tmp_path / "late")
    checkpoints = opened(tmp_path)
    monkeypatch.setattr(checkpoint, "LATE", 0.0)
    with pytest.raises(StorageError, match=r"does not see the checkpoints \[8\], which process 0 sees"):
        checkpoints.restore_latest(jax.eval_shape(lambda: state(0)))
