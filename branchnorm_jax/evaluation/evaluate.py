"""Scoring of whole splits, and the files of hypotheses and scores."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from branchnorm_jax.evaluation.bleu import Measure, Score, scores
from branchnorm_jax.files import write_atomically
from branchnorm_jax.options import Config


def score_split(
    directory: Path,
    split: str,
    texts: Mapping[str, Sequence[str]],
    target_lang: str,
    more: Sequence[Measure] = (),
) -> list[Score]:
    """Scores a split and writes its texts to `directory`.

    The files are <split>.source, <split>.reference and <split>.hypothesis.

    Args:
      directory: folder of the files; created if necessary.
      split: name of the split.
      texts: the lines of "source", "reference" and "hypothesis", which are parallel.
      target_lang: language tag; see `bleu.scores`.
      more: additional measures, whose scores are appended to those of `bleu.scores`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        write_atomically(directory / f"{split}.{name}", "".join(line + "\n" for line in lines))
    sources, hypotheses, references = (texts[name] for name in ("source", "hypothesis", "reference"))
    results = scores(hypotheses, references, target_lang)
    return results + [score for measure in more for score in measure(sources, hypotheses, references)]


def scoring_options(config: Config) -> dict[str, Any]:
    """Returns the options that the scores of a run depend on, as results.json has them under "run"."""
    data, decode = config.data, config.decode
    text = {name: getattr(data, name) for name in ("path", "files", "valid_split", "test_split")}
    if config.model.family == "decoder":
        stride = config.evaluate.stride_in(data.context)
        return {**text, "rows": data.rows, "stride": stride, "checkpoint": decode.checkpoint}
    pairs = config.evaluate.pairs or data.pairs
    return {**text, "pairs": pairs, "checkpoint": decode.checkpoint, "ensemble": decode.ensemble, **decode.search}


def earlier_results(path: Path, run: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the splits in results.json that remain valid, and a sentence about those that do not.

    A split remains valid if it was evaluated with the same `run` (checkpoint, pairs, decoding options).
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        before, run = table.pop("run"), json.loads(json.dumps(run))
        changed = sorted(name for name in before | run if before.get(name) != run.get(name))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}, ""
    if changed and table:
        made = f"they were made with different {', '.join(changed)}"
        return {}, f"{path}: the scores of {', '.join(table)} are removed: {made}"
    return ({} if changed else table), ""


def write_results(path: Path, results: dict[str, list[Score]], directory: Path, run: dict[str, Any]) -> None:
    """Writes results.json.

    It contains {split: {metric: {score, signature, hypotheses}}}, and "run"; see `earlier_results` for splits that are
    already in the file. "hypotheses" is missing for a mean over splits, which has no file of its own. An infinite
    score is null.
    """
    table, _ = earlier_results(path, run)
    table |= {
        split: {
            score.name: {
                "score": score.score if math.isfinite(score.score) else None,
                "signature": score.signature,
            }
            | ({"hypotheses": str(text.relative_to(path.parent))} if text.exists() else {})
            for score in split_scores
        }
        for split, split_scores in results.items()
        for text in [directory / f"{split}.hypothesis"]
    }
    write_atomically(path, json.dumps(table | {"run": run}, indent=2, ensure_ascii=False) + "\n")


def format_table(results: dict[str, list[Score]]) -> str:
    """Formats scores as a text table with one line per split and metric."""
    rows = [
        (split, s.name, f"{s.score:.2f}", s.signature) for split, split_scores in results.items() for s in split_scores
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{split:<{widths[0]}}  {name:<{widths[1]}}  {score:>{widths[2]}}  {signature}"
        for split, name, score, signature in rows
    )
