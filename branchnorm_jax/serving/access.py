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
      sites: names of `serve.names`, in lower case; their pages may send requests from any port. "*": any name in Host.
      tokens: a request needs one of these tokens; empty: it needs none.
      own: further names of the server, in addition to IP addresses and localhost.
    """

    sites: frozenset[str] = frozenset()
    tokens: tuple[bytes, ...] = ()
    own: frozenset[str] = frozenset()

    def check_site(self, request: Request) -> None:
        """Refuses requests that a page of another site makes the browser send.

        Such a page is at another origin, or at a domain name of its own that it points at this server (DNS rebinding).

        Raises:
          HTTPException: 403, if Host is not a name of this server, or Origin is another server.
        """
        origin, places = request.headers.get("origin"), set()
        for host in request.headers.getlist("host"):
            name, place = server_of(f"//{host}")
            places.add(place)
            local = is_address(name) or name == "localhost" or name.endswith(".localhost")
            if not (local or {name, "*"} & (self.sites | self.own)):
                raise HTTPException(403, f"{host[:100]!a} is not a name of this server; add it to serve.names")
        if origin is not None:
            name, place = server_of(origin)
            if name not in self.sites and place not in places:
                what = f"requests of pages from {origin[:100]!a} are refused"
                raise HTTPException(403, f"{what}; if these are pages of this server, add its name to serve.names")

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
    """Returns the lower-case name of the server of a URL, and the name with a port that is not HTTP's or HTTPS' own.

    Both are "" if there is none. Proxies add and remove these two ports.
    """
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.netloc.lower().removesuffix(":80").removesuffix(":443")
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
    """Reads the rules. Raises `UserError` if `serve.names` or the file of tokens cannot be used."""
    sites = {name for each in serve.names.lower().split(",") if (name := each.strip())}
    for name in sites - {"*"}:
        if not (is_address(name) or re.fullmatch(r"[a-z0-9_.-]*[a-z0-9]", name)):
            raise UserError(
                f"config: serve.names has {name!r}; write the name alone, without https:// and port, and other letters "
                "than a to z as in xn--bersetzer-0ya.example"
            )
    tokens = read_tokens(Path(serve.token_file).expanduser(), say) if serve.token_file else ()
    return Access(frozenset(sites), tokens, frozenset({serve.host.lower(), socket.gethostname().lower()}))


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
