"""The command line: its modes, and exit code 2 with a one-line error for each mistake of a user."""

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from branchnorm_jax import cli
from branchnorm_jax import config as configs
from branchnorm_jax.cli import parse
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.options import Config, fields
from branchnorm_jax.training.loop import train
from branchnorm_jax.workdir import Workdir
from tests.conftest import HASTY, ROOT, TINY, read_metrics, read_status, run_main


def ends_with(error: str, *parts: str) -> bool:
    """Returns whether the last line of stderr contains all `parts` and there is no traceback."""
    last = error.strip().splitlines()[-1]
    return "Traceback" not in error and all(part in last for part in parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--config=configs/numerals.py", "--config.model.widht=3"], ["model.widht", "model.width"]),
        (["--config=configs/numerals.py", "--config.model.width=wide"], ["model.width", "wide"]),
        (["--config=configs/numerals.py", "--train.steps=10"], ["'train.steps'", "did you mean --config.train.steps?"]),
        (["--config=configs/numerals.py", "--max-tokens=10"], ["did you mean --config.train.batch_tokens?"]),
        (
            ["--config=configs/numerals.py", "--config.model.width=30", "--config.model.heads=4"],
            ["heads=4", "width=30"],
        ),
        (["--config=configs/numerals.py", "--config.model.dropout=2.0"], ["model.dropout=2.0", "maximum"]),
        (["--config=configs/numerals.py", "--mode=plan", "--config.model.method=postln"], ["postln", "post_ln"]),
        (
            ["--config=configs/numerals.py", "--config.train.epochs=3", "--config.train.steps=3"],
            ["steps=3", "epochs=3"],
        ),
        (["--config=configs/numerals.py:deep"], ["deep", "6L-6L"]),
        (["--config=configs/nothing.py"], ["configs/nothing.py"]),
        (["--config=configs/numerals.py", "--mode=fly"], ["fly", "translate"]),
        (["--config=configs/numerals.py", "--wrokdir=x"], ["wrokdir", "workdir"]),
        (["--config=configs/numerals.py", "extra"], ["extra", "--name=value"]),
        (["--workdir=/nowhere"], ["no --config", "numerals", "text"]),
        ([], ["no --config"]),
        (["--config=configs/numerals.py", "--config=configs/text.py"], ["twice"]),
        (["--config=configs/numerals.py", "--workdir="], ["--workdir is empty"]),
        (
            ["--config=configs/numerals.py", "--config.train.steps=a: b"],
            ["train.steps=a: b: a whole number is expected"],
        ),
        (["--config=configs/numerals.py", "--config.model.dropout=x"], ["model.dropout=x: a number is expected"]),
        (
            ["--config=configs/numerals.py", "--config.data.shared_vocab=yes"],
            ["flag --config.data.shared_vocab=yes: True or False is expected"],
        ),
        (["--config=README.md"], ["README.md"]),
        (["--config=nothing"], ["nothing", "numerals", "text"]),
    ],
    ids=lambda value: value[-1] if value else "nothing",
)
def test_command_line_mistakes_are_reported(options: list[str], parts: list[str]) -> None:
    done = run_main(*options)
    assert done.returncode == 2, done.stderr
    assert ends_with(done.stderr, *parts), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_epochs_on_the_command_line_replace_the_steps_of_the_config(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    options = [option for option in HASTY if "train.steps" not in option]
    done = run_main(*options, "--config.train.epochs=0.5", "--workdir", str(workdir))
    assert done.returncode == 0, done.stderr
    per_epoch = int(re.findall(r"(\d+) updates per epoch", done.stderr)[0])
    assert read_status(workdir)["step"] == math.ceil(0.5 * per_epoch)


@pytest.mark.slow
def test_default_workdir_is_named_after_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("branchnorm_jax", "configs", "main.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = "import sys, main; sys.exit(main.main(sys.argv))"
    for argument, folder in (("configs/numerals.py", "numerals"), ("configs/numerals.py:4L-4L", "numerals-4L-4L")):
        done = subprocess.run(
            [sys.executable, "-c", code, "--mode=plan", f"--config={argument}", "--config.plan.compile=none"],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "runs" / folder / "plan.json").exists()


def small_config(**data: object) -> Config:
    """Returns a config for text files of a few lines."""
    values = configs.default_config("1L-1L")
    with values.unlocked():
        values.model.update(width=8, heads=2, ffn_width=8)
        values.data.update(source="text", vocab_size=30, max_length=30, batch_shapes=1, row_multiple=1)
        values.data.update(**data)
        values.train.update(steps=1, batch_tokens=64, eval_bleu_sentences=1)
    return configs.from_config_dict(values)


def corpus(folder: Path) -> Path:
    """Writes a corpus of three short splits and returns its folder."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "valid", "test"):
        for lang in ("en", "de"):
            text = "".join(f"{split} {lang} line {number} of some words\n" for number in range(20))
            (folder / f"{split}.{lang}").write_text(text)
    return folder


def unequal(folder: Path) -> None:
    with (folder / "train.de").open("a") as file:
        file.write("one more\n")


def invalid(folder: Path) -> None:
    (folder / "train.en").write_bytes(b"good\n" * 6 + b"bad \xff byte\n" + b"good\n" * 13)


def emptied(folder: Path) -> None:
    for lang in ("en", "de"):
        (folder / f"train.{lang}").write_text("")


def removed(folder: Path) -> None:
    (folder / "valid.de").unlink()


@pytest.mark.parametrize(
    ("damage", "data", "parts"),
    [
        (removed, {}, ["valid.de"]),
        (unequal, {}, ["train.de", "21", "train.en", "20"]),
        (invalid, {}, ["train.en", "line 7", "UTF-8"]),
        (emptied, {}, ["empty"]),
        (lambda folder: None, {"vocab_size": 5000}, ["vocab_size"]),
        (lambda folder: shutil.rmtree(folder), {}, ["corpus"]),
    ],
    ids=["missing", "unequal", "invalid", "empty", "vocabulary", "folder"],
)
def test_invalid_corpora_are_rejected(
    damage: Callable[[Path], None], data: dict, parts: list[str], tmp_path: Path
) -> None:
    folder = corpus(tmp_path / "corpus")
    damage(folder)
    with pytest.raises(UserError) as error:
        train(small_config(path=str(folder), **data), Workdir(tmp_path / "run"))
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.slow
def test_workdir_rejects_another_config_or_corpus(tmp_path: Path) -> None:
    folder, workdir = corpus(tmp_path / "corpus"), Workdir(tmp_path / "run")
    config = small_config(path=str(folder))
    train(config, workdir)

    other = dataclasses.asdict(config)
    other["model"]["width"] = 16
    with pytest.raises(UserError, match=r"model\.width: 8 -> 16"):
        train(configs.from_config_dict(other), workdir)

    (folder / "train.en").write_text((folder / "train.en").read_text().replace("words", "verbs"))
    with pytest.raises(UserError, match=r"train: \w+ -> \w+"):
        train(config, workdir)

    # A refused start with other text leaves the run as it was.
    saved, right = workdir / "config.json", corpus(tmp_path / "corpus")
    before = saved.read_bytes()
    (corpus(tmp_path / "other") / "train.en").write_bytes((right / "train.de").read_bytes())
    with pytest.raises(UserError, match=r"train: \w+ -> \w+"):
        train(small_config(path=str(tmp_path / "other")), workdir)
    assert saved.read_bytes() == before
    train(configs.load(saved), workdir)


@pytest.mark.slow
def test_failed_start_does_not_fix_the_options_of_the_workdir(tmp_path: Path) -> None:
    """Before the first checkpoint, the corrected command works in the workdir where the wrong one failed."""
    folder, workdir = corpus(tmp_path / "corpus"), Workdir(tmp_path / "run")
    with pytest.raises(UserError, match="vocab_size"):
        train(small_config(path=str(folder), vocab_size=5000), workdir)
    train(small_config(path=str(folder)), workdir)
    with pytest.raises(UserError, match="vocab_size: 30 -> 29"):
        train(small_config(path=str(folder), vocab_size=29), workdir)


@pytest.mark.slow
def test_broken_files_in_a_workdir_are_reported(trained: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    options = ("--mode=translate", f"--workdir={workdir}")
    model = workdir / "vocabulary" / "source.model"
    good = model.read_bytes()
    other = corpus(tmp_path / "corpus")
    train(small_config(path=str(other)), Workdir(tmp_path / "other"))
    model.write_bytes((tmp_path / "other" / "vocabulary" / "source.model").read_bytes())
    swapped = run_main(*options, stdin="Five.\n")
    assert (swapped.returncode, swapped.stdout) == (2, "")
    assert ends_with(swapped.stderr, "not the vocabulary")
    model.write_bytes(good)
    saved = (workdir / "data.json").read_text()
    (workdir / "data.json").write_text(saved.replace(json.loads(saved)["vocabulary"], "0" * 64))
    assert ends_with(run_main(*options, stdin="Five.\n").stderr, "not the vocabulary", "data.json")
    resumed = run_main("--mode=train", f"--workdir={workdir}")
    assert resumed.returncode == 2
    assert ends_with(resumed.stderr, "the data of this run changed (vocabulary)", "data.json is damaged")
    (workdir / "data.json").write_text('{"vocabulary": "a')
    assert ends_with(run_main(*options, stdin="Five.\n").stderr, "data.json", "delete the file")
    (workdir / "data.json").unlink()
    (workdir / "data.json").symlink_to("/proc/self/mem")  # reading it is an input or output error
    unreadable = run_main(*options, stdin="Five.\n")
    assert unreadable.returncode == 5
    assert ends_with(unreadable.stderr, "StorageError", "data.json: Input/output error")
    assert "delete" not in unreadable.stderr
    (workdir / "data.json").unlink()
    (workdir / "data.json").write_bytes((trained / "data.json").read_bytes())
    unfinished = workdir / "checkpoints" / "130.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert run_main(*options, stdin="Five.\n").returncode == 0
    assert unfinished.exists(), "reading must not delete the unfinished checkpoint of a running training"
    (workdir / "config.json").write_text("{")
    assert ends_with(run_main(*options, stdin="Five.\n").stderr, "config.json", "--config again")


def test_unwritable_workdirs_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_main(*TINY, f"--workdir={tmp_path / 'file'}")
    assert done.returncode == 2
    assert ends_with(done.stderr, "file", "--workdir")


def test_low_disk_space_is_reported_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="GB are free"):
        train(small_config(path=str(corpus(tmp_path / "corpus"))), Workdir(tmp_path / "run"))


def test_help_lists_every_option() -> None:
    done = run_main("--mode=help")
    assert done.returncode == 0
    for name, _ in fields():
        assert name in done.stdout


@pytest.mark.slow
def test_plan_counts_parameters_without_allocating(tmp_path: Path) -> None:
    done = run_main(
        "--mode=plan", "--config=configs/numerals.py:500L-500L", "--config.model.width=512", "--config.model.heads=8",
        "--config.model.ffn_width=2048", f"--workdir={tmp_path}", "--config.data.vocab_size=250002",
        "--config.plan.device=h200", "--config.model.remat=auto",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    # The papers' 1000-layer model with one table of a quarter of a million rows.
    assert plan["parameters"] == 3_806_209_024
    assert plan["non_embedding_parameters"] == 3_806_209_024 - 250_002 * 512
    assert plan["state_bytes"] == 12 * plan["parameters"] + 4
    assert "3,806,209,024" in done.stdout
    names = {
        "parameters", "non_embedding_parameters", "flops_per_target_token", "state_bytes", "peak_bytes",
        "tokens_per_microbatch", "step_seconds", "gpu_days",
    }  # fmt: skip
    assert plan.keys() >= names
    assert plan["peak_bytes"] == plan["remat"][plan["chosen_remat"]]["peak_bytes"] > plan["state_bytes"]


def test_runs_whose_state_cannot_fit_are_not_started(tmp_path: Path) -> None:
    done = run_main(*TINY, f"--workdir={tmp_path / 'run'}", "--config.model.width=500000")
    assert done.returncode == 2
    assert ends_with(done.stderr, "GB", "train.update_in_backward=True", "parallel.model", "plan.refuse=False")
    assert not (tmp_path / "run" / "config.json").exists()


def test_steps_below_the_current_step_are_rejected(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    done = run_main(f"--workdir={run}", "--config.train.steps=60")
    assert done.returncode == 2
    assert ends_with(done.stderr, "at step 120, past train.steps=60")
    assert (run / "config.json").read_bytes() == (trained / "config.json").read_bytes()


def test_status_and_metrics_have_the_fields_that_scripts_use(trained: Path) -> None:
    status = read_status(trained)
    assert set(status) >= {
        "status", "reason", "step", "state_sha256", "compile_seconds", "compiled_shapes", "batch_fill",
        "train_seconds", "target_tokens_per_second", "peak_memory_bytes", "devices", "versions", "git_revision",
    }  # fmt: skip
    assert (status["status"], status["step"]) == ("done", 120)
    assert status["compiled_shapes"] == 1
    assert 0.8 < status["batch_fill"] <= 1
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    names = {"step", "loss", "nll", "learning_rate", "alpha", "grad_norm", "target_tokens", "seconds", "batch"}
    names |= {"update_norm", "loss_deviations", "update_deviations"}
    assert all(set(line) == names for line in lines)
    # An update uses the alpha after the previous update. alpha reaches 1 after T = 10 updates.
    assert [line["alpha"] for line in lines] == pytest.approx([min(1, step / 10) for step in range(120)])
    assert lines[-1]["loss"] < lines[0]["loss"]
    steps = [json.loads(line)["step"] for line in (trained / "validation.jsonl").read_text().splitlines()]
    assert steps == [60, 120]
    assert list((trained / "tensorboard").iterdir())
    assert configs.load(trained / "config.json").model.width == 16


LINES = ["twenty-one", "", "The answer is 1,234.", "   ", "Number of visitors today: four thousand and two."]


def test_translate_keeps_every_line_and_ignores_order_and_batch(trained: Path) -> None:
    options = ("--mode=translate", f"--workdir={trained}", "--config.decode.nbest=2")

    def translate(lines: list[str], *more: str) -> list[list[str]]:
        done = run_main(*options, *more, stdin="".join(line + "\n" for line in lines))
        assert done.returncode == 0, done.stderr
        rows = [line.split(" ||| ") for line in done.stdout.split("\n")[:-1]]
        assert [row[0] for row in rows] == [str(index) for index in range(len(lines)) for _ in range(2)]
        return [row[1:] for row in rows]

    together = translate(LINES)
    assert together[2:4] == together[6:8] == [["", "0.0000"]] * 2
    assert len({row[1] for row in together}) == 7
    backwards = translate(LINES[::-1], "--config.decode.batch_tokens=1")
    for index in range(len(LINES)):
        for rank in range(2):
            text, score = together[2 * index + rank]
            other_text, other_score = backwards[2 * (len(LINES) - 1 - index) + rank]
            assert other_text == text
            assert float(other_score) == pytest.approx(float(score), abs=2e-4)


def test_translate_prints_nbest_with_scores_and_warns_about_cut_lines(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("twenty-one\n" + "one hundred and " * 30 + "two\n")
    with (tmp_path / "in").open() as file:
        done = subprocess.run(
            [sys.executable, "main.py", "--mode=translate", f"--workdir={trained}", "--config.decode.nbest=2",
             "--config.decode.max_input_length=20", "--config.decode.split=none"],
            cwd=ROOT, stdin=file, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split(" ||| ") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["0", "0", "1", "1"]
    scores = [float(row[2]) for row in rows]
    assert scores[0] >= scores[1] and scores[2] >= scores[3]
    assert "line 2: cut from" in done.stderr


def test_translate_answers_each_line_before_the_next_is_written(trained: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "main.py", "--mode=translate", f"--workdir={trained}"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdin and process.stdout
    for line in ("twenty-one", "twenty-two"):
        process.stdin.write(line + "\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith("\n")
    process.stdin.close()
    assert process.wait() == 0


def test_translate_names_the_line_of_invalid_utf8(trained: Path) -> None:
    process = subprocess.run(
        [sys.executable, "main.py", "--mode=translate", f"--workdir={trained}"],
        cwd=ROOT, input=b"good\nbad \xff\n", capture_output=True,
    )  # fmt: skip
    assert process.returncode == 2
    assert ends_with(process.stderr.decode(), "line 2", "UTF-8")


@pytest.mark.slow
def test_score_prints_one_line_per_pair_in_any_order(trained: Path) -> None:
    """tests/decoding/test_translate.py tests the values."""
    pairs = ["The answer is 1,234.\tDie Antwort lautet 1.234.", "twenty-one\teinundzwanzig", "one\t", "\teins"]
    scored = []
    for lines in (pairs, pairs[::-1]):
        done = run_main("--mode=score", f"--workdir={trained}", stdin="".join(line + "\n" for line in lines))
        assert done.returncode == 0, done.stderr
        scored.append([tuple(map(float, line.split("\t"))) for line in done.stdout.splitlines()])
    assert [tokens for _, tokens in scored[0]][2] == 1
    for (log_prob, tokens), (other, same) in zip(scored[0], scored[1][::-1], strict=True):
        assert log_prob == pytest.approx(other, abs=1e-4)
        assert log_prob < 0
        assert tokens == same
    bad = run_main("--mode=score", f"--workdir={trained}", stdin="no tab here\n")
    assert bad.returncode == 2
    assert ends_with(bad.stderr, "line 1", "source<TAB>target")


@pytest.mark.slow
def test_evaluate_writes_scores_with_signatures(trained: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    done = run_main("--mode=evaluate", f"--workdir={workdir}", "--config.evaluate.splits=valid,test")
    assert done.returncode == 0, done.stderr
    results = json.loads((workdir / "results.json").read_text())
    assert f"evaluating the checkpoint of step {results['run']['step']} (decode.checkpoint=best)" in done.stderr
    for split in ("valid", "test"):
        for metric in ("bleu", "chrf", "multi_bleu"):
            entry = results[split][metric]
            assert 0 <= entry["score"] <= 100
            assert entry["signature"]
            assert (workdir / entry["hypotheses"]).read_text().count("\n") == 500
    assert "tok:13a" in results["test"]["bleu"]["signature"]
    again = run_main("--mode=evaluate", f"--workdir={workdir}", "--config.evaluate.splits=valid")
    assert again.returncode == 0, again.stderr
    assert json.loads((workdir / "results.json").read_text()) == results
    assert "tok:13a" in done.stdout
    assert "are removed" not in done.stderr + again.stderr


def test_inference_without_a_run_is_rejected(tmp_path: Path) -> None:
    done = run_main("--mode=translate", "--config=configs/numerals.py", f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert ends_with(done.stderr, "train first")


@pytest.mark.slow
def test_a_wrong_workdir_lists_the_runs_near_it(tmp_path: Path) -> None:
    runs = tmp_path / "runs"  # Beside tmp_path are the runs of other tests.
    for name in ("german", "french"):
        (runs / name / "checkpoints/20").mkdir(parents=True)
        for file in ("config.json", "data.json"):
            (runs / name / file).write_text("{}")
    near = f"no training run in this folder; runs near it: {runs / 'french'}, {runs / 'german'}"
    done = run_main("--mode=evaluate")
    assert done.returncode == 2
    assert "UserError: --mode=evaluate needs --workdir=<folder of a run>" in done.stderr
    (runs / "untrained").mkdir()
    (runs / "untrained/config.json").write_text("{}")
    (runs / "french/config.json").unlink()
    with pytest.raises(UserError, match=r"french: config\.json is missing; restore it, or give the --config"):
        parse(["main.py", "--mode=translate", f"--workdir={runs / 'french'}"])
    (runs / "french/config.json").write_text("{}")
    for folder in (runs, runs / "germna"):
        with pytest.raises(UserError, match=re.escape(f"--workdir={folder}: {near}")):
            parse(["main.py", "--mode=translate", f"--workdir={folder}"])
        with pytest.raises(UserError, match=re.escape(near)):
            parse(["main.py", "--mode=generate", f"--workdir={folder}"])
        # These modes do not need a run.
        with pytest.raises(
            UserError, match=f"no earlier run in {re.escape(str(folder))}; runs near it: .*; give --config="
        ):
            parse(["main.py", "--mode=plan", f"--workdir={folder}"])


@pytest.mark.slow
def test_diverging_run_is_reported_and_saves_no_checkpoint(tmp_path: Path) -> None:
    options = ("--config.train.learning_rate=1e38", "--config.train.warmup_steps=0", "--config.train.eval_every=0")
    done = run_main(*TINY, f"--workdir={tmp_path}", *options)
    assert done.returncode == 3, done.stderr
    assert ends_with(done.stderr, "diverged", "learning_rate")
    status = read_status(tmp_path)
    assert status["status"] == "diverged"
    assert "step" in status["reason"]
    # The metrics include the last update as standard JSON, in which nonfinite values are null.
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert None in (last["loss"], last["grad_norm"], last["update_norm"])
    assert not [entry for entry in (tmp_path / "checkpoints").iterdir() if entry.name.isdecimal()]


@pytest.mark.slow
def test_a_diverging_run_finishes_the_save_before(tmp_path: Path) -> None:
    """The state of the first update is finite, that of the second is not. The save of the first is still going on."""
    options = ("learning_rate=1e15", "warmup_steps=0", "eval_every=0", "checkpoint_every=1", "schedule=constant")
    model = ("--config.model.method=post_ln", f"--workdir={tmp_path}")
    done = run_main(*TINY, *model, *(f"--config.train.{option}" for option in options))
    assert done.returncode == 3, done.stderr
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_a_device_that_is_missing_is_one_line() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "rocm"}
    done = subprocess.run(
        [sys.executable, "main.py", "--mode=methods"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("UserError: JAX finds no device with JAX_PLATFORMS=rocm")


def test_closed_streams_are_replaced(tmp_path: Path) -> None:
    """Otherwise the first file that is opened would get the messages."""
    code = (
        "import os, sys; from branchnorm_jax.cli import open_streams; open_streams(); "
        f"log = open({str(tmp_path / 'log')!r}, 'w'); print('message', file=sys.stderr, flush=True); "
        "os.write(2, b'message'); log.write(str(log.fileno()))"
    )
    for closed in ("2>&-", "<&- 2>&-", "<&- >&- 2>&-"):
        subprocess.run(["bash", "-c", f"{sys.executable} -c {shlex.quote(code)} {closed}"], cwd=ROOT, check=True)
        assert int((tmp_path / "log").read_text()) > 2
    done = subprocess.run(["bash", "-c", f"{sys.executable} main.py --mode=x 2>&-"], cwd=ROOT, check=False)
    assert done.returncode == 2


def test_a_workdir_whose_name_is_no_utf8_is_rejected() -> None:
    with pytest.raises(UserError, match="is not UTF-8"):
        Workdir.open("runs/\udcff")


def no_thread() -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("lack", "said"),
    [
        (lambda: jax.block_until_ready(jax.numpy.ones(2**50)), "the device has too little memory; lower train"),
        (
            lambda: bytearray(2**60),
            "this process gets no more memory: the host has too little, or ulimit -v forbids it; lower",
        ),
        (no_thread, "this process may start no further thread; raise its limits (ulimit -u, ulimit -v)"),
    ],
    ids=["device", "process", "threads"],
)
def test_a_lack_of_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lack: Callable[[], Any], said: str
) -> None:
    def run(*_: Any) -> None:
        lack()

    monkeypatch.setattr(cli, "parse", lambda argv: (None, None))
    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(cli, "FLAGS", argparse.Namespace(mode="train"))
    assert cli.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"UserError: {said}")


@pytest.mark.slow
def test_training_imports_no_other_framework(tmp_path: Path) -> None:
    """Covers a whole run: text, training, validation with BLEU, TensorBoard files, and checkpoints."""
    code = (
        "import sys, main\n"
        "code = main.main(['main.py', *sys.argv[1:]])\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "print(code, sorted(names & {'tensorflow', 'tensorflow_datasets', 'clu', 'keras', 'torch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *TINY, f"--workdir={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1] == "0 []", done.stderr


@pytest.mark.slow
def test_methods_mode_lists_every_method_and_its_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "methods.md"
    before = page.read_text(encoding="utf-8")
    done = run_main("--mode=methods")
    assert done.returncode == 0, done.stderr
    listed = {line for line in done.stdout.splitlines() if line and not line.startswith(" ")}
    assert listed == set(METHODS)
    assert page.read_text(encoding="utf-8") == before, "run python main.py --mode=methods to update the page"


def test_defaults_assigned_in_a_config_file_override_recommendations(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from branchnorm_jax.config import default_config\n\n\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.model.method = 'admin'\n"
        "    config.train.optimizer = 'adamw'\n"
        "    config.data.source = 'text'\n"
        "    return config\n"
    )
    # Without a text, training ends after it has printed the options.
    options = (f"--workdir={tmp_path / 'run'}", "--config.data.path=/nowhere", "--config.train.warmup_steps=4000")
    done = run_main(f"--config={tmp_path / 'mine.py'}", *options)
    assert ends_with(done.stderr, "/nowhere")
    assert "train.learning_rate: 0.0005 -> 0.001  (recommended for admin)" in done.stderr
    assert "train.optimizer" not in done.stderr
    assert "train.warmup_steps" not in done.stderr


@pytest.mark.slow
def test_recommended_options_are_printed_used_and_saved(tmp_path: Path) -> None:
    options = ("--config.model.method=pre_scale_norm", "--config.train.steps=2", "--config.train.adam_b2=0.9")
    done = run_main(*HASTY, *options, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "model.norm: 'layer_norm' -> 'scale_norm'  (recommended for pre_scale_norm)" in done.stderr
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["model"]["norm"] == "scale_norm"
    assert saved["train"]["adam_b2"] == 0.9  # the command line has precedence
    again = run_main(f"--workdir={tmp_path / 'run'}", "--config.train.steps=3")
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_a_polynomial_decay_ends_with_the_run(tmp_path: Path) -> None:
    options = ("schedule=polynomial", "decay_steps=0", "warmup_steps=4", "steps=12", "eval_every=0")
    done = run_main(*HASTY, *(f"--config.train.{option}" for option in options), f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    rates = [line["learning_rate"] for line in read_metrics(tmp_path)]
    assert rates[4] == pytest.approx(5e-3)
    assert rates[11] == pytest.approx(5e-3 / 8)


def test_explicit_options_override_the_depth_recipe() -> None:
    """branchnorm has updates x alpha^2, and at 144L-144L a T of twice the warm-up: 144 = 8 x 18."""

    def chosen(*options: str) -> list[str]:
        code = (
            "import sys; from branchnorm_jax.cli import parse; c = parse(['main.py', *sys.argv[1:]])[0]; "
            "print(c.train.branch_update_power, c.model.alpha_end, c.model.alpha_steps)"
        )
        command = [sys.executable, "-c", code, "--config=configs/text.py:144L-144L", *options]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()

    assert chosen() == ["2.0", "7/cbrt(n)", "8000"]
    assert chosen("--config.train.warmup_steps=300") == ["2.0", "7/cbrt(n)", "600"]
    published = "--config.train.branch_update_power=0", "--config.model.alpha_end=1"
    assert chosen(*published) == ["0.0", "1", "4000"]
    assert chosen(*published, "--config.model.alpha_steps=70") == ["0.0", "1", "70"]
    assert chosen("--config.model.method=deepnorm")[0] == "0.0"
