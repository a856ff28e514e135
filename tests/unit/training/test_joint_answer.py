"""What a rank answers when it is asked again for what all ranks gather together."""

from __future__ import annotations

import pytest

from kintsugi.errors import RefusedError
from kintsugi.protocol.messages import Body
from kintsugi.protocol.training import EvaluatePairs, HashWeights, PairsEvaluated
from kintsugi.protocol.weights import Publish
from kintsugi.training.joint_answer import Joint, JointAnswer


class Asked:
    """A rank's memory, with the number of times that it has gathered weights."""

    def __init__(self) -> None:
        self.gathered = 0
        self._memory = JointAnswer()

    def ask(self, request: Joint, *, group: int = 1, step: int = 3) -> Body:
        return self._memory.once(request, group=group, step=step, answer=self._gather)

    def _gather(self) -> Body:
        self.gathered += 1
        return PairsEvaluated(self.gathered, 0, ())


@pytest.mark.parametrize("asked", [Publish(3, 3), HashWeights(), EvaluatePairs(3, 0, 2)])
def test_what_is_asked_again_is_answered_without_the_other_ranks(asked: Joint) -> None:
    rank = Asked()
    assert rank.ask(asked) is rank.ask(asked)
    assert rank.gathered == 1


def test_another_order_to_publish_the_same_step_is_refused_and_nothing_is_gathered() -> None:
    rank = Asked()
    first = rank.ask(Publish(3, 3, servers=("server-0", "server-1")))
    reason = "the weights of step 3 were gathered for another order; the group has to be formed again"
    for _ in range(2):
        with pytest.raises(RefusedError, match=reason):
            rank.ask(Publish(3, 3, servers=("server-0",)))
    assert rank.gathered == 1
    assert rank.ask(Publish(3, 3, servers=("server-0", "server-1"))) is first


@pytest.mark.parametrize(("group", "step"), [(2, 3), (1, 4)], ids=["another group", "another step"])
def test_another_order_of_another_group_or_step_is_carried_out(group: int, step: int) -> None:
    rank = Asked()
    rank.ask(Publish(3, 3))
    rank.ask(Publish(step, step, transports=("stream",)), group=group, step=step)
    assert rank.gathered == 2


def test_an_order_for_a_step_that_is_not_committed_is_left_to_the_rank_to_refuse() -> None:
    rank = Asked()
    rank.ask(Publish(3, 3))
    rank.ask(Publish(4, 4), step=3)
    assert rank.gathered == 2


def test_requests_of_other_kinds_follow_each_other_in_one_step() -> None:
    rank = Asked()
    for request in (Publish(3, 3), EvaluatePairs(3, 0, 2), EvaluatePairs(3, 2, 2), HashWeights()):
        rank.ask(request)
    assert rank.gathered == 4


def test_a_askedthat_failed_is_carried_out_when_it_comes_again() -> None:
    memory, failing = JointAnswer(), [True]

    def answer() -> Body:
        if failing:
            raise RefusedError(f"attempt {failing.pop()}")
        return PairsEvaluated(1, 0, ())

    with pytest.raises(RefusedError, match="attempt"):
        memory.once(HashWeights(), group=1, step=3, answer=answer)
    assert memory.once(HashWeights(), group=1, step=3, answer=answer) == PairsEvaluated(1, 0, ())


def test_a_master_that_does_not_know_how_far_the_one_before_had_come_is_answered_from_any_point() -> None:
    rank = Asked()
    requests: list[Joint] = [Publish(3, 3), EvaluatePairs(3, 0, 2), HashWeights()]
    first = [rank.ask(request) for request in requests]
    assert [rank.ask(request) for request in requests] == first
    assert rank.gathered == 3
