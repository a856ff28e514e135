import math

import msgspec
import pytest

from kintsugi.config import AlgorithmSection, Config, Stage, stages
from kintsugi.graph.algorithms import STD_EPSILON, batch_totals, group_advantages, sample_values
from kintsugi.types import Finish, SampleMeta

STAGE: Stage = stages(Config(name="x", algorithm=AlgorithmSection()))[0]


def meta(ticket: str, index: int, reward: float, *, tokens: int = 3) -> SampleMeta:
    components = {"r": reward}
    return SampleMeta(
        f"{ticket}/{index}", ticket, tokens + 2, tokens, reward, components, Finish.EOS, 0, "rollout-0", ""
    )


def test_advantages_are_centred_and_scaled_by_the_sample_deviation() -> None:
    values = group_advantages([1.0, 0.0, 0.0, 0.0], scale_by_std=True)
    deviation = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    assert values[0] == pytest.approx(0.75 / (deviation + STD_EPSILON))
    assert sum(values) == pytest.approx(0.0)


def test_equal_rewards_give_no_advantage() -> None:
    assert group_advantages([1.0, 1.0, 1.0], scale_by_std=True) == [0.0, 0.0, 0.0]


def test_groups_are_told_apart_by_ticket_and_not_by_text() -> None:
    metas = [
        meta("g:0:0:0", 0, 1.0),
        meta("g:0:0:0", 1, 0.0),
        meta("g:0:1:0", 0, 1.0),
        meta("g:0:1:0", 1, 1.0),
    ]
    values = sample_values(STAGE, metas)
    assert values["g:0:0:0/0"]["advantage"] > 0 > values["g:0:0:0/1"]["advantage"]
    assert values["g:0:1:0/0"]["advantage"] == 0.0


def test_sft_needs_no_values() -> None:
    stage = msgspec.structs.replace(STAGE, algorithm=AlgorithmSection(name="sft", group_size=1))
    assert sample_values(stage, [meta("s:0:0:0", 0, 0.0)]) == {"s:0:0:0/0": {}}


def test_denominators_count_the_whole_batch_without_fully_masked_samples() -> None:
    totals = batch_totals(STAGE, [meta("a", 0, 1.0, tokens=5), meta("a", 1, 0.0, tokens=0)], max_new_tokens=8)
    assert totals == {"tokens": 5.0, "sequences": 1.0, "constant": 8.0}
