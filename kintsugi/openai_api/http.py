"""Common parts of the HTTP servers of the API: timeouts of reads and writes, errors in the API's shape, bounded
connections."""

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

from kintsugi.openai_api.api_errors import ApiError, wrong_key

MAX_BODY_BYTES = 8 << 20
READ_TIMEOUT_S = 60.0
"""Deadline for the body of a request to arrive."""
WRITE_TIMEOUT_S = 60.0
"""A client that reads nothing for this long has left."""
KEEPALIVE_S = 75.0
"""An idle connection is closed after this time; not every client closes its own."""
PIECE_BYTES = 64 << 10
JSON = "application/json"


def runner(application: web.Application, *, shutdown_timeout_s: float) -> web.AppRunner:
    """Create the server; a client that disconnects cancels its request."""
    logging.getLogger("aiohttp.server").addFilter(_is_logged)
    return web.AppRunner(
        application,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=shutdown_timeout_s,
    )


def _is_logged(record: logging.LogRecord) -> bool:
    """Exclude malformed HTTP from the log: any client that can connect could fill the log with it."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def check_key(request: web.Request, api_key: str) -> None:
    """Raise `ApiError` for a wrong or missing key."""
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
        raise ApiError(
            f"the body of your request has not arrived in {READ_TIMEOUT_S:.0f} s",
            status=HTTPStatus.REQUEST_TIMEOUT,
        ) from error


async def write(response: web.StreamResponse, content: bytes) -> None:
    """Write in pieces, each with its own deadline: a slow client is served, one that reads nothing has left."""
    for start in range(0, len(content), PIECE_BYTES):
        await _taken(response.write(content[start : start + PIECE_BYTES]))


async def write_last(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    """Write the end of a response and drain the connection's buffer, which has no deadline of its own."""
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


def error_response(api_error: ApiError) -> web.Response:
    return web.Response(
        body=api_error.body, content_type=JSON, status=api_error.status.value, headers=api_error.headers
    )


def from_http_error(error: web.HTTPException, request: web.Request) -> ApiError:
    """Error response for an error of the HTTP library: unknown route, wrong method, body too large."""
    messages = {
        HTTPStatus.NOT_FOUND: f"Invalid URL ({request.method} {request.path})",
        HTTPStatus.METHOD_NOT_ALLOWED: f"Not allowed to {request.method} on {request.path}",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: f"expected a body of at most {MAX_BODY_BYTES} bytes",
    }
    status = HTTPStatus(error.status)
    return ApiError(messages.get(status, error.reason), status=status)
