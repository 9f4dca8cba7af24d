"""Writes docs/reliability.md from the results of the campaign.

python -m faults.report
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from faults.campaign import FAMILIES
from faults.processes import ROOT
from faults.trial import recorded

PAGE = ROOT / "docs" / "reliability.md"

HEAD = """# Reliability

```
python -m faults.campaign
python -m faults.report
```

The first command injects faults into real runs, the second one writes this page from the
[results](../benchmarks/results/faults), one line per trial. *Lost*: work of the user that is gone. *Wrong* is any of
these: a result that differs from that of an undisturbed run although no message says so; a traceback; exit code 1, or
one that the [reference](reference.md#exit-codes) does not have. *With a message*: the program said what happened
(a program that SIGKILL ends cannot); among the negative controls, the comparison noticed the fault. A trial in which
the program does not meet the fault is made again with other random numbers. *Trials run: 4 of 20* means that the
campaign is not finished.

The campaign has found defects. They are mended, and the trials that found them were repeated on the mended program;
the other trials were kept. Each line has the revision that it was made with.
"""


def table(rows: Iterable[dict[str, Any]], goal: int) -> list[str]:
    """Returns a table with a row per fault."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["fault"], []).append(row)
    lines = ["| fault | trials | with a message | lost | wrong |", "|---|---|---|---|---|"]
    for fault, found in sorted(groups.items()):
        counts = [len(found), *(sum(bool(row[name]) for row in found) for name in ("said", "lost", "wrong"))]
        lines.append("| " + " | ".join([fault, *map("{:,}".format, counts)]) + " |")
    done = sum(map(len, groups.values()))
    return [*lines, "", f"Trials run: {done:,} of {goal:,}."]


def page(results: Path) -> str:
    """Returns the page."""
    parts = [HEAD]
    for name, family in FAMILIES.items():
        rows = recorded(results / f"{name}.jsonl").values()
        parts.append(f"## {family.title}\n\n{family.what}\n")
        parts.append("\n".join(table(rows, family.trials)) + "\n")
        if bad := [row for row in rows if row["lost"] or row["wrong"]]:
            parts.append("\n".join(f"- `{name}:{row['trial']}`: {row['lost'] or row['wrong']}" for row in bad) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(RESULTS / "faults"), encoding="utf-8")
