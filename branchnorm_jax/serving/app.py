"""The HTTP application: POST /translate, GET /health and a page at GET /. Errors are {"error": "one line"}."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ServeConfig
from branchnorm_jax.serving.batches import Batches
from branchnorm_jax.serving.messages import TranslationRequest, to_json

PAGE = Path(__file__).parent / "page.html"

PAGE_HEADERS = {
    # The page may neither load anything from other origins nor send anything to them.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def make_app(
    parse: Callable[[bytes], TranslationRequest],
    answers: Callable[[Sequence[TranslationRequest]], list[bytes]],
    serve: ServeConfig,
    about: Mapping[str, Any],
    say: Callable[[str], None],
) -> Starlette:
    """Creates the ASGI application. The server must support the lifespan protocol.

    Args:
      parse: parses a request body; raises `UserError` for an invalid one.
      answers: see `Batches`.
      serve: limits of the server.
      about: information about the model for GET /health.
      say: called with the traceback of a failed translation.
    """
    batches, page = Batches(answers, serve, say), PAGE.read_bytes()

    async def translate(request: Request) -> Response:
        try:
            parsed = parse(await body(request, serve.max_body_bytes))
        except UserError as error:
            raise HTTPException(400, str(error)) from error
        try:
            return json_response(await batches.answer(parsed))
        except asyncio.QueueFull as error:
            busy = f"{serve.max_waiting} requests are already waiting (serve.max_waiting); try again in a second"
            raise HTTPException(503, busy, {"retry-after": "1"}) from error
        except Exception as error:
            raise HTTPException(500, f"the translation failed ({type(error).__name__}); see the log") from error

    async def health(request: Request) -> Response:
        return json_response(to_json({"status": "ready", "waiting": batches.waiting, **about}))

    async def index(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=PAGE_HEADERS)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()

    return Starlette(
        routes=[
            Route("/", index),
            Route("/health", health),
            Route("/translate", translate, methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: refuse, ClientDisconnect: nobody},
    )


async def body(request: Request, most: int) -> bytes:
    """Reads the body of a request.

    Raises `HTTPException` 413 as soon as it exceeds `most` bytes.
    """
    too_large = HTTPException(413, f"the body has more than {most:,} bytes (serve.max_lines, serve.max_characters)")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > most:
            raise too_large
    return bytes(content)


def json_response(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Creates a response from encoded JSON."""
    return Response(content, status, headers, "application/json")


async def refuse(request: Request, error: Exception) -> Response:
    """Returns an error response with a message of one line."""
    assert isinstance(error, HTTPException)
    unknown = error.status_code in (404, 405)
    line = "unknown route; use POST /translate, GET /health or, in a browser, GET /" if unknown else error.detail
    return json_response(to_json({"error": line}), error.status_code, error.headers)


async def nobody(request: Request, error: Exception) -> Response:
    """Returns an empty response, for a client that has disconnected."""
    return Response(status_code=400)
