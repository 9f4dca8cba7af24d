"""Broken updates: the faults are what they say, and the predictions are worked out by hand."""

import json
import math
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.data.batches import TextBatch
from branchnorm_jax.training import step
from faults import broken_updates, numbers
from faults.broken_updates import KINDS, PLACES, SHIFT, Fault
from faults.numbers import Case, Documented


def documented(
    policy: str, first: int, updates: int = 1, lasts: bool = True, of: int = 4, kind: str = ""
) -> Documented:
    """Returns the prediction for a case. Runs have 64 updates, and save the last five multiples of ten."""
    fault = Fault(kind or "NaN in a gradient", 0, first, updates, lasts)
    return Documented(Case(fault, policy, of, "numerals")).run()


def test_stop() -> None:
    found = documented("stop", 33)
    assert (found.code, found.status["status"], found.events) == (3, "diverged", [(33, "nonfinite", "stop", None)])
    assert found.clocks == {update: update for update in range(34)}
    assert found.status["step"] == 34


def test_skip() -> None:
    found = documented("skip", 33, updates=2)
    assert (found.code, found.skipped, found.same) == (0, 2, 33)
    assert found.clocks == {update: update for update in range(64)}


def test_ten_skipped_updates_end_the_run() -> None:
    found = documented("skip", 33, updates=10)
    assert (found.code, found.skipped, found.events[-1]) == (3, 10, (42, "skipped", "stop", None))


@pytest.mark.parametrize(
    ("first", "of", "to", "left_out"), [(33, 4, 30, [30, 33]), (33, 12, 20, [22, 33]), (5, 12, 0, [0, 5])]
)
def test_rollback_leaves_batches_out(first: int, of: int, to: int, left_out: list[int]) -> None:
    found = documented("rollback batches", first, of=of)
    assert found.events == [(first, "nonfinite", "rollback", None), (first, "rollback", None, to)]
    assert (found.status["left_out"], found.same) == ([left_out], left_out[0])
    assert list(found.clocks) == [update for update in range(64) if not left_out[0] <= update <= left_out[1]]
    assert all(clock == update for update, clock in found.clocks.items())


def test_the_sixth_rollback_ends_the_run() -> None:
    found = documented("rollback batches", 33, updates=10, of=1)
    assert (found.code, found.rollbacks, found.left_out) == (3, 5, [[update, update] for update in range(33, 38)])
    assert list(found.clocks) == [*range(33), 38]


def test_rollback_pauses_alpha() -> None:
    """From the checkpoint, 30, until four updates after update 33."""
    found = documented("rollback alpha", 33, lasts=False)
    assert (found.code, found.rollbacks, found.events[-1]) == (0, 1, (33, "rollback", None, 30))
    assert [found.clocks[update] for update in (29, 30, 33, 37, 38, 63)] == [29, 30, 30, 30, 31, 56]


def test_the_pause_ends_the_run_if_the_trouble_recurs() -> None:
    found = documented("rollback alpha", 33)
    assert (found.code, found.rollbacks, len(found.events)) == (3, 1, 3)


def test_spikes_need_fifty_updates() -> None:
    assert documented("stop", 33, kind="a spike of the loss").code == 0
    assert documented("stop", 55, kind="a spike of the loss").code == 3


def test_cases_are_determined_by_the_generator() -> None:
    assert [numbers.draw(random.Random(seed)) for seed in range(20)] == [
        numbers.draw(random.Random(seed)) for seed in range(20)
    ]


def batch_of(number: int) -> TextBatch:
    return TextBatch(np.full((2, 3), number + 7, np.int32), np.full((2, 3), 5, np.int32))


def test_only_the_batches_of_broken_updates_are_marked() -> None:
    fault, seen = Fault("NaN in a gradient", 2, 4, 1, lasts=False), set[int]()
    first = [*broken_updates.marked(fault, seen, batch_of, 3, 6)]
    again = [*broken_updates.marked(fault, seen, batch_of, 3, 6)]
    assert [int(batch.source[0, 0]) >> SHIFT for batch in first] == [0, fault.mark, 0]
    assert [int(batch.source[0, 0]) % (1 << SHIFT) for batch in first] == [10, 11, 12]
    assert [int(batch.source[0, 0]) >> SHIFT for batch in again] == [0, 0, 0]


def test_padding() -> None:
    for kind, sides in {"a batch of padding": "source target", "sources of padding": "source"}.items():
        fault = Fault(kind, 0, 0, 1, lasts=True)
        (batch,) = broken_updates.marked(fault, set(), batch_of, 0, 1)
        batch.source[0, 0] -= fault.mark << SHIFT
        assert [side for side in TextBatch._fields if not getattr(batch, side).any()] == sides.split()


def broken(kind: str, place: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, float]:
    """Returns the parameters of the forward pass, the gradient and the loss scale of a broken train step."""
    params = {"embedding": jnp.ones((5, 2)), "encoder": {"w": jnp.ones((2, 3))}, "decoder": {"w": jnp.ones((2, 3, 3))}}
    monkeypatch.setattr(step, "loss_sums", lambda model, params: params)
    monkeypatch.setattr(step, "update", lambda gradient: gradient)
    mark = Fault(kind, place, 0, 1, True).mark if kind else 0

    traced_step: Any = step

    def traced(mark: jax.Array) -> tuple[Any, Any, jax.Array]:
        with broken_updates.broken_functions(mark):
            scale = traced_step.loss_scale(jnp.float32(100))
            return traced_step.loss_sums(None, params), traced_step.update(params), scale

    forward, gradient, scale = jax.jit(traced)(jnp.int32(mark))
    return forward, gradient, float(scale)


@pytest.mark.parametrize("kind", ["", *KINDS])
@pytest.mark.parametrize("place", range(len(PLACES)))
def test_faults_change_what_they_say(kind: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    site, value, _ = KINDS[kind] if kind else ("", 0.0, "")
    forward, gradient, scale = broken(kind, place, monkeypatch)
    assert scale == (64 * value if site == "scale" else 64)
    assert (forward["embedding"] == (value if site == "logits" else 1)).all()
    stack, layer = PLACES[place].split()
    for where, tree in (("forward", forward), ("backward", gradient)):
        for name in ("encoder", "decoder"):
            expected = np.ones(tree[name]["w"].shape)
            if (where, name) == (site, stack):
                expected[int(layer) - 1] = np.float32(value)
            np.testing.assert_array_equal(tree[name]["w"], expected)
    assert not math.isnan(scale)
    assert (gradient["embedding"] == 1).all()


def test_a_fault_without_effect_is_found(tmp_path: Path) -> None:
    case = Case(Fault("gradients of 1e15", 0, 33, 1, True), "stop", 4, "numerals")

    def written(name: str, loss: float) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        lines = [{"step": step, "alpha": 0.5, "loss": loss if step == 34 else 2.0} for step in range(numbers.STEPS)]
        lines = [line | {"batch": 1, "learning_rate": 1.0, "seconds": loss} for line in lines]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / name / "status.json").write_text(json.dumps(Documented(case).run().status))
        return tmp_path / name

    def verdict(loss: float) -> str:
        return numbers.verdict(case, numbers.Finished(0, "", ""), written("run", loss), written("undisturbed", 2.0))

    assert verdict(2.0) == "the fault changes no update"
    assert verdict(2.5) == ""


def test_a_wrong_reaction_is_found(tmp_path: Path) -> None:
    case = Case(Fault("NaN in a gradient", 0, 33, 1, True), "stop", 4, "numerals")
    done = numbers.Finished(0, "", "")
    assert "exit code 0 instead of 3" in numbers.verdict(case, done, tmp_path, tmp_path)
