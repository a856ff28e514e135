"""Runs by algorithms whose steps are more than one training call, with a process that dies in the middle of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.journal.facts import FilterReason, IncidentClosed, ProcessLost, TicketFiltered
from kintsugi.simulation.replay import replay
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import PROGRAMS, Run, finished, play, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GATE = 5
METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
PPO = ("algorithm.name=ppo", "algorithm.beta=0.05", "algorithm.updates_per_step=2")
DAPO = ("algorithm.name=dapo", "algorithm.resampling_rounds=1", "algorithm.reward=[gated_rewards.begins_odd]")
PROXIMAL = ("algorithm.proximal=recompute",)
DECOUPLED = (*PROXIMAL, "algorithm.updates_per_step=2")
REWARD_MODEL = ("algorithm.name=reward_model", "algorithm.group_size=2")
CUSTOM = f"{PROGRAMS}/custom_algorithms.py:grpo_again"


def to_its_end(*overrides: str) -> Callable[[Run], None]:
    def scenario(run: Run) -> None:
        run.start(*overrides)
        assert run.end()[0] == 0

    return scenario


def with_a_death_in(place: str, *overrides: str) -> Callable[[Run], None]:
    def scenario(run: Run) -> None:
        run.environment["KINTSUGI_TEST_DIE_IN"] = place
        run.start(*overrides)
        assert run.end()[0] == 0
        died = int((run.gates / "died").read_text())
        killed = [name for name, pids in run.pids_joined().items() if died in pids]
        assert killed and killed[0].startswith("model-")

    return scenario


def dapo_without_a_rollout_worker(run: Run) -> None:
    run.start(*DAPO, gates=(GATE,))
    run.wait_at(GATE)
    run.kill("rollout-0")
    until(lambda: len(run.pids_joined()["rollout-0"]) == 2, "another rollout-0")
    run.let_through(GATE)
    assert run.end()[0] == 0


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "ppo": to_its_end(*PPO),
    "ppo, a rank dies in critic_train": with_a_death_in(
        "kintsugi.training.objectives:ValueRegression.loss:6", *PPO
    ),
    "grpo and its proximal policy": to_its_end(*PROXIMAL),
    "decoupled": to_its_end(*DECOUPLED),
    "decoupled, a rank dies in prox_inference": with_a_death_in(
        "kintsugi.training.model_calls:ModelCalls._proximal_inference:6", *DECOUPLED
    ),
    "dapo": to_its_end(*DAPO),
    "dapo, a rollout worker dies": dapo_without_a_rollout_worker,
    "custom": to_its_end(f"algorithm.name={CUSTOM}"),
    "custom, a rank dies in its loss": with_a_death_in(
        "kintsugi.training.objectives:PolicyGradient.loss:6", f"algorithm.name={CUSTOM}"
    ),
    "reward_model": to_its_end(*REWARD_MODEL),
    "reward_model, a rank dies while it ranks pairs": with_a_death_in(
        "kintsugi.training.worker:ModelWorker._evaluate:7", *REWARD_MODEL
    ),
}
DISTURBED = [name for name in SCENARIOS if "," in name]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    runs = play(SCENARIOS, tmp_path_factory.mktemp("algorithms"))
    return lambda name: finished(runs[name])


@pytest.fixture
def grpo(undisturbed: Run) -> Run:
    """The run that others of this folder are compared with is one by GRPO."""
    assert undisturbed.summary.algorithm == "grpo"
    return undisturbed


@pytest.mark.parametrize("name", DISTURBED)
def test_a_disturbed_run_ends_with_the_weights_of_an_undisturbed_one(
    played: Callable[[str], Run], name: str
) -> None:
    run, twin = played(name), played(name.partition(",")[0])
    assert [fact for fact in run.facts if isinstance(fact, ProcessLost)]
    assert [fact for fact in run.facts if isinstance(fact, IncidentClosed)]
    assert run.summary.outcome == "finished"
    assert run.summary.weights_sha256 == twin.summary.weights_sha256
    assert run.summary.evaluations == twin.summary.evaluations
    assert run.summary.samples_filtered == twin.summary.samples_filtered
    run.assert_nothing_left()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_sample_is_trained_exactly_once(played: Callable[[str], Run], name: str) -> None:
    assert_trained_exactly_once(played(name))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_gives_the_same_facts_again(played: Callable[[str], Run], name: str) -> None:
    again, journaled = replay(played(name).run_dir)
    assert again == journaled


def test_on_fresh_samples_a_proximal_policy_of_its_own_changes_no_bit(
    grpo: Run, played: Callable[[str], Run]
) -> None:
    decoupled = played("grpo and its proximal policy")
    assert decoupled.summary.weights_sha256 == grpo.summary.weights_sha256
    assert [line for line in decoupled.lines("metrics.jsonl") if "importance_weight_mean" in line]


def test_a_custom_algorithm_that_computes_the_same_as_grpo_ends_with_the_same_weights(
    grpo: Run, played: Callable[[str], Run]
) -> None:
    custom = played("custom")
    assert custom.summary.algorithm == CUSTOM
    assert custom.summary.weights_sha256 == grpo.summary.weights_sha256


def test_dynamic_sampling_has_replaced_groups(played: Callable[[str], Run]) -> None:
    for name in ("dapo", "dapo, a rollout worker dies"):
        filtered = [fact.reason for fact in played(name).facts if isinstance(fact, TicketFiltered)]
        assert filtered and set(filtered) == {FilterReason.EQUAL_REWARDS}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "," not in name])
def test_the_meaning_of_every_figure_is_documented(played: Callable[[str], Run], name: str) -> None:
    written = {figure for line in played(name).lines("metrics.jsonl") for figure in line} - {"step", "time"}
    rows = [line.split("|")[1] for line in METRICS.read_text().splitlines() if line.startswith("| `")]
    patterns = [
        re.sub(r"<\w+>", r"\\w+", figure).replace("@k", r"@\d+")
        for row in rows
        for figure in re.findall(r"`([^`]+)`", row)
    ]
    plain = {re.sub("_(low|high)$", "", figure) for figure in written}
    assert [figure for figure in plain if not any(re.fullmatch(each, figure) for each in patterns)] == []
