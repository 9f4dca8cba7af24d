"""The HTTP application: POST /translate, GET /health and a page at GET /. Errors are {"error": "one line"}."""

import asyncio
import base64
import contextlib
import hashlib
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ServeConfig
from branchnorm_jax.serving.access import Access
from branchnorm_jax.serving.batches import Batches
from branchnorm_jax.serving.messages import TranslationRequest, to_json

PAGE = Path(__file__).parent / "page.html"

BODY_SECONDS = 30
"""A request whose body takes longer is refused. Otherwise a client that stops sending would keep a signal waiting."""

READ = 4
"""How much of a body that is too large is read, as a multiple of what is allowed."""


def make_app(
    parse: Callable[[bytes], TranslationRequest],
    answers: Callable[[Sequence[TranslationRequest]], list[bytes]],
    serve: ServeConfig,
    about: Mapping[str, Any],
    say: Callable[[str], None],
    access: Access,
) -> Starlette:
    """Creates the ASGI application. The server must support the lifespan protocol.

    Args:
      parse: parses a request body; raises `UserError` for an invalid one.
      answers: see `Batches`.
      serve: limits of the server.
      about: information about the model for GET /health.
      say: called with the traceback of a failed translation.
      access: who may use the server.
    """
    batches, page = Batches(answers, serve, say), PAGE.read_bytes()
    headers = page_headers(page)

    async def health(request: Request) -> Response:
        access.check_site(request)
        return json_response(
            to_json({"status": "ready", "waiting": batches.waiting, "needs_token": bool(access.tokens), **about})
        )

    async def index(request: Request) -> Response:
        access.check_site(request)
        return Response(page, media_type="text/html", headers=headers)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/health", health),
            Route("/translate", translation_handler(parse, batches, serve, access), methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: refuse, ClientDisconnect: nobody},
    )
    app.router.redirect_slashes = False  # /translate/ would be sent to whatever server the request names
    return app


def translation_handler(
    parse: Callable[[bytes], TranslationRequest], batches: Batches, serve: ServeConfig, access: Access
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Returns the function that answers POST /translate; see `make_app`."""
    bodies = asyncio.Semaphore(serve.max_waiting)

    def busy() -> HTTPException:
        waiting = (
            f"{serve.max_waiting} requests are already waiting or arriving (serve.max_waiting); try again in a second"
        )
        return HTTPException(503, waiting, {"retry-after": "1"})

    async def translate(request: Request) -> Response:
        async with refusing(request, serve.max_body_bytes):
            access.check_site(request)
            access.check_token(request)
        try:
            if bodies.locked():
                async with refusing(request, serve.max_body_bytes):
                    raise busy()
            async with bodies:
                # In a thread, so that a large request does not hold up the others.
                parsed = await asyncio.to_thread(parse, await body(request, serve.max_body_bytes))
            return json_response(await while_connected(request, batches.answer(parsed)))
        except UserError as error:
            raise HTTPException(400, str(error)) from error
        except asyncio.QueueFull:
            raise busy() from None
        except asyncio.CancelledError as error:
            late = f"this request takes longer than serve.drain_seconds={serve.drain_seconds}"
            raise HTTPException(503, f"the server is stopping, and {late}", {"connection": "close"}) from error
        except (ClientDisconnect, HTTPException):
            raise
        except Exception as error:
            raise HTTPException(500, f"the translation failed ({type(error).__name__}); see the log") from error

    return translate


@contextlib.contextmanager
def starting(listener: socket.socket, serve: ServeConfig, access: Access, state: Callable[[], str]) -> Iterator[None]:
    """Answers requests with status 503, in another thread, until the context ends.

    The page is there, too, and asks again until the server is ready.

    Args:
      listener: the socket; it stays open, and keeps later connections for the next server.
      serve: limits of the server.
      access: who may use the server.
      state: returns what the server is doing, in a few words.
    """
    page, later = PAGE.read_bytes(), {"retry-after": "2", "cache-control": "no-store"}

    async def wait(request: Request) -> Response:
        async with refusing(request, serve.max_body_bytes):
            access.check_site(request)
            if request.url.path != "/":
                raise HTTPException(503, f"the server is starting: {state()}", later)
        return Response(page, 503, page_headers(page) | later, "text/html")

    app = Starlette(
        routes=[Route("/{path:path}", wait, methods=["GET", "POST"])], exception_handlers={HTTPException: refuse}
    )
    server = make_server(app, serve)
    thread = threading.Thread(target=server.run, args=([listener.dup()],))
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def page_headers(page: bytes) -> dict[str, str]:
    """Returns the headers of the page. It may run its own script and nothing else, and talk only to this server."""
    (script,) = re.findall(b"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return {
        "content-security-policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
    }


@contextlib.asynccontextmanager
async def refusing(request: Request, most: int) -> AsyncIterator[None]:
    """Reads the body of a request that is refused in the context: most clients read no answer before it is sent.

    A client that waits for a status 100 gets the refusal at once.
    """
    try:
        yield
    except HTTPException:
        if "expect" not in request.headers:
            with contextlib.suppress(HTTPException):
                await body(request, most, keep=False)
        raise


async def body(request: Request, most: int, keep: bool = True) -> bytes:
    """Reads the body of a request; returns b"" if it need not `keep` it.

    Raises `HTTPException` 413 if it exceeds `most` bytes, and 408 after `BODY_SECONDS`. Of a body that is too large, up
    to `READ` times `most` bytes are read and not kept; see `refusing`.
    """
    size, content = int(request.headers.get("content-length", 0)), bytearray()
    too_large = HTTPException(413, f"the body has more than {most:,} bytes (serve.max_lines, serve.max_characters)")
    if size > most and "expect" in request.headers:
        raise too_large
    read = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                read += len(part)
                if read > READ * most:
                    break
                if keep and max(read, size) <= most:
                    content += part
    except TimeoutError as error:
        late = f"the body did not arrive within {BODY_SECONDS} seconds"
        raise HTTPException(408, late, {"connection": "close"}) from error
    if max(read, size) > most:
        raise too_large
    return bytes(content)


async def while_connected(request: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Awaits the answer to a request. Cancels it if the client disconnects, and raises `ClientDisconnect`."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.create_task(answer), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


def json_response(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Creates a response from encoded JSON."""
    return Response(content, status, {"x-content-type-options": "nosniff", **(headers or {})}, "application/json")


async def refuse(request: Request, error: Exception) -> Response:
    """Returns an error response with a message of one line."""
    assert isinstance(error, HTTPException)
    wrong = {404: "unknown route", 405: f"this route has no {request.method}"}.get(error.status_code)
    line = f"{wrong}; use POST /translate, GET /health or, in a browser, GET /" if wrong else error.detail
    return json_response(to_json({"error": line}), error.status_code, error.headers)


async def nobody(request: Request, error: Exception) -> Response:
    """Returns an empty response, for a client that has disconnected."""
    return Response(status_code=400)


@contextlib.contextmanager
def draining(server: uvicorn.Server) -> Iterator[None]:
    """Lets SIGHUP and SIGUSR1 stop the server, as SIGINT and SIGTERM do. They take effect at the end of the context."""
    received: list[signal.Signals] = []

    def stop(number: int, frame: Any) -> None:
        received.append(signal.Signals(number))
        server.should_exit = True

    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1)}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # as under nohup
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
    for number in received:
        signal.raise_signal(number)


def make_server(app: Starlette, serve: ServeConfig) -> uvicorn.Server:
    """Creates the HTTP server of an application."""
    waits = serve.drain_seconds
    return uvicorn.Server(
        uvicorn.Config(app, lifespan="on", log_config=None, log_level="warning", timeout_graceful_shutdown=waits)
    )
