"""Hypotheses and scores of whole splits, written beside each other."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from branchnorm_jax.evaluation.bleu import Measure, Score, scores
from branchnorm_jax.workdir import write_atomically


def score_split(
    directory: Path,
    split: str,
    texts: Mapping[str, Sequence[str]],
    target_lang: str,
    more: Sequence[Measure] = (),
) -> list[Score]:
    """Writes <split>.source, .reference and .hypothesis into `directory`, line by line parallel; returns the scores.

    `texts` are these three; `more` measures come after `bleu.scores`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        (directory / f"{split}.{name}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    sources, hypotheses, references = (texts[name] for name in ("source", "hypothesis", "reference"))
    found = scores(hypotheses, references, target_lang)
    return found + [score for measure in more for score in measure(sources, hypotheses, references)]


def write_results(path: Path, results: dict[str, list[Score]], directory: Path, extra: dict[str, Any]) -> None:
    """Writes results.json: {split: {metric: {score, signature, hypotheses}}}, and what was decoded how under "run".

    A mean over splits is of no file of hypotheses.

    Splits that were scored before stay, if they were decoded from the same checkpoint in the same way.
    """
    table: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        before = json.loads(path.read_text(encoding="utf-8"))
        table = before if before.pop("run") == json.loads(json.dumps(extra)) else {}
    table |= {
        split: {
            score.name: {
                "score": score.score,
                "signature": score.signature,
            }
            | ({"hypotheses": str(text.relative_to(path.parent))} if text.exists() else {})
            for score in found
        }
        for split, found in results.items()
        for text in [directory / f"{split}.hypothesis"]
    }
    write_atomically(path, json.dumps(table | {"run": extra}, indent=2, ensure_ascii=False) + "\n")


def format_table(results: dict[str, list[Score]]) -> str:
    """One line per split and metric, for people."""
    rows = [(split, s.name, f"{s.score:.2f}", s.signature) for split, found in results.items() for s in found]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{split:<{widths[0]}}  {name:<{widths[1]}}  {score:>{widths[2]}}  {signature}"
        for split, name, score, signature in rows
    )
