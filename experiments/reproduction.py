"""Writes docs/reproduction.md: every table and figure of the papers, with its command and what was measured here.

    python -m experiments.reproduction

reproduction.toml lists the items, their claims (see `claims.py`) and the result files in benchmarks/results.
"""

import collections
import math
import re
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path

from experiments.claims import (
    UNMEASURED,
    Data,
    Metric,
    Outcome,
    Row,
    Side,
    Source,
    judge,
    read_rows,
    summarise,
    text_of,
)

ROOT = Path(__file__).resolve().parent.parent
ENTRIES, RESULTS = ROOT / "experiments/reproduction.toml", ROOT / "benchmarks/results"
DOCUMENT = ROOT / "docs/reproduction.md"


def load() -> Data:
    """Returns the entries."""
    return tomllib.loads(ENTRIES.read_text(encoding="utf-8"))


def metric_of(claim: Data, entries: Data) -> Metric:
    """Returns the score of a claim."""
    return Metric(claim["metric"], **entries["metrics"][claim["metric"]])


def outcomes_of(claim: Data, entries: Data, folder: Path = RESULTS) -> dict[str, Outcome]:
    """Compares a claim with its result file in `folder`.

    Returns:
      The outcome for each value of the column `by` of the file, such as each language pair. Without this column, or
      without rows, there is one outcome, for "".
    """
    file = entries["results"][claim["file"]]
    options = {name: value for name, value in file.items() if name in Source._fields[1:]}
    groups: dict[str, list[Row]] = {}
    for row in read_rows(folder / claim["file"], file.get("key", "")):
        groups.setdefault(text_of(row, file["by"]) if "by" in file else "", []).append(row)
    metric = metric_of(claim, entries)
    return {value: judge(claim, Source(rows, **options), metric) for value, rows in (groups or {"": []}).items()}


def verdict_of(item: Data, entries: Data) -> str:
    """Returns the verdict of an item: on the paper's claims, and on each variant of them that the item adds."""
    if "untestable" in item:
        return "not testable here"
    outcomes: dict[str, list[Outcome]] = {"": []}
    for claim in item.get("claims", ()):
        outcomes.setdefault(claim.get("variant", ""), []).extend(outcomes_of(claim, entries).values())
    scale = "" if item.get("full_scale") else " at our scale"
    texts = [(f"{variant}: " if variant else "") + summarise(found, scale) for variant, found in outcomes.items()]
    return "; ".join(texts)


def describe(side: Side, metric: Metric) -> str:
    """Returns a side as text: name, mean and range of the scores, and the chosen setting."""
    scores = sorted(metric.sign * cost for cost in side.costs if cost < math.inf)
    failed = len(side.costs) - len(scores)
    if not side.costs:
        text = UNMEASURED
    elif not scores:
        text = metric.missing
    else:
        text = f"{statistics.mean(scores):{metric.format}}"
        if len(scores) > 1:
            text += f" ({scores[0]:{metric.format}} to {scores[-1]:{metric.format}}, {len(scores)} seeds)"
        text += f", {metric.missing} with {failed} more" if failed else ""
    if side.settings > 1:
        text += f" [best of {side.settings} settings: {side.setting}]"
    return f"{side.name}: {text}"


def claims_table(item: Data, entries: Data) -> str:
    """Returns the claims of an item as a table."""
    lines = []
    for claim in item["claims"]:
        metric = metric_of(claim, entries)
        limits = [f"{name}: {claim[name]:g}" for name in ("limit", "within") if name in claim]
        for value, outcome in outcomes_of(claim, entries).items():
            setting = ", ".join(filter(None, (claim.get("variant", ""), value)))
            sides = [describe(side, metric) for side in outcome.sides]
            measured = f"{metric.title}. {'; '.join(sides + limits)}" if any(s.costs for s in outcome.sides) else ""
            says = f"*{setting}:* {claim['says']}" if setting else claim["says"]
            verdict = outcome.verdict + (f" ({outcome.remark})" if outcome.remark else "")
            lines.append((says, measured, verdict, f"[{claim['file']}](#{anchor(claim['file'])})"))
    return table(("claim", "measured", "verdict", "runs"), lines)


def anchor(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading.

    >>> anchor("ReZero, Table 2: speed")
    'rezero-table-2-speed'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [" | ".join(cell.replace("|", r"\|") for cell in row) for row in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", "|" + "---|" * len(head), *(f"| {line} |" for line in lines[1:])])


def heading_of(item: Data, entries: Data) -> str:
    """Returns the heading of an item's section."""
    return f"{entries['papers'][item['paper']]['short']}, {item['name']}: {item['title']}"


def item_section(item: Data, entries: Data) -> list[str]:
    """Returns the paragraphs of an item."""
    verdict = f"**Verdict: {verdict_of(item, entries)}.** {item.get('untestable', '')}".strip()
    parts = [f"### {heading_of(item, entries)}", verdict, f"The paper: {item['found'].strip()}"]
    if "command" in item:
        parts.append(f"```\n{item['command'].strip()}\n```")
    if "note" in item:
        parts.append(item["note"].strip())
    return [*parts, claims_table(item, entries)] if "claims" in item else parts


def runs_section(entries: Data) -> list[str]:
    """Returns the paragraphs about the result files."""
    parts = ["## The runs", entries["text"]["runs"].strip()]
    for name, file in entries["results"].items():
        link = f"[Results](../benchmarks/results/{name})" if (RESULTS / name).exists() else "Not run yet"
        more = f", [explained]({file['section']})" if "section" in file else ""
        parts += [f"### {name}", f"{file['scale'].strip()} {link}{more}.", f"```\n{file['command'].strip()}\n```"]
    return parts


def render(entries: Data) -> str:
    """Returns the document: an overview of each paper, the items, the result files."""
    count = collections.Counter(re.split(r"[,;(]", verdict_of(item, entries))[0].strip() for item in entries["items"])
    total = ", ".join(f"{verdict} {number}" for verdict, number in count.most_common())
    parts = [entries["text"]["opening"].strip(), f"Verdicts of the {len(entries['items'])} items: {total}."]
    sections = []
    for key, paper in entries["papers"].items():
        items = [item for item in entries["items"] if item["paper"] == key]
        links = [f"[{item['name']}](#{anchor(heading_of(item, entries))})" for item in items]
        lines = [(link, item["title"], verdict_of(item, entries)) for link, item in zip(links, items, strict=True)]
        parts += [f"**{paper['title']}**", table(("item", "what it shows", "verdict"), lines)]
        sections += [f"## {paper['title']}", paper["text"].strip()]
        sections += [part for item in items for part in item_section(item, entries)]
    return "\n\n".join([*parts, *sections, *runs_section(entries)]) + "\n"


def main() -> None:
    """Writes the document."""
    DOCUMENT.write_text(render(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
