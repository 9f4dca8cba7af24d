"""A long run under a restart loop: faults at random times, and then the numbers of an undisturbed run.

    python -m faults.campaign soak                     six trials of two hours
    python -m faults.campaign soak --seconds 600       one trial of ten minutes

In the first half of the time, faults interrupt a run, which is started again by the rule of launch/exit_codes.sh. Then
it goes on to the next hundredth update, and a run that nothing interrupts is trained to the same update.
"""

import contextlib
import functools
import random
import resource
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from faults.damage import CHANGES
from faults.kills import differing, digest, steps_of
from faults.processes import ROOT, TINY, Finished, start
from faults.trial import Family, Outcome, Trial

HOURS = 2.0
MEAN = 300.0
"""Mean time between two faults in seconds. In a short trial it is a twentieth of the trial, but at least `LEAST`."""

LEAST = 15.0
"""Mean time in which a run can start and save a checkpoint."""

STEP = 100

LONGEST = 10**7
"""Updates that no trial reaches."""

OPTIONS = (
    *TINY,
    "--config.model.dropout=0.1",
    "--config.train.ema_decay=0.9",
    f"--config.train.decay_steps={LONGEST}",
    f"--config.train.checkpoint_every={STEP}",
    f"--config.train.eval_every={5 * STEP}",
    "--config.train.log_every=10",
)
RESULTS = ("status.json", "metrics.jsonl", "validation.jsonl")

FAULTS = ("SIGKILL", "SIGKILL", "SIGTERM", "full disk", "damaged checkpoint")


class Stopped(Exception):
    """The restart loop would not start the run again, or the program misbehaved."""


class Loop:
    """Starts a run again and again by the rule of launch/exit_codes.sh."""

    def __init__(self, workdir: Path, cache: Path) -> None:
        self.workdir, self.cache = workdir, cache
        self.retries, self.step, self.said = 0, 0, ""

    def start(self, steps: int = LONGEST) -> None:
        """Starts the run."""
        options = [*OPTIONS, f"--config.train.steps={steps}", f"--workdir={self.workdir}"]
        self.process = start(options, self.cache)

    def ended(self, seconds: float | None = None) -> Finished | None:
        """Waits for the end of the run; None if it is still running after `seconds`."""
        try:
            out, error = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        done = Finished(self.process.returncode, out, error)
        self.said = done.said or self.said
        return done

    def check(self, done: Finished, fault: str) -> None:
        """Raises `Stopped` unless the run may be started again after this end."""
        # SIGTERM ends a process at once while Python starts.
        if wrong := "" if done.code in (-signal.SIGKILL, -signal.SIGTERM) else done.fault:
            raise Stopped(f"{fault}: {wrong}")
        latest = max(steps_of(self.workdir), default=0)
        self.retries, self.step = 0 if latest > self.step else self.retries, max(latest, self.step)
        code = 128 - done.code if done.code < 0 else done.code
        rule = f"source launch/exit_codes.sh; decide {code} {self.retries}"
        decision = subprocess.check_output(["bash", "-c", rule], cwd=ROOT, text=True).strip()
        self.retries += decision == "retry"
        # Somebody makes room on a full disk and starts the run. Early kills in a row are chance here.
        if decision == "stop" and not (fault == "full disk" and code == 5) and code != 128 + signal.SIGKILL:
            raise Stopped(f"{fault}: exit code {code}: {done.said}")

    def inject(self, fault: str, rng: random.Random) -> Finished | None:
        """Injects a fault; returns how the run ended, or None if it goes on."""
        if fault == "full disk":
            size = rng.choice((0, 1 << 12, 1 << 16))
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            if done := self.ended(rng.uniform(1, 60)):
                return done
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            return None
        self.process.send_signal(signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
        done = self.ended()
        if fault == "damaged checkpoint" and len(steps_of(self.workdir)) > 1:
            newest = self.workdir / "checkpoints" / str(steps_of(self.workdir)[-1])
            path = rng.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
            path.write_bytes(rng.choice(list(CHANGES.values()))(path.read_bytes(), rng)[0])
        return done


def disturb(loop: Loop, rng: random.Random, mean: float, until: float) -> Counter[str]:
    """Trains with faults until a time, and stops the run with a signal; returns the numbers of faults."""
    faults: Counter[str] = Counter()
    loop.start()
    while True:
        gap, fault = rng.expovariate(1 / mean), rng.choice(FAULTS)
        at_end = time.monotonic() + gap > until
        if done := loop.ended(max(0.0, min(gap, until - time.monotonic()))):
            raise Stopped(f"without a fault: exit code {done.code}: {done.said}")
        fault = "SIGTERM" if at_end else fault
        faults[fault] += 1
        done = loop.inject(fault, rng)
        if done:
            loop.check(done, fault)
            if at_end:
                return faults
            loop.start()


def trial(cache: Path, seconds: float, rng: random.Random, folder: Path) -> Outcome:
    """Trains for half of the time with faults, and then the same updates without."""
    loop, undisturbed = Loop(folder / "run", cache), Loop(folder / "undisturbed", cache)
    begin = time.monotonic()
    where = ""
    try:
        faults = disturb(loop, rng, max(LEAST, min(MEAN, seconds / 20)), begin + seconds / 2)
        steps = (max(steps_of(loop.workdir), default=0) // STEP + 1) * STEP
        where = f"{steps} updates: " + ", ".join(f"{count} x {fault}" for fault, count in sorted(faults.items()))
        for each in (loop, undisturbed):
            each.start(steps)
            done = each.ended()
            if done is None or done.code or done.fault:
                raise Stopped(f"the last start ends with {done}")
    except Stopped as stopped:
        return Outcome("a schedule of faults", where, loop.said, wrong=str(stopped)[:400])
    different = differing(digest(loop.workdir, RESULTS), digest(undisturbed.workdir, RESULTS))
    wrong = f"{', '.join(different)} differ from the undisturbed run" if different else ""
    return Outcome("a schedule of faults", where, wrong=wrong)


def prepare(shared: Path, seconds: float) -> Trial:
    """Compiles the programs; a trial takes two hours, or the rest of the time."""
    begin, first = time.monotonic(), Loop(shared / "first", shared / "compiled")
    first.start(steps=1)
    if (done := first.ended()) and done.code:
        raise RuntimeError(done.error)
    return functools.partial(trial, shared / "compiled", min(seconds + begin - time.monotonic(), HOURS * 3600))


FAMILY = Family(
    "A long run with a restart loop",
    f"A run is trained for {HOURS:g} hours, or a shorter time. In the first half, faults interrupt it at random times, "
    f"on average every {MEAN:g} seconds: SIGKILL, SIGTERM, files that cannot grow, or SIGKILL and a damaged newest "
    "checkpoint. The rule of launch/exit_codes.sh starts it again, and the trial does, if the rule stops after a lack "
    "of space or several early kills. In the second half, the same updates are trained without faults. The digest of "
    "the state, and every line of the metrics and of the validations must be equal.",
    prepare,
    6,
)
