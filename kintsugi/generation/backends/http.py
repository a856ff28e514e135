"""HTTP client of one server: calls with an immediate response, and responses that arrive as a stream of events.

There is no thread: an event loop runs while a call waits, and the kernel buffers what arrives in between. Every call
has a deadline, every wait is declared. Connections are not reused: a server may close an idle one at any moment, and a
request sent at that moment could not be distinguished from one that was accepted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kintsugi.errors import IntegrityError, KintsugiError, UserError, WorldError
from kintsugi.runtime.waits import wait

CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 30.0
"""Deadline of calls without long work."""
MAX_EVENT_BYTES = 1 << 26
MAX_REASON_BYTES = 2000
_DATA = b"data:"
_DONE = b"[DONE]"


@dataclass(frozen=True)
class ResponseArrival:
    """An event that arrived for the stream `name`, or the failure that ended it."""

    name: Hashable
    event: bytes = b""
    failure: KintsugiError | None = None


class HttpClient:
    """Not thread-safe. Events are kept in order until `arrivals` returns them."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._session = self._loop.run_until_complete(self._new_session())
        self._streams: dict[Hashable, asyncio.Task[None]] = {}
        self._arrivals: deque[ResponseArrival] = deque()
        self._arrived = asyncio.Event()
        self._bug: BaseException | None = None
        """Unexpected exception of a stream's task, re-raised by the next call."""

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        what: str,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Return the decoded response; None if it is empty. Every error status is a WorldError."""
        status, content = self._run(self._answer(method, path, body), what=what, timeout_s=timeout_s)
        if status >= 400:
            raise WorldError(self._refusal(status, content, path))
        try:
            return msgspec.json.decode(content) if content.strip() else None
        except msgspec.DecodeError as error:
            raise IntegrityError(f"{self.url}{path}: expected JSON: {error}") from error

    def status(self, method: str, path: str) -> int:
        """HTTP status of a request without a body: whether the server knows this path."""
        answer = self._answer(method, path, None)
        status: int = self._run(answer, what="what it can do", timeout_s=CALL_TIMEOUT_S)[0]
        return status

    def open(self, name: Hashable, path: str, *, body: Mapping[str, Any]) -> None:
        """Start to read the events of a response; a request that the server refuses (4xx) is a UserError."""
        assert name not in self._streams, f"stream {name} is open"
        task = self._loop.create_task(self._read(name, path, body), name=f"stream {name}")
        task.add_done_callback(self._note_bug)
        self._streams[name] = task

    def abandon(self, name: Hashable) -> None:
        """Close a stream: the server sees the disconnect, and no further event of it is returned."""
        task = self._streams.pop(name, None)
        if task is not None:
            task.cancel()
            self._run(_ended(task), what="the end of a stream", timeout_s=CONNECT_TIMEOUT_S)
        self._arrivals = deque(arrival for arrival in self._arrivals if arrival.name != name)

    def arrivals(self, timeout_s: float) -> list[ResponseArrival]:
        """Return what has arrived immediately, or wait up to this time for the first event."""

        def attempt(remaining_s: float) -> list[ResponseArrival]:
            self._loop.run_until_complete(self._attempt_arrival(min(remaining_s, timeout_s)))
            arrived = list(self._arrivals)
            self._arrivals.clear()
            self._arrived.clear()
            if self._bug is not None:
                raise self._bug
            return arrived

        return wait(attempt, whom=self.url, what="tokens", timeout_s=timeout_s)

    def close(self) -> None:
        for name in tuple(self._streams):
            self.abandon(name)
        self._run(self._session.close(), what="the end of a session", timeout_s=CONNECT_TIMEOUT_S)
        self._loop.close()

    async def _new_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        # Proxies from the environment are for external hosts, which these servers are not.
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)

    def _run(self, work: Coroutine[Any, Any, Any], *, what: str, timeout_s: float) -> Any:
        task = self._loop.create_task(work, name=what)

        def attempt(remaining_s: float) -> tuple[Any] | None:
            self._loop.run_until_complete(asyncio.wait({task}, timeout=remaining_s))
            return (task.result(),) if task.done() else None

        try:
            return wait(attempt, whom=self.url, what=what, timeout_s=timeout_s)[0]
        finally:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(_ended(task))

    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from error

    async def _read(self, name: Hashable, path: str, body: Mapping[str, Any]) -> None:
        """Read until the server reports the end; an end without that report is a failure."""
        try:
            await self._read_events(name, path, body)
        except (aiohttp.ClientError, OSError) as error:
            self._put(ResponseArrival(name, failure=self._broken(error)))
        except KintsugiError as error:
            self._put(ResponseArrival(name, failure=error))
        self._streams.pop(name, None)

    async def _read_events(self, name: Hashable, path: str, body: Mapping[str, Any]) -> None:
        async with self._session.post(self.url + path, json=body) as response:
            if response.status >= 400:
                # A 4xx status of a healthy server is about the request, except for too many requests.
                kind = UserError if response.status < 500 and response.status != 429 else WorldError
                content = await response.content.read(MAX_REASON_BYTES)
                raise kind(self._refusal(response.status, content, path))
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not line.startswith(_DATA):
                        continue
                    event = line.removeprefix(_DATA).strip()
                    if event == _DONE:
                        return
                    self._put(ResponseArrival(name, event))
                if len(rest) > MAX_EVENT_BYTES:
                    raise IntegrityError(f"{self.url}{path}: an event of more than {MAX_EVENT_BYTES} bytes")
        raise WorldError(f"{self.url}{path} ended its answer in the middle")

    async def _attempt_arrival(self, timeout_s: float) -> None:
        if self._arrivals:
            # Let the streams read what the kernel has buffered.
            await asyncio.sleep(0)
            return
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        except TimeoutError:
            return

    def _put(self, arrival: ResponseArrival) -> None:
        self._arrivals.append(arrival)
        self._arrived.set()

    def _note_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = error
            self._arrived.set()

    def _refusal(self, status: int, content: bytes, path: str) -> str:
        reason = content[:MAX_REASON_BYTES].decode(errors="replace").strip()
        return f"{self.url}{path} answered {status}: {reason}"

    def _broken(self, error: Exception) -> WorldError:
        return WorldError(f"the server at {self.url} does not answer: {str(error) or type(error).__name__}")


async def _ended(task: asyncio.Task[Any]) -> None:
    """Wait until a cancelled task has cleaned up; its last exception is irrelevant."""
    await asyncio.gather(task, return_exceptions=True)
