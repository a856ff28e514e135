"""The simulated runs whose steps are more than one training call, and what their invariants catch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from weakref import WeakKeyDictionary

import pytest

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.graph.advantages import is_uninformative
from kintsugi.journal.facts import (
    BatchFormed,
    EvaluationDone,
    Fact,
    FilterReason,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketFiltered,
    TicketReturned,
)
from kintsugi.samples.ledger import Ledger
from kintsugi.samples.lifecycle import SampleState
from kintsugi.simulation import workers
from kintsugi.simulation.campaign import ASYNCHRONOUS, VARIANTS, Runner, shape_of, simulated_config
from kintsugi.simulation.cluster import SimulatedCluster, SimulationOutcome, undisturbed
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan
from kintsugi.simulation.invariants import Reference
from kintsugi.types import Role, sample_key, ticket_of

CONFIGS: dict[str, Config] = {variant.name: simulated_config(6, variant) for variant in VARIANTS}


@cache
def reference(name: str) -> Reference:
    return undisturbed(CONFIGS[name])


def simulate(name: str, *faults: PlannedSimFault) -> SimulationOutcome:
    expected = reference(name) if faults else None
    return SimulatedCluster(
        CONFIGS[name], seed=0, plan=SimulatedFaultPlan(list(faults)), reference=expected
    ).run()


def kill_a_collector(name: str) -> SimulationOutcome:
    """A run in which a rollout worker is killed, compared with one of the samples as they are drawn now."""
    killed = PlannedSimFault(SimulatedFaultKind.KILL, "rollout-1", state="collecting", step=3, delay_s=0.05)
    plan = SimulatedFaultPlan([killed])
    return SimulatedCluster(CONFIGS[name], seed=0, plan=plan, reference=undisturbed(CONFIGS[name])).run()


def seeds_of(name: str, *, count: int) -> list[int]:
    return [seed for seed in range(2000) if shape_of(seed).variant.name == name][:count]


def with_other_rewards(monkeypatch: pytest.MonkeyPatch, *, count: int) -> Iterator[Runner]:
    """Runners of simulations whose samples have other rewards: whether the order of groups matters hangs on them."""
    drawn = workers.drawn_digest
    for number in range(count):
        other = partial(lambda key, weights, suffix: drawn(key + suffix, weights), suffix=f" {number}")
        monkeypatch.setattr(workers, "drawn_digest", other)
        yield Runner()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_by_each_algorithm_finishes_and_is_evaluated_before_and_after(name: str) -> None:
    outcome = simulate(name)
    assert (outcome.outcome, outcome.violations, outcome.num_steps) == ("finished", [], 10)
    assert [fact.step for fact in outcome.facts if isinstance(fact, EvaluationDone)] == [2, 10]


@pytest.mark.parametrize(
    ("process", "state"),
    [
        ("rollout-0", "collecting"),
        ("master-0", "collecting"),
        ("model-1", "training"),
        ("master-0", "training"),
        ("model-1", "committing"),
        ("model-1", "evaluating"),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "dapo", "rloo", "reward_model"])
def test_a_killed_process_costs_neither_a_step_nor_a_bit(name: str, process: str, state: str) -> None:
    step = 2 if state == "evaluating" else 5
    outcome = simulate(name, PlannedSimFault(SimulatedFaultKind.KILL, process, state=state, step=step))
    assert [fault.target for fault in outcome.faults] == [process]
    assert (outcome.outcome, outcome.violations) == ("finished", [])


def test_dynamic_sampling_replaces_groups_and_now_and_then_reaches_its_bound() -> None:
    outcome = simulate("dapo")
    filtered = [fact.reason for fact in outcome.facts if isinstance(fact, TicketFiltered)]
    assert FilterReason.EQUAL_REWARDS in filtered
    steps = [fact.metrics for fact in outcome.facts if isinstance(fact, StepCommitted)][2:]
    bound = CONFIGS["dapo"].algorithm.batch_size
    assert max(metrics["filtered_groups"] for metrics in steps) == bound
    assert any(metrics["equal_reward_groups"] for metrics in steps)


def test_groups_that_are_judged_as_they_arrive_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def resample(self: EpisodeDispatch, stage: Stage) -> None:
        ledger, step = self._decision.state.ledger, self._decision.state.step + 1
        left = stage.algorithm.resampling_rounds * stage.algorithm.batch_size
        left -= len(ledger.dropped_in(step, reason=FilterReason.EQUAL_REWARDS))
        workers = self._decision.state.members.live(Role.ROLLOUT)
        for ticket in [ticket for worker in workers for ticket in ledger.assigned_to(worker)]:
            is_ready = ledger.state(sample_key(ticket, 0)) is SampleState.READY
            if left > 0 and is_ready and is_uninformative(stage, ledger.metas(ticket), max_new_tokens=16):
                self._decision.add_fact(TicketFiltered(ticket, FilterReason.EQUAL_REWARDS))
                left -= 1

    monkeypatch.setattr(EpisodeDispatch, "resample", resample)
    assert any(
        runner.run(seed).violations
        for runner in with_other_rewards(monkeypatch, count=4)
        for seed in seeds_of("dapo", count=5)
    )


def test_a_bound_that_a_new_master_has_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: WeakKeyDictionary[EpisodeDispatch, Counter[int]] = WeakKeyDictionary()

    def resample(self: EpisodeDispatch, stage: Stage) -> None:
        ledger, step = self._decision.state.ledger, self._decision.state.step + 1
        size, mine = stage.algorithm.batch_size, counted.setdefault(self, Counter())
        for ticket in ledger.oldest_ready(size):
            is_left = mine[step] < stage.algorithm.resampling_rounds * size
            if is_left and is_uninformative(stage, ledger.metas(ticket), max_new_tokens=16):
                self._decision.add_fact(TicketFiltered(ticket, FilterReason.EQUAL_REWARDS))
                mine[step] += 1

    reference("dapo")
    monkeypatch.setattr(EpisodeDispatch, "resample", resample)
    # At one of these times the seventh step has used up some of its bound.
    kills = [
        PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="collecting", step=6, delay_s=delay_s)
        for delay_s in (0.2, 0.25, 0.3)
    ]
    found = [why for killed in kills for why in simulate("dapo", killed).violations]
    assert any("is not that of the undisturbed run" in why for why in found)


def test_an_answer_that_is_refused_for_a_sample_that_was_set_aside_before_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remembered = Ledger.quarantined_of
    caught = []
    for _ in with_other_rewards(monkeypatch, count=8):  # And other samples whose reward is not a number.
        monkeypatch.setattr(Ledger, "quarantined_of", remembered)
        outcome = kill_a_collector("ppo")
        returned = {fact.ticket for fact in outcome.facts if isinstance(fact, TicketReturned)}
        aside = {ticket_of(fact.key) for fact in outcome.facts if isinstance(fact, SampleQuarantined)}
        assert (outcome.outcome, outcome.violations) == ("finished", [])
        if aside & returned:
            monkeypatch.setattr(Ledger, "quarantined_of", lambda _ledger, _ticket: frozenset())
            caught += [why for why in kill_a_collector("ppo").violations if "still collecting" in why]
    assert caught


def test_a_step_that_loses_more_groups_than_it_needs_ends_a_run_rightly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs ahead of their training have complete groups left for further steps, and train none of them any more."""
    monkeypatch.setattr(workers, "UNSCORABLE", 4)
    config = simulated_config(6, asynchrony=ASYNCHRONOUS[-1])
    outcomes = [SimulatedCluster(config, seed=seed).run() for seed in range(12)]
    assert [violation for outcome in outcomes for violation in outcome.violations] == []
    failed = [outcome.facts for outcome in outcomes if outcome.outcome == "failed"]
    assert any(complete_groups(facts) >= 2 * config.algorithm.batch_size for facts in failed)
    assert any(wholly_set_aside(facts) for facts in failed), "no group lost all its samples"


def complete_groups(facts: Sequence[Fact]) -> int:
    """Number of groups that could still have been trained at the end of a run."""
    scored = {fact.ticket for fact in facts if isinstance(fact, SamplesScored)}
    batches = [fact.tickets for fact in facts if isinstance(fact, BatchFormed)]
    aside = {ticket_of(fact.key) for fact in facts if isinstance(fact, SampleQuarantined)}
    return len(scored - aside - {ticket for tickets in batches for ticket in tickets})


def wholly_set_aside(facts: Sequence[Fact]) -> list[str]:
    """Groups none of whose samples could be scored."""
    tickets = Counter(ticket_of(fact.key) for fact in facts if isinstance(fact, SampleQuarantined))
    return [ticket for ticket, count in tickets.items() if count == 2]
