"""Answers the file calls of a program: each call below a folder is counted, and chosen ones fail or kill the program.

Linux passes chosen system calls of a process to another process before it makes them (seccomp user notification). The
counts are those of the whole program, with all its threads and libraries. Linux on x86-64 only.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import select
import signal
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple, NoReturn

KILL = "SIGKILL"
"""The program is killed instead of making the call."""


class Call(NamedTuple):
    """A system call: what it does, and the arguments with its folder and its path. No path: the folder is a file."""

    does: str
    folder: int | None
    path: int | None


CALLS: dict[int, Call] = {
    1: Call("write", 0, None),
    18: Call("write", 0, None),  # pwrite64
    20: Call("write", 0, None),  # writev
    296: Call("write", 0, None),  # pwritev
    40: Call("write", 0, None),  # sendfile
    326: Call("write", 2, None),  # copy_file_range
    77: Call("resize", 0, None),  # ftruncate
    285: Call("resize", 0, None),  # fallocate
    74: Call("sync", 0, None),  # fsync
    75: Call("sync", 0, None),  # fdatasync
    2: Call("open", None, 0),
    257: Call("open", 0, 1),  # openat
    82: Call("rename", None, 1),
    264: Call("rename", 2, 3),  # renameat
    316: Call("rename", 2, 3),  # renameat2
    83: Call("make a folder", None, 0),  # mkdir
    258: Call("make a folder", 0, 1),  # mkdirat
    87: Call("delete", None, 0),  # unlink
    84: Call("delete", None, 0),  # rmdir
    263: Call("delete", 0, 1),  # unlinkat
}
"""The supervised calls of x86-64, by number. The path of `rename` is the new one."""

FAILURES: dict[str, tuple[str, ...]] = {
    "write": ("ENOSPC", "EDQUOT", "EIO"),
    "resize": ("ENOSPC", "EDQUOT", "EIO"),
    "sync": ("ENOSPC", "EDQUOT", "EIO"),
    "create": ("ENOSPC", "EDQUOT", "EIO", "EACCES"),
    "open": ("EIO", "EACCES"),
    "rename": ("ENOSPC", "EDQUOT", "EIO", "EACCES"),
    "make a folder": ("ENOSPC", "EDQUOT", "EIO", "EACCES"),
    "delete": ("EIO", "EACCES"),
}
"""How each kind of call can fail. "create" is `open` with a flag to write."""


class Fault(NamedTuple):
    """What is done to the calls of one place: nothing before the n-th call, which is the first one."""

    place: str
    """As `place_of` returns it; "" for none."""
    n: int = 1
    action: str = KILL
    """`KILL` or the name of an error."""
    lasting: bool = False
    """From the n-th call on, every call that can fail with this error does, at any place below the folder."""


def place_of(does: str, path: str) -> str:
    """Returns the place of a call: what it does and with which file, with # in place of random names and numbers.

    >>> place_of("rename", "checkpoints/15/params")
    'rename checkpoints/#/params'
    """
    return f"{does} {re.sub(r'[0-9a-f]{32}|(?<=/[.]tmp)[^/]+$|[0-9]+', '#', path)}"


def unavailable() -> str:
    """Returns why this machine cannot supervise programs; "" if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the supervisor of file calls needs Linux on x86-64"
    child = os.fork()
    if not child:
        code = 1
        try:
            _listen()
            code = 0
        finally:
            os._exit(code)
    refused = os.waitpid(child, 0)[1]
    return "this machine does not let a process supervise the system calls of another one" if refused else ""


def supervise(folder: Path, fault: Fault, report: Path) -> None:
    """Makes this process the supervisor of a copy of itself; returns in the copy only.

    When the copy ends, so does this process, in the same way. `report` is then a JSON object: "calls" has the number of
    calls at each place below `folder`, and "hit" the path of the first call that met the fault, or "".
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        listener = _listen()
        socket.send_fds(theirs, [b" "], [listener])
        os.close(listener)
        theirs.close()
        return
    theirs.close()
    listener = socket.recv_fds(ours, 1, 1)[1][0]
    counts, hit = _answer(listener, child, f"{folder}/", fault)
    _, status = os.waitpid(child, 0)
    report.write_text(json.dumps({"calls": counts, "hit": hit}), encoding="utf-8")
    _end_like(status)


def _end_like(status: int) -> NoReturn:
    """Ends this process as the one with this `waitpid` status has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _listen() -> int:
    """Filters the calls of this process and its threads from now on; returns the descriptor that receives them."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A program of the classic BPF: load the number; if it is in CALLS, jump to the last line, which asks the
    # supervisor; otherwise allow the call.
    lines = [(0x20, 0, 0, 0)]
    for place, number in enumerate(CALLS):
        lines.append((0x15, len(CALLS) - place, 0, number))
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FC00000)]
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(content)))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    listener = libc.syscall(317, 1, 8, program)  # seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


def _answer(listener: int, program: int, folder: str, fault: Fault) -> tuple[Counter[str], str]:
    """Answers calls until nobody can make any; returns how many there were at each place, and what met the fault."""
    counts: Counter[str] = Counter()
    hit = ""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while not poll.poll()[0][1] & select.POLLHUP:
        request = bytearray(80)
        try:
            fcntl.ioctl(listener, 0xC0502100, request)  # SECCOMP_IOCTL_NOTIF_RECV
        except OSError:  # The caller was killed in between.
            continue
        identity, thread, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", request)
        does, path = _described(thread, number, arguments)
        error = 0
        if path.startswith(folder):
            path = path.removeprefix(folder)
            place = place_of(does, path)
            counts[place] += 1
            first = not hit and place == fault.place and counts[place] == fault.n
            hit = path if first else hit
            if first and fault.action == KILL:
                os.kill(program, signal.SIGKILL)
                continue  # An answer could arrive first, and the call would be made.
            if first or (hit and fault.lasting and fault.action in FAILURES[does]):
                error = getattr(errno, fault.action)
        # The flag 1 makes the call go on.
        response = bytearray(struct.pack("QqiI", identity, 0, -error, 0 if error else 1))
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, 0xC0182101, response)  # SECCOMP_IOCTL_NOTIF_SEND
    return counts, hit


def _described(thread: int, number: int, arguments: list[int]) -> tuple[str, str]:
    """Returns what a call does and with which file; "" if it is not a file."""
    does, base, at = CALLS[number]
    try:
        name = "" if at is None else _text(thread, arguments[at])
        if not name.startswith("/"):
            here = base is None or arguments[base] & 0xFFFFFFFF == 0xFFFFFF9C  # AT_FDCWD
            start = "cwd" if here else f"fd/{arguments[base or 0]}"
            name = os.path.join(os.readlink(f"/proc/{thread}/{start}"), name).rstrip("/")
    except OSError:  # The caller was killed in between.
        return does, ""
    if does == "open" and arguments[1 if base is None else 2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        does = "create"
    return does, name


def _text(process: int, address: int) -> str:
    """Returns the text at an address in the memory of a process."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        found = b""
        while b"\0" not in found and (part := memory.read(256 - address % 256)):
            address += len(part)
            found += part
    return found.split(b"\0")[0].decode(errors="replace")
