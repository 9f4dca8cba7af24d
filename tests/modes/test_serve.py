"""Serve mode, tested with real servers, HTTP requests and a browser."""

import contextlib
import functools
import http.client
import json
import re
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
from starlette.applications import Starlette

from branchnorm_jax.data.tokenizer import Tokenizer, load_tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.results import Translation, pharaoh
from branchnorm_jax.options import DataConfig, DecodeConfig, ServeConfig
from branchnorm_jax.serving import messages
from branchnorm_jax.serving.access import Access
from branchnorm_jax.serving.app import PAGE, draining, make_app, make_server
from branchnorm_jax.serving.messages import TranslationRequest, parse, to_json
from tests.conftest import run_main, start_main

DECODE = (
    "--config.decode.batch_tokens=128",
    "--config.decode.max_input_length=24",
    "--config.decode.no_repeat_ngram=1",  # so that translations of the tiny model differ and end
)
SERVE = ("--config.serve.port=0", "--config.serve.warm_up_length=16", "--config.serve.max_lines=4")
LIMITS = (
    "--config.serve.max_characters=500",
    "--config.serve.max_terms=2",
    "--config.serve.max_term_tokens=8",
)

LUMINANCE = np.array((0.2126, 0.7152, 0.0722))
"""Weights of red, green and blue in the luminance of a colour (sRGB)."""

TEXTS = [
    f"{number} {rest}" for number in ("one", "two", "20", "seven") for rest in ("", "hundred", "and 5:17 PM", "$3")
]
TEXTS += ["", "   ", "😀 🏳️‍🌈", "שלום עולם", "مرحبا", "nul\0here", "a\u2028b", "tab here", " ".join(["seven"] * 60)]

NO_RULES = Access()
"""Local clients, without tokens."""

ONE_PAIR = Languages(DataConfig(), cast(Tokenizer, None))
"""A model of one language pair needs no tokenizer here."""

SIDES = "source_pieces", "pieces"


class Server:
    """A process of main.py in serve mode."""

    def __init__(self, *options: str) -> None:
        self.process = start_main("--mode=serve", *options)
        assert self.process.stderr
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if line.startswith("serving at "):
                break
        else:
            raise AssertionError("".join(self.log))
        self.url = line.split()[2].rstrip(";")
        self._rest = threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()))
        self._rest.start()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal, unless the process has ended, and returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait()
        self._rest.join()
        return code


def ask(url: str, body: bytes | None = None) -> tuple[int, Any, Any]:
    """Sends GET, or POST if there is a body. Returns status, headers and JSON."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
            return response.status, response.headers, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


def translations(url: str, **request: Any) -> list[list[dict[str, Any]]]:
    """Sends a valid request and returns its translations."""
    status, headers, answer = ask(url + "/translate", json.dumps(request).encode())
    assert status == 200, answer
    assert headers["content-type"] == "application/json"
    return answer["translations"]


@pytest.fixture(scope="module")
def first_answers() -> list[tuple[int, dict[str, Any]]]:
    """Status and JSON of GET /health, from the start of `server` until it is ready."""
    return []


@pytest.fixture(scope="module")
def server(trained: Path, first_answers: list[tuple[int, dict[str, Any]]]) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def wait() -> None:
        while not first_answers or first_answers[-1][0] != 200:
            with contextlib.suppress(OSError):
                status, _, answer = ask(f"http://127.0.0.1:{port}/health")
                first_answers.append((status, answer))
            threading.Event().wait(0.05)

    client = threading.Thread(target=wait, daemon=True)
    client.start()
    server = Server(f"--workdir={trained}", *DECODE, *SERVE, *LIMITS, f"--config.serve.port={port}")
    client.join()
    yield server
    server.end()


@pytest.fixture(scope="module")
def expected(trained: Path) -> dict[str, list[tuple[str, float]]]:
    """Returns the output of --mode=translate for each text: text and score of the two best translations."""
    done = run_main(
        f"--workdir={trained}", "--mode=translate", *DECODE, "--config.decode.nbest=2", stdin="\n".join(TEXTS) + "\n"
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" ||| ") for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(TEXTS)
    return {text: [(row[1], float(row[2])) for row in rows[2 * i : 2 * i + 2]] for i, text in enumerate(TEXTS)}


def test_concurrent_requests_equal_translate_mode(server: Server, expected: dict[str, list[tuple[str, float]]]) -> None:
    """Sends 200 concurrent requests of one to three lines, with one or two translations per line."""
    rng = np.random.default_rng(0)
    requests = [([str(text) for text in rng.choice(TEXTS, 1 + i % 3)], 1 + i % 2) for i in range(200)]
    start = threading.Barrier(len(requests))

    def one(request: tuple[list[str], int]) -> list[list[dict[str, Any]]]:
        start.wait()
        texts, nbest = request
        return translations(server.url, text=texts, nbest=nbest)

    with ThreadPoolExecutor(len(requests)) as clients:
        answers = list(clients.map(one, requests))
    for (texts, nbest), answer in zip(requests, answers, strict=True):
        assert [[each["text"] for each in line] for line in answer] == [
            [text for text, _ in expected[line][:nbest]] for line in texts
        ]
        scores = [[each["score"] for each in line] for line in answer]
        np.testing.assert_allclose(scores, [[s for _, s in expected[line][:nbest]] for line in texts], atol=2e-4)
    assert len({line[0][0] for line in expected.values()}) > 5


def test_alignments_equal_translate_mode(server: Server, trained: Path) -> None:
    texts = TEXTS[1:5]
    done = run_main(
        f"--workdir={trained}", "--mode=translate", *DECODE, "--config.decode.alignments=True",
        "--config.decode.token_scores=True", stdin="\n".join(texts) + "\n",
    )  # fmt: skip
    tokenizer = load_tokenizer(trained / "vocabulary")
    answer = translations(server.url, text=texts, alignments=True)
    for text, printed, (result,) in zip(texts, done.stdout.splitlines(), answer, strict=True):
        best, pieces, pairs = printed.split(" ||| ")
        assert result["text"] == best
        assert result["pieces"] == [piece.rpartition(":")[0] for piece in pieces.split()]
        assert result["source_pieces"] == tokenizer.source_pieces_of(tokenizer.encode_source([text])[0])
        matrix = np.array(result["alignment"])
        assert matrix.shape == (len(result["pieces"]), len(result["source_pieces"]))
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-3)
        assert " ".join(f"{i}-{j}" for i, j in pharaoh([matrix])) == pairs
    ((empty,),) = translations(server.url, text=[""], alignments=True)
    assert (empty["text"], empty["alignment"]) == ("", [])


def test_line_breaks_are_white_space(server: Server) -> None:
    """A sentence that an editor or a mail program wrapped is one sentence. Clients separate sentences in a list."""
    one, *others = translations(server.url, text=["one hundred", "one\nhundred", "one\r\n\r\nhundred", "one hundred\n"])
    assert others == [one] * 3


def test_long_lines_are_translated_in_parts(server: Server, trained: Path) -> None:
    """The parts fit the limit and have all of the source, and each attends only to itself."""
    ((long,),) = translations(server.url, text=TEXTS[-1], alignments=True)
    tokenizer = load_tokenizer(trained / "vocabulary")
    assert "warnings" not in long
    whole = [piece for piece in long["source_pieces"] if piece != "</s>"]
    assert [*whole, "</s>"] == tokenizer.source_pieces_of(tokenizer.encode_source(TEXTS[-1:])[0])
    sources, targets = (np.cumsum([piece == "</s>" for piece in ["", *long[name][:-1]]]) for name in SIDES)
    assert 1 < max(np.bincount(sources)) <= 24
    assert max(sources) == max(targets) > 0
    matrix = np.array(long["alignment"])
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-3)
    assert (matrix[targets[:, None] != sources] == 0).all()


def test_cut_lines_return_a_warning(trained: Path) -> None:
    tokenizer = load_tokenizer(trained / "vocabulary")
    texts = [Translation("one", -1.0, -2.0, warning=warning) for warning in ("cut", "")]
    ((cut, whole),) = messages.shown([texts], tokenizer, [""])
    assert cut == whole | {"warnings": ["cut"]}


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[" * 4000, 400, "not JSON"),
        (b'{"text": "one", "nbest": ' + b"9" * 4500 + b"}", 400, "not JSON"),
        (b'"one"', 400, "an object with a field text"),
        (b"{}", 400, "an object with a field text"),
        (b'{"text": "\xff"}', 400, "not UTF-8"),
        ('{"text": "one"}'.encode("utf-16"), 400, "not UTF-8"),
        (b'{"text": 3}', 400, "a string or a list of strings"),
        (b'{"text": null}', 400, "a string or a list of strings"),
        (b'{"text": ["one", ["two"]]}', 400, "a string or a list of strings"),
        (rb'{"text": "\ud800"}', 400, r"line 1: '\ud800'"),
        (rb'{"text": ["one", "\udc00\ud800"]}', 400, r"line 2: '\udc00'"),
        (rb'{"text": "one", "\ud800\n": 1}', 400, "unknown field"),
        (b'{"text": "one", "beam": 1}', 400, "unknown field 'beam'"),
        (b'{"text": "one", "text": "two"}', 400, "two fields are called 'text'"),
        (b'{"text": ["", "", "", "", ""]}', 400, "5 lines, more than 4"),
        (b'{"text": ["one", "' + b"x" * 501 + b'"]}', 400, "line 2 has 501 characters, more than 500"),
        (b'{"text": "one", "nbest": 3}', 400, "from 1 to 2"),
        (b'{"text": "one", "nbest": 0}', 400, "from 1 to 2"),
        (b'{"text": "one", "nbest": true}', 400, "from 1 to 2"),
        (b'{"text": "one", "nbest": NaN}', 400, "from 1 to 2"),
        (b'{"text": "one", "alignments": 1}', 400, "true or false"),
        (b'{"text": "one", "glossary": {"one": "eins"}}', 400, 'glossary must be a list such as [["term", "trans'),
        (b'{"text": "one", "glossary": [["one"]]}', 400, "glossary, entry 1: expected two strings"),
        (b'{"text": "one", "glossary": [["one", "eins"], ["two", 2]]}', 400, "glossary, entry 2: expected two strings"),
        (b'{"text": "one", "glossary": [["one", " "]]}', 400, "glossary, entry 1: expected a term and a translation"),
        (b'{"text": "", "glossary": [["a", "b"], ["a", "c"]]}', 400, "entry 2: 'a' already has the translation 'b'"),
        (b'{"text": "", "glossary": [["a", "b"], ["c", "d"], ["e", "f"]]}', 400, "3 terms, more than 2"),
        (b'{"text": "", "glossary": [["' + b"a" * 201 + b'", "b"]]}', 400, "entry 1: a text of 201 characters"),
        (rb'{"text": "", "glossary": [["a", "\ud800"]]}', 400, r"glossary, entry 1: '\ud800' is an unpaired surrogate"),
        ('{"text": "one", "glossary": [["one", "北"]]}'.encode(), 400, "the model cannot write '北'"),
        (b'{"text": ["", "one"], "glossary": [["one", "' + b"sieben " * 12 + b'"]]}', 400, "line 2: its terms have"),
        (b'{"text": "' + b"x" * 40_000 + b'"}', 413, "more than 34,728 bytes"),
    ],
    ids=lambda value: str(value[:30]) if isinstance(value, bytes) else None,
)
def test_invalid_requests_are_rejected(server: Server, body: bytes, status: int, part: str) -> None:
    code, headers, answer = ask(server.url + "/translate", body)
    assert (code, list(answer), headers["content-type"]) == (status, ["error"], "application/json")
    assert part in answer["error"]
    assert "\n" not in answer["error"]


def test_bodies_of_unknown_length_have_the_same_limit(server: Server) -> None:
    for size, status in ((30_000, 200), (40_000, 413)):
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        parts = iter([b'{"text": "one"', b" " * size, b"}"])
        connection.request("POST", "/translate", parts, {"transfer-encoding": "chunked"}, encode_chunked=True)
        assert connection.getresponse().status == status


def test_other_paths_and_methods_are_rejected(server: Server) -> None:
    paths = ("/nothing", None, 404), ("/translate/", b"{}", 404), ("/translate", None, 405), ("/health", b"", 405)
    for path, body, status in paths:
        code, _, answer = ask(server.url + path, body)
        assert (code, "POST /translate" in answer["error"]) == (status, True)


def test_a_request_has_terms_of_its_own(trained: Path, tmp_path: Path) -> None:
    """Requests with other terms, or none, are translated in the same batch; terms of the request replace those of the
    server. Programs for the terms of the server are compiled first.
    """
    (tmp_path / "terms.tsv").write_text("one\tacht\nseven\tneun\n")
    few = "--config.decode.batch_tokens=16", "--config.serve.batch_wait_ms=200"
    terms = f"--config.decode.glossary={tmp_path / 'terms.tsv'}"
    server = Server(f"--workdir={trained}", *DECODE, *SERVE, *LIMITS, *few, terms)
    try:
        requests: list[dict[str, Any]] = [
            {"text": ["one", "two"]},
            {"text": ["one", "seven", "two"], "glossary": [["one", "elf"], ["two", "zwei"]]},
            {"text": "one", "glossary": []},
        ]
        with ThreadPoolExecutor(len(requests)) as clients:
            found = list(clients.map(lambda request: translations(server.url, **request), requests))
        texts = [[best["text"] for (best,) in each] for each in found]
        assert re.search(r"\bacht\b", texts[0][0])
        for term, text in zip(("elf", "neun", "zwei"), texts[1], strict=True):
            assert re.search(rf"\b{term}\b", text)
        assert texts[2][0] == texts[0][0]
        assert any("and for terms of decode.glossary" in line for line in server.log)
        assert ask(server.url + "/health")[2]["serve"]["max_terms"] == 2
    finally:
        server.end()


def test_valid_edge_cases_are_accepted(server: Server) -> None:
    assert translations(server.url, text=[]) == []
    empty = {"text": "", "score": 0.0, "log_prob": 0.0}
    assert translations(server.url, text="", nbest=2) == [[empty, empty]]
    assert len(translations(server.url, text="\ud83d\ude00")) == 1  # JSON combines the two surrogates


def test_health_describes_the_model_and_the_options(server: Server) -> None:
    status, _, health = ask(server.url + "/health")
    assert (status, health["status"], health["waiting"]) == (200, "ready", 0)
    assert (health["method"], health["depth"]) == ("branchnorm", "2L-2L")
    assert health["step"] in (60, 120)
    assert (health["source_langs"], health["target_langs"]) == (["en"], ["de"])
    assert health["decode"]["beam_size"] == 2
    assert health["serve"]["max_lines"] == 4
    assert any("compiling for lines of up to 16 tokens" in line for line in server.log)


def test_health_says_what_a_start_is_doing(server: Server, first_answers: list[tuple[int, dict[str, Any]]]) -> None:
    *early, (status, ready) = first_answers
    assert (status, ready["status"]) == (200, "ready")
    states = list(dict.fromkeys((status, answer["error"]) for status, answer in early))
    assert states[0] == (503, "the server is starting: loading the model")
    programs = [
        re.fullmatch(r"the server is starting: compiling program (\d+) of (\d+)", state) for _, state in states[1:]
    ]
    numbers = [(int(match[1]), int(match[2])) for match in programs if match]
    assert len(numbers) == len(states) - 1 > 0
    assert numbers == sorted(numbers)
    assert all(1 <= number <= count for number, count in numbers)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow),
    ],
)
def test_signals_stop_the_server_after_the_last_answer(trained: Path, number: int, code: int) -> None:
    # Under nohup, tests ignore SIGHUP, and the server would inherit this.
    before = signal.signal(number, signal.SIG_DFL)
    server = Server(f"--workdir={trained}", *DECODE, "--config.serve.port=0", "--config.serve.warm_up_length=0")
    signal.signal(number, before)
    body = b'{"text": "one hundred"}'
    head = f"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode())
        # The server has requested the body, so the request is now in flight.
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        server.process.send_signal(number)
        connection.sendall(body)
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"translations": [[{"text"' in answer
    assert server.process.wait() == code
    assert server.end() == code
    assert "Traceback" not in "".join(server.log)


def test_unavailable_addresses_are_reported(trained: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_main("--mode=serve", f"--workdir={trained}", f"--config.serve.port={port}")
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1, port {port}: Address already in use" in done.stderr.splitlines()[-1]
    done = run_main("--mode=serve", f"--workdir={trained}", "--config.serve.host=no such host")
    assert (done.returncode, "cannot listen at no such host" in done.stderr) == (2, True)


def test_a_language_that_the_model_lacks_ends_the_start(trained: Path) -> None:
    done = run_main("--mode=serve", f"--workdir={trained}", "--config.serve.port=0", "--config.decode.target_lang=fr")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("this model was trained to translate to de, not to 'fr'")


class Device:
    """A fake model for tests of the queue. It echoes its input, and waits or fails on demand."""

    def __init__(self) -> None:
        self.go, self.began, self.batches = threading.Event(), threading.Event(), list[list[str]]()

    def __call__(self, requests: Sequence[TranslationRequest]) -> list[bytes]:
        self.batches.append([line for request in requests for line in request.lines])
        self.began.set()
        assert self.go.wait(60)
        if any("bad" in request.lines for request in requests):
            raise MemoryError("too much")
        return [to_json({"translations": request.lines}) for request in requests]


@contextlib.contextmanager
def serving(
    device: Device,
    log: list[str],
    access: Access = NO_RULES,
    languages: Languages = ONE_PAIR,
    about: Mapping[str, Any] = MappingProxyType({}),
    at: socket.socket | None = None,
    decode: DecodeConfig = DecodeConfig(),  # noqa: B008 – it is frozen
    **serve: Any,
) -> Iterator[str]:
    """Runs the application with this device in a thread."""
    limits = ServeConfig(**serve)
    read = functools.partial(parse, serve=limits, decode=decode, languages=languages, encode=lambda phrase: [])
    app = make_app(read, device, limits, about, log.append, access)
    server = make_server(app, limits)
    with at or socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Any) -> None:
    """Waits until the condition holds; fails after a minute."""
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition did not hold within a minute")


def waiting(url: str) -> int:
    return ask(url + "/health")[2]["waiting"]


def test_waiting_requests_are_batched_and_excess_requests_get_retry_after() -> None:
    device = Device()
    with serving(device, [], max_waiting=3, batch_lines=2) as url, ThreadPoolExecutor(4) as clients:
        futures = [clients.submit(translations, url, text=["first"])]
        assert device.began.wait(60)
        for number in range(3):
            futures.append(clients.submit(translations, url, text=[str(number)]))
            wait_until(lambda number=number: waiting(url) == number + 1)
        status, headers, answer = ask(url + "/translate", b'{"text": "one too many"}')
        assert (status, headers["retry-after"]) == (503, "1")
        assert "3 requests are already waiting or arriving" in answer["error"]
        device.go.set()
        assert [future.result() for future in futures] == [["first"], ["0"], ["1"], ["2"]]
    assert device.batches == [["first"], ["0", "1"], ["2"]]


def test_requests_of_clients_that_have_left_are_not_translated() -> None:
    device = Device()
    with serving(device, []) as url, ThreadPoolExecutor(2) as clients:
        first = clients.submit(translations, url, text=["first"])
        assert device.began.wait(60)
        for number in range(3):
            text = json.dumps({"text": f"left {number}"}).encode()
            head = f"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n".encode()
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
                client.sendall(head + text)
                wait_until(lambda: waiting(url) == 1)
            wait_until(lambda: waiting(url) == 0)
        device.go.set()
        assert first.result() == ["first"]
        assert translations(url, text=["after"]) == ["after"]
    assert device.batches == [["first"], ["after"]]


def test_a_translation_that_takes_too_long_does_not_hold_up_a_signal() -> None:
    device, log = Device(), list[str]()
    with ThreadPoolExecutor(1) as clients:
        with serving(device, log, drain_seconds=1) as url:
            answer = clients.submit(ask, url + "/translate", b'{"text": "slow"}')
            assert device.began.wait(60)
        # The server has ended, and the translation has not.
        status, _, content = answer.result()
        device.go.set()
    assert (status, content) == (
        503,
        {"error": "the server is stopping, and this request takes longer than serve.drain_seconds=1"},
    )
    assert log == []


def test_a_body_that_takes_too_long_does_not_hold_up_a_signal() -> None:
    log = list[str]()
    head = b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\nexpect: 100-continue\r\n\r\n"
    with contextlib.ExitStack() as stack:
        with serving(Device(), log, drain_seconds=1) as url:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            client.sendall(head)
            assert client.recv(100).startswith(b"HTTP/1.1 100")
        answer = b"".join(iter(lambda: client.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'{"error": "the server is stopping, and this request' in answer
    assert log == []


def test_ignored_signals_stay_ignored_while_the_server_runs() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = make_server(Starlette(), ServeConfig())
        with draining(server):
            signal.raise_signal(signal.SIGHUP)
            assert not server.should_exit
            with pytest.raises(ValueError, match="stopped"), draining(server):
                raise ValueError("stopped")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_limited_number_of_requests_is_read_at_once() -> None:
    device = Device()
    device.go.set()
    head = b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\nexpect: 100-continue\r\n\r\n"
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(device, [], max_waiting=2))
        for _ in range(2):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            client.sendall(head)
            assert client.recv(100).startswith(b"HTTP/1.1 100")
        assert ask(url + "/translate", b'{"text": "one"}')[0] == 503
        # A body that the buffers of the connection cannot hold is read, too, or the client would not get the answer.
        assert ask(url + "/translate", json.dumps({"text": ["x" * 5000] * 80}).encode())[0] == 503
        client.close()
        wait_until(lambda: ask(url + "/translate", b'{"text": "one"}')[0] == 200)


def test_failed_translation_does_not_affect_other_requests() -> None:
    device, log = Device(), list[str]()
    with serving(device, log) as url, ThreadPoolExecutor(3) as clients:
        first = clients.submit(translations, url, text=["first"])
        assert device.began.wait(60)
        bad = clients.submit(ask, url + "/translate", b'{"text": "bad"}')
        wait_until(lambda: waiting(url) == 1)
        good = clients.submit(translations, url, text=["good"])
        wait_until(lambda: waiting(url) == 2)
        device.go.set()
        status, _, answer = bad.result()
        assert (status, "MemoryError" in answer["error"]) == (500, True)
        assert (first.result(), good.result()) == (["first"], ["good"])
        assert translations(url, text=["after"]) == ["after"]
    assert device.batches == [["first"], ["bad", "good"], ["bad"], ["good"], ["after"]]
    assert len(log) == 1
    assert log[0].endswith("MemoryError: too much")


class Elements(HTMLParser):
    """The elements of a page, as (name, attributes)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_is_one_file_that_loads_nothing_else() -> None:
    with serving(Device(), []) as url, urllib.request.urlopen(url) as response:
        policy, page = response.headers["content-security-policy"], response.read().decode()
    assert "default-src 'none'" in policy
    assert page == PAGE.read_text(encoding="utf-8")
    assert len(page) < 20_000
    elements = Elements(page).found
    loaded = [attributes.get(name) for _, attributes in elements for name in ("src", "href", "srcset", "action")]
    assert [link for link in loaded if link] == ["data:,"]
    assert not re.findall(r"\burl\(|@import|https?:", page)
    # The script finds all the elements that it needs, and the user sees what each control is for.
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'\$\("(\w+)"\)', page)) <= set(ids)
    assert {attributes.get("for") for tag, attributes in elements if tag == "label"} >= {"text"}


def test_colours_of_the_page_have_enough_contrast() -> None:
    """WCAG 2.2, level AA: a contrast of 4.5 for text and of 3 for the edges of controls, light and dark."""

    def luminance(colour: np.ndarray) -> float:
        return float(np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4) @ LUMINANCE)

    def contrast(first: np.ndarray, second: np.ndarray) -> float:
        low, high = sorted((luminance(first), luminance(second)))
        return (high + 0.05) / (low + 0.05)

    style = PAGE.read_text(encoding="utf-8")
    (share,) = re.findall(r"calc\((\d+)% \* var\(--weight\)\)", style)
    palettes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(palettes) == 2
    for palette in palettes:
        colours = {
            name: np.array([int(code[i : i + 2], 16) for i in (0, 2, 4)]) / 255
            for name, code in re.findall(r"--([\w-]+): #(\w{6});", palette)
        }
        colours["weight"] = colours["card"] + int(share) / 100 * (colours["accent"] - colours["card"])
        colours["chosen"] = colours["card"] + 0.12 * (colours["accent"] - colours["card"])
        for text, paper, least in (
            *(("ink", "paper", 4.5), ("ink", "card", 4.5), ("ink", "weight", 4.5), ("quiet", "chosen", 4.5)),
            *(("quiet", "paper", 4.5), ("quiet", "card", 4.5), ("on-accent", "accent", 4.5), ("alarm", "card", 4.5)),
            *(("alarm", "alarm-paper", 4.5), ("edge", "card", 3), ("edge", "paper", 3), ("accent", "card", 3)),
        ):
            assert contrast(colours[text], colours[paper]) >= least, (text, paper)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """Starts headless Chromium from the Debian packages chromium and chromium-driver."""
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium or chromedriver on the PATH: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for name in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{name}")
    options.add_argument("--disable-background-networking")
    options.add_argument("--disable-component-update")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    browser = selenium.Chrome(options, selenium.ChromeService(driver))
    yield browser
    browser.quit()


def test_page_shows_translations_attention_and_errors(server: Server, browser: Any) -> None:
    """Types text, presses Ctrl+Enter, and checks translations, attention, error messages and the browser log."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    def all_of(selector: str) -> list[Any]:
        return browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(selector: str) -> list[str]:
        return [each.text for each in all_of(selector)]

    wait = WebDriverWait(browser, 60)
    browser.get(server.url)
    wait.until(lambda _: browser.title == "English → German")
    assert texts("#model")[0].startswith("branchnorm 2L-2L, after ")

    (box,), (button,) = all_of("textarea"), all_of("#translate")
    assert (box.accessible_name, button.accessible_name) == ("Text, one sentence per line", "Translate")
    button.click()
    wait.until(lambda _: texts("#error") == ["There is no text to translate; type a sentence above."])

    box.send_keys("one hundred", Keys.ENTER, Keys.ENTER, "<b>seven</b>", Keys.CONTROL, Keys.ENTER)
    wait.until(lambda _: len(all_of("article")) == 2)
    assert not all_of("#error")[0].is_displayed()
    request = dict(text=["one hundred", "<b>seven</b>"], nbest=2, alignments=True)
    expected = translations(server.url, **request)
    assert texts(".source") == request["text"]
    assert texts(".best") == [line[0]["text"] for line in expected]
    all_of("summary")[0].click()
    wait.until(lambda _: all_of("table"))
    assert texts("article:first-child label bdi") == [each["text"] for each in expected[0]]
    for rank in (0, 1):
        all_of("article:first-child input")[rank].click()
        translation = expected[0][rank]
        assert texts(".best")[0] == translation["text"]
        labels = [piece.replace("▁", "_") for piece in (*translation["source_pieces"], *translation["pieces"])]
        assert texts("th[scope]") == labels
        styles = [cell.get_attribute("style") for cell in all_of("td[style]")]
        weights = [float(style.removeprefix("--weight:").rstrip(";")) for style in styles]
        np.testing.assert_allclose(weights, np.ravel(translation["alignment"]), atol=1e-6)
        shares = [int(text or 0) / 100 for text in texts("td[style]")]
        np.testing.assert_allclose(shares, np.where(np.array(weights) < 0.05, 0, weights), atol=0.00501)
    browser.execute_script("navigator.clipboard.writeText = (text) => { document.copied = text; }")
    all_of("#copy")[0].click()
    copied = f"{expected[0][1]['text']}\n\n{expected[1][0]['text']}"
    wait.until(lambda _: browser.execute_script("return document.copied") == copied)

    box.send_keys(" ", *([Keys.ENTER, "x"] * 4), Keys.CONTROL, Keys.ENTER)
    wait.until(lambda _: texts("#error") == ["text has 7 lines, more than 4 (serve.max_lines)"])
    assert not all_of("#results")[0].is_displayed()
    # The browser logs the answer with status 400. It would also log blocked external resources.
    assert [line["message"] for line in browser.get_log("browser") if "status of 400" not in line["message"]] == []


def test_page_reports_that_the_server_does_not_respond(trained: Path, browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    server = Server(f"--workdir={trained}", "--config.serve.port=0", "--config.serve.warm_up_length=0")
    browser.get(server.url)
    WebDriverWait(browser, 60).until(lambda _: browser.title == "English → German")
    server.end()
    browser.find_element(By.TAG_NAME, "textarea").send_keys("one")
    browser.find_element(By.TAG_NAME, "button").click()
    error = browser.find_element(By.ID, "error")
    WebDriverWait(browser, 60).until(lambda _: error.text)
    assert error.text == "The server does not respond. Check that it is still running."
