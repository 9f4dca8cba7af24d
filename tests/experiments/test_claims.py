"""Verdicts of claims about small tables made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.claims import FAILS, HOLDS, UNDECIDED, UNMEASURED, Metric, Outcome, Source, judge, read_rows, summarise

BLEU = Metric("bleu", "BLEU", ".1f", tie=0.5)
LOSS = Metric("loss", "loss", ".2f", lower=True)


def rows(**scores: list[Any]) -> list[dict[str, Any]]:
    """Returns runs of methods, one per seed. None is a diverged run."""
    return [
        {"method": method, "train.seed": str(seed), "status": "diverged" if score is None else "done", "bleu": score}
        for method, values in scores.items()
        for seed, score in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("scores", "verdict", "remark"),
    [
        ({"a": [20.0, 21.0], "b": [18.0, 19.0]}, HOLDS, ""),
        ({"a": [18.0, 19.0], "b": [20.0, 21.0]}, FAILS, ""),
        ({"a": [18.0, 20.0], "b": [17.0, 19.0]}, UNDECIDED, ""),
        ({"a": [20.0], "b": [18.0, 19.0]}, HOLDS, "one seed"),
        ({"a": [18.5], "b": [18.0, 19.0]}, UNDECIDED, "one seed"),
        ({"a": [20.0], "b": [20.0]}, UNDECIDED, "one seed"),
        ({"a": [20.4], "b": [20.0]}, UNDECIDED, "one seed"),
        ({"a": [20.6], "b": [20.0]}, HOLDS, "one seed"),
        ({"a": [20.0, 21.0], "b": [None, None]}, HOLDS, ""),
        ({"a": [None, None], "b": [2.0, 3.0]}, FAILS, ""),
        ({"a": [20.0, None], "b": [2.0, 3.0]}, UNDECIDED, ""),
        ({"a": [None], "b": [None]}, UNDECIDED, "one seed"),
        ({"a": [20.0]}, UNMEASURED, ""),
        ({}, UNMEASURED, ""),
    ],
)
def test_order_compares_all_seeds(scores: dict[str, list[Any]], verdict: str, remark: str) -> None:
    outcome = judge({"better": "method=a", "than": "method=b"}, Source(rows(**scores)), BLEU)
    assert (outcome.verdict, outcome.remark) == (verdict, remark)


def test_settings_are_compared_on_the_seeds_that_both_have() -> None:
    table = [
        {"method": "a", "train.learning_rate": rate, "train.seed": seed, "bleu": bleu, "valid_nll": loss}
        for rate, seed, bleu, loss in (("1", "0", 20, 2.0), ("1", "1", 18, 2.6), ("2", "0", 19, 2.1))
    ]
    # Without a shared seed, the means of all seeds are compared.
    others = [row | {"train.seed": f"{row['train.learning_rate']}{row['train.seed']}"} for row in table]
    for given, rate in ((table, 1), (others, 2)):
        (side,) = judge({"trains": "method=a", "limit": 10}, Source(given), BLEU).sides
        assert side.setting == f"learning_rate={rate}"


def test_lower_is_better_for_losses() -> None:
    table = [{"method": "a", "loss": "0.5"}, {"method": "b", "loss": "0.7"}]
    claim = {"better": "method=a", "than": "method=b"}
    assert judge(claim, Source(table), LOSS).verdict == HOLDS
    assert judge(claim, Source(table), LOSS._replace(lower=False)).verdict == FAILS


def test_worst_of_several_comparisons_counts_and_missing_ones_are_listed() -> None:
    table = Source(rows(a=[20.0, 21.0], b=[10.0, 11.0], c=[20.5, 20.6], d=[30.0, 31.0]))
    claim = {"better": "method=a", "than": "method=b,x"}
    outcome = judge(claim, table, BLEU)
    assert outcome.verdict == HOLDS
    assert [(side.name, side.costs) for side in outcome.sides] == [("a", [-20, -21]), ("b", [-10, -11]), ("x", [])]
    assert judge({"better": "method=a", "than": "method=b,c"}, table, BLEU).verdict == UNDECIDED
    assert judge({"not_worse": "method=a", "than": "method=b,c"}, table, BLEU).verdict == HOLDS
    assert judge({"not_worse": "method=a", "than": "method=b | method=d"}, table, BLEU).verdict == FAILS


@pytest.mark.parametrize(
    ("scores", "trains", "fails"),
    [
        ([20.0, 21.0], HOLDS, FAILS),
        ([1.0, None], FAILS, HOLDS),
        ([20.0, None], UNDECIDED, UNDECIDED),
        ([], UNMEASURED, UNMEASURED),
    ],
)
def test_training_is_a_score_better_than_the_limit(scores: list[Any], trains: str, fails: str) -> None:
    table = Source(rows(a=scores))
    assert judge({"trains": "method=a", "limit": 10}, table, BLEU).verdict == trains
    assert judge({"fails": "method=a", "limit": 10}, table, BLEU).verdict == fails
    losses = Source([{"method": "a", "loss": "2"}])
    assert judge({"trains": "method=a", "limit": 3}, losses, LOSS).verdict == HOLDS
    assert judge({"trains": "method=a", "limit": 1}, losses, LOSS).verdict == FAILS


def test_equality_compares_means_and_needs_models_that_learn() -> None:
    table = Source(rows(a=[20.0, 22.0], b=[20.5, 20.5], c=[1.0], d=[1.2], e=[None]))
    assert judge({"equal": "method=a,b", "within": 0.5}, table, BLEU).verdict == HOLDS
    assert judge({"equal": "method=a,b", "within": 0.4}, table, BLEU).verdict == FAILS
    assert judge({"equal": "method=a,e", "within": 0.4}, table, BLEU).verdict == FAILS
    assert judge({"equal": "method=e,e", "within": 0.4}, table, BLEU).verdict == FAILS
    assert judge({"equal": "method=c,d", "within": 0.5}, table, BLEU).verdict == HOLDS
    assert judge({"equal": "method=c,d", "within": 0.5, "limit": 10}, table, BLEU).verdict == UNDECIDED
    assert judge({"equal": "method=a,b", "within": 0.5, "limit": 10}, table, BLEU).verdict == HOLDS
    assert judge({"equal": "method=a,x", "within": 0.5}, table, BLEU).verdict == UNMEASURED


def test_setting_with_the_lowest_mean_validation_loss_counts() -> None:
    """The best test score does not choose, and runs that have not ended do not count."""
    table = [
        {
            "method": "a",
            "train.seed": seed,
            "train.learning_rate": rate,
            "status": "done",
            "valid_nll": nll,
            "bleu": bleu,
        }
        for rate, seed, nll, bleu in (
            ("", "0", "0.5", "30"),
            ("", "1", "0.7", "32"),
            ("1e-3", "0", "0.4", "20"),
            ("1e-3", "1", "0.6", "22"),
        )
    ]
    table += [table[0] | {"train.learning_rate": "2e-3", "status": "running", "valid_nll": "0.1"}]
    table += [table[0] | {"train.learning_rate": "3e-3", "status": "diverged", "valid_nll": "0.1"}]
    (side,) = judge({"trains": "method=a", "limit": 0}, Source(table), BLEU).sides
    assert (side.costs, side.setting, side.settings) == ([-20, -22], "learning_rate=1e-3", 3)
    (side,) = judge({"trains": "method=a train.learning_rate=", "limit": 0}, Source(table), BLEU).sides
    assert (side.name, side.costs, side.settings) == ("a", [-30, -32], 1)


def test_rows_of_all_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("method,bleu\na,20\nb,\n")
    (tmp_path / "a.jsonl").write_text('{"method": "a", "curve": [1, null]}\n')
    run = {"options": {"train.seed": 3}, "status": {"status": "done"}, "scores": [{"bleu": 20.0}, {"bleu": 30.0}]}
    (tmp_path / "a.json").write_text(json.dumps({"runs": [run]}))
    assert read_rows(tmp_path / "missing.csv") == []
    table = Source(read_rows(tmp_path / "a.csv"))
    assert judge({"better": "method=a", "than": "method=b"}, table, BLEU).verdict == HOLDS
    (side,) = judge({"trains": "method=a", "limit": 1}, Source(read_rows(tmp_path / "a.jsonl")), LOSS).sides
    assert side.costs == [float("inf")]
    last = BLEU._replace(column="scores/-1/bleu")
    claim = {"trains": "options/train.seed=3", "limit": 25}
    assert judge(claim, Source(read_rows(tmp_path / "a.json", "runs")), last).verdict == HOLDS


def outcome(verdict: str, remark: str = "") -> Outcome:
    return Outcome(verdict, remark, [])


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        ([], "not run"),
        ([outcome(UNMEASURED)], "not run"),
        ([outcome(HOLDS), outcome(HOLDS, "one seed")], "holds at our scale"),
        ([outcome(FAILS, "one seed")], "does not hold at our scale (one seed)"),
        ([outcome(UNDECIDED)], "undecided at our scale"),
        ([outcome(HOLDS), outcome(UNMEASURED)], "holds at our scale (1 of 2 claims measured)"),
        (
            [outcome(HOLDS), outcome(FAILS), outcome(UNDECIDED)],
            "mixed at our scale, main claim: holds, 1 of 3 claims hold",
        ),
    ],
)
def test_verdict_of_an_item_is_computed_from_its_claims(outcomes: list[Outcome], text: str) -> None:
    assert summarise(outcomes, " at our scale") == text
