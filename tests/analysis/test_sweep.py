"""Sweep grids, and a real sweep in which one run diverges."""

import csv
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from branchnorm_jax.analysis import sweep, sweep_results
from branchnorm_jax.config import default_config, from_config_dict, load, record_chosen
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import Score
from branchnorm_jax.evaluation.evaluate import scoring_options, write_results
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.modes import function_of
from branchnorm_jax.options import Config, DataConfig, EvaluateConfig, ModelConfig, SweepConfig, TrainConfig
from branchnorm_jax.workdir import Workdir
from tests.conftest import HASTY, run_main


def test_grid_combines_its_axes_and_names_its_runs() -> None:
    runs = sweep.parse_grid(
        "method=post_ln,rezero depth=6L-6L,18L-3L | method=rezero depth=6L-6L | method=keel train.seed=3"
    )
    assert [sweep.name_of(run) for run in runs] == [
        "post_ln-6L-6L",
        "post_ln-18L-3L",
        "rezero-6L-6L",
        "rezero-18L-3L",
        "keel-seed=3",
    ]
    config = sweep.configure(Config(), runs[1])
    assert (config.model.method, config.model.encoder_layers, config.model.decoder_layers) == ("post_ln", 18, 3)
    assert sweep.configure(Config(), runs[4]).train.seed == 3


def test_recommended_options_that_no_run_sets_are_named() -> None:
    def left_out(grid: str, **train: str) -> dict[str, dict[str, Any]]:
        options = default_config("2L-2L")
        options.sweep.grid = grid
        options.train.update(train)
        return sweep.left_out(sweep.plan_runs(from_config_dict(options)))

    recommended = METHODS["rezero"].recommended
    rest = {name: value for name, value in recommended.items() if name != "train.optimizer"}
    assert left_out("method=rezero,post_ln") == {"rezero": recommended}
    assert left_out("method=rezero", optimizer="lamb") == {"rezero": rest}
    assert left_out("method=rezero | method=rezero train.optimizer=adam train.seed=1") == {"rezero": rest}
    assert not left_out("method=rezero train.optimizer=lamb train.schedule=constant train.warmup_steps=0")


def test_recommended_options_apply_on_request_to_options_that_are_not_set() -> None:
    def run_of(options: ConfigDict, method: str) -> Config:
        return sweep.configure(from_config_dict(options), {"method": method, "train.learning_rate": "0.002"})

    options = default_config("2L-2L")
    options.sweep.grid = "method=admin,post_ln train.learning_rate=0.002"
    options.train.optimizer = "adamw"  # the default
    record_chosen(options, set())
    assert run_of(options, "admin").train.warmup_steps == Config().train.warmup_steps
    options.sweep.recommended = True
    record_chosen(options, {"sweep.recommended"})
    admin = run_of(options, "admin")
    assert (admin.train.warmup_steps, admin.model.attention_dropout) == (8000, 0.1)
    assert (admin.train.optimizer, admin.train.learning_rate) == ("adamw", 0.002)
    assert run_of(options, "post_ln").train.warmup_steps == Config().train.warmup_steps
    taken = sweep.recommended(from_config_dict(options), {"method": "admin", "train.learning_rate": "0.002"})
    left = {"train.optimizer", "train.learning_rate"}
    assert taken == {name: value for name, value in METHODS["admin"].recommended.items() if name not in left}

    # The sweep is resumed from its workdir with one more option.
    again = ConfigDict(dataclasses.asdict(from_config_dict(options)))
    again.model.attention_dropout = Config().model.attention_dropout
    record_chosen(again, {"model.attention_dropout"})
    assert dataclasses.replace(run_of(again, "admin"), model=admin.model) == admin
    assert run_of(again, "admin").model.attention_dropout == Config().model.attention_dropout


def test_the_options_of_an_earlier_run_all_count_as_set() -> None:
    saved = ConfigDict(dataclasses.asdict(Config(train=TrainConfig(warmup_steps=300, branch_update_power=0.0))))
    saved.sweep.update(grid="method=branchnorm", recommended=True)
    record_chosen(saved, {"sweep.grid", "sweep.recommended"})
    (run,) = (config for _, config in sweep.plan_runs(from_config_dict(saved)).values())
    assert (run.model.alpha_steps, run.model.alpha_end) == (Config().model.alpha_steps, Config().model.alpha_end)
    assert (run.train.warmup_steps, run.train.branch_update_power) == (300, 0.0)


def test_alpha_steps_follow_the_warmup_of_each_run_unless_set() -> None:
    def alpha_steps(warmup: int, chosen: int | None, run: dict[str, str]) -> int:
        options = default_config("2L-2L")
        options.train.warmup_steps = warmup
        if chosen is not None:
            options.model.alpha_steps = chosen
        record_chosen(options, set())
        return sweep.configure(from_config_dict(options), run).model.alpha_steps

    assert alpha_steps(300, None, {"method": "branchnorm"}) == 300
    assert alpha_steps(300, None, {"train.warmup_steps": "100"}) == 100
    assert alpha_steps(300, 700, {"train.warmup_steps": "100"}) == 700
    assert alpha_steps(300, Config().model.alpha_steps, {"method": "branchnorm"}) == Config().model.alpha_steps
    # This includes a T that equals the warm-up.
    deep = {"depth": "144L-144L", "train.branch_update_power": "2"}
    assert alpha_steps(300, None, deep) == 600
    assert alpha_steps(300, 300, deep) == 300
    assert alpha_steps(300, None, {"model.alpha_steps": "50"}) == 50


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("", "give axes"),
        ("method", "name=value"),
        ("method=post_ln,", "name=value"),
        ("train.learning_rat=1", "learning_rate"),
        ("train.lr=1", "did you mean 'train.learning_rate'"),
        ("method=post_ln | ", "give axes"),
        ("method=post_ln |", "none in 'an empty part' of"),
        ("dept=1L-1L", "did you mean 'depth'"),
        ("sweep.grid=x", "no axis 'sweep.grid'; axes are method, depth and the options of"),
        ("model.depth=2L-2L", "no axis 'model.depth'; did you mean 'depth'"),
        ("method=post_ln method=rezero", "set the same option"),
        ("method=post_ln train.seed=0,1,0", "train.seed=0,1,0 has 0 twice"),
        ("method=post_ln model.method=rezero", "method and model.method set the same option"),
        ("depth=2L-2L model.encoder_layers=3", "depth and model.encoder_layers set the same option"),
        ("method=post_ln,rezro", "no method 'rezro'; did you mean 'rezero'"),
        ("method=post_ln,rezero", "'deepnorm' is not among the grid's methods \\(post_ln, rezero\\)"),
    ],
)
def test_invalid_grids_are_rejected(grid: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.parse_grid(grid, baseline="deepnorm")


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("train.seed", "x", "expected int"),
        ("depth", "18L-", "expected a depth such as"),
        ("model.heads", "7", "does not divide"),
        ("model.output_bias", "maybe", "expected bool"),
    ],
)
def test_options_reject_invalid_values(axis: str, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.configure(Config(), {axis: value})


def test_an_axis_of_epochs_replaces_the_number_of_updates() -> None:
    for axis, value, lengths in (("train.epochs", "3", (0, 3)), ("train.steps", "5", (5, 0))):
        train = sweep.configure(Config(train=TrainConfig(steps=7)), {axis: value}).train
        assert (train.steps, train.epochs) == lengths


def test_folders_of_runs_are_inside_the_workdir() -> None:
    plain = {"method": "post_ln", "train.learning_rate": "1e-3"}
    assert sweep.folder_of(plain) == sweep.name_of(plain) == "post_ln-learning_rate=1e-3"
    folders = {sweep.folder_of({"data.path": path}) for path in ("../../a", "../../b", "/a/b", "..", "x" * 5000)}
    assert len(folders) == 5
    assert all("/" not in name and not name.startswith(".") and len(name) < 120 for name in folders)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            SweepConfig(grid="train.learning_rate=1e-3,0.001"),
            "learning_rate=0.001 and learning_rate=1e-3 are the same run",
        ),
        (
            SweepConfig(grid="method=post_ln train.learning_rate=1e-3 | method=rezero train.learning_rate=0.001"),
            "train.learning_rate has 1e-3 and 0.001, which are equal",
        ),
        (SweepConfig(grid="method=post_ln depth=6L-6L | method=rezero depth=6-6"), "depth has 6L-6L and 6-6"),
        (
            SweepConfig(grid="depth=2L-2L model.heads=7"),
            "sweep.grid: 2L-2L-heads=7: config: model.heads=7 does not divide",
        ),
        (SweepConfig(grid="train.seed=x"), "sweep.grid: seed=x: train.seed=x: expected int"),
        (
            SweepConfig(grid="train.seed=1,2", columns="depth, nosuch"),
            "sweep.columns: the grid has no axis nosuch",
        ),
    ],
    ids=["spelling", "spelling of a rate", "spelling of a depth", "value", "type", "columns"],
)
def test_invalid_sweeps_are_rejected(options: SweepConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.plan_runs(dataclasses.replace(Config(), sweep=options))


def test_values_of_text_options_are_not_compared_as_numbers() -> None:
    plans = sweep.plan_runs(dataclasses.replace(Config(), sweep=SweepConfig(grid="data.test_split=1,01")))
    assert [config.data.test_split for _, config in plans.values()] == ["1", "01"]


def test_sweeps_without_test_scores_are_rejected() -> None:
    config = dataclasses.replace(Config(), evaluate=EvaluateConfig(splits="valid"))
    with pytest.raises(UserError, match=r"evaluate\.splits=valid: a sweep compares test scores"):
        sweep.plan_runs(config)


def test_table_shows_means_and_significance() -> None:
    def row(method: str, depth: str, seed: str, bleu: float | None, p: float | None, status: str = "done") -> dict:
        axes = {"method": method, "depth": depth, "train.seed": seed}
        return {"run": f"{method}-{depth}-{seed}", **axes, "status": status, "bleu": bleu, "p_value": p}

    rows = [
        row("post_ln", "6L-6L", "0", 30.0, 0.01),
        row("post_ln", "6L-6L", "1", 32.0, 0.02),
        row("post_ln", "18L-18L", "0", None, None, "diverged"),
        row("deepnorm", "6L-6L", "0", 29.0, None),
        row("rezero", "6L-6L", "0", 27.0, 0.01),
        row("rezero", "6L-6L", "1", None, None, "not run"),
        row("rezero", "6L-6L", "2", None, None, "not run"),
        row("rezero", "18L-18L", "0", 28.0, 0.5),
    ]
    assert sweep_results.to_markdown(rows, ["depth"], "deepnorm").splitlines()[:5] == [
        "| test BLEU | 6L-6L | 18L-18L |",
        "|---|---|---|",
        "| post_ln | 31.00 ± 1.0* | diverged |",
        "| deepnorm | 29.00 |  |",
        "| rezero | 27.00 (1 of 3, not run) | 28.00 |",
    ]


def test_a_star_needs_differences_in_one_direction() -> None:
    rows: list[dict[str, Any]] = [
        {"method": method, "train.seed": str(seed), "status": "done", "bleu": 20.0, "p_value": 0.01, "difference": sign}
        for method, signs in (("pre_ln", (-1.0, 1.0)), ("rezero", (1.0, 2.0)))
        for seed, sign in enumerate(signs)
    ]
    assert sweep_results.to_markdown(rows, ["depth"], "deepnorm").splitlines()[2:] == [
        "| pre_ln | 20.00 ± 0.0 |",
        "| rezero | 20.00 ± 0.0* |",
        "",
        "\\* p < 0.05 against deepnorm, approximate randomisation.",
    ]


def test_runs_are_compared_with_the_baseline_of_the_same_axes(tmp_path: Path) -> None:
    """Axes that the baseline does not have are ignored, also in runs of its method. The others must be equal."""
    runs = sweep.parse_grid(
        "method=deepnorm depth=6L-6L | method=post_ln,deepnorm depth=6L-6L train.seed=0,1 | "
        "method=branchnorm depth=6L-6L,9L-9L train.seed=1 model.alpha_steps=200 | "
        "method=deepnorm depth=6L-6L train.seed=1 model.dropout=0.3"
    )
    folders = {sweep.name_of(run): (run, Workdir(tmp_path / sweep.name_of(run))) for run in runs}
    right, wrong = ["one two three four five"] * 30, ["six seven eight nine ten"] * 30
    for run, folder in folders.values():
        (folder / "evaluation").mkdir(parents=True)
        # The texts depend on method, dropout and seed, so a comparison with a wrong baseline would be detected.
        good = (run["method"] == "deepnorm" and "model.dropout" not in run) == (run.get("train.seed") != "1")
        (folder / "evaluation" / "test.hypothesis").write_text("\n".join(right if good else wrong) + "\n")
        (folder / "evaluation" / "test.reference").write_text("\n".join(right) + "\n")
    rows: list[dict[str, Any]] = [{"run": name, "bleu": 1.0} for name in folders]
    sweep_results.compare(rows, folders, "deepnorm", "en")
    p_values = {row["run"]: row["p_value"] for row in rows}
    # Randomisation of the systems of 30 lines: only the two that leave them alone, or exchange all, differ as much.
    assert p_values["post_ln-6L-6L-seed=0"] == pytest.approx(1 / 10_001)
    assert {row["run"]: row["difference"] for row in rows}["post_ln-6L-6L-seed=0"] == 0.0
    assert p_values["deepnorm-6L-6L-seed=0"] is None and p_values["deepnorm-6L-6L-seed=1"] is None
    assert p_values["deepnorm-6L-6L-seed=1-dropout=0.3"] < 0.01
    assert p_values["post_ln-6L-6L-seed=0"] < 0.01
    assert p_values["branchnorm-6L-6L-seed=1-alpha_steps=200"] < 0.01
    assert p_values["branchnorm-9L-9L-seed=1-alpha_steps=200"] is None
    # A run whose own baseline has no score is not compared with another one.
    rows = [{"run": name, "bleu": None if name == "deepnorm-6L-6L-seed=0" else 1.0} for name in folders]
    sweep_results.compare(rows, folders, "deepnorm", "en")
    assert {row["run"]: row["difference"] for row in rows}["post_ln-6L-6L-seed=0"] is None
    # Texts of a run without a score are those of other options, or from before it diverged.
    for unscored in ("deepnorm", "post_ln-6L-6L-seed=0"):
        rows = [{"run": name, "bleu": None if name.startswith(unscored) else 1.0} for name in folders]
        sweep_results.compare(rows, folders, "deepnorm", "en")
        assert {row["run"]: row["p_value"] for row in rows}["post_ln-6L-6L-seed=0"] is None


@pytest.mark.parametrize("family", ["encoder_decoder", "decoder"])
def test_only_scores_of_the_run_itself_are_in_the_table(family: str, tmp_path: Path) -> None:
    """Not those of another text, of other options of the search, or from before more updates, which may diverge."""
    config = Config(model=ModelConfig(family=family), data=DataConfig(path="text"))
    workdir, metric = Workdir(tmp_path), sweep_results.main_metric(config)
    (workdir / "evaluation").mkdir()
    for side in ("reference", "hypothesis"):
        (workdir / "evaluation" / f"test.{side}").write_text("one\n")

    def scores(status: str, age: float, **options: Any) -> tuple[str, float | None]:
        run = {"step": 7, **scoring_options(config), **options}
        results = {"test": [Score(metric, 30.0, "signature")]}
        write_results(workdir / "results.json", results, workdir / "evaluation", run)
        (workdir / "status.json").write_text(json.dumps({"status": status}))
        modified = (workdir / "results.json").stat().st_mtime
        os.utime(workdir / "status.json", (modified + age, modified + age))
        (row,) = sweep_results.collect({"a": ({}, config)}, {"a": ({}, workdir)}, metric)
        return row["status"], row[metric]

    assert scores("done", -1) == ("done", 30.0)
    assert scores("diverged", 1) == ("diverged", None)
    assert scores("done", -1, test_split="valid") == ("done", None)
    other = {"stride": 3} if family == "decoder" else {"beam_size": 1}
    assert scores("done", -1, **other) == ("done", None)


def test_texts_of_returns_the_written_lines(tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    (workdir / "evaluation").mkdir()
    for side, text in (("reference", "a\rb\nc\n"), ("hypothesis", "\ufeffa\r\n\n")):
        (workdir / "evaluation" / f"test.{side}").write_bytes(text.encode())
    assert sweep_results.texts_of(workdir) == (["a\rb", "c"], ["a", ""])
    for broken in (b"a\n", b"", b"a\n\xff\n"):
        (workdir / "evaluation" / "test.hypothesis").write_bytes(broken)
        assert sweep_results.texts_of(workdir) is None
    for side in ("reference", "hypothesis"):
        (workdir / "evaluation" / f"test.{side}").write_bytes(b"")
    assert sweep_results.texts_of(workdir) is None


@pytest.mark.slow
def test_a_sweep_leaves_out_the_run_that_another_process_makes(tmp_path: Path) -> None:
    options = (*HASTY, "--mode=sweep", f"--workdir={tmp_path}", "--config.train.steps=2", "--config.train.eval_every=0")
    grid = "--config.sweep.grid=method=deepnorm,post_ln depth=1L-1L"

    def statuses() -> list[str]:
        with (tmp_path / "sweep.csv").open() as file:
            return [row["status"] for row in csv.DictReader(file)]

    with Workdir(tmp_path / "deepnorm-1L-1L").claimed() as ours:
        assert ours
        done = run_main(*options, grid)
    assert done.returncode == 0, done.stderr
    assert "skipping deepnorm-1L-1L, already being made by another process" in done.stderr
    assert statuses() == ["not run", "done"]
    assert run_main(*options, grid).returncode == 0
    assert statuses() == ["done", "done"]


def test_sweep_records_diverged_and_refused_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # Compilation is most of the time.
    grid = (
        "method=deepnorm depth=1L-1L train.batch_tokens=64 | method=post_ln,branchnorm depth=1L-1L | "
        "method=post_ln depth=1L-1L train.learning_rate=1e30"
    )
    options = (
        *HASTY,
        "--mode=sweep",
        f"--workdir={tmp_path}",
        "--config.train.steps=12",
        "--config.train.eval_every=0",
        f"--config.sweep.grid={grid}",
        "--config.sweep.baseline=branchnorm",
    )
    done = run_main(*options)
    assert done.returncode == 2, done.stderr
    left_out = "deepnorm-1L-1L-batch_tokens=64"
    assert f"\n{left_out}: config: train.batch_tokens=64 cannot hold" in done.stderr
    assert done.stderr.endswith(f"UserError: sweep.grid: {left_out} could not run; the reasons are above\n")
    with (tmp_path / "sweep.csv").open() as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert [row["status"] for row in rows.values()] == ["not run", "done", "done", "diverged"]
    assert float(rows["post_ln-1L-1L"]["bleu"]) >= 0
    assert 0 < float(rows["post_ln-1L-1L"]["p_value"]) <= 1
    table = (tmp_path / "sweep.md").read_text()
    assert "diverged" in table and done.stdout.endswith(table)
    for name in ("sweep.png", "sweep_curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    run, finished = sweep.parse_grid(grid)[1], Workdir(tmp_path / "post_ln-1L-1L")
    config = load(finished / "config.json")
    assert sweep_results.ended(finished, sweep.configure(config, run)) == "done"
    smoother = dataclasses.replace(config, train=dataclasses.replace(config.train, label_smoothing=0.2))
    assert sweep_results.ended(finished, sweep.configure(smoother, run)) == ""
    # Another device may need other loops.
    nested = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="nested"))
    assert sweep_results.ended(finished, sweep.configure(nested, run)) == "done"
    refused = run_main(f"--workdir={tmp_path}")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "add --mode=sweep" in refused.stderr
    saved, whole, folder = (tmp_path / "config.json").read_text(), load(tmp_path / "config.json"), Workdir(tmp_path)
    for mode in ("evaluate", "analyze"):
        with pytest.raises(UserError, match="one of its runs"):
            function_of(mode)(whole, folder)
    with pytest.raises(UserError, match="this is the folder of a sweep"):
        folder.agree_on_config(dataclasses.replace(whole, sweep=SweepConfig()))
    for train, reason in (
        (dataclasses.replace(whole.train, label_smoothing=0.3), "made with another config"),
        (dataclasses.replace(whole.train, steps=2), "past train.steps=2"),
    ):
        with pytest.raises(UserError, match=reason):
            function_of("sweep")(dataclasses.replace(whole, train=train), folder)
    assert (tmp_path / "config.json").read_text() == saved
    # A run with unreadable or inconsistent files is evaluated again.
    hypothesis, results = finished / "evaluation" / "test.hypothesis", finished / "results.json"
    for path, damage in ((results, "[]"), (results, '{"test": {"bleu": 3}}'), (results, "{"), (hypothesis, "x\n")):
        original = path.read_text()
        path.write_text(damage)
        assert sweep_results.ended(finished, sweep.configure(config, run)) == ""
        path.write_text(original)
        os.utime(results)
    (finished / "status.json").write_text("[]")
    results.write_text("{}")
    left = tmp_path / "branchnorm-1L-1L" / "corpus" / f".valid.{'0' * 32}.tmp"
    left.write_text("half of it")
    os.utime(left, (0, 0))
    repaired = run_main(f"--workdir={tmp_path}", "--mode=sweep")
    assert repaired.returncode == 2, repaired.stderr
    assert repaired.stderr.count(": skipping ") == 2
    assert not left.exists()
    assert repaired.stdout.endswith(table) and (tmp_path / "sweep.md").read_text() == table
    # A status newer than the scores means that the run continued and has not been evaluated yet.
    os.utime(finished / "status.json")
    assert sweep_results.ended(finished, sweep.configure(config, run)) == ""
