"""Meta-server: key-value store for weights in the memory of the controller."""

from __future__ import annotations

import threading
import time
from urllib.parse import quote, unquote

from kintsugi.errors import DeadlineExceeded, WorldError
from kintsugi.lab.fragile.directory import Address
from kintsugi.lab.fragile.rpc import KeyNotFound, RpcServer, call
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import wait

_POLL_S = 0.05


class TransferTimedOut(WorldError):
    """The transfer exceeded its time-out."""


class WeightMetaServer:
    """Serves in a thread of the controller. A request for a missing key fails, and the client retries."""

    def __init__(self, *, host: str, port: int = 0, known_as: str = "") -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        routes = {"/put": self._put, "/get": self._get}
        server = RpcServer(routes, host=host, port=port, known_as=known_as, concurrent=True)
        server.serve_in_thread()
        self.address = server.address

    @property
    def size(self) -> int:
        """Bytes stored."""
        with self._lock:
            return sum(map(len, self._values.values()))

    def forget(self) -> None:
        with self._lock:
            self._values.clear()

    def _put(self, request: bytes) -> None:
        path, _, value = request.partition(b"\n")
        with self._lock:
            self._values[_key(path)] = value

    def _get(self, request: bytes) -> bytes:
        path, _, _ = request.partition(b"\n")
        with self._lock:
            value = self._values.get(_key(path))
        if value is None:
            raise KeyNotFound(_key(path))
        return value


def _key(path: bytes) -> str:
    return unquote(path.decode())


class MetaClient:
    """Transfer of many values with one time-out for all of them."""

    def __init__(self, address: Address, *, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._deadline = SYSTEM_CLOCK.monotonic() + timeout_s

    def put(self, key: str, value: bytes) -> None:
        if SYSTEM_CLOCK.monotonic() > self._deadline:
            raise TransferTimedOut(f"PUT {key}: request timeout")
        # As in common HTTP libraries, the time-out applies to each request, so it can exceed the rest of the
        # total.
        call(self._address, f"/put/{quote(key)}", value, peer="meta", timeout_s=self._timeout_s)

    def get(self, key: str) -> bytes:
        """Poll until the key exists."""

        def attempt(remaining_s: float) -> bytes | None:
            try:
                return call(self._address, f"/get/{quote(key)}", peer="meta", timeout_s=self._timeout_s)
            except KeyNotFound:
                time.sleep(max(0.0, min(_POLL_S, remaining_s)))
                return None

        try:
            remaining_s = self._deadline - SYSTEM_CLOCK.monotonic()
            return wait(attempt, whom="meta", what=key, timeout_s=remaining_s)
        except DeadlineExceeded as error:
            raise TransferTimedOut(f"GET {key}: timeout, the key does not exist") from error
