from array import array

import msgspec
import pytest
import xxhash

from kintsugi.errors import IntegrityError
from kintsugi.protocol.generation import Generated
from kintsugi.rollout.environments.protocol import Turn
from kintsugi.rollout.trajectory import (
    demonstrated_trajectory,
    describe,
    discounted,
    episode_trajectory,
    int32,
    repetition,
    sampled_trajectory,
    trajectory_digest,
    whole,
)
from kintsugi.types import Completion, FinishReason

LOGPROBS = array("f", [-0.5, -0.25]).tobytes()
COMPLETION = Completion(3, int32([7, 1]), LOGPROBS, int32([4, 5]), FinishReason.EOS)


def test_only_sampled_tokens_are_in_the_loss_and_a_sampled_end_is_one_of_them() -> None:
    trajectory = sampled_trajectory("g:0:0:0", int32([5, 6]), COMPLETION)
    assert list(array("i", trajectory.tokens)) == [5, 6, 7, 1]
    assert list(trajectory.loss_mask) == [0, 0, 1, 1]
    assert list(array("f", trajectory.logprobs)) == [0.0, 0.0, -0.5, -0.25]
    assert list(array("i", trajectory.versions)) == [-1, -1, 4, 5]
    assert trajectory.key == "g:0:0:0/3"


def test_an_episode_is_its_turns_one_after_the_other_and_what_was_read_is_masked() -> None:
    turns = [Turn(int32([5, 6]), COMPLETION), Turn(int32([8]), COMPLETION)]
    trajectory = episode_trajectory("g:0:0:0/1", turns, finish=FinishReason.LENGTH)
    assert list(array("i", trajectory.tokens)) == [5, 6, 7, 1, 8, 7, 1]
    assert list(trajectory.loss_mask) == [0, 0, 1, 1, 0, 1, 1]
    assert list(array("f", trajectory.logprobs)) == [0.0, 0.0, -0.5, -0.25, 0.0, -0.5, -0.25]
    assert list(array("i", trajectory.versions)) == [-1, -1, 4, 5, -1, 4, 5]
    assert (trajectory.key, trajectory.finish) == ("g:0:0:0/1", FinishReason.LENGTH)


def test_an_episodes_rewards_are_summed_or_worth_less_the_later_they_come() -> None:
    assert discounted([0.25, 0.0, 1.0], discount=1.0) == 1.25
    assert discounted([0.0, 0.0, 1.0], discount=0.5) == 0.25
    assert discounted([], discount=0.5) == 0.0


def test_a_demonstration_learns_its_completion_and_its_end() -> None:
    trajectory = demonstrated_trajectory("warmup:0:0:0", [5, 6], [7, 1])
    assert list(trajectory.loss_mask) == [0, 0, 1, 1]
    assert list(array("i", trajectory.tokens)) == [5, 6, 7, 1]


def test_the_description_carries_the_oldest_version_and_a_digest_of_the_encoded_trajectory() -> None:
    trajectory = sampled_trajectory("g:0:0:0", int32([5, 6]), COMPLETION)
    meta = describe(
        trajectory,
        ticket="g:0:0:0",
        holder="rollout-1",
        components={"a": 1.0, "b": 0.5},
        reward=1.25,
    )
    assert (meta.version, meta.reward, meta.num_tokens, meta.num_loss_tokens) == (4, 1.25, 4, 2)
    assert (
        meta.digest
        == xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(trajectory))
        == trajectory_digest(trajectory)
    )


def test_repetition_is_the_share_of_n_grams_seen_before() -> None:
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == 1 - 4 / 5


def test_an_answer_with_a_sample_that_was_cut_short_is_refused() -> None:
    done = Completion(0, b"", b"", b"", FinishReason.LENGTH)
    cut = Completion(1, b"", b"", b"", None)
    assert whole(Generated("a", 0, (done,), "server-0")) == (done,)
    with pytest.raises(IntegrityError, match=r"server-0: expected finished samples of a, \[1\] are not"):
        whole(Generated("a", 0, (done, cut), "server-0"))
