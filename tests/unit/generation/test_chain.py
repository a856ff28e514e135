"""Manager and servers as they run in a process, each in a thread, against a master that the test plays."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.config.recipe import dump
from kintsugi.config.schema import Config, GenerationSection, ModelSection, NewModel
from kintsugi.generation import manager, server
from kintsugi.model.plan import plan_model
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.bulk import OpenBulk
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.protocol.membership import AddressBook, Heartbeat, Register, Registered, Shutdown
from kintsugi.protocol.weights import FetchWeights, LoadWeights, Publish, WeightsLoaded
from kintsugi.telemetry.events import Note, read_events
from kintsugi.transport import Delivery, Endpoint, PendingReply, new_key_pair
from kintsugi.types import Peer, Role, SamplingParams, role_of
from kintsugi.weights.publish import Publisher

_CONFIG = Config(
    name="chain",
    model=ModelSection(new=NewModel(hidden_size=32, intermediate_size=64)),
    generation=GenerationSection(slots=8, max_length=24),
)
_MAINS: dict[Role, Callable[[Bootstrap], int]] = {Role.MANAGER: manager.main, Role.SERVER: server.main}


class _Run:
    """Plays master, trainer and rollout worker in the test's thread."""

    def __init__(self, run_dir: Path) -> None:
        (run_dir / "events").mkdir(parents=True)
        dump(_CONFIG, run_dir / "config.yaml")
        self.run_dir = run_dir
        self._threads: list[threading.Thread] = []
        self._lifeline, self._lifeline_writer = os.pipe()
        self._book_number = 0
        self.heartbeats: dict[str, Heartbeat] = {}
        self.registered: dict[str, Peer] = {}
        self.exit_codes: dict[str, int] = {}
        self.master, self.model, self.rollout = (
            _endpoint(name) for name in ("master-0", "model-0", "rollout-0")
        )
        self._bulk = BulkEndpoint(
            process="model-0", mode="encrypted", peer_of=self.model.peers.get, call=_asks_nothing
        )
        self._publisher = Publisher(process="model-0", host="host-0", segments=None, bulk=self._bulk.server)
        self.start("manager-0", "server-0", "server-1")
        self.publish_book(["manager-0", "server-0", "server-1"])

    def start(self, *processes: str, incarnation: str = "a") -> None:
        for process in processes:
            self._start(process, incarnation=incarnation)
        self.until(
            lambda: all(
                process in self.registered and self.registered[process].incarnation == incarnation
                for process in processes
            )
        )

    def stop(self, process: str) -> None:
        self.exit_codes.pop(process, None)
        self.master.send(process, Shutdown("it is to be replaced"))
        self.until(lambda: process in self.exit_codes)

    def _start(self, process: str, *, incarnation: str) -> None:
        public_key, secret_key = new_key_pair()
        self.master.admit(Peer(process, incarnation, "host-0", "", public_key))
        bootstrap = Bootstrap(
            job="job",
            run_dir=str(self.run_dir),
            process=process,
            role=role_of(process),
            host="host-0",
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
            master=self.master.peer(host="host-0"),
            lifeline=os.dup(self._lifeline),
        )
        thread = threading.Thread(target=self._run, args=(bootstrap,), name=process, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, bootstrap: Bootstrap) -> None:
        self.exit_codes[bootstrap.process] = _MAINS[bootstrap.role](bootstrap)
        os.close(bootstrap.lifeline)

    def publish_book(self, processes: list[str]) -> None:
        self._book_number += 1
        ours = [endpoint.peer(host="host-0") for endpoint in (self.master, self.model, self.rollout)]
        peers = (*ours, *(self.registered[process] for process in processes))
        book = AddressBook(self._book_number, peers)
        for process in processes:
            self.master.send(process, book)
        self.master.set_book(book)
        self.model.set_book(book)
        self.rollout.set_book(book)

    def turn(self) -> None:
        for delivery in self.master.poll(0.002):
            self._as_master(delivery)
        for delivery in self.model.poll(0):
            if isinstance(delivery.body, OpenBulk):
                opened = self._bulk.server.open_session(delivery.peer, delivery.body.certificate)
                self.model.reply(delivery, opened)
                continue
            assert isinstance(delivery.body, FetchWeights)
            self.model.reply(delivery, self._publisher.answer(delivery.body))
        self.rollout.turn(0)

    def _as_master(self, delivery: Delivery) -> None:
        if isinstance(delivery.body, Register):
            self.registered[delivery.body.peer.process] = delivery.body.peer
            self.master.admit(delivery.body.peer)
            self.master.reply(delivery, Registered(0))
        elif isinstance(delivery.body, Heartbeat):
            self.heartbeats[delivery.envelope.sender] = delivery.body

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached"
            self.turn()

    def load(self, version: int) -> WeightsLoaded:
        architecture, _ = plan_model(_CONFIG)
        model = Transformer(architecture)
        initialize(model, version)
        manifest, sources = self._publisher.publish(dict(model.named_parameters()), Publish(version, version))
        pending = self.master.request("manager-0", LoadWeights(manifest, sources), deadline_s=20)
        self.until(lambda: pending.done)
        loaded = pending.result().expect(WeightsLoaded)
        assert loaded.digest == manifest.digest
        return loaded

    def generate(self, ticket: str, *, num_samples: int, max_new_tokens: int = 12) -> PendingReply:
        prompt = np.array([1, 10, 2, 11], dtype="<i4").tobytes()
        sampling = SamplingParams(max_new_tokens=max_new_tokens, num_samples=num_samples)
        return self.rollout.request("manager-0", Generate(ticket, 0, prompt, sampling, 1), deadline_s=20)

    def close(self) -> None:
        for process in self.registered:
            self.master.send(process, Shutdown("the test is over"))
        os.close(self._lifeline_writer)
        for thread in self._threads:
            while thread.is_alive():
                self.master.turn(0.01)
        os.close(self._lifeline)
        for endpoint in (self.master, self.model, self.rollout):
            endpoint.close()
        self._publisher.close()
        self._bulk.close()


def _asks_nothing(process: str, request: OpenBulk, deadline_s: float) -> NoReturn:
    raise AssertionError(f"the rank fetches nothing from {process}")


def _endpoint(process: str) -> Endpoint:
    public_key, secret_key = new_key_pair()
    return Endpoint(job="job", process=process, incarnation="a", public_key=public_key, secret_key=secret_key)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[_Run]:
    run = _Run(tmp_path / "run")
    yield run
    run.close()
    assert run.exit_codes == dict.fromkeys(run.registered, 0)


def test_weights_go_out_and_completions_come_back_the_same_whichever_servers_live(run: _Run) -> None:
    assert run.load(1).servers == ("server-0", "server-1")
    before = [run.generate(f"ticket-{index}", num_samples=4) for index in range(6)]
    run.until(lambda: all(pending.done for pending in before))
    answers = [pending.result().expect(Generated) for pending in before]
    assert {answer.server for answer in answers} == {"server-0", "server-1"}

    doomed = [run.generate(f"ticket-{index}", num_samples=4) for index in range(6)]
    run.publish_book(["manager-0", "server-1"])
    run.until(lambda: all(pending.done for pending in doomed))
    again = [pending.result().expect(Generated) for pending in doomed]
    assert [answer.completions for answer in again] == [answer.completions for answer in answers]
    assert run.load(2).servers == ("server-1",)
    run.until(lambda: run.heartbeats["server-1"].progress.counters.get("tokens", 0) > 0)


def test_completions_are_the_same_after_manager_and_server_were_replaced(run: _Run) -> None:
    run.load(1)
    before = run.generate("ticket", num_samples=4)
    run.until(lambda: before.done)
    run.stop("manager-0")
    run.start("manager-0", incarnation="b")
    run.publish_book(["manager-0", "server-0", "server-1"])
    assert run.load(1).servers == ("server-0", "server-1")
    for process in ("server-0", "server-1"):
        run.stop(process)
    run.start("server-0", incarnation="b")
    run.publish_book(["manager-0", "server-0"])
    after = run.generate("ticket", num_samples=4)
    run.until(lambda: after.done)
    assert after.result().expect(Generated).completions == before.result().expect(Generated).completions
    notes = [record.event for record in read_events(run.run_dir, process="manager-0")]
    assert Note("server-0 b is admitted: it answered the probe of version 1") in notes
