"""Numbers that break an update: skipping, rolling back and stopping must do exactly what docs/reference.md says."""

import contextlib
import dataclasses
import functools
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax

from branchnorm_jax import cli
from branchnorm_jax.errors import BranchNormError
from branchnorm_jax.modes import runs
from branchnorm_jax.options import Config
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.workdir import Workdir
from faults.broken_updates import KINDS, PLACES, Fault, breaking, install
from faults.kills import TRAINED, digest
from faults.processes import TINY, Finished, run
from faults.trial import Family, Outcome, Trial

STEPS, SAVE_EVERY, KEEP = 64, 10, 5

OPTIONS = (
    *TINY,
    f"--config.train.steps={STEPS}",
    f"--config.train.decay_steps={STEPS}",  # by default the length of the run, which trials shorten
    f"--config.train.checkpoint_every={SAVE_EVERY}",
    f"--config.train.keep_last={KEEP}",
    "--config.train.keep_best=0",
    "--config.train.eval_every=0",
    "--config.train.watch_every=20",
    "--config.model.alpha_steps=100",  # alpha grows until the end of the run, so that a pause is seen
    "--config.model.dropout=0.1",
)

POLICIES: dict[str, dict[str, str]] = {
    "stop": {"nonfinite": "stop", "spike": "stop"},
    "log": {"nonfinite": "stop", "spike": "log"},
    "skip": {"nonfinite": "skip", "spike": "skip"},
    "rollback batches": {"nonfinite": "rollback", "spike": "rollback", "rollback": "batches"},
    "rollback alpha": {"nonfinite": "rollback", "spike": "rollback", "rollback": "alpha"},
}

TEXTS = ("numerals", "six letters", "numerals, float16")
"""What the run is trained on, and the type of its residual stream. The vocabulary of the six letters has 16 pieces."""


class Case(NamedTuple):
    """What a trial breaks, and how the run has to react."""

    fault: Fault
    policy: str
    rollback_updates: int
    text: str

    @property
    def program(self) -> str:
        """The name of the program that the run compiles."""
        return f"{'skip' if self.policy == 'skip' else 'apply'}, {self.text}"

    def changes(self, shared: Path) -> dict[str, dict[str, Any]]:
        """Returns the options of the run beside `OPTIONS`, by section."""
        letters = {"source": "text", "path": str(shared / "texts"), "vocab_size": 16}
        return {
            "train": {**POLICIES[self.policy], "rollback_updates": self.rollback_updates},
            "data": letters if self.text == "six letters" else {},
            "model": {"carry_dtype": "float16"} if self.text.endswith("float16") else {},
        }


def draw(rng: random.Random) -> Case:
    """Draws a case."""
    kind = rng.choice(list(KINDS))
    # Spikes are detected from update 50 on, so faults keep away from it.
    first = rng.choice((rng.randrange(15, 40), rng.randrange(54, 60)))
    updates = rng.choice((1, 1, 1, 2, 3, 10)) if KINDS[kind].trouble == "nonfinite" else 1
    first, lasts = min(first, STEPS - updates - 2), updates > 1 or rng.random() < 0.5
    return Case(
        Fault(kind, rng.randrange(len(PLACES)), first, updates, lasts),
        rng.choice(list(POLICIES)),
        rng.choice((1, 4, 12)),
        TEXTS[2] if KINDS[kind].site == "scale" else rng.choice(TEXTS),
    )


@dataclasses.dataclass
class Documented:
    """What docs/reference.md says about a run: the run itself, without its numbers."""

    case: Case
    now: int = 0
    clock: int = 0
    """Number of updates in which alpha has grown."""
    hold: int = 0
    """Number of coming updates in which alpha stands still."""
    saved: dict[int, int] = dataclasses.field(default_factory=dict)
    """Step of a checkpoint -> its clock."""
    clocks: dict[int, int] = dataclasses.field(default_factory=dict)
    """Logged update -> its clock."""
    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    """Step, kind and policy, and the step that a rollback went back to."""
    left_out: list[list[int]] = dataclasses.field(default_factory=list)
    skipped: int = 0
    in_a_row: int = 0
    rollbacks: int = 0
    troubled: int = -1
    met: set[int] = dataclasses.field(default_factory=set)
    same: int = STEPS
    """The updates before this one equal those of an undisturbed run."""
    code: int = 0

    def run(self) -> "Documented":
        """Runs to the end."""
        while self.now < STEPS and not self.code:
            if self.now % SAVE_EVERY == 0 and self.now:
                self.saved = dict(sorted({**self.saved, self.now: self.clock}.items())[-KEEP:])
            if not any(first <= self.now <= last for first, last in self.left_out):
                self.clocks[self.now] = self.clock
                if self.meets_fault() and self.reacts():
                    continue
            self.now, self.clock, self.hold = self.now + 1, self.clock + (self.hold == 0), max(self.hold - 1, 0)
        return self

    def meets_fault(self) -> bool:
        """Returns whether this update is in trouble."""
        fault, now = self.case.fault, self.now
        broken = now in fault.broken and (fault.lasts or now not in self.met)
        if broken:
            self.met.add(now)
            self.same = min(self.same, now)
        self.in_a_row = self.in_a_row + 1 if broken else 0
        return broken and bool(fault.trouble)

    def reacts(self) -> bool:
        """Reacts to trouble. Returns whether the run goes back."""
        policy, _, change = self.case.policy.partition(" ")
        if policy == "log" and self.case.fault.trouble == "nonfinite":
            policy = "stop"
        self.events.append((self.now, self.case.fault.trouble, policy, None))
        if policy == "stop":
            self.code = 3
        elif policy == "skip":
            self.skipped += 1
            if self.in_a_row == 10:
                self.events.append((self.now, "skipped", "stop", None))
                self.code = 3
        elif policy == "rollback":
            if self.rollbacks == 5 or (change == "alpha" and self.now <= self.troubled):
                self.code = 3
            else:
                self.go_back(change)
        return policy == "rollback"

    def go_back(self, change: str) -> None:
        """Goes back to a checkpoint: that before the batches to leave out, or the last one."""
        updates = self.case.rollback_updates
        first = max(0, self.now - updates + 1) if change == "batches" else self.now
        to = max((step for step in self.saved if step <= first), default=min(self.saved, default=0))
        self.events.append((self.now, "rollback", None, to))
        self.rollbacks, self.troubled = self.rollbacks + 1, self.now
        if change == "batches":
            self.left_out.append([first, self.now])
            self.same = min(self.same, first)
        else:
            self.hold = self.now - to + updates
            self.same = min(self.same, to + 1)
        self.clock, self.now = self.saved.get(to, 0), to
        self.saved = {step: clock for step, clock in self.saved.items() if step <= to}
        self.clocks = {step: clock for step, clock in self.clocks.items() if step < to}

    @property
    def status(self) -> dict[str, Any]:
        """Fields of status.json."""
        spikes = sum(kind == "spike" for _, kind, *_ in self.events)
        return {
            "status": "diverged" if self.code else "done",
            "step": self.events[-1][0] + 1 if self.code else STEPS,
            "skipped_updates": self.skipped,
            "spikes": spikes,
            "rollbacks": self.rollbacks,
            "left_out": self.left_out,
        }


def verdict(case: Case, done: Finished, workdir: Path, undisturbed: Path) -> str:
    """Returns what a run did that is not documented; "" if nothing."""
    documented = Documented(case).run()
    if done.fault or done.code != documented.code:
        return done.fault or f"exit code {done.code} instead of {documented.code}: {done.said}"
    status = json.loads((workdir / "status.json").read_text())
    if wrong := {name: status[name] for name, value in documented.status.items() if status[name] != value}:
        return f"status.json says {wrong} instead of {documented.status}"
    events = read_lines(workdir / "events.jsonl")
    found = [(event["step"], event["kind"], event.get("policy"), event.get("to")) for event in events]
    if found != documented.events:
        return f"events {found} instead of {documented.events}"
    lines, sound = read_lines(workdir / "metrics.jsonl"), read_lines(undisturbed / "metrics.jsonl")
    if [line["step"] for line in lines] != list(documented.clocks):
        return f"metrics of updates {[line['step'] for line in lines]} instead of {list(documented.clocks)}"
    if not case.fault.trouble and all(same_numbers(line, sound[line["step"]]) for line in lines):
        return "the fault changes no update"
    for line in lines:
        update = line["step"]
        names = [name for name in line if name != "seconds"] if update < documented.same else ["batch", "learning_rate"]
        twin = sound[update] | {"alpha": sound[documented.clocks[update]]["alpha"]}
        if wrong := {name: line[name] for name in (*names, "alpha") if line[name] != twin[name]}:
            return f"update {update} has {wrong} instead of {twin}"
    return words(case, documented, done, status, events)


def same_numbers(line: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two lines of metrics.jsonl are equal, wall times aside."""
    return line | {"seconds": 0} == other | {"seconds": 0}


def words(case: Case, documented: Documented, done: Finished, status: dict[str, Any], events: list[Any]) -> str:
    """Returns what is wrong with the messages of a run; "" if nothing."""
    site = KINDS[case.fault.kind].site
    if events and site in ("forward", "backward"):
        layer = f"first in the {site} pass of {PLACES[case.fault.place].replace(' ', ' layer ')}"
        if layer not in events[0]["what"]:
            return f"the event does not say {layer!r}: {events[0]['what']!r}"
    if documented.code and not (status["reason"].startswith("diverged: ") and status["reason"] in done.said):
        return f"status.json says {status['reason']!r}, and the last line is {done.said!r}"
    return ""


def stored(workdir: Path) -> str:
    """Returns the digest of the parameters, the optimiser state and the moving average at the end of a run."""
    return json.loads((workdir / "status.json").read_text())["state_sha256"]


@functools.cache
def base(shared: Path) -> Config:
    """Returns the config of `OPTIONS`. The command line can be parsed only once in a process."""
    return cli.parse(["main.py", *OPTIONS, f"--workdir={shared}"])[0]


class Runs:
    """Runs the faulty and the undisturbed trainings of a trial."""

    def __init__(self, shared: Path, case: Case) -> None:
        self.shared, self.case = shared, case
        self.undisturbed = shared / case.program

    def run_process(self, workdir: Path, fault: Fault | None) -> Finished:
        """Trains in a process of its own, in which the updates of `fault` are broken."""
        changes = self.case.changes(self.shared).items()
        flags = [f"--config.{section}.{name}={value}" for section, each in changes for name, value in each.items()]
        prepared = functools.partial(install, fault)
        return run([*OPTIONS, *flags, f"--workdir={workdir}"], self.shared / "compiled", prepared=prepared)

    def run(self, workdir: Path, fault: Fault | None, steps: int = STEPS) -> Finished:
        """Trains in this process, which compiles each program once, with the text of the undisturbed run."""
        if not workdir.exists() and self.undisturbed.exists():
            for name in ("vocabulary", "corpus"):
                shutil.copytree(self.undisturbed / name, workdir / name)
        config = base(self.shared)
        for section, changes in self.case.changes(self.shared).items():
            config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
        errors, code = io.StringIO(), 0
        with breaking(fault), contextlib.redirect_stderr(errors):
            try:
                runs.train(config, Workdir(workdir))
            except BranchNormError as error:
                code = error.exit_code
                print(f"{type(error).__name__}: {error}", file=errors)
        return Finished(code, "", errors.getvalue())

    def prepare(self) -> None:
        """Makes the undisturbed run, unless an earlier trial has."""
        finished = self.undisturbed / "finished"
        if not finished.exists():
            shutil.rmtree(self.undisturbed, ignore_errors=True)
            done = self.run(self.undisturbed, None)
            if done.code or (self.undisturbed / "events.jsonl").exists():
                raise RuntimeError(f"there is trouble without a fault: {done.error}")
            finished.touch()

    def faulty(self, workdir: Path) -> tuple[Finished, str]:
        """Runs the faulty run to its end. Returns what is wrong with the state around the broken updates, too.

        A skipped update must leave the state as it is, bit for bit; therefore the run is stopped before and after it.
        """
        fault, digests = self.case.fault, set[str]()
        if self.case.policy == "skip" and fault.trouble and fault.updates < 10:
            for steps in (fault.first, fault.first + fault.updates):
                done = self.run(workdir, fault, steps)
                if done.code:
                    return done, ""
                digests.add(stored(workdir))
        return self.run(workdir, fault), "a skipped update changed the state" if len(digests) > 1 else ""


def trial(shared: Path, rng: random.Random, folder: Path) -> Outcome:
    """Trains with broken updates, twice; if the run stops, once more without them."""
    case = draw(rng)
    fault = case.fault
    where = f"{case.policy}, {case.rollback_updates}: {fault.updates} from update {fault.first}, {case.text}"
    if KINDS[fault.kind].site in ("forward", "backward"):
        where += f", {PLACES[fault.place]}"
    trained, workdir, again = Runs(shared, case), folder / "run", folder / "again"
    trained.prepare()
    done, wrong = trained.faulty(workdir)
    lost, wrong = "", wrong or verdict(case, done, workdir, trained.undisturbed)
    if not wrong:
        repeat = trained.run_process if rng.random() < 0.1 else trained.run
        repeated, files = repeat(again, fault), (*TRAINED, "events.jsonl")
        same = repeated.code == done.code and digest(again, files) == digest(workdir, files)
        wrong = repeated.fault or ("" if same else "a second run differs")
    if not wrong and done.code:
        resumed = trained.run(workdir, None)
        if resumed.code:
            lost = f"without the fault the run ends with {resumed.code}: {resumed.said}"
        elif case.policy in ("stop", "log") and digest(workdir, TRAINED) != digest(trained.undisturbed, TRAINED):
            wrong = "after the stop, the run differs from the undisturbed one"
    return Outcome(fault.kind, where, done.said if done.code else "", done.code, lost=lost, wrong=wrong)


def prepare(shared: Path, seconds: float) -> Trial:
    """Writes texts of six letters; an undisturbed run is made when a trial needs it."""
    texts, rng = shared / "texts", random.Random(0)
    texts.mkdir(parents=True, exist_ok=True)
    for split, count in {"train": 300, "valid": 40, "test": 40}.items():
        lines = [" ".join("".join(rng.choices("abcdef", k=rng.randint(1, 4))) for _ in range(5)) for _ in range(count)]
        for lang, order in {"en": 1, "de": -1}.items():
            (texts / f"{split}.{lang}").write_text("".join(f"{line[::order]}\n" for line in lines), encoding="utf-8")
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    return functools.partial(trial, shared)


FAMILY = Family(
    "Broken updates",
    "One to ten updates of a run are broken: NaN or infinity in the parameters or the gradient of a layer, "
    "gradients of 1e15 and 1e30, logits times 30, a batch of padding, or a loss scale at the edges of float16. Some"
    " runs have a float16 residual stream, and some a text of six letters with a vocabulary of 16 pieces. The run "
    "must do what the [reference](reference.md#trouble) says about its policy: the updates that it logs, the "
    "batches that it leaves out, the checkpoint that it goes back to, the time that alpha stands still, "
    "`status.json`, `events.jsonl`, the exit code and the layer in the message. All updates before the fault must "
    "equal those of an undisturbed run, skipped updates must leave the digest of the state as it is, and a second run "
    "must give the same results. A run that stopped must go on if it is started again without the fault, and under "
    "the policies stop and log it must end like the undisturbed run.",
    prepare,
    100,
)
