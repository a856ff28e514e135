"""HTTP calls over persistent connections, as such systems use them. Bodies are msgpack; an exception is a 500.

The caller gets no details, except of errors that the server anticipated (`EngineError`): the cause is in the server's
log only. A caller that times out closes its connection, and a request that has not started by then is dropped.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import msgspec

from kintsugi.errors import DeadlineExceeded, WorldError
from kintsugi.lab.fragile.directory import Address
from kintsugi.runtime.waits import wait

log = logging.getLogger("rpc")

T = TypeVar("T")
Route = Callable[[bytes], msgspec.Struct | bytes | None]
"""Takes the body of a request and returns the body of the response."""

OK, NOT_FOUND, SERVER_ERROR = 200, 404, 500
_SHORTEST_S = 0.001


class CallFailed(WorldError):
    """A call failed."""


class WorkerGone(CallFailed):
    """The server did not accept the connection, or closed it before it responded."""


class CallTimedOut(CallFailed):
    """No response in time."""


class ServerError(CallFailed):
    """The server raised an exception."""


class EngineError(WorldError):
    """Anticipated failure of a worker; its message reaches the caller."""


class KeyNotFound(CallFailed):
    """The key does not exist (yet)."""


class Connections:
    """Idle connections by address; a call takes one or creates one, and returns it after the response."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[HTTPConnection]] = {}
        self._lock = threading.Lock()

    def take(self, address: Address, *, timeout_s: float) -> HTTPConnection:
        with self._lock:
            kept = self._idle.get(address)
            connection = kept.pop() if kept else HTTPConnection(address.host, address.port)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection

    def give_back(self, address: Address, connection: HTTPConnection) -> None:
        with self._lock:
            self._idle.setdefault(address, []).append(connection)


CONNECTIONS = Connections()
"""Connections of this process."""


def call(
    address: Address, path: str, body: msgspec.Struct | bytes = b"", *, peer: str, timeout_s: float
) -> bytes:
    """Send a request and wait for the response."""
    content = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    pool = f"HTTPConnectionPool(host='{address.host}', port={address.port})"

    def attempt(remaining_s: float) -> tuple[int, bytes]:
        connection = CONNECTIONS.take(address, timeout_s=max(remaining_s, _SHORTEST_S))
        try:
            connection.request("POST", path, body=content)
            answer = connection.getresponse()
            found = answer.status, answer.read()
        except TimeoutError as error:
            connection.close()
            raise CallTimedOut(f"{pool}: Read timed out. ({peer}{path})") from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise WorkerGone(f"{pool}: {error!r} ({peer}{path})") from error
        CONNECTIONS.give_back(address, connection)
        return found

    status, answer = wait(attempt, whom=peer, what=path, timeout_s=timeout_s)
    if status == NOT_FOUND:
        raise KeyNotFound(f"{peer}{path}: HTTP 404")
    if status != OK:
        detail = f": {answer.decode(errors='replace')}" if answer else ""
        raise ServerError(f"Non-retryable HTTP error: {status} ({peer}{path}){detail}")
    return answer


def request(
    address: Address, path: str, body: msgspec.Struct, *, peer: str, kind: type[T], timeout_s: float
) -> T:
    """Send a request and decode the response."""
    return msgspec.msgpack.decode(call(address, path, body, peer=peer, timeout_s=timeout_s), type=kind)


def begin(function: Callable[[], T], *, name: str) -> Future[T]:
    """Run a call in a daemon thread, so that a call that hangs does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except WorldError as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def wait_future_ordered(pending: Sequence[Future[T]], *, whom: str, what: str, timeout_s: float) -> list[T]:
    """Return all results in order, or raise the first exception as soon as one call has failed."""

    def attempt(remaining_s: float) -> bool | None:
        done, _ = futures.wait(pending, timeout=remaining_s, return_when=futures.FIRST_EXCEPTION)
        failed = any(future.exception() for future in done)
        return True if failed or len(done) == len(pending) else None

    try:
        wait(attempt, whom=whom, what=what, timeout_s=timeout_s)
    except DeadlineExceeded as error:
        raise CallTimedOut(str(error)) from error
    for future in pending:
        if future.done() and (failure := future.exception()):
            raise failure
    return [future.result(timeout=0) for future in pending]


class RpcServer:
    """Serves routes by path, either one request at a time or concurrently."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        host: str,
        port: int = 0,
        known_as: str = "",
        concurrent: bool = False,
    ) -> None:
        self._server = _Server((host, port), _handler(routes, None if concurrent else threading.Lock()))
        self.address = Address(known_as or host, self._server.server_port)

    def serve(self) -> None:
        """Serve until the process ends."""
        self._server.serve_forever(poll_interval=0.1)

    def serve_in_thread(self) -> None:
        threading.Thread(target=self.serve, name="http", daemon=True).start()


class _Server(ThreadingHTTPServer):
    """HTTP server with one thread per connection."""

    request_queue_size = 128
    daemon_threads = True


def _handler(routes: Mapping[str, Route], turn: threading.Lock | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if turn is None:
                status, answer = _outcome(routes, self.path, body)
            else:
                with turn:
                    if _is_closed(self.connection):
                        log.warning("%s: the caller closed the connection, the request is dropped", self.path)
                        self.close_connection = True
                        return
                    status, answer = _outcome(routes, self.path, body)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError as error:
                log.warning("%s: the caller closed the connection: %s", self.path, error)
                self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            log.debug(format, *arguments)

    return Handler


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _outcome(routes: Mapping[str, Route], path: str, body: bytes) -> tuple[int, bytes]:
    try:
        return OK, _answer(routes, path, body)
    except KeyNotFound:
        return NOT_FOUND, b""
    except EngineError as error:
        log.error("%s failed: %s", path, error)
        return SERVER_ERROR, str(error).encode()
    except Exception:  # The caller gets no details of an unexpected exception.
        log.exception("%s failed", path)
        return SERVER_ERROR, b""


def _answer(routes: Mapping[str, Route], path: str, body: bytes) -> bytes:
    """Call the route; a route that matches the first path component gets the rest of the path as first line of the
    body."""
    if path in routes:
        answer = routes[path](body)
    elif (first := f"/{path.split('/')[1]}") in routes:
        answer = routes[first](path.removeprefix(f"{first}/").encode() + b"\n" + body)
    else:
        raise KeyNotFound(path)
    if answer is None:
        return b""
    return answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)
