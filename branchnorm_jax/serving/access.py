"""Who may use the server: the names in Host and Origin of requests from browsers, and bearer tokens."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request

from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ServeConfig


class Access(NamedTuple):
    """The rules of a server.

    Attributes:
      names: lower-case names of the server beside IP addresses and localhost; "*": any name.
      tokens: a request needs one of these tokens; empty: it needs none.
    """

    names: frozenset[str] = frozenset()
    tokens: tuple[bytes, ...] = ()

    def check_site(self, request: Request) -> None:
        """Refuses requests that a page of another site makes the browser send.

        Such a page is at another origin, or at a domain name of its own that it points at this server (DNS rebinding).

        Raises:
          HTTPException: 403, if Host is not a name of this server, or Origin is another server.
        """
        origin, hosts = request.headers.get("origin"), request.headers.getlist("host")
        for host in hosts:
            name, _ = server_of(f"//{host}")
            local = is_address(name) or name == "localhost" or name.endswith(".localhost")
            if not (local or {name, "*"} & self.names):
                raise HTTPException(403, f"{host[:100]!a} is not a name of this server; add it to serve.names")
        if origin is not None:
            name, place = server_of(origin)
            if name not in self.names and place not in hosts:
                raise HTTPException(403, f"requests of pages from {origin[:100]!a} are refused; see serve.names")

    def check_token(self, request: Request) -> None:
        """Raises `HTTPException` 401 if the request needs a token and has none that is valid."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")
        # Every token is compared, so that the time does not tell which one is similar.
        valid = sum([hmac.compare_digest(sent, token) for token in self.tokens])
        if self.tokens and not (valid and scheme.lower() == "bearer"):
            what = 'Bearer error="invalid_token"' if given else "Bearer"
            raise HTTPException(401, "this server needs a token: Authorization: Bearer ...", {"www-authenticate": what})


def server_of(url: str) -> tuple[str, str]:
    """Returns the server of a URL as its lower-case name, and as name:port; ("", "") if there is none."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.netloc
    except ValueError:
        return "", ""


def is_address(name: str) -> bool:
    """Returns whether a name is an IP address. No page can point an address at another server."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Returns whether only this machine reaches an IP address."""
    return ipaddress.ip_address(address).is_loopback


def make_access(serve: ServeConfig, say: Callable[[str], None]) -> Access:
    """Reads the rules. Raises `UserError` if the file of tokens cannot be used."""
    names = {serve.host, socket.gethostname(), *map(str.strip, serve.names.split(","))} - {""}
    tokens = read_tokens(Path(serve.token_file), say) if serve.token_file else ()
    return Access(frozenset(map(str.lower, names)), tokens)


def read_tokens(path: Path, say: Callable[[str], None]) -> tuple[bytes, ...]:
    """Reads a file with one token per line; blank lines are ignored.

    Args:
      path: the file.
      say: called with a warning if every user of the machine can read the file.

    Raises:
      UserError: if the file cannot be read or has no token, or a token has characters other than visible ASCII.
    """
    tokens = []
    for number, line in enumerate(text_lines(path), start=1):
        if token := line.strip():
            if not re.fullmatch("[!-~]+", token):
                raise UserError(f"{path}, line {number}: a token consists of visible ASCII characters, without spaces")
            tokens.append(token.encode())
    if not tokens:
        raise UserError(f"serve.token_file={path}: the file has no token; write one per line")
    if path.stat().st_mode & 0o004:
        say(f"{path}: every user of this machine can read these tokens; chmod 600 hides them")
    return tuple(tokens)
