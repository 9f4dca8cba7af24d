"""Signals at random moments: after the same command again, every result equals that of an undisturbed run.

An undisturbed run of each job records when it prints each line of stderr, except for the list of its options. A trial
chooses one of these lines, waits until the job has printed it, and then for a random part of the time until the next
line. So short phases, such as the end of a run, are hit as often as long ones.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from branchnorm_jax.data import numerals
from branchnorm_jax.files import ABANDONED
from faults.processes import PROGRAM, ROOT, TINY, Finished, run, start
from faults.trial import Family, Outcome, Trial

SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""At least 200 of the trials shall be kills, and 50 each of the others."""


class Job(NamedTuple):
    """A command whose result must not depend on interruptions."""

    options: Sequence[str]
    results: Sequence[str]
    """Files of the workdir that contain its result, or globs."""
    after: str = ""
    """The job whose finished workdir this one starts in; empty: it starts in a new one."""

    def filled(self, workdir: Path, shared: Path) -> list[str]:
        """Returns the options for a workdir."""
        named = {"workdir": str(workdir), "texts": str(shared / "texts")}
        return [f"--workdir={workdir}", *(option.format(**named) for option in self.options)]


TRAINED = ("status.json", "metrics.jsonl")

SHORT_TEXTS = (*TINY, "--config.data.source=text", "--config.data.path={texts}", "--config.data.vocab_size=200")
"""Options of the run on texts that take less time to evaluate; see `write_texts`."""

JOBS: dict[str, Job] = {
    "train": Job(TINY, TRAINED),
    "train.accumulation": Job((*TINY, "--config.train.accumulation=2"), TRAINED),
    "train.update_in_backward": Job(
        (*TINY, "--config.train.update_in_backward=True", "--config.model.remat=full"), TRAINED
    ),
    "train.ema_decay": Job((*TINY, "--config.train.ema_decay=0.9"), TRAINED),
    "adaptive alpha": Job(
        (
            *TINY,
            "--config.model.alpha_schedule=adaptive",
            "--config.model.alpha_floor=0.5",
            "--config.model.dropout=0.1",
        ),
        TRAINED,
    ),
    "several pairs": Job((*SHORT_TEXTS, "--config.data.pairs=en-de,de-en"), TRAINED),
    "language model": Job(
        (
            "--config=configs/lm.py:2L",
            "--config.model.width=16",
            "--config.model.ffn_width=24",
            "--config.model.heads=2",
            "--config.data.context=64",
            "--config.train.batch_tokens=512",
            "--config.train.steps=30",
            "--config.train.warmup_steps=10",
            "--config.train.eval_every=15",
            "--config.train.checkpoint_every=5",
            "--config.train.log_every=1",
            f"--config.data.path={ROOT}",
            "--config.data.files=README.md",
        ),
        TRAINED,
    ),
    "sweep": Job(
        ("--mode=sweep", *TINY, "--config.sweep.grid=method=pre_ln,rezero", "--config.train.steps=10"),
        ("*/results.json", "*/status.json", "*/metrics.jsonl"),
    ),
    "evaluate": Job(
        ("--mode=evaluate", "--config.evaluate.splits=valid"), ("results.json", "evaluation/*"), after="train"
    ),
    "translate": Job(
        ("--mode=translate", "--config.decode.input={texts}/valid.en", "--config.decode.output={workdir}/out.de"),
        ("out.de",),
        after="train",
    ),
    "average": Job(
        ("--mode=average", "--config.average.checkpoints=last:2"),
        ("average/**/memory/metadata",),  # commit_success.txt names a temporary folder
        after="train",
    ),
    "export": Job(("--mode=export", "--config.export.format=huggingface"), ("export/**/*.safetensors",), after="train"),
}

NOT_COMPARED = re.compile("seconds|hours|time|per_second")
"""Names of values that differ between equal runs."""

NUMBER = re.compile(r"\d[\d.,e+-]*")


class Marker(NamedTuple):
    """A line of stderr, with # in place of its numbers."""

    text: str
    seconds: float
    """Time until the next one."""
    number: int
    """Which one of the lines with this text it is, from 1 on."""


class Undisturbed(NamedTuple):
    """What a job does if nothing disturbs it."""

    markers: list[Marker]
    digest: dict[str, str]


def comparable(path: Path) -> bytes:
    """Returns the content of a file without what may differ between equal runs."""
    content = path.read_bytes()
    if path.name == "status.json":
        status = json.loads(content)
        return json.dumps([status["status"], status["step"], status["state_sha256"]]).encode()
    if path.suffix == ".jsonl":
        try:
            rows = [json.loads(line) for line in content.splitlines()]
        except ValueError:  # damaged on purpose
            return content
        rows = [{name: value for name, value in row.items() if not NOT_COMPARED.search(name)} for row in rows]
        return json.dumps(rows).encode()
    return content


def digest(workdir: Path, patterns: Sequence[str], without: str = "") -> dict[str, str]:
    """Returns the hash of each result of a job, except for the file `without`."""
    paths = {path for pattern in patterns for path in workdir.glob(pattern) if path.is_file()} - {workdir / without}
    return {str(path.relative_to(workdir)): hashlib.sha256(comparable(path)).hexdigest()[:16] for path in sorted(paths)}


class Watched:
    """A running job. `lines` are the lines that it has printed to stderr so far."""

    def __init__(self, options: Sequence[str], cache: Path, program: Sequence[str] = PROGRAM) -> None:
        self.process, self.lines = start(options, cache, program), list[str]()
        self.times = [time.monotonic()]
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                self.times.append(time.monotonic())
                self._changed.notify()

    def printed(self, marker: Marker) -> bool:
        """Waits until the job has printed `marker`; False if it ends before."""
        while marker.text != START:
            with self._changed:
                if [*map(kind, self.lines)].count(marker.text) >= marker.number:
                    return True
                if not self._thread.is_alive():
                    return False
                self._changed.wait(0.1)
        return True

    def finished(self) -> Finished:
        """Waits for the end of the job."""
        out = self.process.stdout.read() if self.process.stdout else ""
        self.process.wait()
        self._thread.join()
        return Finished(self.process.returncode, out, "".join(self.lines))


def kind(line: str) -> str:
    """Returns a line of stderr with # in place of its numbers."""
    return NUMBER.sub("#", line.strip())[:80]


START = "the start"
"""The marker of the time before a job prints anything."""


def undisturbed(name: str, shared: Path) -> Undisturbed:
    """Runs a job without faults, unless an earlier call has."""
    job, made, workdir = JOBS[name], shared / f"{name}.json", shared / name
    if made.exists():
        saved = json.loads(made.read_text())
        return Undisturbed([Marker(*each) for each in saved["markers"]], saved["digest"])
    shutil.rmtree(workdir, ignore_errors=True)
    if job.after:
        undisturbed(job.after, shared)
        shutil.copytree(shared / job.after, workdir)
    # The first run compiles the programs.
    for _ in range(2):
        again = workdir.with_name(f"{name} again")
        shutil.rmtree(again, ignore_errors=True)
        if job.after:
            shutil.copytree(workdir, again)
        watched = Watched(job.filled(again, shared), shared / "compiled")
        done = watched.finished()
        if done.code:
            raise RuntimeError(f"{name} fails without a fault: {done.error}")
    shutil.rmtree(workdir, ignore_errors=True)
    again.rename(workdir)
    result = Undisturbed(markers_of(watched), digest(workdir, job.results))
    if not result.digest:
        raise RuntimeError(f"{name} has no results")
    made.write_text(json.dumps(result._asdict()))
    return result


def markers_of(watched: Watched) -> list[Marker]:
    """Returns the markers of a job that has ended: the start, and the lines that are not of the list of options."""
    shown = [(START, watched.times[0])]
    for line, moment in zip(watched.lines, watched.times[1:], strict=True):
        if not line.startswith("  "):
            shown.append((kind(line), moment))
    names, begins = zip(*shown, strict=True)
    ends = [*begins[1:], time.monotonic()]
    return [
        Marker(name, ends[place] - begins[place], names[: place + 1].count(name)) for place, name in enumerate(names)
    ]


def trial(shared: Path, rng: random.Random, folder: Path) -> Outcome:
    """Interrupts a job one to three times, and then lets it finish."""
    name = rng.choice(list(JOBS))
    job, expected = JOBS[name], undisturbed(name, shared)
    number, times = rng.choice(SIGNALS), rng.choice((1, 1, 2, 3))
    workdir = folder / "run"
    if job.after:
        shutil.copytree(shared / job.after, workdir)
    options, cache = job.filled(workdir, shared), shared / "compiled"
    places, code, said, met = list[str](), 0, "", False

    def outcome(lost: str = "", wrong: str = "") -> Outcome:
        return Outcome(number.name, f"{name}: {'; '.join(places)}", said, code, lost, wrong, injected=met)

    for _ in range(times):
        marker = rng.choice(expected.markers)
        delay = rng.random() * marker.seconds
        due = max(steps_of(workdir), default=0)
        watched = Watched(options, cache)
        if watched.printed(marker):
            nth = f" no. {marker.number}" if marker.number > 1 else ""
            places.append(f"{delay:.2f} s after {marker.text!r}{nth}")
            time.sleep(delay)
            watched.process.send_signal(number)
        done = watched.finished()
        code, said, met = done.code, done.said if done.code > 0 else "", met or done.code != 0
        if done.code not in (0, -number, 128 + number):
            return outcome(wrong=f"exit code {code}")
        if wrong := "" if done.code == -number else done.fault:
            return outcome(wrong=wrong)
        if lost := begins_before(due, done):
            return outcome(lost=lost)
    due = max(steps_of(workdir), default=0)
    age(workdir)
    done = run(options, cache)
    if lost := f"the next start ends with {done.code}: {done.said}" if done.code else begins_before(due, done):
        return outcome(lost=lost)
    different = differing(digest(workdir, job.results), expected.digest)
    left = [str(path.relative_to(workdir)) for path in workdir.rglob("*") if LEFTOVER.search(path.name)]
    wrong = f"{', '.join(different[:5])} differ from the undisturbed run" if different else ""
    return outcome(wrong=wrong or (f"left behind: {left[:3]}" if left else ""))


def begins_before(due: int, done: Finished) -> str:
    """Returns what was lost, if training began before the newest checkpoint, at step `due`; "" if nothing."""
    begin = re.search(r"training from step (\d+)", done.error)
    if begin and int(begin[1]) < due:
        return f"training begins at step {begin[1]}, before the checkpoint of {due}"
    return ""


def differing(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Returns the files that two digests do not have in common."""
    return sorted({file for file, _ in found.items() ^ expected.items()})


def steps_of(workdir: Path) -> list[int]:
    """Returns the steps of the finished checkpoints, and of those that are being deleted, oldest first."""
    return sorted(int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdecimal())


LEFTOVER = re.compile(r"tmp|\.old$")
"""Names of temporary files."""


def age(workdir: Path) -> None:
    """Makes everything in a workdir so old that the temporary files in it count as abandoned."""
    before = time.time() - ABANDONED - 3600
    for path in workdir.rglob("*"):
        os.utime(path, (before, before), follow_symlinks=False)


def write_texts(shared: Path) -> None:
    """Writes the texts of the jobs, unless they are there: undisturbed runs would take newer files for other texts."""
    texts = shared / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for split, count in {"train": 300, "valid": 40, "test": 40}.items():
        for lang, lines in zip(("en", "de"), zip(*numerals.pairs(split, "en", "de", count), strict=True), strict=True):
            content = "".join(f"{line}\n" for line in lines)
            if not (path := texts / f"{split}.{lang}").exists() or path.read_text(encoding="utf-8") != content:
                path.write_text(content, encoding="utf-8")


def prepare(shared: Path, seconds: float) -> Trial:
    """Writes the texts; the undisturbed run of a job is made when a trial needs it."""
    write_texts(shared)
    return lambda rng, folder: trial(shared, rng, folder)


FAMILY = Family(
    "Signals at random moments",
    "A job is interrupted one to three times, at any moment from its start to its end. A day later it is started "
    "again, and must go on from its newest checkpoint. Jobs: "
    + ", ".join(JOBS)
    + ". Their results must equal those of the undisturbed job: the digest of the state and every line of the metrics, "
    "the scores and translations, or the exported weights. No temporary file may be left.",
    prepare,
    400,
)
