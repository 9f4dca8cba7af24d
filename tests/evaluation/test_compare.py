"""Comparisons against the sacrebleu command, planted ties and planted improvements."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.compare import by_frequency, compare, ranges, scores, sentences, write
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
    """Each word is another with this probability."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < share else word for word in line.split()) for line in lines]


REFERENCE = texts(0)
BASE, SAME, BETTER = noisy(REFERENCE, 0.4, 1), noisy(REFERENCE, 0.4, 2), noisy(REFERENCE, 0.25, 3)


def test_p_values_are_those_of_the_sacrebleu_command(found: dict[str, Any], tmp_path: Path) -> None:
    for name, lines in (("ref", REFERENCE), ("base", BASE), ("same", SAME), ("better", BETTER)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = found["scores"]
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "base", "same", "better", "-m", "bleu", "chrf", "ter"]
    for test, label in (("--paired-bs", "p_bootstrap"), ("--paired-ar", "p_randomisation")):
        done = subprocess.run([*command, test, "-f", "latex"], cwd=tmp_path, capture_output=True, text=True, check=True)
        for system in ("same", "better"):
            (row,) = (line for line in done.stdout.splitlines() if line.split("&")[0].strip() == system)
            values = [float(p) for p in re.findall(r"p = ([\d.]+)", row)]
            assert [round(table[metric]["systems"][system][label], 4) for metric in ("bleu", "chrf", "ter")] == values


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The baseline, a copy of it, a system as good, and a better one."""
    return compare({"base": BASE, "copy": list(BASE), "same": SAME, "better": BETTER}, REFERENCE, "de")


def test_a_planted_tie_and_a_planted_improvement(found: dict[str, Any]) -> None:
    for metric in ("bleu", "chrf", "ter"):
        systems = found["scores"][metric]["systems"]
        assert [systems[name]["verdict"] for name in ("copy", "same", "better")] == ["tie", "tie", "better"]
        assert systems["copy"]["p_bootstrap"] == 1.0
    worse = scores({"base": BETTER, "other": BASE}, REFERENCE, "de")
    assert {table["systems"]["other"]["verdict"] for table in worse.values()} == {"worse"}


def test_breakdowns_cover_every_line_and_word(found: dict[str, Any]) -> None:
    assert sum(row["lines"] for row in found["by_length"]) == len(REFERENCE)
    assert sum(row["tokens"] for row in found["by_frequency"]) == sum(len(line.split()) for line in REFERENCE)
    assert all(row["bleu"]["better"] > row["bleu"]["base"] for row in found["by_length"])


def test_f1_of_words_by_hand() -> None:
    """Of "a" twice wanted, once said and meant; of the unseen "z" one is wanted and another said elsewhere."""
    hypothesis, reference = [["a", "b"], ["z"]], [["a", "a"], ["b"]]
    rows = by_frequency({"s": hypothesis}, reference, {"a": 3, "b": 50})
    assert {row["times"]: row["f1"]["s"] for row in rows} == {"2-4": pytest.approx(200 / 3), "10-99": 0.0}
    assert ranges((0, 1, 4)) == ["0", "1", "2-4", "5+"]
    assert ranges((10, 20)) == ["1-10", "11-20", "21+"]


def test_sentences_that_differ_most() -> None:
    changed = list(BASE)
    changed[7], changed[9] = REFERENCE[7], "<b>nichts</b>"
    shown = sentences({"base": BASE, "other": changed}, REFERENCE, texts(5))
    assert [(row["line"], row["gain"] > 0) for row in shown] == [(8, True), (10, False)]


def test_the_page_shows_text_as_text(found: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**found["sentences"][0], "system_text": "<script>alert(1)</script>"}]
    _, page = write({**found, "sentences": rows}, tmp_path)
    html = page.read_text(encoding="utf-8")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_mode_compare_takes_workdirs_and_files(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "sys").write_text("eins\nzwei\n", encoding="utf-8")
    done = run_main(
        "--mode=compare", f"--workdir={tmp_path / 'out'}", f"--config.compare.systems=x={tmp_path},{trained}"
    )
    assert done.returncode == 2
    assert "test.hypothesis" in done.stderr
    (tmp_path / "ref").write_text("eins\nzwei\n", encoding="utf-8")
    (tmp_path / "other").write_text("eins\ndrei\n", encoding="utf-8")
    systems = f"--config.compare.systems=good={tmp_path / 'sys'},{tmp_path / 'other'}"
    done = run_main("--mode=compare", f"--workdir={tmp_path / 'out'}", systems)
    assert done.returncode == 2
    assert "compare.reference" in done.stderr
    done = run_main(
        "--mode=compare", f"--workdir={tmp_path / 'out'}", systems, f"--config.compare.reference={tmp_path / 'ref'}"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["baseline"] == "good"
    assert "good" in done.stdout


def test_bad_input_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="two systems"):
        compare({"a": BASE}, REFERENCE, "de")
    with pytest.raises(UserError, match="b has 1 lines, the reference 60"):
        compare({"a": BASE, "b": ["x"]}, REFERENCE, "de")
