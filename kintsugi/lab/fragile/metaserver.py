"""Where weights wait for those who fetch them: bytes under names, in the memory of the controller."""

from __future__ import annotations

import threading
import time
from urllib.parse import quote, unquote

from kintsugi.errors import DeadlineExceeded, WorldError
from kintsugi.lab.fragile.places import Address
from kintsugi.lab.fragile.rpc import KeyNotFound, RpcServer, call
from kintsugi.runtime import SYSTEM_CLOCK, wait

_ASK_AGAIN_S = 0.05


class TransferTimedOut(WorldError):
    """An hour was not enough."""


class MetaServer:
    """Serves beside the controller. Whoever asks for a name that is not there is told so, and asks again."""

    def __init__(self, *, host: str, port: int = 0, known_as: str = "") -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        routes = {"/put": self._put, "/get": self._get}
        server = RpcServer(routes, host=host, port=port, known_as=known_as, at_once=True)
        server.serve_beside()
        self.address = server.address

    @property
    def size(self) -> int:
        """Bytes that are kept."""
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
    """One transfer of many values, which together may take `timeout_s`."""

    def __init__(self, address: Address, *, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._deadline = SYSTEM_CLOCK.monotonic() + timeout_s

    def put(self, key: str, value: bytes) -> None:
        if SYSTEM_CLOCK.monotonic() > self._deadline:
            raise TransferTimedOut(f"PUT {key}: request timeout")
        # As of the usual libraries: the time is for one request, and so is longer than what is left of all.
        call(self._address, f"/put/{quote(key)}", value, whom="meta", timeout_s=self._timeout_s)

    def get(self, key: str) -> bytes:
        """Ask until it is there."""

        def attempt(remaining_s: float) -> bytes | None:
            try:
                return call(self._address, f"/get/{quote(key)}", whom="meta", timeout_s=self._timeout_s)
            except KeyNotFound:
                time.sleep(max(0.0, min(_ASK_AGAIN_S, remaining_s)))
                return None

        try:
            remaining_s = self._deadline - SYSTEM_CLOCK.monotonic()
            return wait(attempt, whom="meta", what=key, timeout_s=remaining_s)
        except DeadlineExceeded as error:
            raise TransferTimedOut(f"GET {key}: timeout, the key does not exist") from error
