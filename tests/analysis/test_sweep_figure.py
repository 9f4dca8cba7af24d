"""The figure of a sweep: its panels and axes, and what is drawn, read from Matplotlib's own objects."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchnorm_jax.analysis import figures, sweep, sweep_figure, sweep_results
from tests.conftest import ROOT

RATES = "train.learning_rate"


def row(bleu: float | None, **axes: str) -> dict[str, Any]:
    named = {{"rate": RATES, "schedule": "train.schedule", "seed": "train.seed"}.get(k, k): v for k, v in axes.items()}
    return {"run": sweep.name_of(named), **named, "status": "diverged" if bleu is None else "done", "bleu": bleu}


def test_tables_survive_a_round_trip() -> None:
    rows = [row(41.5, method="post_ln", depth="6L-6L"), row(None, method="admin", rate="3e-3")]
    assert sweep_results.from_csv(sweep_results.to_csv(rows)) == rows


@pytest.mark.parametrize(
    ("axis", "settings", "log", "places"),
    [
        ("depth", ["18L-18L", "2L-2L", "6L-6L"], True, {"2L-2L": 0, "6L-6L": 1, "18L-18L": 2}),
        (RATES, ["1e-3", "8e-3", "2e-3"], True, {"1e-3": 0, "2e-3": 1, "8e-3": 3}),
        ("model.dropout", ["0.0", "0.1", "0.3"], False, {"0.0": 0, "0.1": 1, "0.3": 3}),
        ("train.branch_update_power", ["1", "2", "3"], False, {"1": 0, "2": 1, "3": 2}),
        (RATES, ["1e-3"], False, {"1e-3": 0}),
        ("", ["b", "a"], False, {"b": 0, "a": 1}),
    ],
)
def test_numbers_are_placed_in_proportion(axis: str, settings: list[str], log: bool, places: dict[str, float]) -> None:
    found, found_log = sweep_figure.places(axis, settings)
    assert (list(found), found_log) == (list(places), log)
    np.testing.assert_allclose(list(found.values()), list(places.values()), atol=1e-12)


@pytest.mark.parametrize(
    ("axis", "settings"),
    [("depth", ["6L-18L", "18L-6L"]), ("model.method", ["a"]), (RATES, ["nan"]), (RATES, ["1e-3", "0.001"])],
)
def test_settings_that_are_not_different_numbers_have_no_order(axis: str, settings: list[str]) -> None:
    assert sweep_figure.numbers(axis, settings) == {}


def test_each_setting_of_the_other_columns_has_its_own_panel() -> None:
    rows = [row(1.0, method="a", rate=rate) for rate in ("1e-3", "2e-3")]
    rows += [row(2.0, method="a", rate="1e-3", schedule="constant"), row(3.0, method="b")]
    parts = sweep_figure.panels(rows, [RATES, "train.schedule"])
    assert [(part.title, part.axis, list(part.places), part.joined) for part in parts] == [
        ("schedule:\nas configured", RATES, ["1e-3", "2e-3"], True),
        ("schedule:\nconstant", RATES, ["1e-3"], False),
        ("", "", ["as configured"], False),
    ]
    assert [run["bleu"] for part in parts for runs in part.runs.values() for run in runs] == [1, 1, 2, 3]
    # Without a column of numbers, the settings stand side by side and no line joins them.
    (part,) = sweep_figure.panels(rows, ["train.schedule"])
    assert (part.axis, part.joined, list(part.places)) == ("", False, ["as configured", "schedule=constant"])


def test_every_run_is_visible() -> None:
    """Equal scores have different places, bars show the range of seeds, and no run is left out.

    Crosses show runs without a score, triangles those above the axis.
    """
    rows = [row(40.0, method=method, depth=depth) for method in "abcdefghi" for depth in ("6L-6L", "18L-18L")]
    rows += [row(score, method="seeds", depth="6L-6L", seed=str(i)) for i, score in enumerate((10.0, 11.0, 18.0))]
    rows += [row(score, method="half", depth="6L-6L", seed=str(i)) for i, score in enumerate((7.0, None))]
    rows += [row(90.0, method="high", depth="6L-6L")]
    (panel,) = sweep_figure.panels(rows, ["depth"])
    labels = [*"abcdefghi", "seeds", "half", "high"]
    pyplot = figures.pyplot()
    figure, axis = pyplot.subplots()
    assert sweep_figure.plot(axis, panel, "bleu", labels, (-3.0, 50.0))
    lines = {line.get_label(): line for line in axis.lines if line.get_label() in labels}
    looks = {(line.get_color(), line.get_marker()) for line in lines.values()}
    assert (list(lines), len(looks)) == (labels, len(labels))
    points = [tuple(point) for label in "abcdefghi" for point in lines[label].get_xydata()]
    assert len(set(points)) == len(points) == 18
    for (x, _), place in zip(points, itertools.cycle((0, 1))):
        assert abs(x - place) < 0.3  # nearer to its own setting than to the next one
    assert lines["seeds"].get_ydata().tolist() == [13.0]
    bars = {round(float(s[0][0]), 6): s[:, 1].tolist() for bar in axis.collections for s in bar.get_segments()}
    assert bars[round(float(lines["seeds"].get_xdata()[0]), 6)] == [10.0, 18.0]
    crosses = [line.get_xydata().tolist() for line in axis.lines if line.get_marker() == "x"]
    assert crosses == [[[lines["half"].get_xdata()[0], -3.0]]]
    ((_, height),) = next(
        line.get_xydata() for line in axis.lines if line.get_marker() == "^" and not line.get_clip_on()
    )
    assert (height, lines["high"].get_ydata().tolist()) == (50.0, [90.0])
    pyplot.close(figure)


@pytest.mark.parametrize("columns", [["depth"], ["method"], [RATES, "train.schedule"], ["train.seed"]])
def test_stored_results_are_drawn(tmp_path: Path, columns: list[str]) -> None:
    rows = sweep_results.from_csv((ROOT / "benchmarks" / "results" / "sweep_robustness.csv").read_text())
    sweep_figure.draw(rows, columns, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_axes_are_named_with_their_units() -> None:
    names = [
        sweep_figure.axis_name(sweep_figure.Panel("", axis, {}, log, {}))
        for axis, log in (("depth", True), ("model.alpha_steps", False), (RATES, True), ("", False))
    ]
    assert names == [
        "depth (layers, log scale)",
        "alpha steps (updates)",
        "learning rate (log scale)",
        "",
    ]
    assert math.gcd(len(sweep_figure.MARKERS), len(figures.COLOURS)) == 1


def test_range_of_scores() -> None:
    """BLEU begins at 0. Bits per byte begin below the best, and a diverged model does not flatten the others."""
    assert sweep_figure.limits([20.0, 40.0], "bleu") == (0.0, 42.0)
    assert sweep_figure.limits([], "bits_per_byte") == (0.0, 1.0)
    low, high = sweep_figure.limits([2.0, 3.0, 130.0], "bits_per_byte")
    assert low < 2.0
    assert 3.0 < high < 5.0
