"""The quantities that benchmarks collect from the logs of runs, for curves with known values."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import iterations, residual_weights, tears


def test_residual_weights_of_layers_that_grow_one_after_the_other() -> None:
    steps = np.array([0, 10, 20, 30, 40])
    lower, upper = [0, 1, 2, 4, 2], [0, 4, 4, 2, 1]  # The upper layers reach 90 % of their peak first.
    weights = np.array([lower, lower, [0, 2, 3, 3, 2], upper, upper, upper]).T.astype(float)
    measured = residual_weights.measure(steps, weights)
    assert measured["weight_peak"] == pytest.approx((2 + 2 + 3 + 4 + 4 + 4) / 6)
    assert measured["peak_update"] == 20
    assert measured["weight_end"] == pytest.approx((2 + 2 + 2 + 1 + 1 + 1) / 19)
    assert measured["top_delay"] == pytest.approx(10 / 30)
    assert measured["weight_spread"] == pytest.approx(2 / 1)


def test_perplexities_and_gradient_norms_of_a_run(tmp_path: Path) -> None:
    norms = dict(enumerate([100.0] * 10 + [2.0] * 29 + [6.0] + [2.0]))  # Every 10th update, of 400.
    updates = [{"step": 10 * place, "loss": 3.0 if place < 30 else 1.0, "grad_norm": n} for place, n in norms.items()]
    losses = {50: 5.0, 100: 4.0, 150: 3.0, 300: 2.0, 400: 2.5}
    validations = [{"step": step, "loss": loss} for step, loss in losses.items()]
    for name, lines in (("metrics", updates), ("validation", validations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = tears.curves(tmp_path)
    assert measured["train_perplexity"] == pytest.approx(math.exp(1.0))
    assert measured["valid_perplexity"] == pytest.approx(math.exp(2.0))
    assert measured["early_perplexity"] == pytest.approx(math.exp(4.0))
    assert measured["gradient_norm"] == 2.0
    assert measured["gradient_spike"] == 3.0


def test_iterations_are_the_first_validation_that_is_good_enough(tmp_path: Path) -> None:
    lines = [
        {"step": step, "nll": bits * math.log(2)} for step, bits in ((50, 4.0), (100, 3.01), (150, 2.9), (200, 2.0))
    ]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert iterations.iterations(tmp_path, 3) == {"iterations": 150}
    assert iterations.iterations(tmp_path, 1.9) == {}
