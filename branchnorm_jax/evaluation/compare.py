"""Comparison of two or more systems on the same sentences, with significance tests."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sacrebleu.metrics import CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import metrics, sacrebleu_metric, tokenize
from branchnorm_jax.files import write_atomically

TESTS = {"bs": ("p_bootstrap", 1000), "ar": ("p_randomisation", 10_000)}
"""sacreBLEU's paired tests: name of the p-value, and number of samples (the defaults of its command line)."""

SIGNIFICANT = 0.05

ENOUGH = 15
"""With this number of differing lines or more, the bound 2^(1 - n) is below every p-value of the tests."""

LENGTHS = (0, 10, 20, 30, 40)
"""Upper bounds of the ranges of reference length, in tokens, in the table by length."""

FREQUENCIES = (0, 1, 4, 9, 99, 999)
"""Upper bounds of the ranges of training-text frequency in the table by frequency."""

SHOWN = 10
"""Maximum number of better sentences, and of worse sentences, that are shown per system."""

FLOOR = 1.0
"""Minimum difference in sentence chrF, in points, for a sentence to be shown."""


def compare(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    target_lang: str,
    frequencies: Mapping[str, int] | None = None,
    sources: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Compares systems with a baseline; returns the content of compare.json.

    Args:
      systems: translations of each of at least two systems by name; the first system is the baseline.
      references: references in the same order.
      target_lang: language tag; selects the tokenisers.
      frequencies: count of each token in the target side of the training text; by default, counts in the references.
      sources: source sentences, shown with the sentences that differ most.

    Raises:
      UserError: if the numbers of lines differ.
    """
    if not references:
        raise UserError("compare: the reference is empty; evaluate a test set with at least one line")
    for name, lines in systems.items():
        if len(lines) != len(references):
            raise UserError(
                f"compare: {name} has {len(lines):,} lines but the reference has {len(references):,}; "
                "all systems must translate the same test set"
            )
    tokens = {name: [line.split() for line in tokenize(lines, target_lang)] for name, lines in systems.items()}
    reference_tokens = [line.split() for line in tokenize(references, target_lang)]
    counts = frequencies if frequencies is not None else Counter(word for line in reference_tokens for word in line)
    return {
        "baseline": next(iter(systems)),
        "target_lang": target_lang,
        "lines": len(references),
        "scores": scores(systems, references, target_lang),
        "by_length": by_length(systems, references, reference_tokens, target_lang),
        "by_frequency": by_frequency(tokens, reference_tokens, counts),
        "frequencies_of": "references" if frequencies is None else "training text",
        "sentences": sentences(systems, references, sources),
    }


def word_counts(text: Iterable[str], target_lang: str) -> Counter[str]:
    """Counts the tokens of a text."""
    counts: Counter[str] = Counter()
    text = iter(text)
    while chunk := list(itertools.islice(text, 1000)):
        counts.update(word for line in tokenize(chunk, target_lang) for word in line.split())
    return counts


def scores(systems: Mapping[str, Sequence[str]], references: Sequence[str], target_lang: str) -> dict[str, Any]:
    """Computes all metrics, and tests differences from the baseline.

    The verdict on a system is "better" or "worse" if both p-values are below 0.05, and "tie" otherwise.

    Returns:
      metric -> {"signature", "systems": name -> score, 95 % interval, p-values and verdict}.
    """
    by_metric: dict[str, Any] = {name: {"signature": "", "systems": {}} for name in metrics(target_lang)}
    for test, (label, _) in TESTS.items():
        # Create new metrics for each test, because a metric caches its references.
        for metric, (signature, results) in paired_test(systems, references, metrics(target_lang), test).items():
            by_metric[metric]["signature"] = by_metric[metric]["signature"] or signature
            for name, result in results.items():
                row = by_metric[metric]["systems"].setdefault(name, {"score": float(result.score)})
                if result.ci is not None:
                    row["mean"], row["interval"] = float(result.mean or 0.0), float(result.ci)
                if result.p_value is not None:
                    row[label] = float(result.p_value)
    for metric, table in by_metric.items():
        first = next(iter(table["systems"].values()))["score"]
        for row in list(table["systems"].values())[1:]:
            different = all(row[label] < SIGNIFICANT for label, _ in TESTS.values())
            better = (row["score"] > first) != (metric == "ter")
            row["verdict"] = ("better" if better else "worse") if different else "tie"
    return by_metric


def paired_test(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], measures: Mapping[str, Metric], test: str
) -> dict[str, tuple[str, dict[str, Result]]]:
    """Runs one of `TESTS` for every system against the first.

    It gives the results of the `sacrebleu` command, with the same seed, but with lower bounds of the p-values:
    p = 1 for equal scores, and p >= 2^(1 - n) for systems that differ in n lines, where lines with the same statistics
    of the metric count as equal. Exchanging the systems' lines at random leaves all n in place, or exchanges all of
    them, with probability 2^(1 - n), and both give the observed difference. sacreBLEU counts only samples with a larger
    difference, so for small n its p-values are too small. The bound also applies to the bootstrap.

    Returns:
      metric -> (signature, {system: result}); the result of the first system has no p-value.
    """
    named: list[tuple[str, Sequence[str]]] = [(name, list(lines)) for name, lines in systems.items()]
    signatures, results = PairedTest(named, measures, [list(references)], test, TESTS[test][1])()
    tests: dict[str, tuple[str, dict[str, Result]]] = {}
    for metric, (key, signature) in zip(measures, signatures.items(), strict=True):
        baseline, *others = (result for result in results[key] if isinstance(result, Result))
        for result, (_, lines) in zip(others, named[1:], strict=True):
            least = min(1.0, 2.0 ** (1 - differing(measures[metric], named[0][1], lines, references)))
            result.p_value = 1.0 if result.score == baseline.score else max(result.p_value or 0.0, least)
        tests[metric] = str(signature), dict(zip(systems, [baseline, *others], strict=True))
    return tests


def differing(measure: Metric, first: Sequence[str], second: Sequence[str], references: Sequence[str]) -> int:
    """Counts the lines in which two systems have different statistics of a metric; stops at `ENOUGH`."""

    def statistics(line: str, reference: str) -> list[list[float]]:
        # Scores of single lines are not enough: a BLEU of 0 hides the length, which counts in the corpus.
        return measure._extract_corpus_statistics([line], [[reference]])

    others = (
        reference
        for a, b, reference in zip(first, second, references, strict=True)
        if a != b and statistics(a, reference) != statistics(b, reference)
    )
    return sum(1 for _ in itertools.islice(others, ENOUGH))


def by_length(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    reference_tokens: Sequence[list[str]],
    target_lang: str,
) -> list[dict[str, Any]]:
    """Computes BLEU of each system by length of the reference."""
    metric = sacrebleu_metric(target_lang)
    bucket = [sum(len(line) > most for most in LENGTHS) for line in reference_tokens]
    table = []
    for index, label in enumerate(ranges(LENGTHS)):
        chosen = [line for line, bucket_index in enumerate(bucket) if bucket_index == index]
        if chosen:
            parts = {name: [lines[line] for line in chosen] for name, lines in systems.items()}
            target = [[references[line] for line in chosen]]
            bleu = {name: metric.corpus_score(lines, target).score for name, lines in parts.items()}
            table.append({"tokens": label, "lines": len(chosen), "bleu": bleu})
    return table


def by_frequency(
    tokens: Mapping[str, Sequence[list[str]]], reference_tokens: Sequence[list[str]], counts: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Computes the F1 score, in percent, of tokens by their frequency.

    Precision and recall count the tokens that a hypothesis has in common with its reference.
    """

    def bucket(word: str) -> int:
        return sum(counts.get(word, 0) > most for most in FREQUENCIES)

    reference_counts = Counter(bucket(word) for line in reference_tokens for word in line)
    f1: dict[str, dict[int, float]] = {}
    for name, lines in tokens.items():
        hypothesis_counts = Counter(bucket(word) for line in lines for word in line)
        matches: Counter[int] = Counter()
        for line, reference in zip(lines, reference_tokens, strict=True):
            for word, count in (Counter(line) & Counter(reference)).items():
                matches[bucket(word)] += count
        f1[name] = {
            index: 200 * matches[index] / (hypothesis_counts[index] + reference_counts[index])
            for index in reference_counts
        }
    return [
        {
            "times": label,
            "tokens": reference_counts[index],
            "f1": {name: by_bucket[index] for name, by_bucket in f1.items()},
        }
        for index, label in enumerate(ranges(FREQUENCIES))
        if reference_counts[index]
    ]


def ranges(bounds: Sequence[int]) -> list[str]:
    """Returns labels of the ranges of counts with these upper bounds: "0", "1-10", "11-20" and at the end "21+"."""
    lows = [0, *(bound + 1 for bound in bounds)]
    labels = [f"{low}" if low == high else f"{low}-{high}" for low, high in zip(lows, bounds, strict=False)]
    return [*labels, f"{lows[-1]}+"]


def sentences(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], sources: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Returns the sentences that differ most from the baseline in chrF.

    For each system, better sentences come first, then worse ones.
    """
    metric = CHRF()
    baseline, *others = systems
    by_system = {
        name: [metric.sentence_score(line, [ref]).score for line, ref in zip(lines, references, strict=True)]
        for name, lines in systems.items()
    }
    shown = []
    for name in others:
        gains = [b - a for a, b in zip(by_system[baseline], by_system[name], strict=True)]
        order = sorted(range(len(gains)), key=gains.__getitem__)
        better = [line for line in reversed(order) if gains[line] >= FLOOR][:SHOWN]
        worse = [line for line in order if gains[line] <= -FLOOR][:SHOWN]
        shown += [
            {
                "line": line + 1,
                "system": name,
                "gain": gains[line],
                "source": sources[line] if sources else "",
                "reference": references[line],
                "baseline_text": systems[baseline][line],
                "system_text": systems[name][line],
            }
            for line in better + worse
        ]
    return shown


def format_table(comparison: Mapping[str, Any]) -> str:
    """Formats the result of `compare` as text tables."""
    names = list(next(iter(comparison["scores"].values()))["systems"])
    width = max(map(len, names))
    lines = [f"{comparison['lines']:,} lines, scored as {comparison['target_lang']}, baseline {comparison['baseline']}"]
    for metric, table in comparison["scores"].items():
        lines += ["", f"{metric}  {table['signature']}"]
        for name, row in table["systems"].items():
            low, high = row["mean"] - row["interval"], row["mean"] + row["interval"]
            text = f"  {name:<{width}}  {row['score']:6.2f}  [{low:.2f}, {high:.2f}]"
            if "verdict" in row:
                text += f"  bootstrap p = {row['p_bootstrap']:.4f}, randomisation p = {row['p_randomisation']:.4f}"
                text += f"  {row['verdict']}"
            lines.append(text)
    tables = (
        ("bleu by length of the reference in tokens", "by_length", "tokens", "lines", "bleu"),
        (f"F1 of words by frequency in the {comparison['frequencies_of']}", "by_frequency", "times", "tokens", "f1"),
    )  # fmt: skip
    for title, key, label, count, value in tables:
        lines += ["", title]
        for row in comparison[key]:
            cells = "  ".join(f"{name} {row[value][name]:6.2f}" for name in names)
            lines.append(f"  {row[label]:>8}  {row[count]:>8,} {count:<6}  {cells}")
    return "\n".join(lines)


def write(comparison: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Writes the result of `compare` to compare.json and compare.html."""
    import jinja2

    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    paths = folder / "compare.json", folder / "compare.html"
    write_atomically(paths[0], json.dumps(comparison, indent=2, ensure_ascii=False) + "\n")
    write_atomically(paths[1], page.render(comparison))
    return paths


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Comparison with {{ baseline }}</title>
<style>
  :root { color-scheme: light dark; --better: #06710b; --worse: #a40000; --quiet: #5c5c5c; --line: #ccc; }
  @media (prefers-color-scheme: dark) {
    :root { --better: #6fd678; --worse: #ff9a94; --quiet: #a9a9a9; --line: #555; }
  }
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
  small { color: var(--quiet); overflow-wrap: anywhere; }
  table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
  th, td { border-bottom: 1px solid var(--line); padding: .3em .6em; text-align: left; vertical-align: top; }
  .n { text-align: right; font-variant-numeric: tabular-nums; }
  .better { color: var(--better); } .worse { color: var(--worse); }
</style>
<h1>Comparison with {{ baseline }}</h1>
<p>{{ "{:,}".format(lines) }} lines, scored as {{ target_lang }}. Intervals are as wide as 95 % of 1,000 bootstrap
samples. A system is better or worse if both bootstrap and approximate randomisation give p &lt; 0.05, and
otherwise a tie.</p>
{% for metric, table in scores.items() %}
<h2>{{ metric }}</h2>
<small>{{ table.signature }}</small>
<table>
<tr><th>system<th class="n">score<th class="n">interval<th class="n">p, bootstrap<th class="n">p, randomisation<th>
{% for name, row in table.systems.items() %}
<tr><td>{{ name }}<td class="n">{{ "%.2f" % row.score }}
<td class="n">{{ "%.2f" % (row.mean - row.interval) }} to {{ "%.2f" % (row.mean + row.interval) }}
{% if row.verdict %}
<td class="n">{{ "%.4f" % row.p_bootstrap }}<td class="n">{{ "%.4f" % row.p_randomisation }}
<td class="{{ row.verdict }}">{{ row.verdict }}
{% else %}
<td><td><td>baseline
{% endif %}
{% endfor %}
</table>
{% endfor %}
<h2>BLEU by length of the reference in tokens</h2>
<table>
<tr><th>tokens<th class="n">lines{% for name in scores.bleu.systems %}<th class="n">{{ name }}{% endfor %}
{% for row in by_length %}
<tr><td>{{ row.tokens }}<td class="n">{{ row.lines }}
{% for value in row.bleu.values() %}<td class="n">{{ "%.2f" % value }}{% endfor %}
{% endfor %}
</table>
<h2>F1 of words by frequency in the {{ frequencies_of }}</h2>
<table>
<tr><th>times<th class="n">tokens{% for name in scores.bleu.systems %}<th class="n">{{ name }}{% endfor %}
{% for row in by_frequency %}
<tr><td>{{ row.times }}<td class="n">{{ row.tokens }}
{% for value in row.f1.values() %}<td class="n">{{ "%.2f" % value }}{% endfor %}
{% endfor %}
</table>
<h2>Sentences that differ most</h2>
<table>
<tr><th class="n">line<th class="n">chrF<th>texts
{% for s in sentences %}
<tr><td class="n">{{ s.line }}<td class="n {{ "better" if s.gain > 0 else "worse" }}">{{ "%+.1f" % s.gain }}<td>
{% if s.source %}<small><bdi>{{ s.source }}</bdi></small><br>{% endif %}
<small>reference:</small> <bdi>{{ s.reference }}</bdi><br>
<small>{{ baseline }}:</small> <bdi>{{ s.baseline_text }}</bdi><br>
<small>{{ s.system }}:</small> <bdi>{{ s.system_text }}</bdi>
{% endfor %}
</table>
</html>
"""
