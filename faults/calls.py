"""Failing file calls: each call that a job makes in its workdir can fail, or be the last one before a kill.

An undisturbed run of each job is supervised, which counts its calls by kind and file. A trial chooses one of these
places and one of the calls there. Short phases are hit as often as long ones.
"""

import functools
import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from faults import kills
from faults.kills import SHORT_TEXTS, TRAINED, Job, age, differing, digest, kind, steps_of
from faults.processes import Finished, run
from faults.supervisor import FAILURES, KILL, Fault, place_of, supervise, unavailable
from faults.trial import Family, Outcome, Trial, Unavailable

EVERY = 4
"""Updates between two checkpoints."""

MOST = 4
"""Checkpoints that a run may leave: train.keep_last=2, train.keep_best=1, and one whose deletion was interrupted."""

SHORT = (
    *SHORT_TEXTS,
    "--config.train.steps=12",
    f"--config.train.checkpoint_every={EVERY}",
    "--config.train.eval_every=8",
)

JOBS: dict[str, Job] = {
    "train": Job(SHORT, TRAINED),
    "train with on_save_failure=warn": Job((*SHORT, "--config.train.on_save_failure=warn"), TRAINED),
    "resume": Job((*SHORT, "--config.train.steps=16"), TRAINED, after="train"),
    **{name: kills.JOBS[name] for name in ("evaluate", "translate", "average", "export")},
}

MESSAGE = re.compile(
    r"(StorageError|UserError): |<workdir>.*: |checkpoint \d+ in <workdir>|step \d|resuming "
    r"|(train|valid): \d+ pairs read"
)
"""Lines on stderr because of a fault: what failed, a damaged checkpoint, a run that goes on, tokens made again."""

RANDOM = re.compile(r"[0-9a-f]{32}|(\d+\.)?\d{6,}")
"""Parts of names that differ between equal runs. An event file has its first update and a time."""


class Undisturbed(NamedTuple):
    """What a job does if nothing fails."""

    calls: dict[str, int]
    """Place -> number of calls."""
    digest: dict[str, str]
    files: list[str]
    said: list[str]
    """Kinds of lines on stderr, also of a second start, without the workdir."""


def files_of(workdir: Path) -> list[str]:
    """Returns the files and folders of a workdir, with # in place of random names.

    Of the checkpoints only the newest one counts, because each save deletes those that the options do not keep.
    """
    newest = max(steps_of(workdir), default=0)
    names = {RANDOM.sub("#", str(path.relative_to(workdir))) for path in workdir.rglob("*")}
    return sorted(name for name in names if not re.match(rf"checkpoints/(?!{newest}/)\d+(/|$)", name))


def undisturbed(name: str, shared: Path) -> Undisturbed:
    """Runs a job without faults, unless an earlier call has."""
    made, workdir = shared / f"{name}.json", shared / name
    if made.exists():
        return Undisturbed(**json.loads(made.read_text(encoding="utf-8")))
    begin(name, workdir, shared)
    done, calls, _ = supervised(name, workdir, shared, Fault(""))
    if done.code:
        raise RuntimeError(f"{name} fails without a fault: {done.error}")
    results, files = digest(workdir, JOBS[name].results), files_of(workdir)
    if not results:
        raise RuntimeError(f"{name} has no results")
    restarted = run(JOBS[name].filled(workdir, shared), shared / "compiled")
    lines = [*done.error.splitlines(), *restarted.error.splitlines()]
    found = Undisturbed(calls, results, files, sorted({kind(line.replace(str(workdir), "")) for line in lines}))
    made.write_text(json.dumps(found._asdict()), encoding="utf-8")
    return found


def begin(name: str, workdir: Path, shared: Path) -> None:
    """Makes the workdir that a job starts in, if it continues another one."""
    shutil.rmtree(workdir, ignore_errors=True)
    if after := JOBS[name].after:
        undisturbed(after, shared)
        shutil.copytree(shared / after, workdir)


def supervised(name: str, workdir: Path, shared: Path, fault: Fault) -> tuple[Finished, dict[str, int], str]:
    """Runs a job; returns how it ended, its number of calls by place, and the path of the call that met the fault."""
    report = workdir.with_name(f"{workdir.name}.calls")
    prepared = functools.partial(supervise, workdir, fault, report)
    done = run(JOBS[name].filled(workdir, shared), shared / "compiled", prepared=prepared)
    answer = json.loads(report.read_text(encoding="utf-8"))
    return done, answer["calls"], answer["hit"]


def draw(calls: dict[str, int], rng: random.Random) -> Fault:
    """Draws a place, one of its calls, and what happens to the call."""
    place = rng.choice(sorted(calls))
    does = next(does for does in FAILURES if place.startswith(place_of(does, "")))
    action = rng.choice((KILL, KILL, *FAILURES[does]))
    return Fault(place, rng.randint(1, calls[place]), action, lasting=action != KILL and rng.random() < 0.3)


def unusual(workdir: Path, done: Finished, said: Sequence[str]) -> list[str]:
    """Returns the lines on stderr whose kinds are not in `said`, those of an undisturbed job."""
    lines = [line for line in done.error.splitlines() if "repeating updates" not in line]  # after an earlier fault
    return [line for line in lines if kind(line.replace(str(workdir), "")) not in said]


def verdict(job: str, workdir: Path, fault: Fault, hit: str, done: Finished, said: Sequence[str]) -> str:
    """Returns how the program misbehaved when it met the fault; "" if it did what it should."""
    if fault.action == KILL and hit:
        return "" if done.code == -9 else f"exit code {done.code} after a kill"
    if done.fault:
        return done.fault
    if done.code not in (0, 2, 5):
        return f"exit code {done.code}: {done.said}"
    saving = hit.startswith("checkpoints/") and not fault.place.startswith(("open", "delete"))
    if done.code == 2 and saving:
        return f"a failed save is no user error: {done.said}"
    new = unusual(workdir, done, said)
    if done.code and str(workdir) not in done.said:
        return f"the message does not say where: {done.said}"
    if done.code and len(new) > 1 and "warn" not in job:
        return f"more than one line: {new[:3]}"
    named = [line.replace(str(workdir), "<workdir>") for line in new]
    if long := [line for line in named if len(line) > 500 or not MESSAGE.match(line)]:
        return f"no message: {long[0][:200]!r}"
    return ""


def again(name: str, workdir: Path, shared: Path) -> tuple[str, str]:
    """Starts a job again; returns what was lost and what is wrong."""
    expected = undisturbed(name, shared)
    done = run(JOBS[name].filled(workdir, shared), shared / "compiled")
    if done.code or done.fault:
        return f"the next start ends with {done.code}: {done.said}", ""
    if found := [line for line in done.error.splitlines() if "damaged" in line or "cannot be read" in line]:
        return "", f"the next start says: {found[0]}"
    if different := differing(digest(workdir, JOBS[name].results), expected.digest):
        return "", f"{', '.join(different[:5])} differ from the undisturbed run"
    if len(steps_of(workdir)) > MOST:
        return "", f"{len(steps_of(workdir))} checkpoints are left"
    if different := sorted({*files_of(workdir)} ^ {*expected.files}):
        return "", f"other files than after the undisturbed run: {', '.join(different[:5])}"
    return "", ""


def trial(shared: Path, rng: random.Random, folder: Path) -> Outcome:
    """Lets a job meet a fault once or twice, and then lets it finish."""
    name = rng.choice(list(JOBS))
    expected, workdir = undisturbed(name, shared), folder / "run"
    fault = draw(expected.calls, rng)
    begin(name, workdir, shared)
    call = f"{name}: {fault.place}, call {fault.n}" + (" and later ones" if fault.lasting else "")
    met = False
    for _ in range(rng.choice((1, 1, 2))):
        done, _, hit = supervised(name, workdir, shared, fault)
        met = met or bool(hit)
        message = done.said if done.code > 0 else ""
        if done.code == 0:
            message = next(iter(unusual(workdir, done, expected.said)), "")
        outcome = functools.partial(Outcome, fault.action, call, message, done.code, injected=met)
        if wrong := verdict(name, workdir, fault, hit, done, expected.said):
            return outcome(wrong=wrong)
        if done.code == 0 and digest(workdir, JOBS[name].results) != expected.digest:
            return outcome(wrong="the exit code is 0, and the results differ from those of the undisturbed run")
        due = int(step[1]) - EVERY if (step := re.match(r"checkpoints/(\d+)", hit)) else 0
        if max(steps_of(workdir), default=0) < due:
            return outcome(lost=f"of the checkpoints before the fault only {steps_of(workdir)} are there")
    age(workdir)
    lost, wrong = again(name, workdir, shared)
    return outcome(lost=lost, wrong=wrong)


def prepare(shared: Path, seconds: float) -> Trial:
    """Writes the texts; the undisturbed run of a job is made when a trial needs it."""
    if reason := unavailable():
        raise Unavailable(reason)
    kills.write_texts(shared)
    return functools.partial(trial, shared)


FAMILY = Family(
    "File calls that fail",
    "One call that a job makes on a file in its workdir fails: to create, open, write, synchronise, rename or delete a "
    "file, or to make a folder. The job is killed instead of making the call, or the call returns an error (no space, "
    "over quota, an input or output error, no permission), once or from then on. Jobs: "
    + ", ".join(JOBS)
    + ". An error must be reported in one line with exit code 2 or 5, or must not change the results. A day later the "
    "job is started again. It must then continue from its last checkpoint, its results must equal those of the "
    "undisturbed job, and the workdir must contain the same files, so that failures do not fill the disk.",
    prepare,
    2_000,
)
