from collections import Counter

import pytest

from kintsugi.config import AlgorithmSection, CheckpointSection, Config, DataSection, WarmupSection
from kintsugi.control.phases import Phase
from kintsugi.facts import (
    BatchFormed,
    ProcessLost,
    SamplesScored,
    StepCommitted,
    TicketReturned,
    VersionCurrent,
)
from kintsugi.simulation.cluster import Kill, Outcome, SimulatedCluster

CONFIG = Config(
    name="simulated",
    algorithm=AlgorithmSection(steps=8, batch_size=8, group_size=4),
    warmup=WarmupSection(steps=2, batch_size=8),
    data=DataSection(num_eval=6),
    checkpoint=CheckpointSection(every=3),
)


def simulate(*kills: Kill, seed: int = 0) -> Outcome:
    return SimulatedCluster(CONFIG, seed=seed, kills=kills).run()


def steps(outcome: Outcome) -> list[int]:
    return [fact.step for fact in outcome.facts if isinstance(fact, StepCommitted)]


def test_ten_steps_commit_in_order_and_every_version_becomes_current() -> None:
    outcome = simulate()
    assert outcome.outcome == "finished"
    assert steps(outcome) == list(range(1, 11))
    versions = [fact.version for fact in outcome.facts if isinstance(fact, VersionCurrent)]
    assert versions == list(range(11))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("phase", [Phase.COLLECTING, Phase.COMMITTING, Phase.PUBLISHING, Phase.SAVING])
@pytest.mark.parametrize("process", ["rollout-0", "server-1"])
def test_a_killed_worker_is_replaced_and_the_run_ends_in_the_same_state(
    process: str, phase: Phase, seed: int
) -> None:
    kill = Kill(process, 7, phase)
    disturbed = simulate(kill, seed=seed)
    assert disturbed.kills_fired == [kill]
    assert any(isinstance(fact, ProcessLost) and fact.process == process for fact in disturbed.facts)
    assert disturbed.outcome == "finished"
    assert disturbed.state_digest == simulate(seed=seed + 100).state_digest


def test_every_sample_is_trained_exactly_once_also_when_its_worker_dies() -> None:
    outcome = simulate(Kill("rollout-0", 4, Phase.COLLECTING), Kill("rollout-1", 6, Phase.COLLECTING))
    assert len(outcome.kills_fired) == 2
    assert any(isinstance(fact, TicketReturned) for fact in outcome.facts)
    trained = Counter(
        ticket for fact in outcome.facts if isinstance(fact, BatchFormed) for ticket in fact.tickets
    )
    assert set(trained.values()) == {1}
    assert len(trained) == 10 * 8
    assert {fact.ticket for fact in outcome.facts if isinstance(fact, SamplesScored)} == set(trained)


def test_a_rank_that_dies_ends_the_run_with_its_death_as_the_cause() -> None:
    outcome = simulate(Kill("model-1", 5, Phase.TRAINING))
    assert outcome.outcome == "failed"
    assert "model-1" in repr(outcome.facts[-1])
    assert steps(outcome) == [1, 2, 3, 4]


def test_the_same_seed_gives_the_same_facts() -> None:
    kill = Kill("server-0", 5, Phase.COLLECTING)
    assert simulate(kill, seed=3).facts == simulate(kill, seed=3).facts


def test_a_step_whose_groups_can_never_be_scored_ends_the_run_with_the_reason() -> None:
    outcome = SimulatedCluster(CONFIG, seed=0, unscorable_stage="grpo").run()
    assert outcome.outcome == "failed"
    assert steps(outcome) == [1, 2]
    assert "the last: no verdict" in repr(outcome.facts[-1])
