"""Compares planned costs with hand-counted and published numbers, and draws the curves of a run."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.analysis import devices, estimate
from branchnorm_jax.analysis.devices import find, host_memory, memory
from branchnorm_jax.analysis.estimate import (
    calibrate,
    compiled_update_bytes,
    fitting_tokens,
    forward_flops,
    held_bytes,
    peak_bytes,
    recomputed_flops,
    seconds,
    shrink,
    update_costs,
    with_remat,
)
from branchnorm_jax.analysis.plan import make_plan, resolve_remat, warning
from branchnorm_jax.analysis.report import draw_curves
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes import runs
from branchnorm_jax.options import Config, ParallelConfig, PlanConfig
from branchnorm_jax.workdir import Workdir
from configs import lm

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def config(depth: str = "6L-6L", **options: object) -> Config:
    values = configs.default_config(depth)
    with values.unlocked():
        for name, value in options.items():
            section, field = name.split("__")
            values[section][field] = value
    return configs.from_config_dict(values)


@pytest.mark.parametrize(
    ("depth", "kernels", "file"),
    [
        ("6L-6L", "auto", "6L"),
        pytest.param("6L-6L", "plain", "6L_plain_kernels", marks=pytest.mark.slow),
        pytest.param("100L-100L", "auto", "100L", marks=pytest.mark.slow),
        ("500L-500L", "auto", "500L"),
    ],
)
def test_seconds_of_updates_measured_on_an_h200(depth: str, kernels: str, file: str) -> None:
    """Within 3 %, as docs/performance.md says; the fractions of `SHARES` are fitted to these four."""
    measured = json.loads((RESULTS / f"gpu_{file}.json").read_text())
    run = config(
        depth,
        model__dtype="bfloat16",
        model__carry_dtype="float16",
        model__kernels=kernels,
        data__vocab_size=32_000,
        data__power_of_two_rows=True,
        train__batch_tokens=65_536,
        plan__device="h200",
        plan__devices=1,
    )
    run = resolve_remat(run, find("h200").memory)
    assert {name: getattr(run.model, name) for name in ("remat", "group", "unroll")} == measured["remat"]
    assert seconds(run, find("h200"), update_costs(run, 2048, 32)) == pytest.approx(
        measured["seconds_per_update"], rel=0.03
    )


def test_forward_flops_of_a_layer() -> None:
    """Width 512: 6.29 MFLOP of matrix products per source token in an encoder layer, 8.39 in a decoder layer."""
    flops = forward_flops(config(), 0, 0, 32_768)
    assert flops["encoder"] / 6 == 2 * (4 * 512**2 + 2 * 512 * 2048) == pytest.approx(6.29e6, rel=1e-3)
    assert flops["decoder"] / 6 == 2 * (8 * 512**2 + 2 * 512 * 2048) == pytest.approx(8.39e6, rel=1e-3)
    assert flops["output"] == 2 * 512 * 32_768


@pytest.mark.parametrize(("depth", "gigaflops"), [("6L-6L", 0.368), ("100L-100L", 4.55), ("500L-500L", 22.4)], ids=str)
def test_flops_of_an_update(depth: str, gigaflops: float) -> None:
    """Forward and backward FLOP per pair of source and target tokens, with a vocabulary of 32,768."""
    run = config(depth, data__vocab_size=32_768)
    flops = 3 * sum(forward_flops(run, 32, 32, 32_768).values())
    # The published figures are rounded and count the attention over 32 tokens slightly differently.
    assert flops / 1e9 == pytest.approx(gigaflops, rel=0.02)


def test_recomputed_flops() -> None:
    """Depending on remat: nothing, fc1 and the scores q k, one forward pass of the layers, or two."""
    parts = forward_flops(config(), 32, 32, 8000)
    layers = parts["encoder"] + parts["decoder"]
    more = {remat: recomputed_flops(config(model__remat=remat), parts, 32, 32) for remat in REMAT}
    hidden, scores = 2 * 512 * 2048, 2 * 512 * 32
    assert more == {
        "none": 0,
        "save_branches": 6 * (hidden + scores) + 6 * (hidden + 1.5 * scores),
        "full": layers,
        "nested": 2 * layers,
    }


@pytest.mark.slow
def test_plan_of_a_deep_run() -> None:
    plan = make_plan(config("100L-100L", model__remat="auto", plan__device="h200", train__batch_tokens=4096))
    assert plan["non_embedding_parameters"] == 735_641_600
    assert plan["parameter_bytes"] == 4 * plan["parameters"]
    assert plan["state_bytes"] == 12 * plan["parameters"] + 4
    assert sum(plan["parameters_by_part"].values()) == plan["parameters"]
    choices = plan["remat"]
    none, branches, full, nested = (choices[remat] for remat in REMAT)
    assert none["peak_bytes"] > branches["peak_bytes"] > full["peak_bytes"] > nested["peak_bytes"] > plan["state_bytes"]
    assert none["step_seconds"] < branches["step_seconds"] < full["step_seconds"] < nested["step_seconds"]
    assert none["tokens_per_microbatch"] < branches["tokens_per_microbatch"] < full["tokens_per_microbatch"]
    # The run fits into 141 GB without recomputation, but a loop of 100 layers would copy all that it stores.
    assert none["fits"] and plan["chosen_remat"] == "full"


@pytest.mark.parametrize(
    ("depth", "options", "expected"),
    [
        ("6L-6L", {"plan__device": "h200"},
         [("none", 0, 6), ("save_branches", 0, 6), ("full", 3, 0), ("nested", 0, 0)]),
        ("100L-50L", {"plan__device": "h200"}, [("full", 5, 0), ("nested", 0, 0)]),
        ("97L-97L", {"plan__device": "v5e"}, [("full", 1, 0), ("nested", 0, 0)]),
        ("100L-100L", {"plan__device": "h200", "model__group": 2, "model__unroll": 100},
         [("none", 2, 100), ("save_branches", 2, 100), ("full", 2, 100), ("nested", 2, 100)]),
        ("6L-6L", {"plan__device": "v5p", "parallel__fsdp": 4}, [(remat, 0, 0) for remat in REMAT]),
        ("6L-6L", {"plan__device": "cpu"}, [(remat, 0, 0) for remat in REMAT]),
    ],
)  # fmt: skip
def test_choices_and_loops_of_remat_auto(depth: str, options: dict[str, Any], expected: list[Any]) -> None:
    """(remat, group, unroll) from the fastest to the smallest: on accelerators, deep loops store little."""
    order = estimate.remat_order(config(depth, **options))
    assert [(c.model.remat, c.model.group, c.model.unroll) for c in order] == expected


@pytest.mark.slow
def test_plans_of_absent_devices_use_their_mesh(tmp_path: Path) -> None:
    def planned(fsdp: int) -> dict[str, Any]:
        plan = PlanConfig(device="h200", devices=8, compile="none")
        run = config("2L-2L", model__remat="full", model__width=256, data__vocab_size=400, train__batch_tokens=512)
        run = dataclasses.replace(run, plan=plan, parallel=ParallelConfig(fsdp=fsdp))
        runs.plan(run, Workdir(tmp_path / str(fsdp)))
        return json.loads((tmp_path / str(fsdp) / "plan.json").read_text())

    # Parameters, moments and gradients of each device are an eighth; all of them are larger than the activations.
    whole, sharded = planned(1), planned(8)
    assert whole["state_bytes"] == sharded["state_bytes"]
    assert whole["peak_bytes"] - sharded["peak_bytes"] > 0.8 * 7 / 8 * whole["state_bytes"] * 4 / 3
    with pytest.raises(UserError, match="does not match the 8 devices"):
        planned(3)


@pytest.mark.slow
def test_only_plans_of_one_accelerator_include_the_kernels() -> None:
    """The attention kernel stores no weights [B, H, T, S], so its memory does not depend on the length of rows."""

    def growth(count: int, rows_suit: bool = True) -> float:
        chosen = config(
            plan__device="h200", plan__devices=count, model__remat="none", model__width=64, model__heads=4,
            model__dtype="bfloat16", data__vocab_size=1000, data__power_of_two_rows=rows_suit,
        )  # fmt: skip
        short, long = (estimate.update_costs(chosen, rows, 4096 // rows).peak for rows in (128, 16))
        return long - short

    # The weights of one attention with 4 heads, two bytes each. There are 6 + 2 x 6 attentions.
    weights = 4 * 2 * 4096 * (256 - 32)
    assert growth(2) > 18 * weights
    assert growth(1) < weights
    assert growth(1, rows_suit=False) == growth(2)


def test_traced_flops_of_an_update_match_the_formula() -> None:
    """The FLOP count of the traced update is within 2% of the count by hand."""
    run = config("6L-6L", model__width=64, model__ffn_width=256, model__heads=2, data__vocab_size=400)
    for remat in ("none", "full", "nested"):
        chosen = with_remat(run, remat)
        # Masked scores are computed as well, so each query attends to all positions of its own sentence.
        parts = forward_flops(run, 16, 32, 400)
        again = recomputed_flops(chosen, parts, 16, 32)
        counted = update_costs(chosen, 64, 16).flops / (64 * 16)
        assert counted == pytest.approx(3 * sum(parts.values()) + again, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "accumulation"), [("full", 4), ("nested", 1)])
def test_fitting_tokens_fill_the_memory(remat: str, accumulation: int) -> None:
    """The returned tokens fit, and about 10% more rows do not. Holds for little and for much memory."""
    run = config(
        "30L-30L", model__width=64, model__ffn_width=256, model__heads=2, data__vocab_size=400, model__remat=remat,
        train__accumulation=accumulation,
    )  # fmt: skip

    def peak(rows: float) -> float:
        return update_costs(run, int(rows) * accumulation, length).peak

    length = estimate.lengths(run)[0]
    assert fitting_tokens(run, 0.99 * peak(1)) == 0
    for available in (1.3 * peak(1), 1e9):
        rows = fitting_tokens(run, available) // length
        assert peak(rows) <= available < peak(1.1 * rows + 2)


def test_calibration_is_exact_at_the_measured_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line passes through both shallow models and extrapolates to deeper models by the traced costs."""
    run = config("8L-8L", model__width=16, model__ffn_width=32, model__heads=2, data__vocab_size=100)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, batch_tokens=256))
    clock = {1: 2.0, 4: 5.0}
    monkeypatch.setattr(estimate, "measured_seconds", lambda shallow, *_: clock[shallow.model.encoder_layers])
    on_device, device = calibrate(run), find("")
    for layers, expected in (clock | {8: 9.0}).items():
        shallow = shrink(run, layers, layers)
        assert on_device(seconds(shallow, device, update_costs(shallow, 8, 32))) == pytest.approx(expected, rel=1e-3)


def test_warning_lists_what_lowers_the_memory() -> None:
    run = config("2L-2L", model__remat="none")
    assert warning(run, 1e9, needed=1e9) == ""
    message = warning(run, 1e9, needed=1.01e9)
    assert re.search(r"1.01 GB with model.remat=none, .*model.remat=nested.*accumulation.*batch", message), message
    message = warning(with_remat(run, "nested"), 1e9, needed=2e9)
    assert re.search(r"model.remat=nested, .* in this order: a larger train.accumulation", message), message


def test_plans_of_language_models_count_full_rows() -> None:
    run = configs.from_config_dict(lm.get_config("2L"))
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, batch_tokens=4000))
    # There is room for 15 rows of 256 tokens; the number of rows is a multiple of eight.
    assert make_plan(run)["tokens_per_update"] == 8 * 256
    assert "data.context" in warning(run, 1e9, needed=2e9)


@pytest.mark.slow
def test_training_warns_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"model__width": 16, "model__ffn_width": 24, "model__heads": 2, "data__vocab_size": 300}
    brief = {"train__steps": 1, "train__batch_tokens": 512, "train__eval_every": 1, "train__eval_bleu_sentences": 0}
    few = {"data__numerals_pairs": 200, "model__alpha_steps": 10, "train__best_metric": "loss"}
    run = config("1L-1L", model__remat="none", **tiny, **brief, **few)
    monkeypatch.setattr(devices, "memory", lambda: 1.1 * estimate.held_bytes(run))
    runs.train(run, Workdir(tmp_path))
    said = capsys.readouterr().err
    assert "model.alpha_steps=10 is less than train.warmup_steps=4000" in said
    assert 0 < said.index("warning: an update may not fit") < said.index("step 1:"), said
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "done"


@pytest.mark.slow
def test_auto_takes_the_first_choice_that_fits() -> None:
    run = config("100L-100L", model__width=64, model__ffn_width=256, model__heads=2, data__vocab_size=400)
    peaks = {remat: peak_bytes(with_remat(run, remat), 1) for remat in REMAT}
    auto = with_remat(run, "auto")
    for remat in ("none", "full", "nested"):
        assert resolve_remat(auto, 1.01 * peaks[remat]) == with_remat(run, remat)
    assert resolve_remat(auto, 0.99 * peaks["nested"]) == with_remat(run, "nested")
    explicit = with_remat(run, "none")
    assert resolve_remat(explicit, 0.99 * peaks["none"]) == explicit


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        ({}, 16),
        ({"train__ema_decay": 0.9}, 20),
        ({"train__optimizer": "adagrad"}, 12),
        ({"train__update_in_backward": True, "model__remat": "full"}, 12),
    ],
    ids=str,
)
def test_runs_whose_state_cannot_fit_are_rejected(options: dict[str, object], bytes_per_parameter: int) -> None:
    run = config("2L-2L", **{"model__remat": "none", **options})
    count = sum(leaf.size for leaf in jax.tree.leaves(Transformer(run.model, 8000, 8000).abstract_params()))
    available = bytes_per_parameter * count + 100  # 100 bytes for the step counters
    assert resolve_remat(run, available) == run
    with pytest.raises(UserError, match=r"need .* GB, but the device has .* a larger parallel.fsdp or parallel.model"):
        resolve_remat(run, 0.999 * available)
    not_rejected = dataclasses.replace(run, plan=PlanConfig(refuse=False))
    assert resolve_remat(not_rejected, 1.0) == not_rejected
    # Vectors stay whole: they are less than one percent.
    for half in (ParallelConfig(model=2), ParallelConfig(fsdp=2)):
        assert resolve_remat(dataclasses.replace(run, parallel=half), 0.51 * available)
        with pytest.raises(UserError):
            resolve_remat(dataclasses.replace(run, parallel=half), 0.49 * available)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"train__update_in_backward": True, "model__remat": "full"}], ids=str)
def test_compiled_update_needs_more_memory_than_the_state(options: dict[str, object]) -> None:
    """A run is rejected if its state alone does not fit, so no run that would fit is rejected."""
    small = dict(model__width=128, model__ffn_width=512, model__heads=2, data__vocab_size=400, data__row_multiple=2)
    run = config("12L-12L", **small, **options)
    assert 1 < compiled_update_bytes(run, 2, 8) / held_bytes(run) < 1.3


def test_memory_of_known_and_unknown_devices() -> None:
    assert find("h200").memory == pytest.approx(0.94 * 141e9)
    assert 0 < memory() == find("").memory < host_memory()
    with pytest.raises(UserError, match=r"'b200' is not known; set plan\.device to one of v100, a100"):
        find("b200")


def test_curves_are_drawn_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    with pytest.raises(UserError, match="nothing to draw"):
        draw_curves(workdir)
    lines = [{"step": step, "nll": 3.0, "alpha": 0.1, "learning_rate": 1e-3} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "nl')
    picture = draw_curves(workdir)
    assert picture.read_bytes().startswith(b"\x89PNG")
