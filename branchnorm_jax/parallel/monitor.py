"""Notices the loss of another process of the run, and ends this process with a message that names it.

Each process keeps a connection to process 0 and sends it a message every second, and the other way round. The operating
system closes the connections of a process that dies, so the others know at once. A process that has stopped, or whose
host or network is down, is silent. Process 0 tells the others about a lost process.
"""

import contextlib
import math
import os
import socket
import sys
import threading
import time

from branchnorm_jax.parallel.ending import end_process
from branchnorm_jax.parallel.meeting import PATIENCE, PAUSE, Link, readable

ADVICE = "start the run again, it resumes from its last checkpoint"

Failed = tuple[int, str, int]
"""Number, host and exit code of a process."""


class Peer:
    """What is known about another process.

    Attributes:
      heard: when its last message came.
      silent: seconds since then, without the time in which this process itself was stopped.
      age: seconds before `heard` since process 0 had last heard from all processes; 0 if the peer is not process 0.
      code: the exit code with which it ends, or None.
      failed: process 0: the first process that it knows to end with an exit code other than 0.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.heard, self.silent, self.age = link, time.monotonic(), 0.0, 0.0
        self.code: int | None = None
        self.left = math.inf
        self.failed: Failed | None = None


class Monitor:
    """Watches the connections of this process in a thread of its own."""

    def __init__(self, index: int, links: list[Link], silence: float) -> None:
        """Starts the thread.

        Args:
          index: the number of this process.
          links: the connections to all others in process 0, and to process 0 in the others.
          silence: seconds without a message after which a process counts as lost.
        """
        self.index, self.silence = index, silence
        self.peers = [Peer(link) for link in links]
        self._code: int | None = None
        self._deadline = math.inf
        threading.Thread(target=self._run, name="monitor", daemon=True).start()

    def settle(self, runtime_error: bool) -> None:
        """Waits after an error until it is certain that no other process is lost.

        If one is lost, the monitor ends this process meanwhile. If another process has failed with a message of its
        own and this error comes from the runtime, it is only a consequence, and this function ends the process.
        """
        begin = time.monotonic()
        while not (failed := self._failed()) and self._heard() <= begin:
            time.sleep(0.1)
        if failed and runtime_error:
            self.end_all(_has_failed(*failed))

    def leave(self, code: int) -> None:
        """Tells the other processes that this one ends, so that it does not count as lost.

        After a failure process 0 waits up to `PATIENCE` seconds for the others, which may need it for their messages.
        """
        self._code = code
        for peer in self.peers:
            peer.link.send("left", code)
        deadline = time.monotonic() + PATIENCE
        while code and not self.index and any(peer.code is None and not peer.link.closed for peer in self.peers):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)

    def end_all(self, message: str, *, stacks: bool = False, source: Peer | None = None) -> None:
        """Ends this process and all others with the same `message`; see `end_process`. Does not return.

        Args:
          message: what happened.
          stacks: whether each process prints the stacks of its threads.
          source: the process that sent the message, if any.
        """
        for peer in self.peers:
            if peer is not source:
                peer.link.send("over", message, stacks)
        end_process(message, stacks=stacks, last=self._wait_for_others)

    def _wait_for_others(self) -> None:
        """Keeps process 0 until the others have read its message: its end can break connections at once."""
        deadline = time.monotonic() + 3
        while not self.index and time.monotonic() < deadline:
            links = [peer.link for peer in self.peers if not peer.link.closed]
            if not links:
                return
            for link in readable(links, PAUSE):
                list(link.receive())

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # Without its monitor, a process would wait for lost processes for ever.
            end_process(f"the connection to the other processes failed ({error!r}); {ADVICE}")

    def _watch(self) -> None:
        sent, last = 0.0, time.monotonic()
        while True:
            links = {peer.link: peer for peer in self.peers if not peer.link.closed}
            if links:
                for link in readable(links, PAUSE):
                    self._receive(links[link])
            else:
                time.sleep(PAUSE)
            now = time.monotonic()
            for peer in self.peers:
                peer.silent += min(now - max(last, peer.heard), 2 * PAUSE)
            last = now
            if now >= sent + PAUSE:
                sent = now
                # Only process 0 has news of several processes.
                news = (0.0, None) if self.index else (max(0.0, now - self._heard()), self._failed())
                for peer in self.peers:
                    peer.link.send("beat", *news)
            for peer in self.peers:
                self._judge(peer, now)

    def _receive(self, peer: Peer) -> None:
        for kind, *content in peer.link.receive():
            peer.heard, peer.silent = time.monotonic(), 0.0
            if kind == "beat":
                peer.age = content[0]
                peer.failed = tuple(content[1]) if content[1] else None
            elif kind == "left":
                peer.code, peer.left = content[0], peer.heard
            elif kind == "over" and self._code is None:
                self.end_all(content[0], stacks=content[1], source=peer)

    def _judge(self, peer: Peer, now: float) -> None:
        silent = peer.silent > self.silence
        if self._code is not None:
            # This process has finished. It must not wait for others, at most for their part in the common end.
            if silent or peer.link.closed:
                self._deadline = min(self._deadline, now + PATIENCE)
            if now > self._deadline:
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                os._exit(self._code)
        elif peer.code is not None:
            if peer.code and now - peer.left > self.silence:
                self.end_all(_has_failed(peer.link.index, peer.link.host, peer.code))
        elif silent or peer.link.closed:
            why = f"it has been silent for {self.silence:g} s" if silent else "its connection closed"
            self.end_all(f"process {peer.link.index} on host {peer.link.host} was lost: {why}; {ADVICE}")

    def _heard(self) -> float:
        """Returns the latest time at which every process that has not finished is known to have been alive."""
        return min((peer.heard - peer.age for peer in self.peers if peer.code is None), default=math.inf)

    def _failed(self) -> Failed | None:
        """Returns the first process that is known to end with an exit code other than 0."""
        if self._code:
            return self.index, socket.gethostname(), self._code
        for peer in self.peers:
            if peer.code:
                return peer.link.index, peer.link.host, peer.code
            if peer.failed:
                return peer.failed
        return None


def _has_failed(index: int, host: str, code: int) -> str:
    return f"process {index} on host {host} ended with exit code {code}; its own message says why"
