import os
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from kintsugi.control.master import Master
from kintsugi.control.protocol import Decision, Event
from kintsugi.facts import (
    BatchFormed,
    EpochStarted,
    Fact,
    ProcessJoined,
    ProcessLost,
    RolledBack,
    StepCommitted,
    StrategyChosen,
    TicketReturned,
    VersionCurrent,
)
from kintsugi.messages import Body
from kintsugi.recovery.processor import Flow
from kintsugi.simulation import network
from kintsugi.simulation.campaign import Runner, simulated_config
from kintsugi.simulation.cluster import Cluster, Outcome, undisturbed
from kintsugi.simulation.faults import Kind, Plan, Planned
from kintsugi.simulation.injection import POISON
from kintsugi.simulation.network import Process
from kintsugi.transport.exchange import Delivery
from kintsugi.wire import Envelope, MessageKind

CONFIG = simulated_config()
RUNNER = Runner()


def simulate(*faults: Planned, seed: int = 0, flow: Flow = Flow.ROLLBACK) -> Outcome:
    reference = undisturbed(CONFIG, flow=flow) if faults else None
    return Cluster(CONFIG, seed=seed, plan=Plan(list(faults)), reference=reference, flow=flow).run()


def steps(outcome: Outcome) -> list[int]:
    return [fact.step for fact in outcome.facts if isinstance(fact, StepCommitted)]


@pytest.mark.parametrize("flow", Flow)
def test_ten_steps_commit_in_order_and_every_version_becomes_current(flow: Flow) -> None:
    outcome = simulate(flow=flow)
    assert outcome.outcome == "finished"
    assert outcome.violations == []
    assert steps(outcome) == list(range(1, 11))
    versions = [fact.version for fact in outcome.facts if isinstance(fact, VersionCurrent)]
    assert versions == list(range(11))


@pytest.mark.parametrize("state", ["collecting", "training", "committing", "publishing", "saving"])
@pytest.mark.parametrize("process", ["rollout-0", "server-1", "manager-0", "model-1", "agent-1", "master-0"])
def test_a_killed_process_costs_neither_a_step_nor_a_bit(process: str, state: str) -> None:
    outcome = simulate(Planned(Kind.KILL, process, state=state, step=4))
    assert [fault.target for fault in outcome.faults] == [process]
    assert outcome.violations == []
    assert (outcome.outcome, steps(outcome)) == ("finished", list(range(1, 11)))


def test_a_lost_host_costs_neither_a_step_nor_a_bit() -> None:
    outcome = simulate(Planned(Kind.KILL_HOST, "host-1", state="training", step=5))
    lost = {fact.process for fact in outcome.facts if isinstance(fact, ProcessLost)}
    assert {"model-1", "rollout-1", "server-1"} <= lost
    assert outcome.violations == []
    assert steps(outcome) == list(range(1, 11))


def test_every_sample_is_trained_exactly_once_also_when_its_worker_dies() -> None:
    outcome = simulate(
        Planned(Kind.KILL, "rollout-0", state="collecting", step=4, delay_s=0.01),
        Planned(Kind.KILL, "rollout-1", state="collecting", step=6, delay_s=0.01),
    )
    assert len(outcome.faults) == 2
    assert any(isinstance(fact, TicketReturned) for fact in outcome.facts)
    trained = Counter(
        ticket for fact in outcome.facts if isinstance(fact, BatchFormed) for ticket in fact.tickets
    )
    assert set(trained.values()) == {1}
    assert len(trained) == 2 * 8 + 8 * 4


def test_a_users_mistake_ends_the_run_with_its_cause() -> None:
    outcome = simulate(Planned(Kind.POISON, "model-0", "RunCall", state="collecting", step=4))
    assert outcome.outcome == "failed"
    assert outcome.violations == []
    assert POISON in repr(outcome.facts[-1])


def test_a_users_mistake_is_the_cause_also_when_a_worker_was_lost_before_and_one_in_the_dump() -> None:
    outcome = simulate(
        Planned(Kind.KILL, "rollout-0", state="collecting", step=5),
        Planned(Kind.POISON, "model-0", "RunCall", state="collecting", step=5),
        Planned(Kind.KILL, "rollout-1", state="recovering: dump"),
    )
    assert [fault.kind for fault in outcome.faults] == [Kind.KILL, Kind.POISON, Kind.KILL]
    assert outcome.violations == []
    assert POISON in repr(outcome.facts[-1])


def test_a_group_goes_on_smaller_while_a_rank_can_not_be_started_and_grows_back() -> None:
    outcome = simulate(
        Planned(Kind.FAIL, "agent-1", "StartProcess", "collecting", 2, about="model-1", times=4),
        Planned(Kind.KILL, "model-1", state="collecting", step=2),
        Planned(Kind.SLOW, "rollout-0", state="collecting", step=2, share=0.3, duration_s=5.0),
    )
    strategies = [fact.strategy for fact in outcome.facts if isinstance(fact, StrategyChosen)]
    assert "elastic" in strategies
    assert outcome.violations == []
    back = [fact.peer.process for fact in outcome.facts if isinstance(fact, ProcessJoined)]
    assert back.count("model-1") == 2
    assert steps(outcome) == list(range(1, 11))


def test_a_run_that_is_stopped_and_resumed_ends_in_the_same_state() -> None:
    outcome = simulate(Planned(Kind.SIGNAL, "master-0", state="training", step=5))
    assert sum(isinstance(fact, EpochStarted) for fact in outcome.facts) == 2
    assert outcome.violations == []
    assert outcome.outcome == "finished"


def test_two_hundred_seeds_break_no_promise() -> None:
    figures = RUNNER.run_all(0, 200)
    assert figures.violations == []
    assert figures.counted >= 100, "half of the runs must be hard enough to prove something"
    assert figures.coverage().crashes, "no master died at a boundary of a decision"


def test_a_replay_gives_the_identical_trace_also_in_another_process() -> None:
    program = (
        "import sys\n"
        "from kintsugi.simulation.campaign import Runner\n"
        "runner = Runner()\n"
        "sys.stdout.write(' '.join(runner.run(seed).trace_hash for seed in (3, 4, 5)))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    assert result.stdout.split() == [RUNNER.run(seed).trace_hash for seed in (3, 4, 5)]


def is_caught(broken: type[Master], *, seeds: range = range(60)) -> bool:
    return any(RUNNER.run(seed, new_master=broken).violations for seed in seeds)


class Forgetful(Master):
    """Forgets to journal some of what it has decided."""

    forgotten: tuple[type[Fact], ...] = ()

    def decide(self, event: Event, now: float) -> Decision:
        decision = super().decide(event, now)
        kept = tuple(fact for fact in decision.facts if not isinstance(fact, self.forgotten))
        return msgspec.structs.replace(decision, facts=kept)


@pytest.mark.parametrize("kind", [StepCommitted, BatchFormed, TicketReturned, ProcessLost])
def test_a_master_that_forgets_to_journal_is_caught(kind: type[Fact]) -> None:
    assert is_caught(type("Broken", (Forgetful,), {"forgotten": (kind,)}))


class Deaf(Master):
    """Drops every effect of one kind."""

    dropped = ""

    def decide(self, event: Event, now: float) -> Decision:
        decision = super().decide(event, now)
        kept = tuple(effect for effect in decision.effects if type(effect).__name__ != self.dropped)
        return msgspec.structs.replace(decision, effects=kept)


@pytest.mark.parametrize("effect", ["Admit", "Request"])
def test_a_master_that_decides_and_does_nothing_about_it_is_caught(effect: str) -> None:
    assert is_caught(type("Broken", (Deaf,), {"dropped": effect}), seeds=range(3))


def test_a_process_that_listens_to_an_old_epoch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(self: network.SimulatedEndpoint, source: Process, envelope: Envelope, body: Body) -> None:
        caller = self.directory.callers.get(source.key.decode())
        if caller is None or (envelope.kind is MessageKind.REQUEST and envelope.sequence in caller.running):
            return
        if self.accepted is not None:
            self.accepted(envelope, body)
        self._owner.handle(Delivery(envelope, body, (), caller.peer, source, caller.running))  # type: ignore[arg-type]

    monkeypatch.setattr(network.SimulatedEndpoint, "receive", receive)
    runner = Runner()
    assert any(runner.run(seed).violations for seed in range(60))


def test_a_checkpoint_that_nobody_knew_of_when_its_steps_were_undone_is_not_resumed_from() -> None:
    outcome = RUNNER.run(30828)
    undone = any(isinstance(fact, RolledBack) and fact.step == 0 for fact in outcome.facts)
    assert undone and (outcome.outcome, outcome.violations) == ("finished", [])
