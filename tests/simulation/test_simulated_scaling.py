"""Simulated runs that are scaled: by request, at any time, with faults at the same time."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.control.master import Master
from kintsugi.control.protocol import Decision, Event
from kintsugi.journal.facts import (
    Fact,
    ProcessJoined,
    ProcessLost,
    ProcessRetired,
    ScaleRefused,
    ServersScaled,
    TermStarted,
)
from kintsugi.simulation import targeted_faults
from kintsugi.simulation.campaign import Runner, simulated_config
from kintsugi.simulation.cluster import SimulatedCluster, SimulationOutcome, undisturbed
from kintsugi.simulation.coverage import Coverage, Pair
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan

CONFIG = simulated_config()
REFERENCE = undisturbed(CONFIG)
RUNNER = Runner()


def scaling(
    servers: int, *, state: str = "collecting", step: int = 3, delay_s: float = 0.0
) -> PlannedSimFault:
    return PlannedSimFault(SimulatedFaultKind.SCALE, state=state, step=step, delay_s=delay_s, servers=servers)


def simulate(*scalings: PlannedSimFault, faults: tuple[PlannedSimFault, ...] = ()) -> SimulationOutcome:
    plan = SimulatedFaultPlan(list(faults), list(scalings))
    return SimulatedCluster(CONFIG, seed=0, plan=plan, reference=REFERENCE).run()


def finished(outcome: SimulationOutcome) -> bool:
    return (outcome.outcome, outcome.violations, outcome.num_steps) == ("finished", [], 10)


def names(outcome: SimulationOutcome, kind: type[ProcessJoined | ProcessRetired]) -> list[str]:
    found = [fact for fact in outcome.facts if isinstance(fact, kind)]
    processes = [fact.peer.process if isinstance(fact, ProcessJoined) else fact.process for fact in found]
    return [process for process in processes if process.startswith("server-")]


def test_a_run_that_is_scaled_up_and_down_ends_as_one_that_was_not() -> None:
    outcome = simulate(scaling(4), scaling(1, step=6))
    assert finished(outcome) and len(outcome.scalings) == 2
    assert names(outcome, ProcessJoined)[2:] in (["server-2", "server-3"], ["server-3", "server-2"])
    assert names(outcome, ProcessRetired) == ["server-1", "server-2", "server-3"]


@pytest.mark.parametrize("victim", ["server-1", "server-2", "manager-0", "agent-1", "master-0"])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("delay_s", [0.01, 0.3])
def test_whoever_dies_while_servers_come_and_go_costs_neither_a_step_nor_a_bit(
    victim: str, servers: int, delay_s: float
) -> None:
    killed = PlannedSimFault(SimulatedFaultKind.KILL, victim, state="collecting", step=3, delay_s=delay_s)
    assert finished(simulate(scaling(servers), faults=(killed,)))


def test_a_request_that_a_master_dies_over_is_answered_once_by_the_next() -> None:
    crash = PlannedSimFault(SimulatedFaultKind.CRASH, "master-0", "append", "collecting", 3)
    outcome = simulate(scaling(3, delay_s=0.001), faults=(crash,))
    assert finished(outcome) and len(outcome.faults) == 1
    assert sum(isinstance(fact, TermStarted) for fact in outcome.facts) == 2
    assert [fact.servers for fact in outcome.facts if isinstance(fact, ServersScaled)] == [3]


def test_requests_one_after_the_other_are_answered_one_after_the_other() -> None:
    outcome = simulate(scaling(4), scaling(1), scaling(99), scaling(3))
    assert finished(outcome)
    answers = [fact for fact in outcome.facts if isinstance(fact, ServersScaled | ScaleRefused)]
    assert [getattr(fact, "servers", 0) for fact in answers] == [4, 1, 0, 3]


def test_a_seed_of_each_state_is_asked_to_scale_there() -> None:
    coverage, missing = Coverage(), set(targeted_faults.SCALINGS)

    def seeds_aimed_at(pair: Pair) -> list[int]:
        place, period = targeted_faults.SCALINGS.index(pair), len(targeted_faults.SCALINGS)
        return [6 * (place + period * turn) + 5 for turn in range(4)]

    for pair in targeted_faults.SCALINGS:
        for seed in seeds_aimed_at(pair):
            if pair not in missing:
                break
            assert RUNNER.run(seed, coverage=coverage).violations == []
            missing -= coverage.events.keys()
    assert missing == set()


class Forgetful(Master):
    """Forgets to journal some of what it has decided."""

    forgotten: type[Fact]

    def decide(self, event: Event, now: float) -> Decision:
        decision = super().decide(event, now)
        kept = tuple(fact for fact in decision.facts if not isinstance(fact, self.forgotten))
        return msgspec.structs.replace(decision, facts=kept)


@pytest.mark.parametrize("kind", [ServersScaled, ProcessRetired])
def test_a_master_that_forgets_to_journal_a_scaling_is_caught(kind: type[Fact]) -> None:
    broken = type("Broken", (Forgetful,), {"forgotten": kind})
    plan = SimulatedFaultPlan(
        [PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="collecting", step=5)],
        [scaling(1), scaling(3, step=7)],
    )
    cluster = SimulatedCluster(CONFIG, seed=0, plan=plan, reference=REFERENCE, new_master=broken)
    assert cluster.run().violations


def test_no_server_is_lost_by_a_departure() -> None:
    outcome = simulate(scaling(1))
    lost = [fact for fact in outcome.facts if isinstance(fact, ProcessLost)]
    assert [(fact.process, fact.fault.kind) for fact in lost] == [("server-1", "Retired")]
