from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest
import torch

from kintsugi.checkpoint.snapshot import Header
from kintsugi.errors import KintsugiError, ProcessDied
from kintsugi.messages import Ok
from kintsugi.operations import KeepState
from kintsugi.training.buddy import BuddyCopy, StateCopy, buddy_of
from kintsugi.training.copies import Counters
from kintsugi.transport import Blob, Reply
from kintsugi.types import Peer


def peers(**hosts: str) -> list[Peer]:
    return [Peer(name.replace("_", "-"), "a", host, "", b"") for name, host in hosts.items()]


AGENTS = peers(agent_0="host-0", agent_1="host-1", agent_2="host-2")


@pytest.mark.parametrize(
    ("rank", "host", "others", "agents", "buddy"),
    [
        (0, "host-0", peers(model_1="host-0"), AGENTS, "agent-1"),
        (1, "host-0", peers(model_0="host-0"), AGENTS, None),
        (0, "host-0", peers(model_1="host-1"), AGENTS, None),
        (0, "host-1", [], AGENTS, "agent-0"),
        (0, "host-0", [], AGENTS[:1], None),
        (0, "host-0", [], [], None),
    ],
)
def test_a_buddy_is_needed_only_where_no_other_host_has_the_state(
    rank: int, host: str, others: list[Peer], agents: list[Peer], buddy: str | None
) -> None:
    assert buddy_of(rank=rank, host=host, others=others, agents=agents) == next(
        (agent for agent in agents if agent.process == buddy), None
    )


class Travelling:
    """An answer that comes when the test says so."""

    def __init__(self) -> None:
        self.done = False
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

    def send(self, agent: str, body: KeepState, blobs: Sequence[Blob]) -> Travelling:
        self.steps.append(body.state.manifest.step)
        self.answers.append(Travelling())
        self.sent.release()
        return self.answers[-1]


def copy_of(step: int, *, overtaken: bool = False) -> StateCopy:
    held = [Header(step, "grpo", 0, 0, f"d{step}", serial) for serial in (1, 2 if overtaken else 1)]
    return StateCopy(Counters(step), f"d{step}", {"weights/a": torch.ones(4)}, iter(held).__next__)


def offer(buddy: BuddyCopy, copy: StateCopy, *, incarnation: str = "a") -> bool:
    taken = buddy.offer(copy, buddy=msgspec.structs.replace(AGENTS[1], incarnation=incarnation))
    if buddy._thread is not None:
        buddy._thread.join(10)
    return taken


def test_only_one_copy_is_under_way_and_the_next_is_the_latest() -> None:
    agent = Agent()
    buddy = BuddyCopy(agent.send, process="model-0")
    assert offer(buddy, copy_of(1))
    assert not offer(buddy, copy_of(2))
    agent.answers[0].done = True
    assert offer(buddy, copy_of(3))
    agent.answers[1].done = True
    assert not offer(buddy, copy_of(3)), "it was sent when it was prepared"
    assert agent.steps == [1, 3]


def test_a_copy_that_the_agent_did_not_keep_is_offered_again() -> None:
    agent = Agent()
    buddy = BuddyCopy(agent.send, process="model-0")
    assert offer(buddy, copy_of(1))
    agent.answers[0].error = ProcessDied("agent-1 is gone")
    agent.answers[0].done = True
    assert offer(buddy, copy_of(1))
    agent.answers[1].done = True
    assert not offer(buddy, copy_of(1)), "this time it was kept"
    assert agent.steps == [1, 1]


def test_a_copy_is_kept_by_one_incarnation_of_an_agent_and_not_by_the_next() -> None:
    agent = Agent()
    buddy = BuddyCopy(agent.send, process="model-0")
    assert offer(buddy, copy_of(1))
    agent.answers[0].done = True
    assert not offer(buddy, copy_of(1))
    assert offer(buddy, copy_of(1), incarnation="b")
    assert agent.steps == [1, 1]


def test_a_copy_that_was_overtaken_while_it_was_read_is_not_sent() -> None:
    agent = Agent()
    offer(BuddyCopy(agent.send, process="model-0"), copy_of(1, overtaken=True))
    assert agent.steps == []


def test_a_copy_that_would_exceed_the_bandwidth_is_left_out() -> None:
    agent = Agent()
    buddy = BuddyCopy(agent.send, process="model-0", bytes_per_s=1.0)
    assert offer(buddy, copy_of(1))
    agent.answers[0].done = True
    assert not offer(buddy, copy_of(2))
    assert agent.steps == [1]
