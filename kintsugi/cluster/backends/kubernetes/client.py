"""The Kubernetes API over HTTP: requests that are repeated while that can help, lists, and watches.

A request is repeated when the connection failed, and on 429 and 5xx, with pauses, until its deadline. What is created
has a name that its caller chose, so that a repeated creation answers 409 and is no second object. A watch goes on from
the last version that it has seen when its connection is cut, and begins with a list when that version is gone (410).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from kintsugi.cluster.backends.kubernetes.access import Access
from kintsugi.errors import WorldError
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock

CONNECT_S = 3.0
ANSWER_S = 15.0
"""Time for one answer that is no watch."""
REQUEST_S = 10.0
"""Time in which a request is repeated."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
WATCH_S = 60
"""Time after which the server ends a watch, and it is begun again: so a connection that is dead without a sign lasts
no longer."""
MOST_LINE_BYTES = 8 << 20
"""Size of one object in a watch; the server's own limit is smaller."""
PAGE = 500
"""Objects per part of a list."""

Object = dict[str, Any]


class ApiError(WorldError):
    """The API server has refused a request, or can not be reached (status 0)."""

    def __init__(self, message: str, *, status: int, reason: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 429) or self.status >= 500


class Expired(ApiError):
    """The version that a watch began at is gone: list again."""


class Changed(msgspec.Struct, frozen=True):
    """One change of an object."""

    kind: str
    """ADDED, MODIFIED or DELETED."""
    object: Object


class Client:
    """A connection to an API server; used as an asynchronous context."""

    def __init__(self, access: Access, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.access, self._clock = access, clock

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout, trust_env=False, read_bufsize=1 << 20, headers={"User-Agent": "kintsugi"}
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_S,
    ) -> Object:
        """Return the answer; ApiError with what the server said when it refused, or when time is over."""
        until = self._clock.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        renewed = False
        while True:
            try:
                return await self._answer(method, path, body=body, query=query, renew=renewed)
            except ApiError as error:
                if error.status == 401 and not renewed:
                    renewed = True
                    continue
                pause_s = min(max(pause_s, error.retry_after_s), LONGEST_PAUSE_S)
                if not error.may_pass or self._clock.monotonic() + pause_s > until:
                    raise
                await asyncio.sleep(pause_s)
                pause_s *= 2

    async def _answer(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        renew: bool,
    ) -> Object:
        data = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method,
                self.access.server + path,
                data=data,
                params=query,
                headers=self._headers(method, renew=renew),
                ssl=self.access.tls or True,
                server_hostname=self.access.server_name,
                timeout=timeout,
            ) as response:
                content = await response.read()
                if response.status >= 400:
                    raise self._refusal(response.status, content, headers=response.headers)
                return _decoded(content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _headers(self, method: str, *, renew: bool) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        patch = "application/merge-patch+json"
        headers["Content-Type"] = patch if method == "PATCH" else "application/json"
        if token := self.access.token(renew=renew):
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _unreachable(self, error: BaseException) -> ApiError:
        why = str(error) or type(error).__name__
        # Another certificate than the kubeconfig expects will be the same in a moment.
        status = 495 if isinstance(error, aiohttp.ClientSSLError) else 0
        return ApiError(f"the API server at {self.access.server} can not be reached: {why}", status=status)

    def _refusal(self, status: int, content: bytes, *, headers: Mapping[str, str]) -> ApiError:
        error = refusal(status, content, headers=headers)
        if status != 401:
            return error
        message = f"the API server at {self.access.server} refuses these credentials ({self.access.origin}): {error}"
        return ApiError(message, status=401)

    async def open_streams(
        self, path: str, *, query: Sequence[tuple[str, str]], protocol: str
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket; ApiError if the server refuses it."""
        try:
            return await self._session.ws_connect(
                self.access.server + path,
                params=query,
                protocols=(protocol,),
                # The answer is a stream, not a JSON object.
                headers=self._headers("GET", renew=False) | {"Accept": "*/*"},
                ssl=self.access.tls or True,
                server_hostname=self.access.server_name,
            )
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(
                f"{path} is refused: {error.message} ({error.status})", status=error.status
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def list(
        self, path: str, *, selector: str, timeout_s: float = REQUEST_S
    ) -> tuple[list[Object], str]:
        """Return all objects of a kind that a label selector matches, and the version from which a watch goes on."""
        query = {"labelSelector": selector, "limit": str(PAGE)}
        found: list[Object] = []
        while True:
            answer = await self.request("GET", path, query=query, timeout_s=timeout_s)
            found += answer.get("items") or ()
            metadata = answer.get("metadata") or {}
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            query["continue"] = metadata["continue"]

    async def watch(self, path: str, *, selector: str, version: str) -> AsyncGenerator[Changed | str, None]:
        """Yield changes since a version, each followed by the version that it leads to; ends when the server ends it.
        Expired if the version is gone."""
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
            "allowWatchBookmarks": "true",
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=WATCH_S + 10)
        try:
            async with self._session.get(
                self.access.server + path,
                params=query,
                headers=self._headers("GET", renew=False),
                ssl=self.access.tls or True,
                server_hostname=self.access.server_name,
                timeout=timeout,
            ) as response:
                if response.status >= 400:
                    raise self._refusal(response.status, await response.read(), headers=response.headers)
                async with contextlib.aclosing(_lines(response.content)) as lines:
                    async for line in lines:
                        changed = _change(line)
                        if changed.kind != "BOOKMARK":
                            yield changed
                        yield str(changed.object["metadata"]["resourceVersion"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield lines; what is left without an end was cut and is dropped."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > MOST_LINE_BYTES:
            raise ApiError(f"an object of more than {MOST_LINE_BYTES} bytes in a watch", status=0)


def _change(line: bytes) -> Changed:
    """Decode one line of a watch; an error that the server tells there is raised."""
    told = _decoded(line)
    kind, subject = str(told.get("type")), told.get("object") or {}
    if kind == "ERROR":
        status = int(subject.get("code") or 0)
        error = Expired if status == 410 else ApiError
        raise error(str(subject.get("message")), status=status, reason=str(subject.get("reason")))
    return Changed(kind, subject)


def _decoded(content: bytes) -> Object:
    try:
        return msgspec.json.decode(content, type=Object)
    except msgspec.DecodeError as error:
        raise ApiError(f"expected JSON of the API server, got {content[:80]!r}: {error}", status=0) from error


def refusal(status: int, content: bytes, *, headers: Mapping[str, str]) -> ApiError:
    """Return the error that an answer stands for."""
    message, reason = content[:500].decode(errors="replace").strip(), ""
    with contextlib.suppress(msgspec.DecodeError):
        told = msgspec.json.decode(content, type=Object)
        message, reason = str(told.get("message") or message), str(told.get("reason") or "")
    try:
        retry_after_s = float(headers.get("Retry-After", 0))
    except ValueError:
        retry_after_s = 0.0
    error = Expired if status == 410 else ApiError
    return error(f"{message} ({status})", status=status, reason=reason, retry_after_s=retry_after_s)
