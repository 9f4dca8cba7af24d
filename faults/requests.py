"""Hostile requests to the server: each gets the answer that it deserves, and no other request notices.

Most trials run the server's application in this process, with a model that echoes its lines, so that an answer for
another request would be noticed. The others start `--mode=serve` and stop it with a signal. Nothing leaves the machine.
"""

import contextlib
import functools
import itertools
import json
import logging
import os
import random
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, cast

from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.options import DataConfig, DecodeConfig, ServeConfig
from branchnorm_jax.serving.access import Access
from branchnorm_jax.serving.app import make_app, make_server
from branchnorm_jax.serving.messages import TranslationRequest, parse, to_json
from faults import hostile
from faults.kills import Watched
from faults.processes import tiny_model
from faults.trial import Family, Outcome, Trial

BURSTS = (20, 50, 200)
"""Numbers of requests that a trial sends at the same time."""

SECONDS = 60.0
"""A client that waits longer for an answer was forgotten."""

LEAK = 2 << 20
"""Bytes by which the memory of a server may grow in a burst of 40 requests."""

FAILS = "this line fails"
TOKEN = "token"

PLACE = "host: localhost\r\nauthorization: Bearer token\r\nconnection: close\r\n"
"""Headers of a good request."""


def echo(requests: Sequence[TranslationRequest]) -> list[bytes]:
    """Answers with the lines of the requests; raises an error if one of them is `FAILS`."""
    time.sleep(0.002 * len(requests))
    if any(FAILS in request.lines for request in requests):
        raise RuntimeError(FAILS)
    return [to_json({"translations": request.lines}) for request in requests]


@contextlib.contextmanager
def serving(serve: ServeConfig, log: list[str]) -> Iterator[int]:
    """Runs the application in a thread; yields its port."""
    languages = Languages(DataConfig(), cast(Tokenizer, None))  # a model of one pair needs no tags
    read = functools.partial(parse, serve=serve, decode=DecodeConfig(), languages=languages, encode=lambda phrase: [])
    app = make_app(read, echo, serve, {}, log.append, Access(frozenset({"translator"}), (TOKEN.encode(),)))
    server = make_server(app, serve)
    with socket.create_server(("127.0.0.1", 0), backlog=max(BURSTS)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


class Attempt(NamedTuple):
    """What a client sends, how it behaves, and which answers are right."""

    name: str
    parts: Sequence[bytes]
    statuses: tuple[int, ...]
    """Allowed statuses; 0: the connection may be closed without an answer."""
    lines: list[str] | None = None
    """Lines of the answer, if its status is 200."""
    behaviour: str = ""


def post(body: bytes, headers: str = PLACE, path: str = "/translate") -> bytes:
    """Returns a POST request."""
    return f"POST {path} HTTP/1.1\r\n{headers}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


def get(path: str, method: str = "GET", headers: str = PLACE) -> bytes:
    """Returns a request without a body."""
    return f"{method} {path} HTTP/1.1\r\n{headers}\r\n".encode("latin-1")


def good(rng: random.Random, number: int) -> Attempt:
    """A request with text of its own, from a client that may be slow or hang up."""
    markup = rng.choice(("", "<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", ">><script><<", "\u2028"))
    lines = [f"{number} {markup}{rng.choice(hostile.pairs())[0]}" for _ in range(rng.choice((1, 1, 3)))]
    request = post(json.dumps({"text": lines}, ensure_ascii=rng.random() < 0.5).encode())
    behaviour = rng.choice(("", "", "", "slow reader", "slow writer", "half-closed", "reset", "leaves early"))
    parts = [request]
    if behaviour == "slow writer":
        parts = [request[start : start + 40] for start in range(0, len(request), 40)]
    if behaviour == "leaves early":
        parts = [request[: rng.randrange(1, len(request))]]
    gone = behaviour in ("half-closed", "reset", "leaves early")
    return Attempt(behaviour or "good", parts, (200, 503, 0) if gone else (200, 503), lines, behaviour)


def failing(rng: random.Random, number: int) -> Attempt:
    """A request that the model cannot translate."""
    return Attempt("fails", [post(json.dumps({"text": [FAILS]}).encode())], (500, 503))


def malformed(rng: random.Random, number: int) -> Attempt:
    """Bytes that are not HTTP, or that only some programs take for HTTP."""
    body = b'{"text": "x"}'
    whole = post(body)
    data = rng.choice(
        (
            rng.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            hostile.mutated_bytes(whole, rng),
            whole.replace(b"content-length", b"content-length: 1\r\ncontent-length"),
            whole.replace(b"content-length: 13", b"content-length: -1"),
            whole.replace(b"content-length: 13", b"content-length: 1e3"),
            whole.replace(b"content-length: 13", b"transfer-encoding: chunked"),
            whole.replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length"),
            whole.replace(b"host", b"host: localhost\r\nhost"),
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
            b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000,
            b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n",
        )
    )
    return Attempt("malformed", [data], (200, 400, 401, 403, 404, 405, 408, 431, 503, 0), None, "half-closed")


def unwelcome(rng: random.Random, number: int) -> Attempt:
    """A request that is HTTP, and is refused."""
    body, large = b'{"text": "x"}', json.dumps({"text": "x" * 200_000}).encode()
    chunks = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"
    auth = "authorization: Bearer token\r\nconnection: close\r\n"
    cases: dict[str, tuple[bytes, tuple[int, ...]]] = {
        "too large": (post(large), (413, 0)),
        "too large, in chunks": (
            get("/translate", "POST", PLACE + "transfer-encoding: chunked\r\n") + chunks,
            (413, 0),
        ),
        "path": (
            get(
                rng.choice(("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.html", "/\\..\\x"))
            ),
            (404, 400),
        ),
        "method": (get("/translate", rng.choice(("PUT", "DELETE", "OPTIONS", "TRACE", "HEAD", "X"))), (405,)),
        "name of the server": (post(body, f"host: evil.example\r\n{auth}"), (403,)),
        "page of another site": (post(body, f"origin: http://evil.example\r\n{PLACE}"), (403,)),
        "page without a site": (post(body, f"content-type: text/plain\r\norigin: null\r\n{PLACE}"), (403,)),
        "no token": (post(body, "host: localhost\r\nconnection: close\r\n"), (401,)),
        "wrong token": (post(body, PLACE.replace("token", "tokem")), (401,)),
        "form": (post(b"text=x", f"content-type: application/x-www-form-urlencoded\r\n{PLACE}"), (400,)),
        "no text": (post(rng.choice((b"", b"[" * 9999, b'{"text": 1}', b'{"<script>": 1}', b"\xff", b"{}"))), (400,)),
        "web socket": (get("/translate", "GET", f"{PLACE}upgrade: websocket\r\n"), (400, 403, 404, 405)),
    }
    name = rng.choice([*cases])
    return Attempt(name, [cases[name][0]], cases[name][1])


KINDS: tuple[Callable[[random.Random, int], Attempt], ...] = (good, good, good, good, failing, malformed, unwelcome)


def send(port: int, attempt: Attempt) -> bytes:
    """Sends a request and returns all that comes back."""
    with socket.socket() as client, contextlib.suppress(OSError):
        client.settimeout(SECONDS)
        if attempt.behaviour == "slow reader":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", port))
        with contextlib.suppress(OSError):  # the answer may come before the server has read everything
            for part in attempt.parts:
                client.sendall(part)
                time.sleep(0.001 * (len(attempt.parts) > 1))
            if attempt.behaviour in ("half-closed", "leaves early"):
                client.shutdown(socket.SHUT_WR)
        if attempt.behaviour == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return b""
        received = bytearray()
        with contextlib.suppress(OSError):
            while part := client.recv(64 if attempt.behaviour == "slow reader" else 65536):
                received += part
        return bytes(received)
    return b""


def fault_of(attempt: Attempt, answer: bytes) -> str:
    """Returns what is wrong with an answer; "" if nothing is."""
    head, _, body = answer.partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.1 (\d{3})", head)
    status = int(match[1]) if match else 0
    if status not in attempt.statuses:
        return f"{attempt.name}: status {status} instead of {attempt.statuses}: {answer[-200:]!r}"
    if status == 200 and attempt.lines is not None and json.loads(body) != {"translations": attempt.lines}:
        return f"{attempt.name}: another answer: {body[:200]!r}"
    text_page = b"text/html" in head
    if text_page and (status != 200 or b"content-security-policy: default-src 'none'" not in head):
        return f"{attempt.name}: a page without a policy: {head!r}"
    if status and not text_page and b"application/json" in head and b"nosniff" not in head:
        return f"{attempt.name}: browsers may take this for a page: {head!r}"
    if b"Traceback" in answer or b"root:" in answer:
        return f"{attempt.name}: the answer shows more than it should: {answer[:200]!r}"
    return ""


class Errors(logging.Handler):
    """Collects the errors that the server logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the message."""
        self.found.append(record.getMessage()[:200])


def descriptors(process: int | str = "self") -> int:
    """Returns the number of open files of a process."""
    return len(os.listdir(f"/proc/{process}/fd"))


def burst(rng: random.Random, folder: Path) -> Outcome:
    """Sends requests of all kinds at the same time, and then a good one."""
    del folder
    count, errors, log = rng.choice(BURSTS), Errors(), list[str]()
    serve = ServeConfig(max_lines=4, max_characters=2000, max_terms=0, max_waiting=rng.choice((8, 256)))
    attempts = [rng.choice(KINDS)(rng, number) for number in range(count)]
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(errors)
    logger.propagate = False  # it warns of each request that is not HTTP
    before = descriptors()
    with serving(serve, log) as port:
        with ThreadPoolExecutor(count) as clients:
            answers = list(clients.map(functools.partial(send, port), attempts))
        last = Attempt("afterwards", [post(b'{"text": ["last"]}')], (200,), ["last"])
        faults = [*map(fault_of, [*attempts, last], [*answers, send(port, last)])]
        health = send(port, Attempt("health", [get("/health")], (200,)))
    logger.removeHandler(errors)
    wrong = next(filter(None, faults), "") or "; ".join(errors.found[:1])
    if not wrong and b'"waiting": 0' not in health:
        wrong = f"requests are still waiting: {health[-300:]!r}"
    if not wrong and descriptors() > before:
        wrong = f"{descriptors() - before} connections are still open"
    if not wrong and any(FAILS not in entry for entry in log):
        wrong = next(entry for entry in log if FAILS not in entry)[-300:]
    return Outcome(f"{count} requests", f"max_waiting={serve.max_waiting}", wrong=wrong)


def drain(cache: Path, workdir: Path, rng: random.Random, folder: Path) -> Outcome:
    """Stops `--mode=serve` while requests are in flight; all of them must be answered."""
    number, count = rng.choice((signal.SIGTERM, signal.SIGINT)), rng.choice((1, 20))
    options = ["--mode=serve", f"--workdir={workdir}", "--config.serve.port=0", "--config.serve.warm_up_length=0"]
    watched = Watched([*options, f"--config.serve.drain_seconds={int(SECONDS)}"], cache)
    port = port_of(watched)
    name = f"{number.name}, {count} requests in flight"
    if not port:
        return Outcome(name, "serve", watched.finished().said, wrong="the server does not start")
    body = json.dumps({"text": ["one", "twenty-one"]}).encode()
    head = f"POST /translate HTTP/1.1\r\nexpect: 100-continue\r\n{PLACE}content-length: {len(body)}\r\n\r\n".encode()
    sizes, attempt, faults = [], Attempt("", [post(body)], (200,)), list[str]()
    for _ in range(8):
        with ThreadPoolExecutor(20) as clients:
            bursts = list(clients.map(functools.partial(send, port), [attempt] * 40))
        faults += map(functools.partial(fault_of, attempt), bursts)
        sizes.append((memory(watched.process.pid), descriptors(watched.process.pid)))
    with contextlib.ExitStack() as stack:
        clients_ = [stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS)) for _ in range(count)]
        for client in clients_:
            client.sendall(head)
            client.recv(100)
        watched.process.send_signal(number)
        for client in clients_:
            client.sendall(body)
        answers = [b"".join(iter(functools.partial(client.recv, 65536), b"")) for client in clients_]
    done = watched.finished()
    complete = sum(answer.startswith(b"HTTP/1.1 200") and answer.count(b'"score"') == 2 for answer in answers)
    lost = "" if complete == count else f"{count - complete} of {count} requests in flight have no answer"
    wrong = done.fault or ("" if done.code == 128 + number else f"exit code {done.code}")
    wrong = wrong or next(filter(None, faults), "")
    # A burst that has a batch of another size compiles a program, which takes 40 MB. A leak would show in every burst.
    growth = statistics.median(after - before for (before, _), (after, _) in itertools.pairwise(sizes))
    if not wrong and (growth > LEAK or sizes[-1][1] > sizes[0][1]):
        wrong = f"memory and open files grow: {sizes}"
    return Outcome(name, "serve", done.said, done.code, lost, wrong)


def port_of(watched: Watched) -> int:
    """Waits until a server listens, and returns its port; 0 if the server ends before."""
    while True:
        ended = watched.process.poll() is not None
        for line in watched.lines:
            if found := re.match(r"serving at http://\S+:(\d+);", line):
                return int(found[1])
        if ended:
            return 0
        time.sleep(0.1)


def memory(process: int) -> int:
    """Returns the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def prepare(shared: Path, seconds: float) -> Trial:
    """Trains a tiny model, unless it is there."""
    cache, workdir = tiny_model(shared)
    burst(random.Random(0), shared)  # opens what the process keeps open

    def trial(rng: random.Random, folder: Path) -> Outcome:
        return drain(cache, workdir, rng, folder) if rng.random() < 0.1 else burst(rng, folder)

    return trial


FAMILY = Family(
    "Hostile requests",
    "Nine trials of ten send 20, 50 or 200 requests to the server at the same time: good ones from clients that are "
    "slow, hang up or reset the connection; requests that the model fails on; bytes that are not HTTP; headers and "
    "bodies that are too large; paths out of the server; names and pages of other sites; missing tokens; scripts in "
    "texts and fields. Each must get its own answer or its own error, nothing may stay open, and the server must go "
    "on. One of ten sends 320 requests to a server with a model, whose memory and open files must not grow, and then "
    "stops it by a signal with up to 20 requests in flight, which must be answered.",
    prepare,
    100,
)
