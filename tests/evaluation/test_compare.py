"""Compares systems with known differences, and checks the p-values against the sacrebleu command."""

import dataclasses
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchnorm_jax.config import to_json
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import metrics, sacrebleu_metric
from branchnorm_jax.evaluation.compare import (
    TESTS,
    by_frequency,
    compare,
    format_table,
    paired_test,
    ranges,
    scores,
    sentences,
    write,
)
from branchnorm_jax.modes.compare import compare as mode_compare
from branchnorm_jax.modes.compare import systems_of, translations_of
from branchnorm_jax.options import CompareConfig, Config, DataConfig
from branchnorm_jax.workdir import Workdir
from tests.conftest import run_main

WORDS = [
    "der",
    "die",
    "das",
    "Hund",
    "Katze",
    "läuft",
    "schläft",
    "schnell",
    "langsam",
    "im",
    "Garten",
    "Haus",
    "heute",
    "gestern",
    "und",
    "oder",
    "nicht",
    "sehr",
]


def texts(seed: int, lines: int = 60) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 45))) for _ in range(lines)]


def noisy(lines: list[str], share: float, seed: int) -> list[str]:
    """Replaces each word by another one with this probability."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < share else word for word in line.split()) for line in lines]


REFERENCE = texts(0)
BASE, SAME, BETTER = noisy(REFERENCE, 0.4, 1), noisy(REFERENCE, 0.4, 2), noisy(REFERENCE, 0.25, 3)


@pytest.mark.slow
def test_p_values_equal_the_sacrebleu_command(comparison: dict[str, Any], tmp_path: Path) -> None:
    for name, lines in (("ref", REFERENCE), ("base", BASE), ("same", SAME), ("better", BETTER)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = comparison["scores"]
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "base", "same", "better", "-m", "bleu", "chrf", "ter"]
    for test, label in (("--paired-bs", "p_bootstrap"), ("--paired-ar", "p_randomisation")):
        done = subprocess.run([*command, test, "-f", "latex"], cwd=tmp_path, capture_output=True, text=True, check=True)
        for system in ("same", "better"):
            (row,) = (line for line in done.stdout.splitlines() if line.split("&")[0].strip() == system)
            values = [float(p) for p in re.findall(r"p = ([\d.]+)", row)]
            assert [round(table[metric]["systems"][system][label], 4) for metric in ("bleu", "chrf", "ter")] == values


@pytest.fixture(scope="module")
def comparison() -> dict[str, Any]:
    """Compares a baseline with a copy of it, an equally good system and a better one."""
    return compare({"base": BASE, "copy": list(BASE), "same": SAME, "better": BETTER}, REFERENCE, "de")


def test_verdicts_on_planted_differences(comparison: dict[str, Any]) -> None:
    for metric in ("bleu", "chrf", "ter"):
        systems = comparison["scores"][metric]["systems"]
        assert [systems[name]["verdict"] for name in ("copy", "same", "better")] == ["tie", "tie", "better"]
        assert systems["copy"]["p_bootstrap"] == 1.0
    worse = scores({"base": BETTER, "other": BASE}, REFERENCE, "de")
    assert {table["systems"]["other"]["verdict"] for table in worse.values()} == {"worse"}


@pytest.mark.parametrize("test", ["bs", "ar"])
def test_p_values_of_real_and_absent_differences(test: str) -> None:
    references = [f"{i} tree {i * i} house {i + 7} river {i % 5}" for i in range(200)]
    wrong = [line.replace("house", "cat") for line in references]
    half = [line if i % 2 else wrong[i] for i, line in enumerate(references)]
    systems = {
        "half": half,
        "other": [line if not i % 2 else wrong[i] for i, line in enumerate(references)],
        "better": [line if i % 4 else wrong[i] for i, line in enumerate(references)],
        "perfect": references,
    }
    signature, results = paired_test(systems, references, {"bleu": sacrebleu_metric("de")}, test)["bleu"]
    assert f"|{test}:" in signature
    assert list(results) == list(systems)
    p_values = {name: result.p_value for name, result in results.items()}
    assert p_values["half"] is None
    assert (p_values["other"] or 0) > 0.2
    assert (p_values["better"] or 1) < 0.01
    assert results["perfect"].score == pytest.approx(100)
    # If both systems return the same constant, there is no difference.
    same = {"a": [half[0]] * 200, "b": [half[0]] * 200}
    _, results = paired_test(same, references, {"bleu": sacrebleu_metric("de")}, test)["bleu"]
    assert results["b"].p_value == 1


@pytest.mark.parametrize("differing", [1, 2, 3, 5, 6])
def test_p_values_of_few_lines_are_not_below_the_exact_ones(differing: int) -> None:
    """The exact p-value of a randomisation test is that of all 2^n exchanges of the n lines that differ."""
    references = texts(4, 100)
    better = [line if i >= differing else line.rsplit(" ", 1)[0] for i, line in enumerate(references)]
    worse = [line if i >= differing else line.rsplit(" ", 2)[0] for i, line in enumerate(references)]
    metric = sacrebleu_metric("de")

    def difference(exchanged: int) -> float:
        sides = zip(better, worse, strict=True)
        a, b = zip(*((y, x) if exchanged >> i & 1 else (x, y) for i, (x, y) in enumerate(sides)), strict=True)
        return float(metric.corpus_score(a, [references]).score - metric.corpus_score(b, [references]).score)

    observed = abs(difference(0))
    exact = np.mean([abs(difference(each)) >= observed - 1e-9 for each in range(2**differing)])
    result = scores({"worse": worse, "better": better}, references, "de")["bleu"]["systems"]["better"]
    assert result["p_randomisation"] >= exact
    assert result["verdict"] == ("better" if differing > 5 else "tie")


@pytest.mark.parametrize("metric", ["bleu", "chrf", "ter"])
def test_lines_with_equal_statistics_do_not_support_a_p_value(metric: str) -> None:
    """Thirty lines have other wrong words, and only one line is better: the exact p-value is 1."""
    references = texts(4, 100)

    def replaced(word: str, better: int) -> list[str]:
        return [
            line if i == better or i > 30 else " ".join([*line.split()[:-1], word]) for i, line in enumerate(references)
        ]

    systems = {"base": replaced("QQQ", -1), "other": replaced("WWW", 30)}
    measure = {metric: metrics("de")[metric]}
    for test in TESTS:
        _, results = paired_test(systems, references, measure, test)[metric]
        assert results["other"].p_value == 1


def test_breakdowns_cover_every_line_and_word(comparison: dict[str, Any]) -> None:
    assert sum(row["lines"] for row in comparison["by_length"]) == len(REFERENCE)
    assert sum(row["tokens"] for row in comparison["by_frequency"]) == sum(len(line.split()) for line in REFERENCE)
    assert all(row["bleu"]["better"] > row["bleu"]["base"] for row in comparison["by_length"])


def test_f1_of_words_equals_hand_computed_values() -> None:
    """The word "a" occurs twice in the reference and matches once; "z", which is not counted, has no row."""
    hypothesis, reference = [["a", "b"], ["z"]], [["a", "a"], ["b"]]
    rows = by_frequency({"s": hypothesis}, reference, {"a": 3, "b": 50})
    assert {row["times"]: row["f1"]["s"] for row in rows} == {"2-4": pytest.approx(200 / 3), "10-99": 0.0}
    assert ranges((0, 1, 4)) == ["0", "1", "2-4", "5+"]
    assert ranges((0, 10, 20)) == ["0", "1-10", "11-20", "21+"]


def test_sentences_that_differ_most_are_listed() -> None:
    changed = list(BASE)
    changed[7], changed[9] = REFERENCE[7], "<b>nichts</b>"
    shown = sentences({"base": BASE, "other": changed}, REFERENCE, texts(5))
    assert [(row["line"], row["gain"] > 0) for row in shown] == [(8, True), (10, False)]


def test_page_escapes_the_text(comparison: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**comparison["sentences"][0], "system_text": "<script>alert(1)</script>"}]
    _, page = write({**comparison, "sentences": rows}, tmp_path)
    html = page.read_text(encoding="utf-8")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_page_isolates_the_direction_of_each_text(comparison: dict[str, Any], tmp_path: Path) -> None:
    """In a line such as "reference: שלום.", the full stop belongs at the left."""
    texts = dict(source="a.", reference="שלום.", baseline_text="مرحبا!", system_text="תודה (כן).")
    _, page = write({**comparison, "sentences": [{**comparison["sentences"][0], **texts}]}, tmp_path)
    html = page.read_text(encoding="utf-8")
    assert re.findall("<bdi>(.*?)</bdi>", html) == list(texts.values())


@pytest.mark.slow
def test_compare_mode_accepts_workdirs_and_files(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "sys").write_text("eins\nzwei\n", encoding="utf-8")
    done = run_main(
        "--mode=compare", f"--workdir={tmp_path / 'out'}", f"--config.compare.systems=x={tmp_path},{trained}"
    )
    assert done.returncode == 2
    assert f"{tmp_path}: this folder is no workdir" in done.stderr
    (tmp_path / "ref").write_text("eins\nzwei\n", encoding="utf-8")
    (tmp_path / "other").write_text("eins\ndrei\n", encoding="utf-8")
    systems = f"--config.compare.systems=good={tmp_path / 'sys'},other={tmp_path / 'other'}"
    done = run_main("--mode=compare", f"--workdir={tmp_path / 'out'}", systems)
    assert done.returncode == 2
    assert "compare.reference" in done.stderr
    files = (
        "--mode=compare",
        f"--workdir={tmp_path / 'out'}",
        systems,
        f"--config.compare.reference={tmp_path / 'ref'}",
    )
    done = run_main(*files, "--config.compare.target_lang=zh")
    assert done.returncode == 0, done.stderr
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (comparison["baseline"], comparison["target_lang"]) == ("good", "zh")
    assert "|tok:zh|" in comparison["scores"]["bleu"]["signature"]
    assert done.stdout.startswith("2 lines, scored as zh, baseline good\n")
    # Byte-order marks and Windows line ends are not part of a translation.
    (tmp_path / "other").write_bytes("\ufeffeins\r\nzwei\r\n".encode())
    done = run_main(*files, "--config.compare.target_lang=de")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 lines, scored as de, baseline good\n")
    chrf = json.loads((tmp_path / "out" / "compare.json").read_text())["scores"]["chrf"]["systems"]
    assert chrf["other"]["score"] == chrf["good"]["score"] == 100


def evaluated(folder: Path, split: str, data: DataConfig, hypotheses: list[str]) -> Path:
    """Creates a workdir as written by `evaluate` for a run on this data."""
    (folder / "evaluation").mkdir(parents=True)
    (folder / "config.json").write_text(to_json(dataclasses.replace(Config(), data=data)))
    for side, lines in (("source", texts(5)), ("reference", REFERENCE), ("hypothesis", hypotheses)):
        (folder / "evaluation" / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def compared(folder: Path, systems: list[Path], split: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Runs the mode; returns compare.json and the log lines."""
    chosen = CompareConfig(systems=",".join(map(str, systems)), split=split)
    mode_compare(dataclasses.replace(Config(), compare=chosen), Workdir(folder / "out"))
    return json.loads((folder / "out" / "compare.json").read_text()), capsys.readouterr().err


@pytest.mark.slow
def test_directions_that_were_never_trained_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Word frequencies come from the training text of the direction if it exists, else from the references."""
    text = tmp_path / "text"
    text.mkdir()
    data = DataConfig(source="text", path=str(text), files="{split}.{pair}.{lang}", pairs="fr-en,en-zh")
    systems = [evaluated(tmp_path / name, "test.de-zh", data, lines) for name, lines in (("a", BASE), ("b", BETTER))]
    comparison, log = compared(tmp_path, systems, "test.de-zh", capsys)
    assert (comparison["target_lang"], comparison["frequencies_of"]) == ("zh", "references")
    assert "counting the words of the references instead" in log
    assert "no file matches train.de-zh.de" in log
    for lang in ("de", "zh"):
        (text / f"train.de-zh.{lang}").write_text("Hund\n" * 10)
    comparison, log = compared(tmp_path, systems, "test.de-zh", capsys)
    assert comparison["frequencies_of"] == "training text"
    assert "instead" not in log
    with pytest.raises(UserError, match=r"test.hypothesis: each language pair .*; set compare.split=test.de-zh$"):
        compared(tmp_path, systems, "test", capsys)
    with pytest.raises(
        UserError,
        match=r"valid.fr-en.hypothesis: no such file; evaluated splits: test.de-zh; change compare.split, or run with "
        rf"--mode=evaluate --workdir={systems[0]} --config.evaluate.splits=valid --config.evaluate.pairs=fr-en$",
    ):
        compared(tmp_path, systems, "valid.fr-en", capsys)


def test_page_and_table_name_the_language(comparison: dict[str, Any], tmp_path: Path) -> None:
    assert format_table(comparison).startswith("60 lines, scored as de, baseline base\n")
    assert "60 lines, scored as de." in write(comparison, tmp_path)[1].read_text(encoding="utf-8")


def test_names_of_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1").mkdir()
    assert systems_of("seed=1,seed=2") == [("seed=1", "seed=1"), ("seed", "2")]
    systems = "runs/s/post_ln-learning_rate=1e-3, b=runs/s/seed=1-6L,plain ,=x"
    assert systems_of(systems) == [
        ("runs/s/post_ln-learning_rate=1e-3", "runs/s/post_ln-learning_rate=1e-3"),
        ("b", "runs/s/seed=1-6L"),
        ("plain", "plain"),
        ("x", "x"),
    ]
    with pytest.raises(UserError, match="'one=' has no path"):
        systems_of("one=,x")


def test_invalid_input_is_rejected(tmp_path: Path) -> None:
    for again in (f"{tmp_path}/", f"b={tmp_path}"):
        with pytest.raises(UserError, match=f"{tmp_path} and .* are the same"):
            mode_compare(Config(compare=CompareConfig(systems=f"{tmp_path},{again}")), Workdir(Path("x")))
    with pytest.raises(UserError, match="two systems are called 'a'; give them different names"):
        mode_compare(Config(compare=CompareConfig(systems=f"a={tmp_path},a={__file__}")), Workdir(Path("x")))
    file = tmp_path / "text"
    file.write_text("x\n")
    with pytest.raises(UserError, match=r"set compare\.target_lang to their language"):
        mode_compare(
            Config(compare=CompareConfig(systems=f"{__file__},{file}", reference=str(file))), Workdir(Path("x"))
        )
    (tmp_path / "cut.jsonl").write_text('{"source": "x", "translation": "y"}\n{"source": "x", "tra\n')
    systems = CompareConfig(systems=f"{tmp_path / 'cut.jsonl'},{file}", reference=str(file), target_lang="en")
    with pytest.raises(UserError, match=r"cut\.jsonl, line 2: no translation in this JSON"):
        mode_compare(Config(compare=systems), Workdir(Path("x")))
    systems = CompareConfig(systems=f"{__file__},{file}", reference=str(file), target_lang="en")
    with pytest.raises(UserError, match="this is a file"):
        mode_compare(Config(compare=systems), Workdir(file))
    with pytest.raises(UserError, match=f"{tmp_path}: this folder is no workdir"):
        mode_compare(Config(compare=CompareConfig(systems=f"{__file__},{tmp_path}")), Workdir(Path("x")))
    with pytest.raises(UserError, match="needs two systems"):
        mode_compare(Config(compare=CompareConfig(systems="runs/a")), Workdir(Path("x")))
    with pytest.raises(UserError, match=r"compare\.systems: runs/b: neither a workdir nor a file"):
        mode_compare(Config(compare=CompareConfig(systems=f"{Path(__file__)},runs/b")), Workdir(Path("x")))
    with pytest.raises(UserError, match="the reference is empty"):
        compare({"a": BASE, "b": BASE}, [], "de")
    with pytest.raises(UserError, match="b has 1 lines but the reference has 60"):
        compare({"a": BASE, "b": ["x"]}, REFERENCE, "de")


def test_json_that_is_too_deep_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"source": ' + "[" * 100_000 + "\n")
    with pytest.raises(UserError, match="line 1: no translation in this JSON"):
        translations_of(tmp_path / "a")
