"""The other processes of `weight_sync.py`: a rank that publishes, and the agent that holds its memory.

    python -m benchmarks.weight_sync_sides

What each is comes as a JSON line on standard input; then one JSON line per order, answered by one on standard output.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from kintsugi.cluster.shared_memory import SegmentClient, SegmentServer
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.transformer import Transformer
from kintsugi.protocol.membership import AddressBook
from kintsugi.protocol.weights import Publish, Published
from kintsugi.telemetry.events import Alert, Note
from kintsugi.transport import Endpoint
from kintsugi.transport.store import StoreServer
from kintsugi.types import Peer
from kintsugi.weights.publish import Publisher
from kintsugi.weights.transports.collective import CollectiveTransport
from kintsugi.weights.transports.device import DeviceSlots

JOB, HOST = "weightsync", "host-0"
ROOT = Path(__file__).resolve().parents[1]
CAPACITY = 64 << 30


class Setup(msgspec.Struct, frozen=True):
    """What a side is told first."""

    role: str
    process: str
    public_key: bytes
    secret_key: bytes
    job: str
    """Of this benchmark: what lies on one host under one name must not meet another's."""
    model: dict[str, Any]
    device: str = "cpu"
    dtype: str = "float32"
    folder: str = ""


class Order(msgspec.Struct, frozen=True):
    """One publication; without, the peers of the address book."""

    publish: Publish | None = None
    peers: tuple[Peer, ...] = ()


class Told(msgspec.Struct, frozen=True):
    """What a side answers."""

    peers: tuple[Peer, ...] = ()
    published: Published | None = None
    publish_s: float = 0.0
    memcpy_s: float = 0.0
    error: str = ""


def endpoint_of(setup: Setup) -> Endpoint:
    return Endpoint(
        job=setup.job,
        process=setup.process,
        incarnation="a",
        public_key=setup.public_key,
        secret_key=setup.secret_key,
        bind="tcp://127.0.0.1:*",
    )


class Side:
    """A child process and the pipe to it."""

    def __init__(self, setup: Setup) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weight_sync_sides"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.told = self._ask(setup)

    def ask(self, order: Order) -> Told:
        return self._ask(order)

    def _ask(self, line: msgspec.Struct) -> Told:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(msgspec.json.encode(line) + b"\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"{type(line).__name__}: the other process ended with {self._child.wait()}")
        told = msgspec.json.decode(answer, type=Told)
        if told.error:
            raise RuntimeError(told.error)
        return told

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()  # Until it has ended; closes both pipes.


def random_weights(
    config: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    model = Transformer(ModelConfig(**config), dtype=dtype, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class CopyBaseline:
    """memcpy of as many bytes, between memory of the kind that weights lie in, in the same process and moment."""

    def __init__(self, size: int) -> None:
        self._source, self._target = (torch.ones(size, dtype=torch.uint8).numpy() for _ in "ab")

    def seconds(self) -> float:
        since = time.perf_counter()
        self._target[...] = self._source
        return time.perf_counter() - since


class PublishingRank:
    """Publishes a version after the other."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._setup = setup
        self._device = torch.device(setup.device)
        self._weights = random_weights(setup.model, device=self._device, dtype=getattr(torch, setup.dtype))
        size = sum(tensor.nbytes for tensor in self._weights.values())
        self._baseline = CopyBaseline(size) if self._device.type == "cpu" else None
        self.endpoint = endpoint_of(setup)
        self._store = StoreServer(keys=(setup.public_key, setup.secret_key))
        self._publisher: Publisher | None = None

    def carry_out(self, order: Order) -> Told:
        if order.publish is None:
            self.endpoint.set_book(AddressBook(1, order.peers))
            self._store.admit(lambda key: self.endpoint.role_of_key(key) is not None)
            segments = SegmentClient(f"kintsugi-{self._setup.job}-{HOST}")
            self._publisher = Publisher(
                process=self._setup.process,
                host=HOST,
                segments=segments,
                folder=Path(self._setup.folder),
                device=DeviceSlots(self._device, host=HOST) if self._device.type == "cuda" else None,
                transports=(
                    CollectiveTransport(
                        process=self._setup.process,
                        store=self._store.address,
                        keys=(self._setup.public_key, self._setup.secret_key),
                        emit=_print,
                    ),
                ),
            )
            return Told()
        assert self._publisher is not None
        # A step of training, as far as weights are concerned: every version is another than all before.
        next(iter(self._weights.values())).mul_(1.01)
        memcpy_s = 0.0
        if self._baseline is not None:
            memcpy_s = statistics.median(self._baseline.seconds() for _ in range(3))
        else:
            torch.cuda.synchronize(self._device)
        since = time.perf_counter()
        manifest, sources = self._publisher.publish(self._weights, order.publish)
        publish_s = time.perf_counter() - since
        return Told(published=Published(manifest, sources), publish_s=publish_s, memcpy_s=memcpy_s)

    @property
    def peers(self) -> tuple[Peer, ...]:
        return (self.endpoint.peer(host=HOST),)

    def turn(self) -> None:
        self.endpoint.poll(0.5)


class AgentSide:
    """Holds segments, as a node agent does."""

    def __init__(self, setup: Setup) -> None:
        self.endpoint = endpoint_of(setup)
        self._segments = SegmentServer(self.endpoint, job=setup.job, host=HOST, capacity=CAPACITY)

    def carry_out(self, order: Order) -> Told:
        self.endpoint.set_book(AddressBook(1, order.peers))
        return Told()

    @property
    def peers(self) -> tuple[Peer, ...]:
        return (self.endpoint.peer(host=HOST),)

    def turn(self) -> None:
        self.endpoint.poll(0.5)


def _print(event: Alert | Note) -> None:
    print(event.message, file=sys.stderr, flush=True)


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Until standard input ends."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    side: AgentSide | PublishingRank = AgentSide(setup) if setup.role == "agent" else PublishingRank(setup)
    ended = False

    def ordered() -> None:
        nonlocal ended
        line = os.read(0, 1 << 20)
        while line and not line.endswith(b"\n"):
            line += os.read(0, 1 << 20)
        if not line:
            ended = True
            return
        try:
            _tell(side.carry_out(msgspec.json.decode(line, type=Order)))
        except Exception as error:  # noqa: BLE001 - told to who asked, who decides.
            _tell(Told(error=f"{type(error).__name__}: {error}"))

    _tell(Told(peers=side.peers))
    side.endpoint.watch(0, ordered)
    while not ended:
        side.turn()


if __name__ == "__main__":
    main()
