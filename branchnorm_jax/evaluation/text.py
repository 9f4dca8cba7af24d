"""Scores of language models on a text, the losses of its lines, and the comparison of models."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.data.texts import TextStore
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import Score
from branchnorm_jax.files import write_atomically

_LARGEST = math.log(sys.float_info.max)


def scores(nll: np.ndarray, text: TextStore, context: int, stride: int, rows: str = "stream") -> list[Score]:
    """Returns bits per byte, perplexity per token and nll per token in nats, of nll [n - 1].

    The signatures name the number of unknown tokens, if there are any: each costs few bits, however much text it is.
    They also name `rows`, if it is not "stream", see `token_nll`. A perplexity that no float can hold is infinite.
    """
    total, signature = float(nll.sum(dtype=np.float64)), f"context:{context}|stride:{stride}"
    signature += f"|unknown:{text.unknown}" if text.unknown else ""
    signature += f"|rows:{rows}" if rows != "stream" else ""
    mean = total / len(nll)
    return [
        Score("bits_per_byte", total / (math.log(2) * text.bytes), f"{signature}|bytes:{text.bytes}"),
        Score("perplexity", math.exp(mean) if mean < _LARGEST else math.inf, f"{signature}|tokens:{len(nll)}"),
        Score("nll", mean, f"{signature}|tokens:{len(nll)}"),
    ]


def write_lines(path: Path, nll: np.ndarray, text: TextStore) -> None:
    """Writes document, bytes, CRC-32, tokens and nll in nats of each line of a text, separated by tabs.

    The nll of a line includes that of its line feed or of the end of the document.
    """
    before = np.concatenate([[0], text.lines[:-1]])
    sums = np.add.reduceat(nll.astype(np.float64), before)
    document = np.searchsorted(text.starts, text.lines, side="left")
    columns = (document, text.line_bytes, text.line_crc32, text.lines - before, sums)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    body = "".join(f"{number}\t{size}\t{crc}\t{tokens}\t{value:.6f}\n" for number, size, crc, tokens, value in rows)
    write_atomically(path, f"document\tbytes\tcrc32\ttokens\tnll\n{body}")


class LineLosses(NamedTuple):
    """The losses that `write_lines` wrote, one entry per line."""

    document: np.ndarray
    bytes: np.ndarray
    crc32: np.ndarray
    nll: np.ndarray


def read_losses(path: Path) -> LineLosses:
    """Reads a file of `write_lines`. Raises `UserError` if it is missing or damaged."""
    if not path.exists():
        raise UserError(f"{path}: no such file; run --mode=evaluate there, or change compare.split")
    try:
        rows = np.array([line.split("\t") for line in text_lines(path)][1:], np.float64)
        document, sizes, crc32, _, nll = rows.T
    except ValueError as error:
        raise UserError(f"{path}: damaged, or of an earlier version; run --mode=evaluate again") from error
    return LineLosses(document.astype(np.int64), sizes, crc32, nll)


SAMPLES = 1000
"""Number of bootstrap samples."""

UNITS = 30
"""Texts with fewer documents are resampled line by line. With fewer lines, there is no p-value."""


def compare_texts(systems: Mapping[str, LineLosses], signatures: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Compares language models on one text, by a paired bootstrap over its documents.

    Each sample draws as many documents as the text has, with replacement. If there are fewer than `UNITS`, it draws
    lines. The p-value is two-sided: the share of samples in which the difference deviates from its mean by at least
    the observed difference. (sacreBLEU's bootstrap counts one tail.)

    Args:
      systems: losses of each of at least two models by name; the first one is the baseline. Their vocabularies may
        differ.
      signatures: how the losses of each model were computed.

    Returns:
      The content of compare.json: "unit" and "units", and for each model bits per byte, half the width of its 95 %
      interval, its signature and, except for the baseline, the difference and its p-value (None for fewer than `UNITS`
      units).

    Raises:
      UserError: if they were not evaluated on one text, or a loss is not finite.
    """
    baseline, *others = systems
    for name, losses in systems.items():
        if not np.isfinite(losses.nll).all():
            line = int(np.isfinite(losses.nll).argmin()) + 1
            raise UserError(f"compare: {name}: the loss of line {line} is not finite; leave this model out")
    first = systems[baseline]
    for name in others:
        own = systems[name]
        if not all(np.array_equal(a, b) for a, b in zip(own[:3], first[:3], strict=True)):
            raise UserError(
                f'compare: {name} and {baseline} were evaluated on different texts (see "run" in each results.json); '
                "run --mode=evaluate for both with the same text"
            )
    documents = len(np.unique(first.document))
    unit = first.document if documents >= UNITS else np.arange(len(first.document))
    _, index = np.unique(unit, return_inverse=True)
    units = int(index.max()) + 1
    sizes = np.bincount(index, first.bytes, units)
    bits = np.stack([np.bincount(index, losses.nll, units) for losses in systems.values()]) / math.log(2)
    rng, share = np.random.default_rng(0), np.full(units, 1 / units)
    # One sample at a time: all draws of a text of a million lines would take 8 GB.
    draws = (rng.multinomial(units, share) for _ in range(SAMPLES))
    samples = dict(zip(systems, np.stack([bits @ draw / (sizes @ draw) for draw in draws], axis=1), strict=True))
    rows: dict[str, dict[str, Any]] = {}
    for name, total in zip(systems, bits.sum(1).tolist(), strict=True):
        low, high = np.percentile(samples[name], [2.5, 97.5])
        rows[name] = {"bits_per_byte": total / float(sizes.sum()), "interval": float(high - low) / 2}
        if signatures:
            rows[name]["signature"] = signatures[name]
        if name != baseline:
            difference = rows[name]["bits_per_byte"] - rows[baseline]["bits_per_byte"]
            sampled = samples[name] - samples[baseline]
            extreme = int((np.abs(sampled - sampled.mean()) >= abs(difference)).sum())
            p_value = (extreme + 1) / (SAMPLES + 1) if units >= UNITS else None
            rows[name] |= {"difference": difference, "p_bootstrap": p_value}
    return {
        "baseline": baseline,
        "unit": "document" if documents >= UNITS else "line",
        "units": units,
        "systems": rows,
    }


def format_comparison(comparison: Mapping[str, Any]) -> str:
    """Formats the result of `compare_texts` as a table."""
    rows, width = comparison["systems"], max(map(len, comparison["systems"]))
    lines = [f"bits per byte, bootstrap over {comparison['units']:,} {comparison['unit']}s"]
    for name, row in rows.items():
        text = f"{name:<{width}}  {row['bits_per_byte']:.4f} ± {row['interval']:.4f}"
        if "difference" in row:
            p_value = row["p_bootstrap"]
            text += f"  {row['difference']:+.4f}  " + (
                "too few for a p-value" if p_value is None else f"p = {p_value:.4f}"
            )
        lines.append(f"{text}  {row['signature']}" if "signature" in row else text)
    return "\n".join(lines)
