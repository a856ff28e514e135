"""Agent programs in real runs: the example is trained, and programs that fail are set aside by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.real_runs import Run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator_agent"
SMALL = (
    f"rollout.environment={EXAMPLE / 'training.py'}:solve",
    f"data.source={EXAMPLE / 'problems.jsonl'}",
    "data.num_eval=8",
    "warmup.steps=3",
    "warmup.batch_size=8",
    "algorithm.steps=2",
    "algorithm.batch_size=8",
    "algorithm.group_size=4",
)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    """Two runs that are not started."""
    made = [Run(tmp_path / name) for name in ("one", "other")]
    yield made
    for run in made:
        run.close()


def train(run: Run, *overrides: str) -> None:
    run.launcher = run.command("train", str(EXAMPLE / "recipe.yaml"), f"run_dir={run.run_dir}", *overrides)
    code, errors = run.end()
    assert code == 0, errors


def test_an_unmodified_program_is_trained_and_whoever_plays_its_episodes_changes_no_bit(
    runs: list[Run],
) -> None:
    one, other = runs
    train(one, *SMALL)
    train(other, *SMALL, "rollout.workers=1", "generation.servers=1")
    samples = one.lines("samples.jsonl")
    shown = [sample for sample in samples if sample["ticket"].startswith("warmup:")]
    played = [sample for sample in samples if sample["ticket"].startswith("grpo:")]
    # Demonstrations went through the program too, which calculated what they asked for.
    assert len(shown) == 24
    assert all(f"]⟨{sample['completion'].split('⟩')[1]};⟩" in sample["completion"] for sample in shown)
    assert len(played) == 64
    assert {sample["reward_components"]["branches"] for sample in played} == {1.0}
    assert max(sample["reward_components"]["turns"] for sample in played) > 1, "the calculator was used"
    assert one.summary.weights_sha256 == other.summary.weights_sha256
    one.assert_nothing_left()


def test_every_way_in_which_a_program_fails_is_set_aside_by_its_name(runs: list[Run]) -> None:
    run = runs[0]
    failing = ("rollout.environment=failing_agents.solve", "rollout.turn_timeout_s=1", "rollout.attempts=1")
    train(run, *SMALL, *failing, "algorithm.steps=4", "warmup=null", "algorithm.batch_size=12")
    reasons = "\n".join(run.summary.samples_quarantined)
    for said in (
        "agent `solve` raised ValueError: on purpose",
        "agent `solve` did not ask or end for `rollout.turn_timeout_s`=1 s",
        "agent `solve`: expected a finite number as its reward, got nan",
        "agent `solve` returned without a token sampled from the model",
        "its last refused request: 400: expected",
    ):
        assert said in reasons
    run.assert_nothing_left()
