"""A manager between askers and servers that only pretend, driven by hand: a test decides who works when."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from kintsugi.errors import KintsugiError
from kintsugi.generation.manager import Manager
from kintsugi.messages import AddressBook, Generate, Generated, LoadWeights, WeightsLoaded
from kintsugi.runtime import WaitTable
from kintsugi.transport import Delivery, Endpoint, PendingReply, new_key_pair
from kintsugi.types import Completion, Finish, Peer, Sampling, WeightManifest, WeightSource


class FakeServer:
    """Loads what it is told to and keeps requests until the test lets it answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.loads_weights = True
        self.digest: str | None = None
        """What it claims to have loaded; None is the truth."""
        self.loaded: list[int] = []
        self.sources: list[tuple[WeightSource, ...]] = []
        self.held: list[Delivery] = []
        self.probed: list[int] = []
        self.probe_version: int | None = None
        """With which weights it claims to have answered a probe; None is the truth."""
        self.answers_probes = True

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
                    self.endpoint.reply(
                        delivery, WeightsLoaded(manifest.version, self.digest or manifest.digest)
                    )
            elif isinstance(delivery.body, Generate) and delivery.body.ticket == "probe":
                self.probed.append(delivery.body.version)
                if self.answers_probes:
                    self._answer_probe(delivery, delivery.body)
            else:
                self.held.append(delivery)

    def _answer_probe(self, delivery: Delivery, request: Generate) -> None:
        versions = array("i", [request.version if self.probe_version is None else self.probe_version])
        completion = Completion(0, b"\x01\x00\x00\x00", b"", versions.tobytes(), Finish.LENGTH)
        self.endpoint.reply(
            delivery, Generated(request.ticket, request.turn, (completion,), self.endpoint.process)
        )

    def answer(self) -> None:
        for delivery in self.held:
            request = delivery.body
            assert isinstance(request, Generate)
            completions = tuple(
                Completion(sample, f"{request.ticket}/{sample}".encode(), b"", b"", Finish.EOS)
                for sample in request.wanted
            )
            self.endpoint.reply(
                delivery, Generated(request.ticket, request.turn, completions, self.endpoint.process)
            )
        self.held.clear()

    def fail(self, error: KintsugiError) -> None:
        for delivery in self.held:
            self.endpoint.fail(delivery, error)
        self.held.clear()


class World:
    """A manager, who asks it, and its servers: real endpoints on loopback, all driven by this thread."""

    def __init__(self, *, servers: int = 2) -> None:
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
        self.servers = {name: FakeServer(self._endpoint(name)) for name in self._names(servers)}
        self.publish_book()

    def _start_manager(self, *, incarnation: str = "a") -> None:
        self.manager_endpoint = self._endpoint("manager-0", incarnation=incarnation)
        self.manager = Manager(self.manager_endpoint, note=self.notes.append, waits=self.waits)

    def restart_manager(self) -> None:
        self._endpoints.remove(self.manager_endpoint)
        self.manager_endpoint.close()
        self._start_manager(incarnation="b")
        self.publish_book()

    def restart_master(self) -> None:
        """Another one takes over: same key pair, next epoch."""
        self._endpoints.remove(self.master)
        self.master.close()
        self.master = self._endpoint("master-0", incarnation="b", epoch=self.master.epoch + 1)
        self.publish_book()

    @staticmethod
    def _names(servers: int) -> list[str]:
        return [f"server-{index}" for index in range(servers)]

    def _endpoint(self, process: str, *, incarnation: str = "a", epoch: int = 0) -> Endpoint:
        is_master = process == "master-0"
        public_key, secret_key = self._master_keys if is_master else new_key_pair()
        endpoint = Endpoint(
            job="job",
            process=process,
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
            epoch=epoch,
        )
        self._endpoints.append(endpoint)
        self._peers[process] = endpoint.peer(host="host-0")
        return endpoint

    def add_server(self, process: str, *, incarnation: str = "a") -> FakeServer:
        server = self.servers[process] = FakeServer(self._endpoint(process, incarnation=incarnation))
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
        for asker in (self.master, self.rollout):
            asker.turn(0)

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
            Sampling(num_samples=2, max_new_tokens=max_new_tokens),
            version,
            timeout_s=timeout_s,
        )
        return self.rollout.request("manager-0", request, deadline_s=60)

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()
