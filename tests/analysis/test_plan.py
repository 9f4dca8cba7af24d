"""Costs against hand-counted and published figures; curves drawn from a run's files."""

import json
from pathlib import Path

import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.analysis.plan import forward_flops, make_plan
from branchnorm_jax.analysis.report import draw_curves
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.options import Config
from branchnorm_jax.workdir import Workdir


def config(depth: str = "6L-6L", **options: object) -> Config:
    values = configs.default_config(depth)
    with values.unlocked():
        for name, value in options.items():
            section, field = name.split("__")
            values[section][field] = value
    return configs.from_config_dict(values)


def test_operations_of_a_layer() -> None:
    """Width 512: 6.29 MFLOP of matrix products per source token in an encoder layer, 8.39 in a decoder layer."""
    flops = forward_flops(config(), 0, 0, 32_768)
    assert flops["encoder"] / 6 == 2 * (4 * 512**2 + 2 * 512 * 2048) == pytest.approx(6.29e6, rel=1e-3)
    assert flops["decoder"] / 6 == 2 * (8 * 512**2 + 2 * 512 * 2048) == pytest.approx(8.39e6, rel=1e-3)
    assert flops["output"] == 2 * 512 * 32_768


@pytest.mark.parametrize(("depth", "gigaflops"), [("6L-6L", 0.368), ("100L-100L", 4.55), ("500L-500L", 22.4)], ids=str)
def test_operations_of_an_update(depth: str, gigaflops: float) -> None:
    """Forward and backward per pair of tokens, V = 32k."""
    found = make_plan(config(depth, data__vocab_size=32_768))["flops_per_target_token"]
    # The published figures are rounded and count the attention over 32 tokens slightly differently.
    assert found / 1e9 == pytest.approx(gigaflops, rel=0.02)


def test_recomputation() -> None:
    """One more forward pass of the layers, two, or that of fc1 and the scores q k."""
    plans = {remat: make_plan(config("6L-6L", model__remat=remat)) for remat in REMAT}
    parts = plans["none"]["forward_flops_by_part"]
    more = {k: plan["flops_per_target_token"] - plans["none"]["flops_per_target_token"] for k, plan in plans.items()}
    layers = parts["encoder"] + parts["decoder"]
    hidden, scores = 2 * 512 * 2048, 2 * 512 * 32
    assert more == {
        "none": 0,
        "save_branches": 6 * (hidden + scores) + 6 * (hidden + 1.5 * scores),
        "full": layers,
        "nested": 2 * layers,
    }


def test_state_is_parameters_and_two_moments() -> None:
    plan = make_plan(config("100L-100L"))
    assert plan["non_embedding_parameters"] == 735_641_600
    assert plan["parameter_bytes"] == 4 * plan["parameters"]
    assert plan["state_bytes"] == 12 * plan["parameters"] + 4
    assert sum(plan["parameters_by_part"].values()) == plan["parameters"]


def test_curves_are_drawn_from_what_the_run_logged(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    with pytest.raises(UserError, match="nothing to draw"):
        draw_curves(workdir)
    lines = [{"step": step, "nll": 3.0, "alpha": 0.1, "learning_rate": 1e-3} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "nl')
    picture = draw_curves(workdir)
    assert picture.read_bytes().startswith(b"\x89PNG")
