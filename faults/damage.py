"""Damaged files in a workdir: every number that depends on one is refused, restored from elsewhere, or computed again.

A trial damages one file of a finished run and then trains three more updates and evaluates. Each command must either
give the result of the intact workdir, or say what is wrong in one line that names the file or its folder.
"""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from faults.kills import SHORT_TEXTS, Job, digest, write_texts
from faults.processes import Finished, run
from faults.trial import Family, Outcome, Trial

COMMANDS: dict[str, Job] = {
    "train": Job((*SHORT_TEXTS, "--config.train.steps=33"), ("status.json", "metrics.jsonl", "validation.jsonl")),
    "evaluate": Job(("--mode=evaluate", "--config.evaluate.splits=valid"), ("results.json", "evaluation/*")),
}

EXPECTED_LINES = re.compile(
    r"differences from the defaults|^  |training from step|pairs|branchnorm|compiled|step|evaluating|^\w+: +\d+%\|"
)
"""Lines on stderr of an undisturbed command."""


class Case(NamedTuple):
    """A damaged file: its path in the workdir, the kind of damage, and where in the file."""

    file: str
    kind: str
    detail: str


def flip(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flips one bit."""
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :], f"a bit of byte {at}"


def truncate(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Cuts the end off."""
    at = rng.choice((0, rng.randrange(len(content))))
    return content[:at], f"all after byte {at}"


def zero(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Overwrites a block with zeros, as a lost page of a file system."""
    at, size = rng.randrange(len(content)), rng.choice((1, 64, 512, 4096))
    size = min(size, len(content) - at)
    return content[:at] + bytes(size) + content[at + size :], f"bytes {at} to {at + size}"


CHANGES: dict[str, Callable[[bytes, random.Random], tuple[bytes, str]]] = {
    "bit flipped": flip,
    "cut off": truncate,
    "zeroed": zero,
}


def damage(workdir: Path, older: Path, rng: random.Random) -> Case:
    """Damages a file of a workdir; `older` is the workdir at an earlier update. A tenth of the files are deleted."""
    files = sorted(str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file())
    kind = rng.choice((*CHANGES, *CHANGES, "stale", "another file's content", "deleted"))
    if kind == "stale":
        files = [file for file in files if (older / earlier(file)).is_file()]
    name = rng.choice(files)
    path = workdir / name
    if kind == "deleted":
        path.unlink()
        return Case(name, kind, "")
    if kind == "stale":
        shutil.copyfile(older / earlier(name), path)
        return Case(name, kind, "")
    if kind == "another file's content":
        other = rng.choice([file for file in files if file != name])
        shutil.copyfile(workdir / other, path)
        return Case(name, kind, other)
    content = path.read_bytes()
    if not content:
        path.write_bytes(b"\0")
        return Case(name, "bytes added", "")
    changed, detail = CHANGES[kind](content, rng)
    path.write_bytes(changed)
    return Case(name, kind, detail)


def earlier(file: str) -> str:
    """Returns the counterpart of a file in the workdir at the earlier update."""
    return re.sub(r"checkpoints/(\d+)", lambda match: f"checkpoints/{int(match[1]) - 15}", file)


def verdict(name: str, case: Case, done: Finished, same: bool, said: list[str]) -> tuple[str, str]:
    """Returns what was lost and what is wrong; both empty if the command did what it should."""
    if done.fault:
        return "", f"{name}: {done.fault}"
    place = case.file.split("/")[0]
    if done.code:
        if case.file.startswith("checkpoints/") and name == "train":
            return f"{name}: intact checkpoints are not used: {done.said}", ""
        if done.code in (2, 5) and (place in done.error or Path(case.file).name in done.error):
            return "", ""
        return "", f"{name}: exit code {done.code} without the file: {done.said}"
    noticed = any("damaged" in line or place in line for line in said)
    return "", "" if same or noticed else f"{name}: another result, and nothing said"


def prepare(shared: Path, seconds: float) -> Trial:
    """Makes the intact workdir, the same at an earlier update, and the results of the commands."""
    cache, whole, older = shared / "compiled", shared / "whole", shared / "older"
    expected: dict[str, dict[str, str]] = {}
    if not (shared / "made").exists():
        shutil.rmtree(shared, ignore_errors=True)
        write_texts(shared)
        for folder, steps in ((older, 15), (whole, 30)):
            trained = Job((*SHORT_TEXTS, f"--config.train.steps={steps}"), ())
            done = run(trained.filled(folder, shared), cache)
            if done.code:
                raise RuntimeError(done.error)
        for name, job in COMMANDS.items():
            shutil.copytree(whole, shared / name)
            done = run(job.filled(shared / name, shared), cache)
            if done.code:
                raise RuntimeError(done.error)
        (shared / "made").touch()
    for name, job in COMMANDS.items():
        expected[name] = digest(shared / name, job.results)

    def trial(rng: random.Random, folder: Path) -> Outcome:
        damaged = folder / "damaged"
        shutil.copytree(whole, damaged)
        case = damage(damaged, older, rng)
        file = damaged / case.file
        if file.exists() and file.read_bytes() == (whole / case.file).read_bytes():
            return Outcome(case.kind, case.file, injected=False)
        where, lost, wrong, last, code = " ".join(filter(None, (case.file, case.detail))), "", "", "", 0
        for name, job in COMMANDS.items():
            workdir = folder / name
            shutil.copytree(damaged, workdir)
            done = run(job.filled(workdir, shared), cache)
            said = [line for line in done.error.splitlines() if not EXPECTED_LINES.search(line)]
            intact = {file: value for file, value in expected[name].items() if file != case.file}
            same = done.code == 0 and digest(workdir, job.results, without=case.file) == intact
            new_lost, new_wrong = verdict(name, case, done, same, said)
            lost, wrong = lost or new_lost, wrong or new_wrong
            last, code = last or (said[-1] if said else ""), code or done.code
        return Outcome(case.kind, where, last, code, lost, wrong)

    return trial


FAMILY = Family(
    "Damaged files",
    "Any file of a finished run is damaged: a bit is flipped, the end is cut off, a block is zeroed, or the file is "
    "deleted or replaced by an older version or by another file; an empty file gets a byte. Then the run trains three "
    "more updates, and is evaluated. Both must give the results of the intact run, or say what is damaged; an intact "
    "checkpoint must be used.",
    prepare,
    2_000,
)
