from __future__ import annotations

from array import array

from kintsugi.data.saved_rollouts import SAVED
from kintsugi.rollout.replay import replay
from kintsugi.rollout.trajectory import describe
from kintsugi.types import FinishReason, Row, SampleText, Ticket
from tests.unit.telemetry.test_saved_rollouts import saved


def ticket(num_samples: int) -> Ticket:
    return Ticket("grpo:0:7:0", "grpo", 0, 7, 0, num_samples)


def test_a_saved_sample_is_given_under_the_ticket_of_this_run_as_it_was_sampled() -> None:
    row = Row(prompt="1+1=", columns={SAVED: (saved("rollout:0:2:0", 0),)})
    (sample,) = replay(ticket(1), row).samples
    trajectory = sample.trajectory
    assert (trajectory.key, trajectory.finish, sample.text) == (
        "grpo:0:7:0/0",
        FinishReason.EOS,
        SampleText("1+1=", "2"),
    )
    assert array("i", trajectory.tokens).tolist() == [3, 12, 4, 1]
    assert trajectory.loss_mask == b"\0\0\1\1"
    assert array("f", trajectory.logprobs).tolist() == array("f", [0.0, 0.0, -0.25, -0.1]).tolist()
    assert sample.components == {"right": 0.5}


def test_it_has_no_weight_version_because_this_run_generated_nothing() -> None:
    row = Row(prompt="1+1=", columns={SAVED: (saved("rollout:0:2:0", 0),)})
    (sample,) = replay(ticket(1), row).samples
    assert (
        describe(
            sample.trajectory, ticket="grpo:0:7:0", holder="rollout-0", components={}, reward=0.0
        ).version
        == -1
    )


def test_more_than_was_asked_for_is_left_out_and_what_is_missing_is_told() -> None:
    row = Row(prompt="1+1=", columns={SAVED: tuple(saved("rollout:0:2:0", number) for number in (0, 2, 3))})
    given = replay(ticket(3), row)
    assert [sample.trajectory.key for sample in given.samples] == ["grpo:0:7:0/0", "grpo:0:7:0/2"]
    assert given.quarantined == {"grpo:0:7:0/1": "it is not among the saved rollouts"}
