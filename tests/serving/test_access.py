"""Who may use the server: requests of pages of other sites, and bearer tokens, with a real server."""

import base64
import hashlib
import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ServeConfig
from branchnorm_jax.serving import app
from branchnorm_jax.serving.access import Access, is_loopback, make_access, read_tokens
from tests.modes.test_serve import Device, Server, ask, browser, serving  # noqa: F401

TOKENS = ("first", "a+/=~._-!", "second")
BODY = b'{"text": ["one"]}'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that is called translator, and needs a token."""
    device = Device()
    device.go.set()
    access = Access(frozenset({"translator"}), tuple(token.encode() for token in TOKENS))
    with serving(device, [], access) as address:
        yield address


def send(url: str, method: str, path: str, *headers: tuple[str, str]) -> http.client.HTTPResponse:
    """Sends a request with exactly these headers, and a body if it is POST."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers:
        connection.putheader(name, value.replace("PORT", url.rpartition(":")[2]))
    body = BODY if method == "POST" else b""
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body)
    response = connection.getresponse()
    response.answer = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:PORT", None, 200),
        ("127.0.0.1:PORT", "http://127.0.0.1:PORT", 200),
        ("[::1]:PORT", None, 200),
        ("10.0.0.1", None, 200),
        ("LOCALHOST:PORT", None, 200),
        ("a.localhost:PORT", None, 200),
        ("translator:PORT", "http://translator:PORT", 200),
        ("127.0.0.1:PORT", "https://translator", 200),  # behind a proxy
        ("evil.example:PORT", None, 403),
        ("evil.example:PORT", "http://evil.example:PORT", 403),  # DNS rebinding
        ("127.0.0.1.evil.example", None, 403),
        ("localhost.evil.example", None, 403),
        ("nottranslator", None, 403),
        ("[::1", None, 403),
        ("", None, 403),
        ("127.0.0.1:PORT", "http://evil.example", 403),  # a page of another site
        ("127.0.0.1:PORT", "http://127.0.0.1:1", 403),
        ("127.0.0.1:PORT", "http://translator.evil.example", 403),
        ("127.0.0.1:PORT", "null", 403),
        ("127.0.0.1:PORT", "http://[", 403),
        ("127.0.0.1:PORT", "", 403),
    ],
)
def test_requests_of_other_sites_are_refused(url: str, host: str, origin: str | None, status: int) -> None:
    headers = [("host", host), ("authorization", "Bearer first")] + ([("origin", origin)] if origin is not None else [])
    for method, path in (("POST", "/translate"), ("GET", "/health"), ("GET", "/")):
        response = send(url, method, path, *headers)
        assert response.status == status
        if status == 403:
            assert "serve.names" in json.loads(response.answer)["error"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:PORT", "http://127.0.0.1:PORT", 200),
        ("127.0.0.1:PORT", "http://127.0.0.1:1", 403),  # another program of this machine
        ("NAME:PORT", "http://NAME:PORT", 200),
        ("NAME:PORT", "http://NAME:1", 403),
        ("10.0.0.5:443", "https://10.0.0.5", 200),  # behind a proxy that names the port
        ("10.0.0.5", "http://10.0.0.5:80", 200),
    ],
)
def test_rules_without_options(host: str, origin: str, status: int) -> None:
    device = Device()
    device.go.set()
    headers = [
        (key, value.replace("NAME", socket.gethostname())) for key, value in (("host", host), ("origin", origin))
    ]
    with serving(device, [], make_access(ServeConfig(), print)) as url:
        assert send(url, "POST", "/translate", *headers).status == status


def test_clients_without_names_are_no_browsers(url: str) -> None:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"".join(iter(lambda: connection.recv(1000), b"")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        *((f"Bearer {token}", 200) for token in TOKENS),
        *(("bearer first", 200), ("Bearer   second ", 200)),
        *(
            (text, 401)
            for text in ("Bearer", "Bearer ", "Basic first", "first", "Bearer firs", "Bearer firstt", "\xff")
        ),
        *((text, 401) for text in ("Bearer FIRST", "Bearer first, second", "Bearer \xe9", "Bearer first second")),
        (None, 401),
    ],
)
def test_tokens(url: str, given: str | None, status: int) -> None:
    headers = [("host", "localhost")] + ([("authorization", given)] if given is not None else [])
    response = send(url, "POST", "/translate", *headers)
    assert response.status == status
    assert (response.headers["www-authenticate"] or "").startswith("Bearer") == (status == 401)
    assert send(url, "GET", "/health", *headers).status == send(url, "GET", "/", *headers).status == 200
    assert ask(url + "/health")[2]["needs_token"] is True


def test_files_of_tokens(tmp_path: Path) -> None:
    path, said = tmp_path / "tokens", list[str]()
    path.write_text("\ufeffone\r\n\n  two \n")
    path.chmod(0o600)
    assert read_tokens(path, said.append) == (b"one", b"two")
    assert not said
    path.chmod(0o604)
    read_tokens(path, said.append)
    assert said == [f"{path}: every user of this machine can read these tokens; chmod 600 hides them"]
    for content, message in (("\n \n", "has no token"), ("one\na b\n", "line 2: a token"), ("é", "line 1: a token")):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            read_tokens(path, said.append)
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match=f"{missing}: cannot be read"):
            make_access(ServeConfig(token_file=str(missing)), said.append)


def test_names_of_the_server() -> None:
    access = make_access(ServeConfig(host="0.0.0.0", names=" Translator.example, b"), print)
    assert access.sites == {"translator.example", "b"}
    assert access.own == {"0.0.0.0", socket.gethostname().lower()}
    for name in ("translator.example:8443", "https://b.example", "übersetzer.example", "c.example."):
        with pytest.raises(UserError, match="without https:// and port"):
            make_access(ServeConfig(names=name), print)
    assert access.tokens == ()
    for address, expected in (
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
    ):
        assert is_loopback(address) == expected


def test_any_name_is_allowed_if_the_option_says_so() -> None:
    device = Device()
    device.go.set()
    with serving(device, [], Access(frozenset("*"))) as url:
        assert send(url, "POST", "/translate", ("host", "any.example")).status == 200
        assert send(url, "POST", "/translate", ("host", "any.example"), ("origin", "http://b.example")).status == 403


def test_clients_that_send_first_read_why_they_are_refused(url: str) -> None:
    """The sockets hold a part of a body, so a client is still sending when the server knows what it answers."""
    body, token = b" " * ServeConfig().max_body_bytes, ("authorization", "Bearer first")
    for status, size, headers in (
        (413, 2, (token,)),
        (401, 1, ()),
        (403, 1, (token, ("origin", "http://evil.example"))),
    ):
        request = urllib.request.Request(f"{url}/translate", body * size, dict(headers))
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == status
        assert json.load(refused.value)["error"]


def test_bodies_that_do_not_arrive_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    with serving(Device(), []) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n{")
        answer = b"".join(iter(lambda: client.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body did not arrive" in answer


def test_the_page_runs_only_its_own_script(url: str) -> None:
    response = send(url, "GET", "/", ("host", "localhost"))
    policy = dict(part.split(None, 1) for part in response.headers["content-security-policy"].split("; "))
    (script,) = re.findall(b"<script>(.*?)</script>", response.answer, re.DOTALL)  # type: ignore[attr-defined]
    assert policy["script-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")


@pytest.mark.slow
def test_the_page_asks_for_the_token(trained: Path, browser: Any, tmp_path: Path) -> None:  # noqa: F811
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support import expected_conditions as EC
    from selenium.webdriver.support.ui import WebDriverWait

    path = tmp_path / "tokens"
    path.write_text("sesame\n")
    path.chmod(0o600)
    options = "--config.serve.port=0", "--config.serve.warm_up_length=0", "--config.serve.host=0.0.0.0"
    server = Server(f"--workdir={trained}", *options, f"--config.serve.token_file={path}")
    try:
        assert not any("open to everyone" in line for line in server.log)
        box, token, button, best = (
            lambda selector=selector: browser.find_element(By.CSS_SELECTOR, selector)
            for selector in ("#text", "#token", "#translate", ".best")
        )
        wait = WebDriverWait(browser, 60)
        browser.get(server.url.replace("0.0.0.0", "127.0.0.1"))
        wait.until(lambda _: token().is_displayed())
        for given, message in (("", "needs a token"), ("wrong", "does not know this token")):
            box().clear()
            box().send_keys("one hundred")
            token().send_keys(given)
            button().click()
            wait.until(EC.text_to_be_present_in_element((By.ID, "error"), message))
            assert token().is_displayed()
        token().clear()
        token().send_keys("sesame")
        button().click()
        wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".best"))
        assert not token().is_displayed()
        assert best().is_displayed()
        browser.refresh()
        wait.until(lambda _: browser.title == "English → German")
        assert not token().is_displayed()  # the tab knows it
        assert browser.execute_script("return [localStorage.length, document.cookie]") == [0, ""]
    finally:
        server.end()


@pytest.mark.slow
def test_open_servers_are_announced(trained: Path) -> None:
    options = "--config.serve.port=0", "--config.serve.warm_up_length=0", "--config.serve.host=0.0.0.0"
    server = Server(f"--workdir={trained}", *options)
    server.end()
    assert sum("is open to everyone who can reach it; set serve.token_file" in line for line in server.log) == 1


def test_a_signal_does_not_wait_for_clients_that_never_read() -> None:
    """The answer is larger than the buffers of the connection."""
    device = Device()
    device.go.set()
    text = json.dumps({"text": ["x" * 8_000_000]}).encode()
    head = f"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n".encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with serving(device, [], max_characters=8_000_000, drain_seconds=1) as url:
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(head + text)
            assert client.recv(1, socket.MSG_PEEK) == b"H"  # the answer has begun
