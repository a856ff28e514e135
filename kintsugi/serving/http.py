"""What every HTTP server of the API needs: bodies that arrive in time, answers that are taken, errors in shape, and
connections that do not outlive their use."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kintsugi.serving.refusals import Refusal, wrong_key

MAX_BODY_BYTES = 8 << 20
READ_TIMEOUT_S = 60.0
"""For the body of a request to arrive."""
WRITE_TIMEOUT_S = 60.0
"""A client that takes nothing for so long has left."""
KEEPALIVE_S = 75.0
"""A connection on which nothing is asked for so long is closed; not every client closes its own."""
PIECE_BYTES = 64 << 10
JSON = "application/json"


def runner(application: web.Application, *, shutdown_timeout_s: float) -> web.AppRunner:
    """A client that leaves takes its request with it."""
    logging.getLogger("aiohttp.server").addFilter(_is_worth_a_line)
    return web.AppRunner(
        application,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=shutdown_timeout_s,
    )


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """What is no HTTP is refused, and nobody's business here: whoever can connect could fill the log with it."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def check_key(request: web.Request, api_key: str) -> None:
    """A `Refusal` for whoever has another key, or none."""
    given = request.headers.get("Authorization", "")
    scheme, _, key = given.partition(" ")
    right = hmac.compare_digest(key.strip().encode(errors="replace"), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise wrong_key(given=bool(given))


async def read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise Refusal(
            f"the body of your request has not arrived in {READ_TIMEOUT_S:.0f} s",
            status=HTTPStatus.REQUEST_TIMEOUT,
        ) from error


async def write(response: web.StreamResponse, content: bytes) -> None:
    """Piece by piece, each of which has its own time: a slow client is served, one that takes nothing has left."""
    for start in range(0, len(content), PIECE_BYTES):
        await _taken(response.write(content[start : start + PIECE_BYTES]))


async def write_last(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    """Nobody looks after what would be left in the connection's own buffer, so nothing is left there."""
    await write(response, content[:-PIECE_BYTES])
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)
    await _taken(response.write_eof(content[-PIECE_BYTES:]))


async def _taken(writing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await writing
    except TimeoutError as error:
        raise ConnectionResetError(f"the client has taken nothing for {WRITE_TIMEOUT_S:.0f} s") from error


def as_json(body: dict[str, Any], *, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=JSON, status=status.value)


def refused(refusal: Refusal) -> web.Response:
    return web.Response(
        body=refusal.body, content_type=JSON, status=refusal.status.value, headers=refusal.headers
    )


def of_http(error: web.HTTPException, request: web.Request) -> Refusal:
    """What the HTTP library found: no such route, another method, a body that is too large."""
    messages = {
        HTTPStatus.NOT_FOUND: f"Invalid URL ({request.method} {request.path})",
        HTTPStatus.METHOD_NOT_ALLOWED: f"Not allowed to {request.method} on {request.path}",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: f"expected a body of at most {MAX_BODY_BYTES} bytes",
    }
    status = HTTPStatus(error.status)
    return Refusal(messages.get(status, error.reason), status=status)
