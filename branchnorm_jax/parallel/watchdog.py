"""Ends a process whose training makes no progress, for example because a device hangs."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

SHORT = 300.0
"""Seconds that an update may always take."""

LONG = 3600.0
"""Seconds that everything else may always take: validations, saves, and the first updates."""

FIRST = 3
"""Number of first updates. The first one waits for no result, and the second for processes that still compile."""

TICK = 1.0
"""Seconds between two checks."""


class Activity:
    """What the process does. `seconds` is how long it has done it, without the time in which it was stopped."""

    def __init__(self, kind: str, where: str) -> None:
        self.kind, self.where, self.start, self.seconds = kind, where, time.monotonic(), 0.0


class Watchdog:
    """Context manager that calls a function if an update, a validation or a save takes far longer than usual.

    The limit is `multiple` times the median duration of the recent activities of the same kind, and at least `SHORT` or
    `LONG`. The first activity of a kind has no limit, except for the first update. The time in which the process itself
    is stopped does not count.
    """

    def __init__(self, multiple: float, end: Callable[[str], None]) -> None:
        """Sets the limit.

        Args:
          multiple: the limit, in usual durations; 0: no limit.
          end: receives a text that says what takes too long.
        """
        self._multiple, self._end = multiple, end
        self._durations: dict[str, deque[float]] = {}
        self._activity = Activity("", "")
        self._left = threading.Event()

    def __enter__(self) -> Self:
        if self._multiple:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()

    def begin(self, kind: str, where: str = "") -> None:
        """Starts the clock of an activity and ends the one before.

        Args:
          kind: "update" or another word; "" for an activity without a limit.
          where: what the message says after `kind`.
        """
        before, self._activity = self._activity, Activity(kind, where)
        durations = self._durations.setdefault(before.kind, deque(maxlen=101))
        durations.append(self._activity.start - before.start)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._left.wait(TICK):
            now, activity = time.monotonic(), self._activity
            activity.seconds += min(now - max(last, activity.start), 2 * TICK)
            last = now
            durations = self._durations.get(activity.kind)
            if not activity.kind or not (durations or activity.kind == "update"):
                continue
            usual = statistics.median(durations) if durations else 0.0
            short = activity.kind == "update" and len(durations or ()) >= FIRST
            limit = max(SHORT if short else LONG, self._multiple * usual)
            if activity.seconds > limit:
                compared = f", usually {usual:.2g} s" if usual else ""
                self._end(f"{activity.kind} {activity.where} has taken {activity.seconds:.0f} s{compared}")
                return
