"""Scores of a text, and the comparison of language models."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.text import LineLosses, compare_texts, read_losses, scores, write_lines
from branchnorm_jax.tokens import UNK
from tests.decoding.test_text import text


def test_scores_and_lines_add_up(tmp_path: Path) -> None:
    store = text([3, 5])
    nll = np.arange(8, dtype=np.float32)
    found = {score.name: score.score for score in scores(nll, store, 4, 2)}
    assert found["bits_per_byte"] == pytest.approx(28 / math.log(2) / 6)
    assert found["nll"] == 3.5 and found["perplexity"] == pytest.approx(math.exp(3.5))
    write_lines(tmp_path / "lines.tsv", nll, store)
    rows: list[Any] = [line.split("\t") for line in (tmp_path / "lines.tsv").read_text().splitlines()]
    names = ["document", "bytes", "crc32", "tokens", "nll"]
    assert rows == [names, ["1", "2", "0", "3", "3.000000"], ["2", "4", "1", "5", "25.000000"]]
    losses = read_losses(tmp_path / "lines.tsv")
    assert [part.tolist() for part in losses] == [[1, 2], [2, 4], [0, 1], [3, 25]]


def test_a_perplexity_beyond_floats_does_not_end_an_evaluation() -> None:
    found = {score.name: score.score for score in scores(np.full(8, 1e4, np.float32), text([3, 5]), 4, 2)}
    assert found["nll"] == 1e4
    assert found["perplexity"] == math.inf


def test_models_are_compared_on_the_same_documents() -> None:
    rng = np.random.default_rng(0)
    document, sizes = np.repeat(np.arange(50), 3), rng.integers(1, 9, 150).astype(float)
    noise = rng.normal(0, 0.1, 150)

    def losses(gain: float) -> LineLosses:
        return LineLosses(document, sizes, sizes, sizes * (2 - gain) + noise)

    compared = compare_texts({"a": losses(0.0), "same": losses(0.0), "better": losses(0.1)})
    assert (compared["unit"], compared["units"]) == ("document", 50)
    rows = compared["systems"]
    assert rows["a"]["bits_per_byte"] == pytest.approx((2 * sizes + noise).sum() / sizes.sum() / math.log(2))
    assert rows["same"]["difference"] == 0 and rows["same"]["p_bootstrap"] == 1
    # The noise is the same, so the difference is certain although it is smaller than the interval.
    assert rows["better"]["difference"] == pytest.approx(-0.1 / math.log(2))
    assert rows["better"]["p_bootstrap"] < 0.01


def test_p_values_are_uniform_between_models_that_differ_by_chance() -> None:
    values = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        a, b = (LineLosses(np.arange(40), np.ones(40), np.ones(40), rng.normal(2, 0.3, 40)) for _ in range(2))
        values.append(compare_texts({"a": a, "b": b})["systems"]["b"]["p_bootstrap"])
    assert 0.4 < np.mean(values) < 0.6
    assert np.mean(np.array(values) < 0.05) < 0.12


def test_models_of_different_texts_are_refused() -> None:
    a = LineLosses(np.arange(3), np.ones(3), np.ones(3), np.ones(3))
    assert compare_texts({"a": a, "b": a})["systems"]["b"]["p_bootstrap"] is None  # three lines are too few
    for other in (a._replace(bytes=np.full(3, 2.0)), a._replace(crc32=np.zeros(3))):
        with pytest.raises(UserError, match="different texts"):
            compare_texts({"a": a, "b": other})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_without_a_finite_loss_is_named(bad: float) -> None:
    """Comparisons with such a value are all false, and made the difference significant."""
    good = LineLosses(np.arange(40), np.ones(40), np.ones(40), np.ones(40))
    diverged = good._replace(nll=np.where(np.arange(40) == 6, bad, 1.0))
    with pytest.raises(UserError, match="compare: b: the loss of line 7 is not finite"):
        compare_texts({"a": good, "b": diverged})


def test_signatures_name_unknown_tokens() -> None:
    store = text([3, 5])
    store.tokens[1:3] = UNK
    assert [score.signature for score in scores(np.ones(8, np.float32), store, 4, 2)] == [
        f"context:4|stride:2|unknown:2|{name}" for name in ("bytes:6", "tokens:8", "tokens:8")
    ]
