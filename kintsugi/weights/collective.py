"""A version broadcast to several servers at once: a group that exists for this version only.

gloo, in host memory. Everybody meets at the publishing rank's store. The library's waits can not be interrupted, so all
of it runs in a thread beside the process's work, with a deadline after which the servers take another source. A server
that does not come costs the others that deadline, and no more.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d

from kintsugi.errors import WorldError
from kintsugi.messages import Publish
from kintsugi.runtime import wait
from kintsugi.types import CollectiveSource, WeightManifest, WeightSource
from kintsugi.weights.publish import LaidOut

COLLECTIVE_TIMEOUT_S = 10.0
"""For all to come, and for each part to arrive."""
BROADCAST_BYTES = 16 << 20

_distributed: Any = torch._C._distributed_c10d


def receive(manifest: WeightManifest, source: CollectiveSource, into: memoryview) -> None:
    """Take part as a server; WorldError when the others did not come in time, or left."""
    members = (source.process, *source.servers)
    _in_time(
        lambda: _broadcast(source, 1 + _index_among(source), into[: manifest.size]),
        whom=", ".join(members),
        what=f"broadcast of version {manifest.version}",
    )


def _index_among(source: CollectiveSource) -> int:
    """The store counts who comes; every place but the first is as good as another."""
    store = _store(source)
    return int(store.add(f"{source.key}/servers", 1)) - 1


def _store(source: CollectiveSource) -> Any:
    host, _, port = source.store.rpartition(":")
    return _distributed.TCPStore(
        host,
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def _interface(source: CollectiveSource) -> str:
    """The address by which this process reaches the store."""
    host, _, port = source.store.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # Sends nothing: the kernel only chooses the way.
        address: str = probe.getsockname()[0]
        return address


def _broadcast(source: CollectiveSource, rank: int, memory: memoryview) -> None:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    prefixed = _distributed.PrefixStore(source.key, _store(source))
    group_options = _distributed.ProcessGroupGloo._Options()
    group_options._timeout = timeout
    group_options._threads = 1
    group_options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=_interface(source))]
    group = _distributed.ProcessGroupGloo(prefixed, rank, 1 + len(source.servers), group_options)
    options = _distributed.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timeout
    data = torch.frombuffer(memory, dtype=torch.uint8)
    for part in data.split(BROADCAST_BYTES):
        group.broadcast([part], options).wait()


def _in_time(work: Callable[[], None], *, whom: str, what: str) -> None:
    """In a thread that is left behind when it takes too long."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: who waits for it raises it.
            failures.append(error)

    thread = threading.Thread(target=run, name="broadcast", daemon=True)
    thread.start()

    def attempt(remaining_s: float) -> bool | None:
        thread.join(remaining_s)
        return None if thread.is_alive() else True

    wait(attempt, whom=whom, what=what, timeout_s=2 * COLLECTIVE_TIMEOUT_S)
    if failures:
        raise WorldError(f"{what} with {whom} failed: {failures[0]}") from failures[0]


class CollectiveOutlet:
    """The publishing side: one thread per version, which waits for the servers and sends."""

    transport = "collective"

    def __init__(self, *, process: str, store: str, say: Callable[[str], None]) -> None:
        self._process, self._store, self._say = process, store, say
        self._num_offered = 0

    def offer(self, laid_out: LaidOut, order: Publish) -> Sequence[WeightSource]:
        if not order.servers or laid_out.buffer is None:
            return ()
        self._num_offered += 1
        key = f"weights/{self._process}/{order.version}/{self._num_offered}"
        source = CollectiveSource(self._process, self._store, key, order.servers)
        memory = laid_out.buffer[: laid_out.manifest.size]
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
            self._say(f"version {version} was not broadcast to all of {servers}: {error}")

    def close(self) -> None:
        """Its threads end with their deadlines."""
