"""A command in a container of a pod, with lines as input and output, as `kubectl exec -i` carries them.

The API server carries its streams over a WebSocket (`v4.channel.k8s.io`): the first byte of each message is the number
of the stream. The command ends with its pod, or with this connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from enum import IntEnum
from types import TracebackType
from typing import Self

import aiohttp

from kintsugi.cluster.backends.command import LineBuffer
from kintsugi.cluster.backends.kubernetes.client import Client

PROTOCOL = "v4.channel.k8s.io"
MOST_SAID = 500
"""Bytes of what a command has written to its standard error that are kept."""


class Stream(IntEnum):
    """First byte of a message."""

    INPUT = 0
    OUTPUT = 1
    ERRORS = 2
    STATUS = 3
    """How the command has ended."""


class PodCommand:
    """One command; used as an asynchronous context."""

    def __init__(self, client: Client, pod: str, *, container: str, command: Sequence[str]) -> None:
        """`pod` is the path of the pod in the API."""
        self._client, self._path = client, f"{pod}/exec"
        self._query = [
            ("container", container),
            *(("stdin", "true"), ("stdout", "true"), ("stderr", "true")),
            *(("command", word) for word in command),
        ]
        self._output = LineBuffer()
        self._said = b""

    async def __aenter__(self) -> Self:
        """ApiError if the server does not start the command."""
        self._socket = await self._client.open_streams(self._path, query=self._query, protocol=PROTOCOL)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._socket.close()

    async def ask(self, line: bytes, *, begin: bytes, timeout_s: float) -> bytes | None:
        """Write a line and return the next one of its output that begins so; None if none comes in time, or if the
        command has ended."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(timeout_s):
                await self._socket.send_bytes(bytes([Stream.INPUT]) + line + b"\n")
                return await self._hear(begin)
        return None

    async def _hear(self, begin: bytes) -> bytes | None:
        while (line := self._output.take(begin=begin)) is None:
            message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                return None
            stream, content = message.data[0], message.data[1:]
            if stream == Stream.OUTPUT:
                self._output.add(content)
            else:
                self._said = (self._said + content)[-MOST_SAID:]
        return line

    def explain(self) -> str:
        """Return the end of what it has written to its standard error, or how it has ended; empty if nothing came."""
        return self._said.decode(errors="replace").strip()
