"""Agent programs in real runs: the example is trained, and programs that fail are set aside by name."""

from __future__ import annotations

import json
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


REASONS = {
    "raises": "agent `solve` raised ValueError: on purpose",
    "hangs": "agent `solve` did not ask or end for `rollout.turn_timeout_s`=2 s",
    "returns nan": "agent `solve`: expected a finite number as its reward, got nan",
    "asks nothing": "agent `solve` returned without a token sampled from the model",
    "sends nonsense": "its last refused request: 400: expected one reply per request",
}


def test_every_way_in_which_a_program_fails_is_set_aside_by_its_name(runs: list[Run], tmp_path: Path) -> None:
    run = runs[0]
    # In every batch somebody fails; nobody of those that are held out does.
    ways = [way for each in REASONS for way in (each, None, None)] + [None] * 8
    rows = [{"prompt": f"{place}*{place}=", "way": way} for place, way in enumerate(ways, start=10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train(
        run,
        *SMALL,
        "rollout.environment=failing_agents.solve",
        "rollout.turn_timeout_s=2",
        "rollout.attempts=1",
        f"data.source={tmp_path / 'rows.jsonl'}",
        "data.completion_column=null",
        "warmup=null",
    )
    for way, reason in REASONS.items():
        found = [count for said, count in run.summary.samples_quarantined.items() if reason in said]
        assert sum(found) >= 4, f"a group whose program {way} is set aside whole"
    assert run.summary.samples_trained == 64
    run.assert_nothing_left()
