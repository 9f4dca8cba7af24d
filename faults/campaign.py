"""Runs trials of the families of faults, and records them.

    python -m faults.campaign                           all families, the long campaign; resumes where it stopped
    python -m faults.campaign damage --trials 100       100 trials of one family
    python -m faults.campaign --seconds 180             as many trials of each family as fit into three minutes in all
    python -m faults.campaign --again kills:17          repeats trial 17 and keeps its folder
    python -m faults.campaign --part 3/16 --scratch X   every 16th trial, from the third on, beside the other 15 parts

Trial n of a family is determined by --seed and n. Each trial is a line of <results>/<family>.jsonl; trials that are
there are not repeated. Parts may run at the same time if each has its own --scratch; they append to the same results.
The exit code is 1 if anything was lost or wrong.
"""

import argparse
import dataclasses
import itertools
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import RESULTS
from branchnorm_jax.training.logs import git_revision, progress_bar
from faults import calls, configurations, controls, damage, inputs, kills, numbers, requests, soak, topology
from faults.processes import ROOT
from faults.trial import Family, Trial, Unavailable, recorded

FAMILIES: dict[str, Family] = {
    "controls": controls.FAMILY,
    "kills": kills.FAMILY,
    "calls": calls.FAMILY,
    "damage": damage.FAMILY,
    "numbers": numbers.FAMILY,
    "inputs": inputs.FAMILY,
    "requests": requests.FAMILY,
    "topology": topology.FAMILY,
    "soak": soak.FAMILY,
    "options": configurations.TRACED,
    "training": configurations.TRAINED,
}


def one(trial: Trial, family: str, seed: int, number: int, folder: Path) -> dict[str, object]:
    """Runs a trial in an empty folder, again until the program meets the fault; returns its line."""
    begin = time.perf_counter()
    for again in itertools.count():
        folder.mkdir(parents=True)
        outcome = trial(random.Random(f"{seed} {family} {number}" + f" {again}" * bool(again)), folder)
        if outcome.injected or outcome.lost or outcome.wrong:
            break
        shutil.rmtree(folder)
    return {
        "trial": number,
        **{name: value for name, value in dataclasses.asdict(outcome).items() if name != "injected"},
        "seconds": round(time.perf_counter() - begin, 2),
        "seed": seed,
        "git_revision": git_revision(),
    }


def without(line: str, folder: Path, name: str) -> str:
    """Returns a line with a name in place of a folder of this machine, which tells others nothing.

    A message in brackets that was cut off may end with the beginning of the path.
    """
    path = str(folder)
    line = line.replace(path, name)
    for end in range(len(path) - 1, 1, -1):
        line = line.replace(f"{path[:end]})", f"{name})")
    return line


def shared(family: str, scratch: Path) -> Path:
    """Returns the folder of what the trials of a family share. Undisturbed runs of another commit are no reference."""
    return scratch / git_revision() / family


def ends_in_a_line(path: Path) -> bool:
    """Returns whether the last line of a file is complete. A kill can leave it incomplete."""
    return path.read_bytes()[-1:] in (b"", b"\n")


def run(family: str, arguments: argparse.Namespace, until: float) -> int:
    """Runs the trials of a family that are not recorded; returns the number of those with a loss or a wrong result."""
    path = arguments.results / f"{family}.jsonl"
    done = {number: row for (seed, number), row in recorded(path).items() if seed == arguments.seed}
    count = FAMILIES[family].trials if arguments.trials is None else arguments.trials
    first, parts = arguments.part
    ours = range(first - 1, count, parts)
    missing = [number for number in ours if number not in done]
    bad = [number for number, row in done.items() if row["lost"] or row["wrong"]]
    if not missing:
        return len(bad)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        trial = FAMILIES[family].prepare(shared(family, arguments.scratch), until - time.monotonic())
    except Unavailable as error:
        print(f"{family}: left out, because {error}", file=sys.stderr)
        return len(bad)
    bar = progress_bar(len(ours), len(ours) - len(missing), "trial", family)
    # A name of a file may have bytes that are no UTF-8. Python's escapes of their surrogates are also those of JSON.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file, bar:
        if not ends_in_a_line(path):
            file.write("\n")
        for place, number in enumerate(missing):
            if time.monotonic() > until:
                print(f"{family}: the time is over; {len(missing) - place} trials are left", file=sys.stderr)
                break
            folder = Path(tempfile.mkdtemp(prefix=f"{family}-{number}-", dir=arguments.scratch)) / "trial"
            row = one(trial, family, arguments.seed, number, folder)
            line = json.dumps(row, ensure_ascii=False)
            for hidden, name in ((folder, "<trial>"), (arguments.scratch, "<scratch>"), (ROOT, "<checkout>")):
                line = without(line, hidden, name)
            file.write(line + "\n")
            file.flush()
            if row["lost"] or row["wrong"]:
                bad.append(number)
                print(
                    f"{family}:{number} {row['fault']} {row['where']}: {row['lost'] or row['wrong']}", file=sys.stderr
                )
            else:
                shutil.rmtree(folder.parent)
            bar.update()
    return len(bad)


def part(text: str) -> tuple[int, int]:
    """Returns the numbers of I/N. Raises `argparse.ArgumentTypeError` unless 1 <= I <= N."""
    found = re.fullmatch("([0-9]+)/([0-9]+)", text)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return numbers


def main() -> None:
    """Runs the campaign that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family", help=f"by default all: {', '.join(FAMILIES)}")
    parser.add_argument(
        "--trials", type=int, help="number of trials of each family; by default those of the long campaign"
    )
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="only the trials I, I + N, ...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS / "faults", help="folder of the results")
    parser.add_argument("--scratch", type=Path, default=Path("runs/faults"), help="folder of the runs")
    parser.add_argument("--again", metavar="family:n", help="repeats one trial and prints it")
    arguments = parser.parse_args()
    # Background jobs of a shell ignore it, and so would the programs that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments.scratch = arguments.scratch.absolute()  # as in messages, from which `without` removes it
    if unknown := [name for name in arguments.families if name not in FAMILIES]:
        parser.error(f"no family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    if arguments.again:
        family, _, number = arguments.again.partition(":")
        if family not in FAMILIES or not number.isdecimal():
            parser.error(f"--again={arguments.again}: give family:n with one of {', '.join(FAMILIES)}")
        folder = Path(tempfile.mkdtemp(prefix=f"{family}-{number}-")) / "trial"
        try:
            trial = FAMILIES[family].prepare(shared(family, arguments.scratch), float("inf"))
        except Unavailable as error:
            raise SystemExit(f"{family}: left out, because {error}") from None
        print(json.dumps(one(trial, family, arguments.seed, int(number), folder), indent=2), folder, sep="\n")
        return
    families = arguments.families or list(FAMILIES)
    begin, bad = time.monotonic(), 0
    for place, family in enumerate(families):
        # Each family gets an equal share of the time that is left.
        left = float("inf") if arguments.seconds is None else begin + arguments.seconds - time.monotonic()
        bad += run(family, arguments, time.monotonic() + left / (len(families) - place))
    if bad:
        raise SystemExit(f"{bad} trials lost something or came out wrong; see {arguments.results}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on with the trials that are left") from None
