"""Claims about the rows of a result file, as data, and their verdicts.

A selection chooses rows in the notation of a sweep's grid: "method=post_ln,pre_ln depth=12L" makes two sets of rows,
"name=" selects rows without this value, and | joins selections. A claim has one of these forms:

- `better`, `than`: every run of `better` has a better score than every run of each set of `than`.
- `not_worse`, `than`: the same, but ranges of seeds that overlap are enough.
- `trains`, `limit`: every run of each set has a score better than the limit. `fails`, `limit`: no run has.
- `equal`, `within`: the means of the sets differ by at most `within`. With `limit`, the claim is undecided if a mean
  is not better than the limit, because models that learn nothing have equal scores.

If the rows of a set differ in more than the seed, the setting with the lowest mean validation loss counts, so that each
method has its own best learning rate. The mean is over the seeds that all settings have, if there are any. Diverged
runs are worse than all others. Runs that have not ended do not count.
"""

import csv
import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from branchnorm_jax.analysis.sweep import AXES

Row = Mapping[str, Any]
Data = Mapping[str, Any]
"""A table of reproduction.toml."""

SEED = "train.seed"

HOLDS, FAILS, UNDECIDED, UNMEASURED = "holds", "does not hold", "undecided", "not run"
ENDED = "done", "diverged", ""
"""Values of the column `status` of runs that count. Tables of measurements have no status."""


class Metric(NamedTuple):
    """A score.

    Attributes:
      column: where a row has it, see `value_of`.
      title: its name, for readers.
      format: of its numbers, as in an f-string.
      lower: whether a lower score is better.
      tie: smaller differences are undecided.
      missing: what it means that a run has no score.
    """

    column: str
    title: str
    format: str
    lower: bool = False
    tie: float = 0.0
    missing: str = "diverged"

    @property
    def sign(self) -> int:
        """Returns the factor that makes a score a cost."""
        return 1 if self.lower else -1


class Source(NamedTuple):
    """Result rows.

    Attributes:
      rows: the rows.
      settings: columns of the options, without the seed.
      choose: column of the loss that chooses among settings.
      deterministic: whether a repetition with another seed would give the same.
    """

    rows: Sequence[Row]
    settings: Sequence[str] = sorted(AXES - {SEED})
    choose: str = "valid_nll"
    deterministic: bool = False


class Side(NamedTuple):
    """The runs of one set of rows.

    Attributes:
      name: the selector as text.
      costs: score of each seed, negated if higher is better; infinity for a run without a score.
      setting: the setting with the lowest loss, as text.
      settings: the number of settings.
    """

    name: str
    costs: list[float]
    setting: str = ""
    settings: int = 1


class Outcome(NamedTuple):
    """Verdict of a claim, a warning about it or "", and the sides that it compares."""

    verdict: str
    remark: str
    sides: list[Side]


def read_rows(path: Path, key: str = "") -> list[Row]:
    """Returns the rows of a .csv or .jsonl file, or of the list `key` of a .json file; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    rows: list[Row] = json.loads(text)[key]
    return rows


def value_of(row: Row, column: str) -> Any:
    """Returns a value of a row; None if there is none. In JSON, "a/b/-1" is the last entry of the list "b" of "a"."""
    value: Any = row
    for name in column.split("/"):
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return None if value == "" else value


def text_of(row: Row, column: str) -> str:
    """Returns a value as a selector has it; "" if there is none."""
    value = value_of(row, column)
    return "" if value is None else str(value)


def status_of(row: Row) -> str:
    """Returns the status of a run; "" if the rows have none."""
    return text_of(row, "status/status" if isinstance(row.get("status"), Mapping) else "status")


def cost_of(row: Row, column: str, sign: int) -> float:
    """Returns a score times `sign`; infinity for a diverged run, or for a score that is missing or not finite."""
    score = float(text_of(row, column) or math.inf)
    return sign * score if math.isfinite(score) and status_of(row) != "diverged" else math.inf


def expand(selection: str) -> list[dict[str, str]]:
    """Returns the selectors, column -> value, of a selection.

    >>> expand("method=a,b depth=12L | method=c")
    [{'method': 'a', 'depth': '12L'}, {'method': 'b', 'depth': '12L'}, {'method': 'c'}]
    """
    selectors = []
    for part in selection.split("|"):
        axes = {name: values.split(",") for name, _, values in (word.partition("=") for word in part.split())}
        selectors += [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return selectors


def name_of(selector: Mapping[str, str]) -> str:
    """Returns a selector as text: methods and depths without, other options with the last part of their name.

    Options with their defaults are left out, unless there is nothing else.

    >>> name_of({"method": "branchnorm", "depth": "12L", "train.seed": "1", "model.init": ""})
    'branchnorm 12L seed=1'
    >>> name_of({"model.encoder_layers": ""})
    'default encoder_layers'
    """
    words, defaults = list[str](), list[str]()
    for column, value in selector.items():
        option = re.split(r"[./]", column)[-1]
        named = option not in ("method", "depth") or value.isdigit()
        if value:
            words.append(f"{option}={value}" if named else value)
        else:
            defaults.append(f"default {option}")
    return " ".join(words or defaults)


def pick(selector: Mapping[str, str], source: Source, metric: Metric) -> Side:
    """Returns the runs of a selector, with the setting that has the lowest mean loss."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in source.rows:
        if status_of(row) in ENDED and all(text_of(row, column) == value for column, value in selector.items()):
            groups.setdefault(tuple(text_of(row, option) for option in source.settings), []).append(row)
    if not groups:
        return Side(name_of(selector), [])
    shared = set.intersection(*({text_of(row, SEED) for row in rows} for rows in groups.values()))
    compared = {key: [row for row in rows if text_of(row, SEED) in shared] or rows for key, rows in groups.items()}
    losses = {key: statistics.mean(cost_of(row, source.choose, 1) for row in rows) for key, rows in compared.items()}
    best = min(losses, key=lambda key: losses[key])
    varied = {option: best[i] for i, option in enumerate(source.settings) if len({key[i] for key in groups}) > 1}
    setting = name_of({option: value for option, value in varied.items() if value}) or "the default"
    costs = [cost_of(row, metric.column, metric.sign) for row in groups[best]]
    return Side(name_of(selector), costs, setting, len(groups))


def order(first: Sequence[float], second: Sequence[float], tie: float = 0.0) -> str:
    """Returns whether all costs of `first` are lower than all of `second`; undecided if the ranges overlap."""
    if max(first) + tie < min(second):
        return HOLDS
    return FAILS if max(second) + tie < min(first) else UNDECIDED


def judge(claim: Data, source: Source, metric: Metric) -> Outcome:
    """Compares a claim with the rows of its result file."""
    form = next(form for form in ("better", "not_worse", "trains", "fails", "equal") if form in claim)
    sides = [pick(selector, source, metric) for selector in expand(claim[form])]
    if form in ("better", "not_worse"):
        (ours,) = sides
        others = [pick(selector, source, metric) for selector in expand(claim["than"])]
        pairs = [(ours.costs, other.costs) for other in others if ours.costs and other.costs]
        verdicts = [order(*pair, metric.tie) for pair in pairs]
        sides = [ours, *others]
    elif form == "equal":
        means = [statistics.mean(side.costs) for side in sides if side.costs]
        # A diverged run has an infinite mean, which is not within any distance of another one.
        verdicts = [HOLDS if max(means) - min(means) <= claim["within"] else FAILS] if len(means) > 1 else []
        if verdicts and "limit" in claim and max(means) >= metric.sign * claim["limit"]:
            verdicts = [UNDECIDED]
    else:
        verdicts = [order(side.costs, [metric.sign * claim["limit"]]) for side in sides if side.costs]
    read = {"not_worse": {UNDECIDED: HOLDS}, "fails": {HOLDS: FAILS, FAILS: HOLDS}}.get(form, {})
    found = [read.get(verdict, verdict) for verdict in verdicts]
    # The worst part counts.
    verdict = next((verdict for verdict in (FAILS, UNDECIDED, HOLDS) if verdict in found), UNMEASURED)
    one = not source.deterministic and any(len(side.costs) == 1 for side in sides)
    return Outcome(verdict, "one seed" if found and one else "", sides)


def summarise(outcomes: Sequence[Outcome], scale: str) -> str:
    """Returns the verdict of several claims, of which the first is the main one, with `scale` after the verdict."""
    measured = [outcome for outcome in outcomes if outcome.verdict != UNMEASURED]
    if not measured:
        return UNMEASURED
    verdicts = [outcome.verdict for outcome in measured]
    if len(set(verdicts)) == 1:
        text = f"{verdicts[0]}{scale}"
    else:
        text = (
            f"mixed{scale}, main claim: {outcomes[0].verdict}, {verdicts.count(HOLDS)} of {len(verdicts)} claims hold"
        )
    remarks = []
    if len(measured) < len(outcomes):
        remarks.append(f"{len(measured)} of {len(outcomes)} claims measured")
    if all(outcome.remark for outcome in measured):
        remarks.append("one seed")
    return text + (f" ({', '.join(remarks)})" if remarks else "")
