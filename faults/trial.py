"""What a trial injected, and what became of it."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One line of a campaign's results."""

    fault: str
    """What was injected, such as SIGKILL or ENOSPC."""
    where: str
    """The program and the moment or place, such as "train: after 'compiled # batch shapes'"."""
    said: str = ""
    """What the program said about the fault: the last line of stderr if it failed, or the first unusual line."""
    code: int = 0
    """Exit code of the program that met the fault; -n: killed by signal n."""
    lost: str = ""
    """What of the user's work was lost; empty: nothing."""
    wrong: str = ""
    """Which result differs from that of the undisturbed run, or how the program misbehaved; empty: none."""
    injected: bool = True
    """Whether the program met the fault. Otherwise the trial is made again, with other random numbers."""


class Unavailable(Exception):
    """This machine cannot inject the faults of a family. The message says why, in one line."""


Trial = Callable[[random.Random, Path], Outcome]
"""A function of a random generator and an empty folder. The generator alone determines what is injected."""


class Family(NamedTuple):
    """A kind of fault."""

    title: str
    what: str
    """What a trial does, as a paragraph of docs/reliability.md."""
    prepare: Callable[[Path, float], Trial]
    """Makes what all trials share, such as undisturbed runs, in a folder that may contain it already.

    The second argument is the time for all trials in seconds, or infinity, for trials that are as long as that.
    `Unavailable` if the family needs something that this machine lacks.
    """
    trials: int
    """Number of trials of the long campaign."""


def recorded(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Returns the results in a file, by the seed and number of the trial. A kill may have left an incomplete line."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    # A name of a file may have a line separator, U+2028, which JSON does not escape.
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["seed"], row["trial"]] = row
    return rows
