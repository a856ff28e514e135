from __future__ import annotations

from collections.abc import Iterator

import pytest

from kintsugi.errors import GroupBroken
from kintsugi.protocol.training import CommitStep, RunCall
from kintsugi.protocol.weights import FetchWeights, Publish
from kintsugi.runtime.spans import SPANS
from kintsugi.telemetry.spans import known
from kintsugi.training.worker import record_span
from kintsugi.types import LogicalShard, ShardItem

Recorded = list[tuple[str, dict[str, str]]]


@pytest.fixture
def spans() -> Iterator[Recorded]:
    found: Recorded = []
    SPANS.record_to(lambda name, attributes, since, until: found.append((name, known(attributes))))
    yield found
    SPANS.record_to(None)


def test_a_call_names_its_step_and_the_prompts_that_it_learns_from(spans: Recorded) -> None:
    items = tuple(ShardItem(f"grpo:0:{row}:0/{index}", "", "", 1, 1) for row in (4, 5) for index in range(2))
    call = RunCall("actor_train", "policy_train", 3, (LogicalShard(0, items),), 1, {}, 2, stage="grpo")
    with record_span(call):
        pass
    attributes = {"step": "3", "stage": "grpo", "generation": "2", "tickets": "grpo:0:4:0,grpo:0:5:0"}
    assert spans == [("actor_train", attributes)]


def test_other_requests_go_by_their_own_names(spans: Recorded) -> None:
    for body in (CommitStep(3), Publish(4, 3)):
        with record_span(body):
            pass
    assert spans == [("commit_step", {"step": "3"}), ("publish", {"step": "3", "version": "4"})]


def test_a_request_that_failed_says_in_what(spans: Recorded) -> None:
    with pytest.raises(GroupBroken), record_span(CommitStep(3)):
        raise GroupBroken("a rank died")
    assert spans == [("commit_step", {"step": "3", "error": "GroupBroken"})]


def test_one_of_many_small_requests_is_worth_no_line(spans: Recorded) -> None:
    with record_span(FetchWeights(4)):
        pass
    assert spans == []
