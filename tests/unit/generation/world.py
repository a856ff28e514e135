"""A manager between askers and servers that only pretend, driven by hand: a test decides who works when."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kintsugi.config.schema import Strategy
from kintsugi.errors import IntegrityError, KintsugiError, Overwritten
from kintsugi.generation.manager import MAX_REQUESTS, GenerationManager, ManagerJob
from kintsugi.protocol.generation import Cancel, Generate, Generated, Interrupt, Produced
from kintsugi.protocol.membership import AddressBook, Ok
from kintsugi.protocol.weights import LoadWeights, WeightsLoaded
from kintsugi.runtime.waits import WaitTable
from kintsugi.transport import Delivery, Endpoint, PendingReply, new_key_pair
from kintsugi.types import (
    Completion,
    FinishReason,
    Fragment,
    Peer,
    SamplingParams,
    WeightManifest,
    WeightSource,
)


def said(ticket: str, sample: int, *, count: int = 3) -> list[int]:
    """What every server says, so that whoever goes on for another says the same."""
    return [zlib.crc32(f"{ticket}/{sample}/{index}".encode()) % 97 for index in range(count)]


def columns(tokens: list[int], *, version: int = 1) -> tuple[bytes, bytes, bytes]:
    """Tokens, log-probabilities and versions, as a completion has them."""
    logprobs = array("f", [-token / 100 for token in tokens])
    return (
        array("i", tokens).tobytes(),
        logprobs.tobytes(),
        array("i", [version] * len(tokens)).tobytes(),
    )


class FakeAsker:
    """Asks from within the manager's process, and keeps what it is told."""

    def __init__(self) -> None:
        self.streamed: dict[int, list[int]] = {}
        self.finishes: dict[int, FinishReason] = {}
        self.generated: Generated | None = None
        self.error: KintsugiError | None = None
        self.is_gone = False

    @property
    def ended(self) -> bool:
        return self.generated is not None or self.error is not None

    def produced(self, fragments: tuple[Fragment, ...]) -> None:
        assert not self.ended, "told of tokens after the end"
        for fragment in fragments:
            known = self.streamed.setdefault(fragment.sample, [])
            assert fragment.offset == len(known), "a token is missing, or comes twice"
            assert fragment.sample not in self.finishes, "told of tokens after the sample's end"
            known.extend(array("i", fragment.tokens))
            if fragment.finish is not None:
                self.finishes[fragment.sample] = fragment.finish

    def done(self, generated: Generated) -> None:
        assert not self.ended, "answered twice"
        self.generated = generated

    def failed(self, error: KintsugiError) -> None:
        assert not self.ended, "answered twice"
        self.error = error


class FakeServer:
    """Loads what it is told to and keeps requests until the test lets it answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.loads_weights = True
        self.digest: str | None = None
        """What it claims to have loaded; None is the truth."""
        self.overwritten: set[int] = set()
        """Versions whose memory is changing when it reads them."""
        self.loaded: list[int] = []
        self.sources: list[tuple[WeightSource, ...]] = []
        self.held: list[Delivery] = []
        self.probed: list[int] = []
        self.probe_version: int | None = None
        """With which weights it claims to have answered a probe; None is the truth."""
        self.answers_probes = True
        self.cancelled: list[int] = []
        self.interrupts: list[Delivery] = []

    @property
    def tickets(self) -> list[str]:
        return [delivery.body.ticket for delivery in self.held if isinstance(delivery.body, Generate)]

    def turn(self) -> None:
        for delivery in self.endpoint.poll(0):
            if isinstance(delivery.body, LoadWeights):
                if self.loads_weights:
                    manifest = delivery.body.manifest
                    self.loaded.append(manifest.version)
                    self.sources.append(delivery.body.sources)
                    if manifest.version in self.overwritten:
                        gone = Overwritten(manifest.version)
                        self.endpoint.fail(delivery, IntegrityError("was overwritten", detail=gone))
                        continue
                    self.endpoint.reply(
                        delivery, WeightsLoaded(manifest.version, self.digest or manifest.digest)
                    )
            elif isinstance(delivery.body, Generate) and delivery.body.ticket == "probe":
                self.probed.append(delivery.body.version)
                if self.answers_probes:
                    self._answer_probe(delivery, delivery.body)
            elif isinstance(delivery.body, Cancel):
                self.cancelled.append(delivery.body.number)
            elif isinstance(delivery.body, Interrupt):
                self.interrupts.append(delivery)
            else:
                self.held.append(delivery)

    def _answer_probe(self, delivery: Delivery, request: Generate) -> None:
        version = request.version if self.probe_version is None else self.probe_version
        completion = Completion(0, *columns([1], version=version), FinishReason.LENGTH)
        self.endpoint.reply(
            delivery, Generated(request.ticket, request.turn, (completion,), self.endpoint.process)
        )

    def request(self, ticket: str) -> Generate:
        (body,) = [
            each.body for each in self.held if isinstance(each.body, Generate) and each.body.ticket == ticket
        ]
        return body

    def tell(
        self, ticket: str, lengths: dict[int, int], *, finished: tuple[int, ...] = (), start: int = 0
    ) -> None:
        """Say that it has produced so many tokens of these samples."""
        request = self.request(ticket)
        fragments = tuple(
            Fragment(sample, start, *columns(said(ticket, sample, count=length)[start:]))
            if sample not in finished
            else Fragment(
                sample, start, *columns(said(ticket, sample, count=length)[start:]), finish=FinishReason.EOS
            )
            for sample, length in lengths.items()
        )
        self.endpoint.send("manager-0", Produced({request.number: fragments}))

    def answer(self) -> None:
        for delivery in self.held:
            request = delivery.body
            assert isinstance(request, Generate)
            completions = tuple(
                Completion(sample, *columns(said(request.ticket, sample)), FinishReason.EOS)
                for sample in request.wanted
            )
            self.endpoint.reply(
                delivery, Generated(request.ticket, request.turn, completions, self.endpoint.process)
            )
        self.held.clear()

    def give_back(self, lengths: dict[int, int]) -> None:
        """Answer everything as after an interrupt: so many tokens of each sample, none finished."""
        for delivery in self.held:
            request = delivery.body
            assert isinstance(request, Generate)
            completions = tuple(
                Completion(sample, *columns(said(request.ticket, sample, count=lengths[sample])), None)
                for sample in request.wanted
            )
            self.endpoint.reply(
                delivery, Generated(request.ticket, request.turn, completions, self.endpoint.process)
            )
        self.held.clear()
        for delivery in self.interrupts:
            self.endpoint.reply(delivery, Ok())
        self.interrupts.clear()

    def fail(self, error: KintsugiError) -> None:
        for delivery in self.held:
            self.endpoint.fail(delivery, error)
        self.held.clear()


class Driven(Protocol):
    """A server that works when it is told to."""

    @property
    def endpoint(self) -> Endpoint: ...

    def turn(self) -> None: ...


DrivenType = TypeVar("DrivenType", bound=Driven)


class Cluster(Generic[DrivenType]):
    """A manager, who asks it, and its servers: real endpoints on loopback, all driven by this thread."""

    def __init__(self, make: Callable[[Endpoint], DrivenType], *, servers: int = 2) -> None:
        self._make = make
        self._master_keys = new_key_pair()
        self._peers: dict[str, Peer] = {}
        self._endpoints: list[Endpoint] = []
        self._book_number = 0
        self.waits = WaitTable()
        self.notes: list[str] = []
        self.stopped: set[str] = set()
        """Servers that do not run at the moment."""
        self.master = self._endpoint("master-0")
        self.rollout = self._endpoint("rollout-0")
        self._start_manager()
        self.servers = {name: make(self._endpoint(name)) for name in self._names(servers)}
        self.publish_book()

    def _start_manager(
        self,
        *,
        incarnation: str = "a",
        max_requests: int = MAX_REQUESTS,
        strategy: Strategy = "least_loaded",
    ) -> None:
        self.manager_endpoint = self._endpoint("manager-0", incarnation=incarnation)
        self.manager = GenerationManager(
            self.manager_endpoint,
            emit=lambda event: self.notes.append(event.message),
            waits=self.waits,
            max_requests=max_requests,
            strategy=strategy,
        )

    def restart_manager(
        self, *, max_requests: int = MAX_REQUESTS, strategy: Strategy = "least_loaded"
    ) -> None:
        self._endpoints.remove(self.manager_endpoint)
        self.manager_endpoint.close()
        self._start_manager(incarnation="b", max_requests=max_requests, strategy=strategy)
        self.publish_book()

    def restart_master(self) -> None:
        """Another one takes over: same key pair, next term."""
        self._endpoints.remove(self.master)
        self.master.close()
        self.master = self._endpoint("master-0", incarnation="b", term=self.master.term + 1)
        self.publish_book()

    @staticmethod
    def _names(servers: int) -> list[str]:
        return [f"server-{index}" for index in range(servers)]

    def _endpoint(self, process: str, *, incarnation: str = "a", term: int = 0) -> Endpoint:
        is_master = process == "master-0"
        public_key, secret_key = self._master_keys if is_master else new_key_pair()
        endpoint = Endpoint(
            job="job",
            process=process,
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
            term=term,
        )
        self._endpoints.append(endpoint)
        self._peers[process] = endpoint.peer(host="host-0")
        return endpoint

    def add_server(self, process: str, *, incarnation: str = "a") -> DrivenType:
        server = self.servers[process] = self._make(self._endpoint(process, incarnation=incarnation))
        return server

    def kill(self, process: str) -> None:
        """The process stops at once; the address book does not know yet."""
        server = self.servers.pop(process)
        self._endpoints.remove(server.endpoint)
        server.endpoint.close()
        del self._peers[process]

    def forget(self, process: str) -> None:
        del self._peers[process]
        self.publish_book()

    def publish_book(self) -> None:
        self._book_number += 1
        for endpoint in self._endpoints:
            endpoint.set_book(AddressBook(self._book_number, tuple(self._peers.values())))

    def turn(self) -> None:
        for delivery in self.manager_endpoint.poll(0.001):
            self.manager.handle(delivery)
        self.manager.turn()
        for process, server in self.servers.items():
            if process not in self.stopped:
                server.turn()
        for requester in (self.master, self.rollout):
            requester.turn(0)

    def until(self, condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached"
            self.turn()

    def load(
        self, version: int, *, wait: bool = True, sources: tuple[WeightSource, ...] = ()
    ) -> PendingReply:
        manifest = WeightManifest(version, version, (), 0, f"digest-{version}")
        pending = self.master.request("manager-0", LoadWeights(manifest, sources), deadline_s=60)
        if wait:
            self.until(lambda: pending.done)
        return pending

    def generate(
        self, ticket: str, *, version: int = 1, max_new_tokens: int = 4, timeout_s: float = 60.0
    ) -> PendingReply:
        request = Generate(
            ticket,
            0,
            b"\x01\x00\x00\x00",
            SamplingParams(num_samples=2, max_new_tokens=max_new_tokens),
            version,
            timeout_s=timeout_s,
        )
        return self.rollout.request("manager-0", request, deadline_s=60)

    def ask(
        self,
        ticket: str,
        *,
        num_samples: int = 2,
        max_new_tokens: int = 4,
        stream: bool = True,
        endless: bool = False,
    ) -> tuple[ManagerJob, FakeAsker]:
        """From within the manager's process."""
        sampling = SamplingParams(num_samples=num_samples, max_new_tokens=max_new_tokens, ignore_end=endless)
        requester = FakeAsker()
        request = Generate(ticket, 0, b"\x01\x00\x00\x00", sampling, 1, stream=stream)
        return self.manager.submit(request, requester), requester

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()


class World(Cluster[FakeServer]):
    """With servers that only pretend."""

    def __init__(self) -> None:
        super().__init__(FakeServer)

    def holder(self, ticket: str) -> str:
        """Who has been sent this request."""
        self.until(lambda: any(ticket in server.tickets for server in self.servers.values()))
        (process,) = [name for name, server in self.servers.items() if ticket in server.tickets]
        return process
