"""New weights, and a state, between hosts: the bulk channel against raw TCP in the same run.

    python benchmarks/weight_sync.py --between-hosts [--megabytes 256] [--rounds 7] [--chain 4] [--json FILE]

Hosts are network namespaces joined by a switch (root). On the first are a rank that publishes and an agent, on every
other one an agent and a server. Every round measures, one after the other:

    tcp            plain TCP, sendfile to recv_into, one connection, as many bytes
    encrypted      a version of the weights by TLS 1.3: fetched by the server's agent into its host's memory, verified
    authenticated  the same with a code per chunk
    end to end     publish, fetch, verify, swap into the model's parameters
    state          a training state of as many bytes from the rank's memory into another process's, verified

`--chain N`: N hosts fetch one version, each from the one before, against one host alone. Links are limited to `LINK`,
so that not the CPU, which all hosts share here, is measured.

`--deltas SHARE ...`: one host that holds the version before, over links of `LINK`; weights in bfloat16 of which this
share of elements changes per version, spread evenly: as a difference, against the whole version in the same round.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.cluster.namespaces import HostNamespaces, enter
from kintsugi.cluster.shared_memory import OwnSegments, SegmentClient, SegmentServer
from kintsugi.cluster.weight_holder import WeightHolder
from kintsugi.process.loop_calls import LoopCalls
from kintsugi.protocol.bulk import BulkMode, OpenBulk
from kintsugi.protocol.membership import AddressBook
from kintsugi.protocol.recovery import StateFetched
from kintsugi.protocol.weights import (
    FetchWeights,
    HoldDelta,
    HoldWeights,
    Publish,
    Published,
    UploadWeights,
)
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.digests import piece_digest
from kintsugi.transport import Delivery, Endpoint, Reply, new_key_pair
from kintsugi.types import Peer, StreamSource
from kintsugi.weights.delta_choice import DeltaChoice
from kintsugi.weights.fetch import Fetcher
from kintsugi.weights.manifest import tensor_bytes
from kintsugi.weights.publish import Publisher
from kintsugi.weights.transports.relay import RelayTransport
from kintsugi.weights.transports.stream import StreamFetch

LINK = "1gbit"
TC = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf")
WARM_ROUNDS = 2
CAPACITY = 64 << 30
MODES: tuple[BulkMode, ...] = ("encrypted", "authenticated")
RANK, STATE = "model-0", "state"


class Setup(msgspec.Struct, frozen=True):
    """Identity of a process of the benchmark."""

    process: str
    host: str
    address: str
    network: str
    job: str
    public_key: bytes
    secret_key: bytes
    megabytes: int
    mode: BulkMode
    changes: float = -1.0
    """Share of the elements that change per version of weights in bfloat16, which agents may fetch as a difference. If
    negative: weights in float32 that are fetched whole."""


class Order(msgspec.Struct, frozen=True):
    """One thing to do: take peers, publish, fetch a version, a state, or raw bytes."""

    peers: tuple[Peer, ...] = ()
    publish: Publish | None = None
    fetch: Published | None = None
    state: StateFetched | None = None
    """State to fetch, as the rank offers it."""
    raw: str = ""
    """Address of the rank's raw sender."""
    size: int = 0


class Told(msgspec.Struct, frozen=True):
    peers: tuple[Peer, ...] = ()
    raw: str = ""
    published: Published | None = None
    state: StateFetched | None = None
    seconds: dict[str, float] = {}
    error: str = ""


class Whole(DeltaChoice):
    """Never asks for a difference."""

    def is_worth_asking(self, size: int) -> bool:
        return False


class Difference(DeltaChoice):
    """Asks for one version in two as a difference, whatever it costs, so that both are measured in turn."""

    num_asked = 0

    def is_worth_asking(self, size: int) -> bool:
        self.num_asked += 1
        return self.num_asked % 2 == 0

    def pays(self, size: int, num_bytes: int) -> bool:
        return True


class Uploaded:
    """Answer to an upload, waited for by the thread that uploads."""

    done = True

    def __init__(self, call: Callable[[], Reply]) -> None:
        self._call = call

    def result(self) -> Reply:
        return self._call()


class Process:
    """A process of the benchmark: endpoint, bulk endpoint, and what its role adds."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.endpoint = Endpoint(
            job=setup.job,
            process=setup.process,
            incarnation="a",
            public_key=setup.public_key,
            secret_key=setup.secret_key,
            bind=f"tcp://{setup.address}:*",
        )
        self.calls = LoopCalls(self.endpoint)
        self.bulk = BulkEndpoint(
            process=setup.process,
            mode=setup.mode,
            peer_of=self.endpoint.peers.get,
            call=self.calls.call,
            interface=setup.address,
            emit=lambda event: print(event, file=sys.stderr, flush=True),
        )

    @property
    def segments(self) -> str:
        return f"kintsugi-{self.setup.job}-{self.setup.host}"

    def answer(self, delivery: Delivery) -> None:
        if isinstance(delivery.body, OpenBulk):
            opened = self.bulk.server.open_session(delivery.peer, delivery.body.certificate)
            self.endpoint.reply(delivery, opened)

    def carry_out(self, order: Order) -> Told:
        raise NotImplementedError

    def begin(self) -> Told:
        return Told(peers=(self.endpoint.peer(host=self.setup.host),))


class AgentProcess(Process):
    def begin(self) -> Told:
        server = SegmentServer(self.endpoint, job=self.setup.job, host=self.setup.host, capacity=CAPACITY)
        self._holder = WeightHolder(
            self.endpoint,
            self.bulk,
            self.calls,
            process=self.setup.process,
            segments=OwnSegments(server),
            emit=lambda event: print(event, file=sys.stderr, flush=True),
            choice=Whole() if self.setup.changes < 0 else Difference(),
        )
        return super().begin()

    def carry_out(self, order: Order) -> Told:
        """Tell what was fetched so far."""
        counters = COUNTERS.snapshot().counters
        names = ("weights.deltas", "weights.delta_bytes", "bulk.bytes_fetched")
        return Told(seconds={name: float(counters.get(name, 0)) for name in names})

    def answer(self, delivery: Delivery) -> None:
        if isinstance(delivery.body, UploadWeights | HoldWeights | HoldDelta):
            self._holder.handle(delivery)
        else:
            super().answer(delivery)


class RankProcess(Process):
    """Publishes weights, offers a state, and sends raw bytes to whatever connects."""

    def begin(self) -> Told:
        from kintsugi.training.peer_replication import describe_state, state_export
        from kintsugi.training.snapshots import CopyCounters, state_fetched

        torch.manual_seed(0)
        count = self.setup.megabytes * 250_000 // 16
        self._weights = {f"layer.{index:02}": torch.randn(count) for index in range(16)}
        if self.setup.changes >= 0:
            self._weights = {
                f"layer.{index:02}": torch.randn(2 * count).to(torch.bfloat16) for index in range(16)
            }
        snapshot = {name: tensor.clone() for name, tensor in self._weights.items()}
        manifest = describe_state(snapshot, step=1)
        offer = self.bulk.server.offer(STATE, state_export(manifest, snapshot))
        self._state = msgspec.structs.replace(state_fetched(manifest, CopyCounters(1)), offer=offer)
        self._raw = socket.create_server((self.setup.address, 0))
        self._memory = os.memfd_create("raw")
        os.write(self._memory, bytes(1))
        os.ftruncate(self._memory, self.setup.megabytes * 1_000_000)
        for start in range(0, self.setup.megabytes * 1_000_000, 1 << 20):
            os.pwrite(self._memory, os.urandom(1024) * 1024, start)
        os.ftruncate(self._memory, self.setup.megabytes * 1_000_000)
        threading.Thread(target=self._send_raw, daemon=True).start()
        told = super().begin()
        return Told(told.peers, raw=f"{self.setup.address}:{self._raw.getsockname()[1]}", state=self._state)

    def _send_raw(self) -> None:
        while True:
            connection, _ = self._raw.accept()
            with connection:
                offset, size = 0, os.fstat(self._memory).st_size
                while offset < size:
                    offset += os.sendfile(connection.fileno(), self._memory, offset, size - offset)

    def answer(self, delivery: Delivery) -> None:
        if isinstance(delivery.body, FetchWeights):
            self.endpoint.reply(delivery, self._publisher.answer(delivery.body))
        else:
            super().answer(delivery)

    def carry_out(self, order: Order) -> Told:
        if order.publish is None:
            relay = RelayTransport(
                lambda process, body, s: Uploaded(lambda: self.calls.call(process, body, s)),
                process=RANK,
                agent="agent-0",
                emit=lambda event: print(event, file=sys.stderr, flush=True),
            )
            self._publisher = Publisher(
                process=RANK,
                host=self.setup.host,
                segments=SegmentClient(self.segments),
                bulk=self.bulk.server,
                transports=(relay,),
            )
            return Told()
        # A step of training, as far as weights are concerned: every version is another than all before.
        if self.setup.changes < 0:
            next(iter(self._weights.values())).mul_(1.01)
        else:
            for tensor in self._weights.values():
                changed = torch.rand(tensor.shape) < self.setup.changes
                tensor.view(torch.int16)[changed] ^= 1  # By one unit in the last place.
        since = time.perf_counter()
        published = Published(*self._publisher.publish(self._weights, order.publish))
        return Told(published=published, seconds={"publish": time.perf_counter() - since})


class ServerProcess(Process):
    """Fetches; its parameters are swapped as a server's are."""

    def begin(self) -> Told:
        self._parameters: dict[str, torch.Tensor] = {}
        self._target = memoryview(bytearray(self.setup.megabytes * 1_000_000))
        self._state: dict[str, torch.Tensor] = {}
        agent = self.setup.process.replace("server", "agent")
        stream = StreamFetch(
            self.setup.process,
            self.calls.call,
            self.bulk.client,
            agent=agent,
            emit=lambda event: print(event, file=sys.stderr, flush=True),
        )
        self._fetcher = Fetcher(process=self.setup.process, host=self.setup.host, stream=stream)
        return super().begin()

    def carry_out(self, order: Order) -> Told:
        if order.raw:
            return Told(seconds={"tcp": self._receive_raw(order.raw)})
        if order.state is not None:
            return Told(seconds={"state": self._fetch_state(order.state)})
        if order.fetch is None:
            return Told()
        source = order.fetch.sources[0]
        assert isinstance(source, StreamSource) and source.owners
        since = time.perf_counter()
        with closing(SegmentClient(self.segments)) as segments:
            fetched = self._fetcher.fetch(order.fetch.manifest, [source], segments=segments)
        fetched_at = time.perf_counter()
        assert not fetched.failures, f"it fetched for itself: {fetched.failures}"
        for name, tensor in fetched.tensors().items():
            self._parameters.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        swapped_at = time.perf_counter()
        fetched.release()
        for piece in order.fetch.manifest.pieces:
            data = tensor_bytes(self._parameters[piece.name])
            assert piece_digest(data) == piece.digest, f"{piece.name} is not what was published"
        return Told(seconds={"fetch": fetched_at - since, "swap": swapped_at - fetched_at})

    def _receive_raw(self, address: str) -> float:
        host, _, port = address.rpartition(":")
        since, filled = time.perf_counter(), 0
        with socket.create_connection((host, int(port))) as connection:
            while filled < len(self._target):
                filled += connection.recv_into(
                    self._target[filled : filled + (1 << 20)], 0, socket.MSG_WAITALL
                )
        return time.perf_counter() - since

    def _fetch_state(self, state: StateFetched) -> float:
        from kintsugi.training.state_transfer import StateFetcher

        since = time.perf_counter()
        fetcher = StateFetcher(self.bulk.client, lambda process, body: Reply(state), check=lambda: None)
        fetched, _ = fetcher.open(1, replica=RANK)
        for piece in state.manifest.pieces:
            if piece.name not in self._state:
                self._state[piece.name] = torch.zeros(piece.shape)
        fetched.read(self._state)
        return time.perf_counter() - since


def side() -> None:
    """Body of a process of the benchmark, until standard input ends."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    enter([setup.network])
    torch.set_num_threads(1)
    kinds = {"agent": AgentProcess, "model": RankProcess, "server": ServerProcess}
    process = kinds[setup.process.partition("-")[0]](setup)
    tell(process.begin())

    def read() -> None:
        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(0)
        order = msgspec.json.decode(line, type=Order)
        if order.peers:
            process.endpoint.set_book(AddressBook(1, order.peers))
        # In a thread: the loop answers other processes meanwhile.
        threading.Thread(target=work, args=(order,), daemon=True).start()

    def work(order: Order) -> None:
        try:
            tell(process.carry_out(order))
        except NotImplementedError:
            tell(Told())
        except Exception as error:  # noqa: BLE001 - told to the benchmark, which ends.
            tell(Told(error=f"{type(error).__name__}: {error}"))

    process.endpoint.watch(0, read)
    while True:
        for delivery in process.endpoint.poll(0.5):
            process.answer(delivery)


def tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


class Side:
    """A process of the benchmark and the pipes to it."""

    def __init__(self, setup: Setup) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weight_sync_hosts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.told = self.ask(setup)

    def ask(self, line: Setup | Order) -> Told:
        self.send(line)
        return self.take()

    def send(self, line: Setup | Order) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(line) + b"\n")
        self._child.stdin.flush()

    def take(self) -> Told:
        assert self._child.stdout is not None
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"a process of the benchmark ended with {self._child.wait()}")
        told = msgspec.json.decode(answer, type=Told)
        if told.error:
            raise RuntimeError(told.error)
        return told

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


class Between:
    """Hosts with agents and servers, and the rank on the first."""

    def __init__(
        self, places: Sequence[HostNamespaces], *, megabytes: int, mode: BulkMode, changes: float = -1.0
    ) -> None:
        self._resources = ExitStack()
        job, self.version, sides = f"bench{uuid4().hex[:8]}", 0, dict[str, Side]()

        def start(process: str, place: HostNamespaces) -> None:
            public_key, secret_key = new_key_pair()
            network = next(path for path in place.namespaces if path.endswith("/net"))
            sides[process] = Side(
                Setup(
                    process,
                    place.name,
                    place.address,
                    network,
                    job,
                    public_key,
                    secret_key,
                    megabytes,
                    mode,
                    changes,
                )
            )
            self._resources.callback(sides[process].close)

        for index, place in enumerate(places):
            start(f"agent-{index}", place)
        start(RANK, places[0])
        for index, place in enumerate(places[1:], start=1):
            start(f"server-{index}", place)
        peers = tuple(peer for each in sides.values() for peer in each.told.peers)
        for each in sides.values():
            each.ask(Order(peers=peers))
        self.rank, self.agents = sides[RANK], [sides[f"agent-{index}"] for index in range(len(places))]
        self.servers = [sides[f"server-{index}"] for index in range(1, len(places))]

    def publish(self, *, hosts: int) -> Told:
        self.version += 1
        chain = tuple(f"agent-{index}" for index in range(1, hosts + 1))
        order = Publish(
            self.version, self.version, transports=("stream",), meta_server="agent-0", chain=chain
        )
        return self.rank.ask(Order(publish=order))

    def measure(self, *, hosts: int = 1) -> dict[str, float]:
        """Seconds of each part of one version's way to this many hosts."""
        told = self.publish(hosts=hosts)
        since = time.perf_counter()
        for server in self.servers[:hosts]:
            server.send(Order(fetch=told.published))
        found = [server.take().seconds for server in self.servers[:hosts]]
        fetch_s = max(each["fetch"] for each in found)
        swap_s = max(each["swap"] for each in found)
        return {
            "publish": told.seconds["publish"],
            "fetch": fetch_s,
            "swap": swap_s,
            "end_to_end": told.seconds["publish"] + fetch_s + swap_s,
            "all": time.perf_counter() - since,
        }

    def raw(self) -> float:
        return self.servers[0].ask(Order(raw=self.rank.told.raw)).seconds["tcp"]

    def state(self) -> float:
        return self.servers[0].ask(Order(state=self.rank.told.state)).seconds["state"]

    def close(self) -> None:
        self._resources.close()


def run(*, megabytes: int, rounds: int, chain: int) -> dict[str, Any]:
    from kintsugi.lab.testbed.hosts import Hosts

    size = megabytes * 1_000_000 // 64 * 64
    with tempfile.TemporaryDirectory(prefix="weight_sync-") as folder, ExitStack() as resources:
        hosts = resources.enter_context(closing(Hosts(chain + 1, folder=Path(folder))))
        found: dict[str, Any] = {"bytes": size, "rounds": rounds, "load_before": os.getloadavg()[0]}
        modes = {
            mode: resources.enter_context(closing(Between(hosts.places[:2], megabytes=megabytes, mode=mode)))
            for mode in MODES
        }
        seconds: dict[str, list[float]] = {}
        for number in range(WARM_ROUNDS + rounds):
            got = {"tcp": modes["encrypted"].raw()}
            for mode, between in modes.items():
                version = between.measure()
                got |= {f"{mode}, {part}": version[part] for part in ("publish", "fetch", "end_to_end")}
                got[f"{mode}, state"] = between.state()
            if number >= WARM_ROUNDS:
                for part, value in got.items():
                    seconds.setdefault(part, []).append(value)
        found["gigabytes_per_s"] = {
            part: round(size / 1e9 / statistics.median(values), 2) for part, values in seconds.items()
        }
        found["share_of_tcp"] = {
            part: round(
                statistics.median(tcp / each for tcp, each in zip(seconds["tcp"], values, strict=True)), 2
            )
            for part, values in seconds.items()
        }
        found["load_after"] = os.getloadavg()[0]
        if chain > 1:
            for between in modes.values():
                between.close()
            found["chain"] = run_chain(hosts.places, chain=chain)
    return found


def run_chain(places: Sequence[HostNamespaces], *, chain: int, megabytes: int = 192) -> dict[str, Any]:
    """Seconds for one host and for a chain of them, over links of a limited rate."""
    limit_links(places)
    with closing(Between(places, megabytes=megabytes, mode="authenticated")) as between:
        between.measure(hosts=chain)
        one = statistics.median(between.measure(hosts=1)["fetch"] for _ in range(3))
        many = statistics.median(between.measure(hosts=chain)["fetch"] for _ in range(3))
    return {"hosts": chain, "link": LINK, "bytes": megabytes * 1_000_000, "one_s": one, "chain_s": many}


def limit_links(places: Sequence[HostNamespaces]) -> None:
    for place in places:
        network = next(path for path in place.namespaces if path.endswith("/net"))
        subprocess.run(
            ["nsenter", f"--net={network}", *TC, "rate", LINK, "burst", "256kb", "latency", "50ms"],
            check=True,
        )


def run_deltas(*, megabytes: int, rounds: int, shares: Sequence[float]) -> dict[str, Any]:
    """Seconds to fetch a version as a difference and whole, for each share of changed elements."""
    from kintsugi.lab.testbed.hosts import Hosts

    found: dict[str, Any] = {"link": LINK, "bytes": megabytes * 1_000_000, "rounds": rounds, "deltas": []}
    with tempfile.TemporaryDirectory(prefix="weight_sync-") as folder, ExitStack() as resources:
        hosts = resources.enter_context(closing(Hosts(2, folder=Path(folder))))
        limit_links(hosts.places)
        for share in shares:
            with closing(
                Between(hosts.places, megabytes=megabytes, mode="authenticated", changes=share)
            ) as between:
                between.measure()
                seconds: dict[str, list[float]] = {"whole": [], "difference": []}
                sizes = []
                for _ in range(2 * rounds + 2):
                    before = between.agents[1].ask(Order()).seconds
                    fetch_s = between.measure()["fetch"]
                    after = between.agents[1].ask(Order()).seconds
                    is_difference = after["weights.deltas"] > before["weights.deltas"]
                    seconds["difference" if is_difference else "whole"].append(fetch_s)
                    if is_difference:
                        sizes.append(after["weights.delta_bytes"] - before["weights.delta_bytes"])
            found["deltas"].append(
                {
                    "changed": share,
                    "difference_bytes": statistics.median(sizes),
                    "whole_s": statistics.median(seconds["whole"][1:]),
                    "difference_s": statistics.median(seconds["difference"][1:]),
                    "load": os.getloadavg()[0],
                }
            )
    return found


def show_deltas(found: Mapping[str, Any]) -> None:
    for each in found["deltas"]:
        print(
            f"{found['bytes'] / 1e6:.0f} MB of bfloat16 over {found['link']}, {each['changed']:.1%} of the elements "
            f"change: difference {each['difference_bytes'] / found['bytes']:.1%} of the bytes, "
            f"{each['difference_s']:.2f} s, whole {each['whole_s']:.2f} s, load {each['load']:.1f}"
        )


def show(found: Mapping[str, Any]) -> None:
    print(
        f"{found['bytes'] / 1e6:.0f} MB between two namespaces, medians of {found['rounds']} rounds, load "
        f"{found['load_before']:.1f} to {found['load_after']:.1f}: GB/s (share of raw TCP)"
    )
    for part, speed in found["gigabytes_per_s"].items():
        print(f"  {part:28}{speed:6.2f} ({found['share_of_tcp'][part]:.0%})")
    if chain := found.get("chain"):
        ratio = chain["chain_s"] / chain["one_s"]
        print(
            f"  {chain['bytes'] / 1e6:.0f} MB over links of {chain['link']}: one host {chain['one_s']:.2f} s, "
            f"a chain of {chain['hosts']} {chain['chain_s']:.2f} s ({ratio:.2f} ×)"
        )


if __name__ == "__main__":
    side()
