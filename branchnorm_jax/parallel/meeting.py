"""The start of several processes: each connects to process 0, which knows who is missing.

Process 0 listens at the address of JAX's coordinator until all processes have come, and then leaves the address to JAX.
The connections stay open; see `monitor.py`.
"""

import contextlib
import json
import os
import re
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

from branchnorm_jax.errors import HostError, UserError

PATIENCE = 10
"""Seconds of waiting for another process after which a line on stderr says what for."""

PAUSE = 1.0
"""Seconds between two messages, and between two attempts to connect."""

LONGEST = 1 << 16
"""Bytes of a message."""

MOST_NAMES = 10
"""Number of missing processes that a message lists."""


S = TypeVar("S")
"""A socket or a `Link`."""


class Link:
    """A connection that carries lists of JSON values, one per line. It never blocks.

    Attributes:
      index: number of the other process; -1 while unknown.
      host: name of its host.
      closed: whether the other side has closed the connection. The operating system does that for a process that dies.
    """

    def __init__(self, connection: socket.socket, index: int = -1, host: str = "") -> None:
        connection.setblocking(False)
        self.connection, self.index, self.host = connection, index, host
        self.closed = False
        self._rest = b""

    def fileno(self) -> int:
        """Returns the file descriptor, for `select`."""
        return self.connection.fileno()

    def send(self, *message: Any) -> None:
        """Sends a message. A message to a process that does not read, or is gone, is dropped."""
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[list[Any]]:
        """Yields the messages that have arrived. Closes a connection that carries anything else."""
        try:
            data = self.connection.recv(1 << 16)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.closed = not data or len(self._rest) > LONGEST
            yield from [list(json.loads(line)) for line in lines]
        except BlockingIOError:
            pass
        except (OSError, ValueError, TypeError):
            self.closed = True


def readable(sources: Iterable[S], timeout: float) -> list[S]:
    """Waits until data has arrived at some of the sockets, at most `timeout` seconds. Returns these sockets."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(cast(Any, source), selectors.EVENT_READ, source)
        return [key.data for key, _ in selector.select(timeout)]


def parse_address(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[host]:port"; the host may be empty, for all interfaces.

    Raises:
      ValueError: if the address is not of this form.
    """
    match = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:/]*):([0-9]{1,5})", address)
    if not match or not 0 < int(match[2]) < 65536:
        raise ValueError(f"the address {address} is not host:port, with a port from 1 to 65535")
    return match[1].strip("[]"), int(match[2])


def gather_links(count: int, address: str, timeout: float) -> list[Link]:
    """Waits in process 0 for the other processes. Returns a connection to each.

    Args:
      count: number of processes of the run.
      address: where to listen, "host:port".
      timeout: seconds to wait.

    Raises:
      HostError: if some process does not come in time, in all processes that have come.
    """
    joined: dict[int, Link] = {}
    newcomers: list[Link] = []
    begin, told, sent = time.monotonic(), False, 0.0
    with _listen(parse_address(address)) as listener:
        while missing := [index for index in range(1, count) if index not in joined]:
            waited = time.monotonic() - begin
            if waited > timeout:
                text = (
                    f"{count - len(missing)} of {count} processes came within parallel.start_timeout={timeout:g} s, "
                    f"without {_names(missing)}; start all processes at the same time, or raise the timeout"
                )
                _send_all(joined.values(), "failed", text)
                raise HostError(text)
            if waited > PATIENCE and not told:
                told = True
                say(f"process 0 waits for {_names(missing)} to start")
            if waited > sent + PAUSE:
                sent = waited
                _send_all(joined.values(), "missing", _names(missing))
            links = [*newcomers, *joined.values()]
            sources: list[socket.socket | Link] = [listener, *links]
            arrived = readable(sources, PAUSE)
            for link in links:
                if link in arrived:
                    for message in link.receive():
                        _welcome(link, message, count, joined)
            newcomers = [link for link in newcomers if not link.closed and link not in joined.values()]
            joined = {index: link for index, link in joined.items() if not link.closed}
            if listener in arrived:
                newcomers.append(Link(listener.accept()[0]))
    _send_all(joined.values(), "go", socket.gethostname())
    return list(joined.values())


def _welcome(link: Link, message: list[Any], count: int, joined: dict[int, Link]) -> None:
    """Adds a newcomer to `joined`, unless its numbers do not fit this run."""
    if list(map(type, message)) != [str, int, int, str] or message[0] != "hello":
        link.closed = True
        return
    _, link.index, its_count, link.host = message
    mistake = ""
    if its_count != count:
        mistake = f"it belongs to a run of {its_count} processes, process 0 to a run of {count}"
    elif link.index in joined:
        mistake = f"there is already a process {link.index} on host {joined[link.index].host}"
    elif not 0 < link.index < count:
        mistake = f"the numbers are 0 to {count - 1}"
    if mistake:
        link.send("refused", f"process {link.index} on host {link.host} cannot join the run: {mistake}")
    else:
        joined[link.index] = link


def join_first(index: int, count: int, address: str, timeout: float) -> Link:
    """Connects process `index` to process 0 and waits until all processes have come. Returns the connection.

    Args:
      index: number of this process.
      count: number of processes of the run.
      address: where process 0 listens, "host:port".
      timeout: seconds to wait for process 0. Process 0 limits the wait for the others.

    Raises:
      HostError: if process 0 or another process does not come in time.
      UserError: if process 0 rejects this process.
    """
    begin, told = time.monotonic(), False
    while (waited := time.monotonic() - begin) < timeout:
        if waited > PATIENCE and not told:
            told = True
            say(f"process {index} waits for process 0 at {address} to start")
        try:
            link = Link(socket.create_connection(parse_address(address), timeout=PATIENCE), 0)
        except OSError:
            time.sleep(PAUSE)
            continue
        link.send("hello", index, count, socket.gethostname())
        if _wait_for_all(link, index, begin, told):
            return link
        link.connection.close()
        time.sleep(PAUSE)
    raise HostError(
        f"process 0 of {count} is missing: it did not answer at {address} within parallel.start_timeout={timeout:g} s; "
        "start all processes at the same time, or raise the timeout"
    )


def _wait_for_all(link: Link, index: int, begin: float, told: bool) -> bool:
    """Waits until process 0 reports that all processes have come. Returns False if the connection breaks first."""
    while not link.closed and readable([link], PATIENCE):
        for kind, *content in link.receive():
            text = str(content[0]) if content else ""
            if kind == "go":
                link.host = text
                return True
            if kind == "failed":
                raise HostError(text)
            if kind == "refused":
                raise UserError(text)
            if time.monotonic() - begin > PATIENCE and not told:
                told = True
                say(f"process {index} waits for {text} to start")
    return False


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        if host in ("", "::"):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        host = ""  # There is no IPv6 on this host.
    try:
        return socket.create_server((host, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise HostError(f"process 0 cannot listen at {host or '*'}:{port}: {reason}") from error


def _send_all(links: Iterable[Link], *message: Any) -> None:
    for link in links:
        link.send(*message)


def _names(indices: list[int]) -> str:
    names = ", ".join(map(str, indices[:MOST_NAMES]))
    more = f" and {len(indices) - MOST_NAMES} more" if len(indices) > MOST_NAMES else ""
    return f"process{'es' if len(indices) > 1 else ''} {names}{more}"


def say(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr, flush=True)
