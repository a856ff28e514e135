"""Broadcast of a version to several servers by a process group that exists for this version only.

gloo, in host memory. The processes meet at the publishing rank's store. The library's waits can not be interrupted, so
all of it runs in a background thread with a deadline, after which the servers use another source. A server that does
not join costs the others only that deadline.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from kintsugi.errors import WorldError
from kintsugi.model.torch_internals import Store, connect_store, gloo_group, prefix_store, start_broadcast
from kintsugi.protocol.weights import Publish
from kintsugi.runtime.waits import join, wait
from kintsugi.telemetry.events import OperationFailed
from kintsugi.types import CollectiveSource, WeightManifest, WeightSource
from kintsugi.weights.publish import VersionLayout

COLLECTIVE_TIMEOUT_S = 10.0
"""Deadline for all processes to join, and for each part to arrive."""
BROADCAST_BYTES = 16 << 20


def receive(manifest: WeightManifest, source: CollectiveSource, into: memoryview) -> None:
    """Join as a server; WorldError if the others did not join in time, or left."""
    members = (source.process, *source.servers)
    _in_time(
        lambda: _broadcast(source, 1 + _index_among(source), into[: manifest.size]),
        peer=", ".join(members),
        what=f"broadcast of version {manifest.version}",
    )


def _index_among(source: CollectiveSource) -> int:
    """Rank of this process: the store counts arrivals; the order of all ranks but the first is arbitrary."""
    store = _store(source)
    return int(store.add(f"{source.key}/servers", 1)) - 1


def _store(source: CollectiveSource) -> Store:
    host, _, port = source.store.rpartition(":")
    return connect_store(host, int(port), timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))


def _interface(source: CollectiveSource) -> str:
    """Local address that reaches the store."""
    host, _, port = source.store.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # Sends nothing: the kernel only chooses the route.
        address: str = probe.getsockname()[0]
        return address


def _broadcast(source: CollectiveSource, rank: int, memory: memoryview) -> None:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    group = gloo_group(
        prefix_store(source.key, _store(source)),
        rank=rank,
        size=1 + len(source.servers),
        interface=_interface(source),
        timeout=timeout,
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

    def __init__(self, *, process: str, store: str, emit: Callable[[OperationFailed], object]) -> None:
        self._process = process
        self._store = store
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
            _broadcast(source, 0, memory)
            return True

        try:
            what = f"broadcast of version {version}"
            wait(attempt, whom=servers, what=what, timeout_s=COLLECTIVE_TIMEOUT_S)
        except (RuntimeError, OSError) as error:
            message = f"version {version} was not broadcast to all of {servers}: {error}"
            self._emit(OperationFailed(message, operation="broadcast of weights", error=str(error)))

    def close(self) -> None:
        """Nothing to do: its threads end with their deadlines."""
