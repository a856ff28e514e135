"""Broadcast of a version to several servers by a process group that exists for this version only.

gloo, in host memory. The processes meet at the publishing rank's store. The library's waits can not be interrupted, so
all of it runs in a background thread with a deadline, after which the servers use another source. A server that does
not join costs the others only that deadline.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta

import torch

from kintsugi.errors import WorldError
from kintsugi.model.torch_internals import GroupStore, gloo_group, prefix_store, start_broadcast
from kintsugi.protocol.weights import Publish
from kintsugi.runtime.waits import join, wait
from kintsugi.telemetry.events import OperationFailed
from kintsugi.transport.store import StoreClient, split_address
from kintsugi.types import CollectiveSource, WeightManifest, WeightSource
from kintsugi.weights.publish import VersionLayout

COLLECTIVE_TIMEOUT_S = 10.0
"""Deadline for all processes to join, and for each part to arrive."""
BROADCAST_BYTES = 16 << 20
SECRET_BYTES = 32


def receive(
    manifest: WeightManifest, source: CollectiveSource, into: memoryview, *, keys: tuple[bytes, bytes]
) -> None:
    """Join as a server, with the key pair of this process; WorldError if the others did not join in time, or left."""
    members = (source.process, *source.servers)
    _in_time(
        lambda: _receive_part(source, into[: manifest.size], keys=keys),
        peer=", ".join(members),
        what=f"broadcast of version {manifest.version}",
    )


def _receive_part(source: CollectiveSource, memory: memoryview, *, keys: tuple[bytes, bytes]) -> None:
    """Join under the next free rank; the store counts arrivals, because the order of the servers is arbitrary."""
    with closing(_open_store(source, keys)) as store:
        rank = store.add(f"{source.key}/servers", 1)
        _broadcast(source, rank, memory, store=store)


def _open_store(source: CollectiveSource, keys: tuple[bytes, bytes]) -> StoreClient:
    return StoreClient(source.store, keys=keys, timeout_s=COLLECTIVE_TIMEOUT_S)


def _interface(source: CollectiveSource) -> str:
    """Local address that reaches the store."""
    host, port, _ = split_address(source.store)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # Sends nothing: the kernel only chooses the route.
        address: str = probe.getsockname()[0]
        return address


def _broadcast(source: CollectiveSource, rank: int, memory: memoryview, *, store: StoreClient) -> None:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if rank == 0:
        store.set(f"{source.key}/secret", secrets.token_bytes(SECRET_BYTES))
    torch_store = GroupStore(store)
    group = gloo_group(
        prefix_store(source.key, torch_store),
        rank=rank,
        size=1 + len(source.servers),
        interface=_interface(source),
        timeout=timeout,
        secret=store.get(f"{source.key}/secret"),
    )
    data = torch.frombuffer(memory, dtype=torch.uint8)
    for part in data.split(BROADCAST_BYTES):
        start_broadcast(group, part, timeout=timeout).wait()


def _in_time(work: Callable[[], None], *, peer: str, what: str) -> None:
    """Run in a thread that is abandoned when it takes too long."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the waiting thread raises it.
            failures.append(error)

    thread = threading.Thread(target=run, name="broadcast", daemon=True)
    thread.start()
    join(thread, whom=peer, what=what, timeout_s=2 * COLLECTIVE_TIMEOUT_S)
    if failures:
        raise WorldError(f"{what} with {peer} failed: {failures[0]}") from failures[0]


class CollectiveTransport:
    """The publishing side: one thread per version, which waits for the servers and sends."""

    name = "collective"

    def __init__(
        self,
        *,
        process: str,
        store: str,
        keys: tuple[bytes, bytes],
        emit: Callable[[OperationFailed], object],
    ) -> None:
        """`store` is the address of this process's store, `keys` its key pair."""
        self._process = process
        self._store = store
        self._keys = keys
        self._emit = emit
        self._num_offered = 0

    def publish(self, version_layout: VersionLayout, order: Publish) -> Sequence[WeightSource]:
        if not order.servers or version_layout.buffer is None:
            return ()
        self._num_offered += 1
        key = f"weights/{self._process}/{order.version}/{self._num_offered}"
        source = CollectiveSource(self._process, self._store, key, order.servers)
        memory = version_layout.buffer[: version_layout.manifest.size]
        threading.Thread(
            target=self._send, args=(source, memory, order.version), name="broadcast", daemon=True
        ).start()
        return (source,)

    def _send(self, source: CollectiveSource, memory: memoryview, version: int) -> None:
        servers = ", ".join(source.servers)

        def attempt(remaining_s: float) -> bool:
            with closing(_open_store(source, self._keys)) as store:
                _broadcast(source, 0, memory, store=store)
            return True

        try:
            what = f"broadcast of version {version}"
            wait(attempt, whom=servers, what=what, timeout_s=COLLECTIVE_TIMEOUT_S)
        except (RuntimeError, OSError) as error:
            message = f"version {version} was not broadcast to all of {servers}: {error}"
            self._emit(OperationFailed(message, operation="broadcast of weights", error=str(error)))

    def close(self) -> None:
        """Nothing to do: its threads end with their deadlines."""
