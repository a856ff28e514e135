"""Simulated workers without state of their own: rollout workers, the generation manager, generation servers.

They answer as the real ones do, without computing: the contents of a sample are a hash of its key and of the weights
that it was drawn with, so that training on samples of the wrong weights shows in every later state.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import xxhash

from kintsugi.config.schema import LEARN_ROWS
from kintsugi.errors import Fault
from kintsugi.process.membership import HEARTBEAT_S, REGISTER_DEADLINE_S
from kintsugi.protocol.generation import Generate, Generated, Retire
from kintsugi.protocol.membership import AddressBook, Heartbeat, Ok, Ping, Register, Registered, Shutdown
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import Drop, EpisodesDone, FetchSamples, RunEpisodes, SamplesFetched
from kintsugi.protocol.weights import FetchWeights, LoadWeights, WeightsFetched, WeightsLoaded
from kintsugi.simulation.network import SimulatedProcess
from kintsugi.transport.rpc import Delivery
from kintsugi.types import (
    ChildReport,
    Completion,
    FinishReason,
    Peer,
    Progress,
    Role,
    SampleMeta,
    Trajectory,
    Wait,
    kind_of,
    role_of,
    sample_key,
    ticket_of,
)

MANAGER = "manager-0"
FETCH_DEADLINE_S = 10.0
UNSCORABLE = 40
"""One sample in so many cannot be scored; with other weights it may be another one of its group."""
DEMONSTRATED = frozenset({"warmup", *LEARN_ROWS})
"""Stages that train rows of the data."""


def drawn_digest(key: str, weights: str) -> str:
    """Return the contents of a sample that is drawn with these weights."""
    return xxhash.xxh3_64_hexdigest(f"{key} {weights}".encode())


class SimulatedWorker(SimulatedProcess):
    """A process that registers with the master, again for every new term, and then sends heartbeats."""

    def __init__(self, *arguments: Any, master: Peer, pid: int, **names: Any) -> None:
        super().__init__(*arguments, **names)
        self.pid = pid
        self.endpoint.admit(master)
        self.capabilities: dict[str, str] = {}
        self.counters: dict[str, int] = {}
        self.waits: dict[str, Wait] = {}
        self._registering = self.registered = False

    def boot(self, delay_s: float) -> None:
        """Start after a delay."""
        self.after(delay_s, self._beat)

    def children(self) -> tuple[ChildReport, ...]:
        return ()

    def _beat(self) -> None:
        self.tick()
        self.after(HEARTBEAT_S, self._beat)

    def tick(self) -> None:
        endpoint = self.endpoint
        if endpoint.seen_term > endpoint.term:
            endpoint.term = endpoint.seen_term
            self.registered = False
        if self.registered:
            progress, waits = Progress(dict(self.counters)), tuple(self.waits.values())
            endpoint.send("master-0", Heartbeat(progress, 0.0, waits, endpoint.directory.number))
        elif not self._registering:
            self._registering = True
            body = Register(self.peer, self.role, self.pid, self.capabilities, self.children())
            endpoint.request(
                "master-0", body, deadline_s=REGISTER_DEADLINE_S, on_done=self._registration_ended
            )

    def _registration_ended(self, answer: Body | None, fault: Fault | None) -> None:
        self._registering = False
        if isinstance(answer, Registered):
            if answer.term >= self.endpoint.term:
                self.endpoint.term = answer.term
                self.endpoint.seen_term = max(self.endpoint.seen_term, answer.term)
                self.registered = True
        elif fault is not None and fault.kind == "RefusedError":
            self.end(1)  # It was replaced, and is unknown to the master.

    def handle(self, delivery: Delivery) -> None:
        body = delivery.body
        self.world.note(self.name, f"{kind_of(body)} from {delivery.envelope.sender}")
        if self.endpoint.seen_term > self.endpoint.term:
            self.after(0.25 * self.world.random.random(), self.tick)
        if isinstance(body, AddressBook):
            if self.endpoint.set_book(body):
                self.follow_book()
        elif isinstance(body, Shutdown):
            self.end(0)
        elif isinstance(body, Ping):
            self.endpoint.reply(delivery, Ok())
        else:
            self.serve(delivery, body)

    def follow_book(self) -> None:
        """React to a changed address book."""

    def serve(self, delivery: Delivery, body: Body) -> None:
        """Serve a request of this kind of process."""
        raise NotImplementedError

    def count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def wait_begins(self, name: str, *, whom: str, what: str, timeout_s: float) -> None:
        now = self.world.now
        self.waits[name] = Wait(whom, what, now, now + timeout_s)

    def wait_ends(self, name: str) -> None:
        self.waits.pop(name, None)


def _order(request: RunEpisodes) -> tuple[str, int]:
    """Return a key under which equal requests share one answer: for training regardless of the weights, for evaluation
    per version."""
    return request.ticket.id, request.version if request.split == "eval" else -1 - request.lineage


class SimulatedRollout(SimulatedWorker):
    """Runs groups: requests completions from the manager, scores them, keeps the trajectories."""

    def __init__(self, *arguments: Any, **names: Any) -> None:
        super().__init__(*arguments, **names)
        self.kept: dict[str, dict[str, str]] = {}
        """Ticket → sample key → contents."""
        self._answers: dict[tuple[str, int], EpisodesDone] = {}
        """Request → its answer, as long as the samples are kept."""
        self._running: dict[tuple[str, int], list[Delivery]] = {}
        """Request → deliveries to answer: a new master requests running groups again."""
        self._deadlines: dict[tuple[str, int], float] = {}

    def serve(self, delivery: Delivery, body: Body) -> None:
        match body:
            case RunEpisodes():
                self._run(delivery, body)
            case FetchSamples(keys=keys):
                self._hand_over(delivery, keys)
            case Drop(tickets=tickets):
                self._drop(tickets)
            case _:
                self.endpoint.fail(delivery, "RefusedError", f"a rollout worker takes no {kind_of(body)}")

    def _drop(self, tickets: tuple[str, ...]) -> None:
        for ticket in tickets:
            self.kept.pop(ticket, None)
        self._answers = {name: done for name, done in self._answers.items() if name[0] in self.kept}
        for name in [name for name in self._running if name[0] in tickets]:
            for delivery in self._running.pop(name):
                self.endpoint.fail(delivery, "RefusedError", f"{name[0]} was dropped")

    def _run(self, delivery: Delivery, request: RunEpisodes) -> None:
        name = _order(request)
        if name in self._answers:
            self.endpoint.reply(delivery, self._answers[name])
            return
        self._deadlines[name] = self.world.now + request.timeout_s
        if name in self._running:
            self._running[name].append(delivery)
            return
        self._drop((request.ticket.id,))  # As the real worker: a group has one request at a time.
        self._running[name] = [delivery]
        if request.split == "train" and request.ticket.stage in DEMONSTRATED:
            self.after(self.world.random.uniform(0.001, 0.02), self._done, request, -1, "demonstrated")
        else:
            self._generate(request)

    def _generate(self, request: RunEpisodes) -> None:
        """Request completions from the manager; without a manager, a group waits for the next one."""
        name = _order(request)
        timeout_s = self._deadlines[name] - self.world.now
        body = Generate(request.ticket.id, 0, b"", request.sampling, request.version, timeout_s=timeout_s)

        def generated(answer: Body | None, fault: Fault | None) -> None:
            if name not in self._running:
                return
            if isinstance(answer, Generated):
                drawn = answer.completions[0]
                version, weights = int.from_bytes(drawn.versions, "little"), drawn.tokens.decode()
                self.count("completions")
                self.after(self.world.random.uniform(0.001, 0.02), self._done, request, version, weights)
                return
            assert fault is not None
            is_gone = fault.kind in ("ProcessDied", "DeadlineExceeded") or fault.process == MANAGER
            if is_gone and self.world.now < self._deadlines[name]:
                self.after(0.1, self._generate_again, request)
                return
            for delivery in self._running.pop(name):
                self.endpoint.fail(delivery, fault.kind, fault.message, cause=fault)

        self.endpoint.request(MANAGER, body, deadline_s=timeout_s, on_done=generated)

    def _generate_again(self, request: RunEpisodes) -> None:
        if _order(request) in self._running:
            self._generate(request)

    def _done(self, request: RunEpisodes, version: int, weights: str) -> None:
        ticket, metas = request.ticket, []
        name = _order(request)
        deliveries = self._running.pop(name, None)
        if deliveries is None:
            return
        kept: dict[str, str] = {}
        quarantined: dict[str, str] = {}
        for index in range(ticket.num_samples):
            key = sample_key(ticket.id, index)
            digest = drawn_digest(key, weights)
            if request.split == "train" and version >= 0 and int(digest, 16) % UNSCORABLE == 0:
                quarantined[key] = "its reward is not a number"
                continue
            kept[key] = digest
            chance = xxhash.xxh3_64_intdigest(key.encode())
            reward, length = float(chance & 1), 2 + (chance >> 8) % 19
            components = {"reward": reward} if version >= 0 else {}
            metas.append(
                SampleMeta(
                    key,
                    ticket.id,
                    length + 4,
                    length,
                    reward,
                    components,
                    FinishReason.EOS,
                    version,
                    self.name,
                    digest,
                )
            )
        done = EpisodesDone(ticket.id, tuple(metas), quarantined)
        if request.split == "train" and kept:
            self.kept[ticket.id], self._answers[name] = kept, done
        for delivery in deliveries:
            self.endpoint.reply(delivery, done)

    def _hand_over(self, delivery: Delivery, keys: tuple[str, ...]) -> None:
        samples = []
        for key in keys:
            says = self.kept.get(ticket_of(key), {}).get(key)
            if says is None:
                self.endpoint.fail(delivery, "RefusedError", f"{self.name} does not keep sample {key}")
                return
            samples.append(Trajectory(key, says.encode(), b"", b"", b"", FinishReason.EOS))
        self.endpoint.reply(delivery, SamplesFetched(tuple(samples)))


class SimulatedManager(SimulatedWorker):
    """One address for all servers: sends groups to servers with the current weights, and again if one dies."""

    def __init__(self, *arguments: Any, **names: Any) -> None:
        super().__init__(*arguments, **names)
        self._servers: dict[str, str] = {}
        self._loaded: dict[str, tuple[int, str]] = {}
        self._loading: set[str] = set()
        self._weights: LoadWeights | None = None
        self._latest_load = 0, 0
        """Term and number of the last order to load weights; a repetition of an earlier one comes too late."""
        self._asked: list[Delivery] = []
        self._waiting: deque[tuple[Delivery, Generate]] = deque()
        self._sent: dict[str, dict[int, tuple[Delivery, Generate]]] = {}
        """Server → number → request without an answer."""
        self._retired: set[tuple[str, str]] = set()
        self._turn = 0

    @staticmethod
    def _order_of(delivery: Delivery) -> tuple[int, int]:
        return delivery.envelope.term, delivery.envelope.sequence

    def follow_book(self) -> None:
        peers = self.endpoint.directory.peers
        listed = {
            name: peer.incarnation
            for name, peer in peers.items()
            if role_of(name) is Role.SERVER and peer.address and (name, peer.incarnation) not in self._retired
        }
        for name, incarnation in self._servers.items():
            if listed.get(name) != incarnation:
                self._loaded.pop(name, None)
                self._loading.discard(name)
        self._servers = listed
        self._act()

    def serve(self, delivery: Delivery, body: Body) -> None:
        match body:
            case Generate():
                self._waiting.append((delivery, body))
            case LoadWeights() if self._order_of(delivery) < self._latest_load:
                self.endpoint.fail(delivery, "RefusedError", "later weights have been ordered since")
            case LoadWeights():
                self._latest_load = self._order_of(delivery)
                if self._weights is None or self._weights.manifest != body.manifest:
                    for asked in self._asked:
                        self.endpoint.fail(asked, "RefusedError", "superseded by another version")
                    self._asked = []
                self._weights = body
                self._asked.append(delivery)
            case Retire():
                self._retired.add((body.process, body.incarnation))
                if self._servers.get(body.process) == body.incarnation:
                    self._waiting += self._sent.pop(body.process, {}).values()
                    self.follow_book()
                self.endpoint.reply(delivery, Ok())
            case _:
                self.endpoint.fail(delivery, "RefusedError", f"a manager takes no {kind_of(body)}")
        self._act()

    def _act(self) -> None:
        self._send_weights()
        weights = self._weights
        if weights is None:
            return
        manifest = weights.manifest
        ready = [
            name for name in self._servers if self._loaded.get(name) == (manifest.version, manifest.digest)
        ]
        if ready and len(ready) == len(self._servers):
            loaded = WeightsLoaded(manifest.version, manifest.digest, tuple(sorted(ready)))
            for asked in self._asked:
                self.endpoint.reply(asked, loaded)
            self._asked = []
        waiting, self._waiting = self._waiting, deque()
        for delivery, request in waiting:
            if ready and manifest.version >= request.version:
                self._turn += 1
                self._send_on(delivery, request, ready[self._turn % len(ready)])
            else:
                self._waiting.append((delivery, request))

    def _send_weights(self) -> None:
        weights = self._weights
        if weights is None:
            return
        wanted = (weights.manifest.version, weights.manifest.digest)
        for name, incarnation in list(self._servers.items()):
            if self._loaded.get(name) == wanted or name in self._loading:
                continue
            self._loading.add(name)

            def loaded(
                answer: Body | None, fault: Fault | None, name: str = name, incarnation: str = incarnation
            ) -> None:
                if self._servers.get(name) != incarnation:
                    return
                self._loading.discard(name)
                if isinstance(answer, WeightsLoaded):
                    self._loaded[name] = (answer.version, answer.digest)
                    self._act()
                else:
                    self.after(0.1, self._act)

            self.endpoint.request(name, weights, deadline_s=FETCH_DEADLINE_S, on_done=loaded)

    def _send_on(self, delivery: Delivery, request: Generate, server: str) -> None:
        number = self._turn
        self._sent.setdefault(server, {})[number] = (delivery, request)

        def answered(answer: Body | None, fault: Fault | None) -> None:
            if self._sent.get(server, {}).pop(number, None) is None:
                return  # It was moved to another server.
            if isinstance(answer, Generated):
                self.endpoint.reply(delivery, answer)
            else:
                self._waiting.append((delivery, request))
                self.after(0.05, self._act)

        self.endpoint.request(server, request, deadline_s=request.timeout_s, on_done=answered)


class SimulatedServer(SimulatedWorker):
    """Holds one version of the weights and draws samples with it."""

    def __init__(self, *arguments: Any, **names: Any) -> None:
        super().__init__(*arguments, **names)
        self._version, self._digest = -1, ""
        self._loads: deque[tuple[Delivery, LoadWeights]] = deque()
        """Loads, one after the other, the first of them in progress: a real server does nothing else meanwhile."""

    def serve(self, delivery: Delivery, body: Body) -> None:
        match body:
            case LoadWeights():
                self._loads.append((delivery, body))
                if len(self._loads) == 1:
                    self._load_next()
            case Generate() if self._version >= body.version:
                drawn = Completion(
                    0, self._digest.encode(), b"", self._version.to_bytes(4, "little"), FinishReason.EOS
                )
                self.after(self.world.random.uniform(0.005, 0.05), self._generated, delivery, body, drawn)
            case Generate():
                why = f"holds version {self._version}, asked for {body.version}"
                self.endpoint.fail(delivery, "RefusedError", why)
            case _:
                self.endpoint.fail(delivery, "RefusedError", f"a server takes no {kind_of(body)}")

    def _generated(self, delivery: Delivery, request: Generate, drawn: Completion) -> None:
        """Answer with a sample. The oldest of its tokens are of the weights that it began with."""
        self.count("tokens")
        self.endpoint.reply(delivery, Generated(request.ticket, request.turn, (drawn,), self.name))

    def _load_next(self) -> None:
        if self._loads:
            delivery, weights = self._loads[0]
            sources = [getattr(source, "process", "") for source in weights.sources]
            self._fetch(delivery, weights, [name for name in sources if name])

    def _fetch(self, delivery: Delivery, weights: LoadWeights, sources: list[str]) -> None:
        """Load the weights from the first source that has them."""
        if not sources:
            self.endpoint.fail(delivery, "RefusedError", "no source has these weights")
            self._loads.popleft()
            self._load_next()
            return

        def fetched(answer: Body | None, fault: Fault | None) -> None:
            if isinstance(answer, WeightsFetched):
                manifest = weights.manifest
                self._version, self._digest = manifest.version, manifest.digest
                self.count("versions")
                self.endpoint.reply(delivery, WeightsLoaded(manifest.version, manifest.digest))
                self._loads.popleft()
                self._load_next()
            else:
                self._fetch(delivery, weights, sources[1:])

        body = FetchWeights(weights.manifest.version)
        self.endpoint.request(sources[0], body, deadline_s=FETCH_DEADLINE_S, on_done=fetched)
