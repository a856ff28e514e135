from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kintsugi.bulk import pull
from kintsugi.bulk.exports import Region, ViewExport
from kintsugi.checkpoint.snapshot import SlotHeader
from kintsugi.cluster.peer_snapshots import PeerSnapshotStore
from kintsugi.errors import KintsugiError, ProcessDied, RefusedError, WorldError
from kintsugi.process.membership import ShuttingDown
from kintsugi.protocol.bulk import BulkRange
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import KeepState, StateFetched
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import OperationFailed
from kintsugi.training import peer_replication as module
from kintsugi.training.peer_replication import OVERTAKEN_LIMIT, PeerReplica, StateCopy, choose_agent
from kintsugi.training.snapshots import CopyCounters, SlotHold
from kintsugi.training.state_transfer import StateFetcher
from kintsugi.transport import Reply
from kintsugi.types import Peer
from tests.unit.bulk.loop import Loop
from tests.unit.bulk.peers import Processes, processes

SERVER = Processes().add("model-0").server
"""No other process fetches from it."""


def peers(**hosts: str) -> list[Peer]:
    return [Peer(name.replace("_", "-"), "a", host, "", b"") for name, host in hosts.items()]


AGENTS = peers(agent_0="host-0", agent_1="host-1", agent_2="host-2")


@pytest.mark.parametrize(
    ("rank", "host", "others", "agents", "chosen"),
    [
        (0, "host-0", peers(model_1="host-0"), AGENTS, "agent-1"),
        (1, "host-0", peers(model_0="host-0"), AGENTS, None),
        (0, "host-0", peers(model_1="host-1"), AGENTS, None),
        (0, "host-1", [], AGENTS, "agent-0"),
        (0, "host-0", [], AGENTS[:1], None),
        (0, "host-0", [], [], None),
    ],
)
def test_a_peer_copy_is_needed_only_where_no_other_host_has_the_state(
    rank: int, host: str, others: list[Peer], agents: list[Peer], chosen: str | None
) -> None:
    assert choose_agent(is_first=rank == 0, host=host, others=others, agents=agents) == next(
        (agent for agent in agents if agent.process == chosen), None
    )


class Travelling:
    """An answer that comes when the test says so."""

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self.error: KintsugiError | None = None

    def result(self) -> Reply:
        if self.error is not None:
            raise self.error
        return Reply(Ok())


class Agent:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.answers: list[Travelling] = []
        self.sent = threading.Semaphore(0)

    def send(self, agent: str, body: KeepState) -> Travelling:
        self.steps.append(body.state.manifest.step)
        self.answers.append(Travelling())
        self.sent.release()
        return self.answers[-1]


def copy_of(step: int, *, tensors: Mapping[str, Tensor] | None = None, digest: str = "") -> StateCopy:
    header = SlotHeader(step, "grpo", 0, 0, digest or f"d{step}", 1)
    hold = SlotHold(step, purpose="peer copy", yields=True)
    return StateCopy(
        CopyCounters(step), f"d{step}", tensors or {"weights/a": torch.ones(4)}, lambda: header, hold
    )


def offer(replica: PeerReplica, copy: StateCopy, *, incarnation: str = "a") -> bool:
    agent = msgspec.structs.replace(AGENTS[1], incarnation=incarnation)
    return replica.offer(lambda: copy, digest=copy.digest, agent=agent)


def settle(replica: PeerReplica) -> None:
    assert replica._thread is not None
    replica._thread.join(10)
    assert not replica._thread.is_alive()


def offer_and_answer(
    replica: PeerReplica,
    copy: StateCopy,
    agent: Agent,
    *,
    incarnation: str = "a",
    error: KintsugiError | None = None,
) -> bool:
    """Offer a copy; if it is sent, let the agent answer."""
    if not offer(replica, copy, incarnation=incarnation):
        return False
    assert agent.sent.acquire(timeout=10)
    agent.answers[-1].error = error
    agent.answers[-1].done = True
    settle(replica)
    return True


def test_only_one_copy_is_under_way_and_the_next_is_the_latest() -> None:
    agent = Agent()
    replica = PeerReplica(agent.send, SERVER, process="model-0")
    assert offer(replica, copy_of(1))
    assert agent.sent.acquire(timeout=10)
    assert not offer(replica, copy_of(2))
    agent.answers[0].done = True
    settle(replica)
    assert offer_and_answer(replica, copy_of(3), agent)
    assert not offer(replica, copy_of(3)), "it was sent when it was prepared"
    assert agent.steps == [1, 3]


def test_a_copy_that_the_agent_did_not_keep_is_offered_again() -> None:
    agent = Agent()
    replica = PeerReplica(agent.send, SERVER, process="model-0")
    assert offer_and_answer(replica, copy_of(1), agent, error=ProcessDied("agent-1 is gone"))
    assert offer_and_answer(replica, copy_of(1), agent)
    assert not offer(replica, copy_of(1)), "this time it was kept"
    assert agent.steps == [1, 1]


def test_a_copy_is_kept_by_one_incarnation_of_an_agent_and_not_by_the_next() -> None:
    agent = Agent()
    replica = PeerReplica(agent.send, SERVER, process="model-0")
    assert offer_and_answer(replica, copy_of(1), agent)
    assert not offer(replica, copy_of(1))
    assert offer_and_answer(replica, copy_of(1), agent, incarnation="b")
    assert agent.steps == [1, 1]


def test_a_slot_that_holds_another_state_by_now_is_not_sent() -> None:
    agent = Agent()
    replica = PeerReplica(agent.send, SERVER, process="model-0")
    offer(replica, copy_of(1, digest="of a later step"))
    settle(replica)
    assert agent.steps == []


def test_a_copy_is_given_up_at_once_when_a_later_step_needs_the_slot_and_repetition_is_reported() -> None:
    agent, alerts = Agent(), list[OperationFailed]()
    replica = PeerReplica(agent.send, SERVER, process="model-0", emit=alerts.append)
    for step in range(1, OVERTAKEN_LIMIT + 1):
        copy = copy_of(step)
        assert offer(replica, copy)
        assert agent.sent.acquire(timeout=10)
        copy.hold.revoke("a later step needs its memory")
        copy.hold.await_release(timeout_s=10)
        settle(replica)
    assert [alert.message for alert in alerts] == [
        f"{OVERTAKEN_LIMIT} copies of the state to agent-1 in a row took longer than two steps"
    ]
    assert offer_and_answer(replica, copy_of(9), agent)


def test_a_large_state_travels_in_pieces_from_where_it_is_to_a_keeper_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    tensors = {
        "weights/a": torch.arange(40.0).view(10, 4),
        "weights/b": torch.arange(3.0),
        "weights/c": torch.tensor(5.0),
        "weights/d": torch.zeros(0, 2),
    }
    with processes() as made:
        loop: Any = Loop()
        keeper = PeerSnapshotStore(loop, made.add("agent-1"), loop, capacity=1000)

        def send(agent: str, body: KeepState) -> Travelling:
            assert len(body.state.manifest.pieces) == 6
            delivery = loop.delivery("model-0", body)
            keeper.handle(delivery)
            assert loop.until_answered(delivery.envelope.sequence) == Ok()
            return Travelling(done=True)

        replica = PeerReplica(send, made.add("model-0").server, process="model-0")
        assert offer(replica, copy_of(1, tensors=tensors))
        settle(replica)
        made.kill("model-0")

        def ask(process: str, body: Body) -> Reply:
            delivery = loop.delivery("model-1", body)
            keeper.handle(delivery)
            return Reply(loop.until_answered(delivery.envelope.sequence))

        fetcher = StateFetcher(made.add("model-1").client, ask, check=lambda: None)
        fetched, _ = fetcher.open(1, replica="agent-1")
        received = {name: torch.full_like(tensor, -1.0) for name, tensor in tensors.items()}
        fetched.read(received)
        keeper.close()
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor), name


def test_a_state_whose_source_ends_in_the_middle_goes_on_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    tensors = {"weights/a": torch.arange(400.0).view(100, 4)}
    manifest = module.describe_state(tensors, step=3)
    received = {"weights/a": torch.zeros(100, 4)}
    monkeypatch.setattr(pull, "REQUEST_BYTES", 64)
    with processes() as made:
        whole = module.state_export(manifest, tensors)
        other = made.add("model-1").server.offer("state", whole)
        source = made.add("model-0")

        class EndsInTheMiddle(ViewExport):
            def attempt_region(self, part: BulkRange, remaining_s: float) -> Region | None:
                if part.index == len(manifest.pieces) // 2:
                    del made.book["model-0"]
                    raise RefusedError("killed")
                return whole.attempt_region(part, remaining_s)

        sizes = {index: piece.size for index, piece in enumerate(manifest.pieces)}
        ending = source.server.offer("state", EndsInTheMiddle(sizes, lambda index: memoryview(b"")))
        offers = {"model-0": ending, "model-1": other}
        client = made.add("model-2").client

        def ask(process: str, body: Body) -> Reply:
            return Reply(StateFetched(manifest, "grpo", 3, 0, offer=offers[process]))

        fetcher = StateFetcher(client, ask, check=lambda: None)
        before = COUNTERS.snapshot().counters.get("state_bytes_fetched", 0)
        with pytest.raises(WorldError):
            fetcher.open(3, replica="model-0")[0].read(received)
        assert fetcher.interrupted_step == 3
        fetcher.open(3, replica="model-1")[0].read(received)
        fetched = COUNTERS.snapshot().counters["state_bytes_fetched"] - before
    assert torch.equal(received["weights/a"], tensors["weights/a"])
    in_flight = 4 * 64  # Pieces that other connections were receiving when the source ended.
    assert fetched <= 1600 // 2 + 64 + in_flight, "what had arrived was not fetched again"


def test_a_copy_that_would_exceed_the_bandwidth_is_left_out() -> None:
    agent = Agent()
    replica = PeerReplica(agent.send, SERVER, process="model-0", bytes_per_s=1.0)
    assert offer_and_answer(replica, copy_of(1), agent)
    assert not offer(replica, copy_of(2))
    assert agent.steps == [1]


def test_a_copy_that_fails_is_counted_and_reported_once_and_tried_again() -> None:
    agent, alerts = Agent(), list[OperationFailed]()
    failures = iter([RuntimeError("CUDA error"), RuntimeError("CUDA error"), None])

    def send(name: str, body: KeepState) -> Travelling:
        failure = next(failures)
        if failure is not None:
            raise failure
        return agent.send(name, body)

    before = COUNTERS.snapshot().counters.get("buddy_copies_failed", 0)
    replica = PeerReplica(send, SERVER, process="model-0", emit=alerts.append)
    for _ in range(2):
        assert offer(replica, copy_of(1))
        settle(replica)
    assert offer_and_answer(replica, copy_of(1), agent)
    assert [alert.message for alert in alerts] == [
        "the state could not be copied to agent-1: RuntimeError: CUDA error"
    ]
    assert COUNTERS.snapshot().counters["buddy_copies_failed"] - before == 2
    assert agent.steps == [1]


def test_a_copy_that_cannot_be_read_is_reported() -> None:
    alerts = list[OperationFailed]()

    def broken() -> SlotHeader | None:
        raise MemoryError("no memory left")

    replica = PeerReplica(Agent().send, SERVER, process="model-0", emit=alerts.append)
    offer(replica, dataclasses.replace(copy_of(1), header=broken))
    settle(replica)
    assert [alert.message for alert in alerts] == [
        "the state could not be copied to agent-1: MemoryError: no memory left"
    ]


def test_a_copy_that_ends_with_its_process_is_no_failure() -> None:
    alerts = list[OperationFailed]()

    def send(name: str, body: KeepState) -> Travelling:
        raise ShuttingDown("the run ends")

    replica = PeerReplica(send, SERVER, process="model-0", emit=alerts.append)
    offer(replica, copy_of(1))
    settle(replica)
    assert alerts == []
