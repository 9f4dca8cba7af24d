"""The campaign of faults: what is injected is what is recorded, and its verdicts can fail."""

import argparse
import json
import random
import re
import signal
import sys
from pathlib import Path

import pytest

from branchnorm_jax.errors import UserError
from faults import calls, campaign, configurations, controls, damage, kills, numbers, processes, report
from faults.processes import Finished
from faults.trial import Family, Outcome, recorded


def bits(a: bytes, b: bytes) -> int:
    """Returns the number of bits that differ."""
    return sum((x ^ y).bit_count() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_what_it_says(seed: int) -> None:
    rng = random.Random(seed)
    content = rng.randbytes(5000)
    flipped, _ = damage.flip(content, rng)
    assert bits(content, flipped) == 1
    cut, detail = damage.truncate(content, rng)
    assert cut == content[: int(detail.rpartition(" ")[2])]
    zeroed, detail = damage.zero(content, rng)
    begin, end = (int(word) for word in detail.split() if word.isdecimal())
    assert zeroed == content[:begin] + bytes(end - begin) + content[end:]


def test_trials_are_determined_by_seed_and_number(tmp_path: Path) -> None:
    for name in ("whole/checkpoints/30", "older/checkpoints/15"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "memory").write_text(name)
    cases = []
    for attempt in range(2):
        copies = tmp_path / f"copy {attempt}"
        copies.mkdir()
        for number in range(30):
            workdir = copies / str(number)
            (workdir / "checkpoints/30").mkdir(parents=True)
            (workdir / "checkpoints/30/memory").write_text("0123456789")
            (workdir / "config.json").write_text("{}")
            cases.append(damage.damage(workdir, tmp_path / "older", random.Random(number)))
    assert cases[:30] == cases[30:]
    assert {case.kind for case in cases} >= {*damage.CHANGES, "stale", "another file's content", "deleted"}
    stale = next(number for number, case in enumerate(cases) if case.kind == "stale")
    assert (tmp_path / f"copy 0/{stale}/checkpoints/30/memory").read_text() == "older/checkpoints/15"


def test_options_of_jobs_are_valid(tmp_path: Path) -> None:
    for job in kills.JOBS.values():
        if not job.after:
            done = processes.run([*job.filled(tmp_path / "run", tmp_path), "--mode=help"], tmp_path)
            assert done.code == 0, done.error


WEIGHTS = damage.Case("checkpoints/30/params/d/ab", "zeroed", "")
MODEL = damage.Case("vocabulary/source.model", "zeroed", "")
TRACE = "Traceback (most recent call last):\n  ...\nKeyError: 'x'"


@pytest.mark.parametrize(
    ("case", "done", "same", "said", "lost", "wrong"),
    [
        (WEIGHTS, Finished(0, "", ""), True, [], False, False),
        (WEIGHTS, Finished(0, "", ""), False, ["checkpoint 30 is damaged"], False, False),
        (WEIGHTS, Finished(0, "", ""), False, [], False, True),
        (WEIGHTS, Finished(2, "", "UserError: none of the checkpoints can be read"), False, [], True, False),
        (MODEL, Finished(2, "", "UserError: runs/x/vocabulary/source.model: damaged"), False, [], False, False),
        (MODEL, Finished(2, "", "UserError: something is wrong"), False, [], False, True),
        (MODEL, Finished(1, "", TRACE), False, [], False, True),
        (MODEL, Finished(0, "", TRACE), True, [], False, True),
        (MODEL, Finished(-11, "", ""), False, [], False, True),
        (damage.Case("metrics.jsonl", "deleted", ""), Finished(0, "", ""), False, [], False, True),
    ],
)
def test_verdicts(case: damage.Case, done: Finished, same: bool, said: list[str], lost: bool, wrong: bool) -> None:
    assert tuple(map(bool, damage.verdict("train", case, done, same, said))) == (lost, wrong)


def test_results_are_compared_without_wall_times(tmp_path: Path) -> None:
    def written(**row: float) -> dict[str, str]:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return kills.digest(tmp_path, ["metrics.jsonl"])

    first = written(step=1, loss=2.5, seconds=0.1)
    assert written(step=1, loss=2.5, seconds=0.2) == first
    assert written(step=1, loss=2.5000001, seconds=0.1) != first


@pytest.mark.slow
def test_random_configs_are_refused_in_one_line_or_built() -> None:
    outcomes = [configurations.trace(random.Random(number), Path()) for number in range(12)]
    assert {outcome.fault for outcome in outcomes} == {"refused", "built"}
    assert not any(outcome.wrong for outcome in outcomes)


@pytest.mark.parametrize(
    "error", [UserError("two\nlines"), UserError(""), UserError("x" * 1000), ValueError("shape mismatch")]
)
def test_other_refusals_and_exceptions_are_found(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(options: object) -> None:
        raise error

    monkeypatch.setattr(configurations, "built", fails)
    assert configurations.trace(random.Random(0), Path()).wrong


def test_recorded_trials_survive_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "damage.jsonl"
    path.write_text('{"trial": 3, "seed": 0}\n{"trial": 4, "se')
    assert recorded(path) == {(0, 3): {"trial": 3, "seed": 0}}


def test_undisturbed_runs_of_another_commit_are_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for commit in ("a", "b", "a"):
        monkeypatch.setattr(campaign, "git_revision", lambda commit=commit: commit)
        folders.append(campaign.shared("kills", Path("scratch")))
    assert folders[0] == folders[2] != folders[1]


def test_results_name_no_folder_of_this_machine() -> None:
    scratch = Path("/srv/branchnorm/runs/faults")
    line = f'"said": "{scratch}/kills-1/trial: no space; (cannot open /srv/bra) /srv/other"'
    expected = '"said": "<scratch>/kills-1/trial: no space; (cannot open <scratch>) /srv/other"'
    assert campaign.without(line, scratch, "<scratch>") == expected


def test_a_family_that_this_machine_cannot_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls, "unavailable", lambda: "it needs Linux")
    arguments = argparse.Namespace(
        results=tmp_path / "results", scratch=tmp_path / "scratch", trials=1, seed=0, part=(1, 1)
    )
    assert campaign.run("calls", arguments, until=float("inf")) == 0
    assert capsys.readouterr().err == "calls: left out, because it needs Linux\n"
    assert not recorded(tmp_path / "results/calls.jsonl")


def test_parts_share_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[float] = []

    def trial(rng: random.Random, folder: Path) -> Outcome:
        ran.append(rng.random())
        return Outcome("none", "a name with \u2028 and \udcff")

    def call(*options: str) -> None:
        argv = ["campaign", *options, "--scratch", str(tmp_path / "scratch"), "--results", str(tmp_path)]
        monkeypatch.setattr("sys.argv", argv)
        campaign.main()

    family = Family("A title.", "A description.", lambda folder, seconds: trial, 10)
    monkeypatch.setattr(campaign, "FAMILIES", {"none": family})
    for part in ("3/3", "1/3", "2/3", "1/1"):
        call("--part", part)
    results = tmp_path / "none.jsonl"
    assert set(recorded(results)) == {(0, number) for number in range(10)}
    assert {row["where"] for row in recorded(results).values()} == {"a name with \u2028 and \udcff"}
    assert sorted(ran) == sorted(random.Random(f"0 none {number}").random() for number in range(10))
    # A trial whose line a kill has cut is repeated, and only that.
    results.write_text(results.read_text()[:-15])
    call()
    assert (len(ran), len(recorded(results))) == (11, 10)
    call("--seed", "1", "--trials", "2")
    assert ran[11:] == [random.Random(f"1 none {number}").random() for number in range(2)]
    call()
    assert (len(ran), len(recorded(results))) == (13, 12)
    for wrong in ("nope:1", "none", "none:x"):
        with pytest.raises(SystemExit, match="2"):
            call("--again", wrong)


def test_a_trial_without_a_fault_is_made_again(tmp_path: Path) -> None:
    drawn: list[float] = []

    def trial(rng: random.Random, folder: Path) -> Outcome:
        (folder / "file").touch(exist_ok=False)
        drawn.append(rng.random())
        return Outcome("none", f"{len(drawn)}", injected=len(drawn) == 3)

    row = campaign.one(trial, "none", 0, 5, tmp_path / "trial")
    assert row["where"] == "3"
    assert "injected" not in row
    assert drawn == [random.Random(seed).random() for seed in ("0 none 5", "0 none 5 1", "0 none 5 2")]


def test_the_short_campaign_has_faults_that_matter() -> None:
    seed = re.search(r"--trials 1 --seed (\d+)", (processes.ROOT / ".ci" / "run").read_text())
    assert seed
    case = numbers.draw(random.Random(f"{seed[1]} numbers 0"))
    assert case.fault.trouble == "nonfinite"
    assert case.policy.startswith("rollback")
    killed = random.Random(f"{seed[1]} kills 0")
    assert killed.choice(list(kills.JOBS)).startswith("train")
    assert killed.choice(kills.SIGNALS) == signal.SIGKILL
    assert random.Random(f"{seed[1]} controls 0").choice(list(controls.BROKEN)) != "nothing"


def test_a_start_before_the_newest_checkpoint_is_found() -> None:
    done = Finished(0, "", "compiled\ntraining from step 10 to 30; the learning rate\n")
    assert not kills.begins_before(10, done)
    assert kills.begins_before(15, done)
    assert not kills.begins_before(30, Finished(0, "", "this run is finished"))


def test_damage_that_changes_nothing_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("whole", "older", *damage.COMMANDS):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "made").touch()
    trial = damage.prepare(tmp_path, 0)
    monkeypatch.setattr(damage, "CHANGES", {})
    monkeypatch.setattr(random.Random, "choice", lambda rng, items: "stale" if "stale" in items else items[0])
    (tmp_path / "trial").mkdir()
    assert not trial(random.Random(0), tmp_path / "trial").injected


def test_markers_count_equal_lines_and_leave_out_the_options(tmp_path: Path) -> None:
    lines = ["head", "  model.width: 4", "step 1", "step 2", "end"]
    code = f"import sys; sys.stderr.writelines(line + '\\n' for line in {lines})"
    watched = kills.Watched([], tmp_path, [sys.executable, "-c", code])
    assert watched.finished().code == 0
    markers = kills.markers_of(watched)
    assert [(marker.text, marker.number) for marker in markers] == [
        (kills.START, 1), ("head", 1), ("step #", 1), ("step #", 2), ("end", 1)
    ]  # fmt: skip
    assert all(map(watched.printed, markers))
    assert not watched.printed(markers[3]._replace(number=3))


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "-1/3"])
def test_part_needs_two_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not I/N"):
        campaign.part(text)


def test_page_counts_every_trial(tmp_path: Path) -> None:
    rows = [
        {"trial": number, "seed": 0, "fault": fault, "said": said, "lost": lost, "wrong": ""}
        for number, (fault, said, lost) in enumerate(
            [("zeroed", "", ""), ("zeroed", "damaged", "work"), ("cut", "x", "")]
        )
    ]
    (tmp_path / "damage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report.page(tmp_path)
    assert "| zeroed | 2 | 1 | 1 | 0 |" in text
    assert "| cut | 1 | 1 | 0 | 0 |" in text
    assert "`damage:1`: work" in text
    assert all(family.title in text for family in campaign.FAMILIES.values())


def test_the_page_is_that_of_the_results() -> None:
    assert report.PAGE.read_text(encoding="utf-8") == report.page(report.RESULTS / "faults")


def test_texts_that_are_there_stay(tmp_path: Path) -> None:
    """Runs know their texts by the time of the last change. A file that a kill has cut is written again."""
    kills.write_texts(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "texts").iterdir()}
    cut = tmp_path / "texts" / "valid.en"
    whole = cut.read_text()
    cut.write_text(whole[:9])
    kills.write_texts(tmp_path)
    assert cut.read_text() == whole
    assert {path for path, time in times.items() if path.stat().st_mtime_ns != time} == {cut}
