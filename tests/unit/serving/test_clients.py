"""Clients that do not do their part: bodies that never arrive, answers that nobody reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kintsugi.errors import KintsugiError
from kintsugi.openai_api import http
from kintsugi.protocol.generation import Generate
from kintsugi.serving.gateway import Gateway, GatewayLimits
from kintsugi.types import FinishReason
from tests.unit.serving.fakes import LIMITS, FakeGeneration, tokenizer

SMALL_BYTES = 4096
"""Of the buffers between client and gateway."""


def small_buffers(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
    listening.bind((host, port))
    return listening


@asynccontextmanager
async def listening(
    generation: FakeGeneration, *, queue: int = 1024
) -> AsyncIterator[tuple[web.Server, socket.socket]]:
    """A gateway, and a client that is connected to it and takes little at a time."""
    application = Gateway(generation, tokenizer(), GatewayLimits(LIMITS, queue=queue)).application()
    async with TestServer(application, socket_factory=small_buffers, handler_cancellation=True) as server:
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
            await asyncio.get_running_loop().sock_connect(client, (server.host, server.port))
            assert server.runner is not None and server.runner.server is not None
            yield server.runner.server, client


def head(num_bytes: int) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {num_bytes}\r\n\r\n".encode()


def question(**fields: Any) -> bytes:
    body = msgspec.json.encode({"model": "tiny", "prompt": "abc", **fields})
    return head(len(body)) + body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_is_let_go_though_it_stays(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "WRITE_TIMEOUT_S", 0.1)

    async def body() -> None:
        generation = FakeGeneration()
        async with listening(generation) as (gateway, client):
            asked = question(n=40, max_tokens=100, logprobs=0, stream=stream)
            await asyncio.get_running_loop().sock_sendall(client, asked)
            await generation.until(lambda: bool(generation.submitted))
            (connection,) = gateway.connections
            handler = connection._task_handler
            assert handler is not None
            await asyncio.wait([handler], timeout=10)
            assert gateway.connections == []
        assert (generation.faults, caplog.records) == ([], [])

    asyncio.run(body())


def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.1)

    async def body() -> None:
        async with listening(FakeGeneration()) as (_, client):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, head(1000) + b"abc")
            async with asyncio.timeout(10):
                answer = await loop.sock_recv(client, SMALL_BYTES)
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"type":"invalid_request_error"' in answer

    asyncio.run(body())


def test_a_mistake_of_ours_in_the_middle_of_a_stream_is_its_last_event() -> None:
    def rule(request: Generate, sample: int) -> tuple[list[int], FinishReason]:
        return [2, 3], FinishReason.LENGTH

    class Odd(KintsugiError):
        @property
        def cause(self) -> Any:
            raise ZeroDivisionError

        @cause.setter
        def cause(self, cause: object) -> None: ...

    async def body() -> None:
        generation = FakeGeneration(rule=rule, error=Odd("odd"), error_after=1)
        async with listening(generation) as (_, client):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, question(max_tokens=2, stream=True))
            answer = b""
            async with asyncio.timeout(10):
                while not answer.endswith(b"0\r\n\r\n"):
                    answer += await loop.sock_recv(client, SMALL_BYTES)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b'data: {"error":' in answer and b'"type":"server_error"' in answer
        assert [type(fault) for fault in generation.faults] == [ZeroDivisionError]

    asyncio.run(body())


def test_every_completion_that_is_asked_for_has_a_place_in_the_queue() -> None:
    async def body() -> None:
        generation = FakeGeneration()
        async with listening(generation, queue=3) as (_, client):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, question(n=4))
            answer = await loop.sock_recv(client, SMALL_BYTES)
            assert answer.startswith(b"HTTP/1.1 429 ") and b"Retry-After: " in answer
            assert generation.submitted == []

    asyncio.run(body())
