import socket

import msgspec
import pytest

from kintsugi.config.schema import Config, RolloutSection
from kintsugi.rollout.user_code.channel import (
    FromWorker,
    GenerationAnswered,
    OpenUserCode,
    RewardCase,
    attempt_send,
    receive,
)
from kintsugi.types import Completion, FinishReason


@pytest.mark.parametrize("length", [0, 16_000, 200_000, 3_000_000])
def test_a_message_of_any_size_arrives_as_it_was_sent(length: int) -> None:
    sent = RewardCase(1, "?", ("x" * length,), {"answer": "2"})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert attempt_send(ours, sent)
        content = receive(theirs)
    assert content is not None and msgspec.msgpack.decode(content, type=FromWorker) == sent


def test_many_small_messages_wait_in_the_socket_until_there_is_no_room_and_none_is_lost() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        count = 0
        while attempt_send(ours, GenerationAnswered(count, Completion(0, b"", b"", b"", FinishReason.EOS))):
            count += 1
        assert count > 32
        received = [msgspec.msgpack.decode(receive(theirs) or b"", type=FromWorker) for _ in range(count)]
    assert [each.id for each in received if isinstance(each, GenerationAnswered)] == list(range(count))


def test_a_configuration_is_handed_over_whole() -> None:
    config = Config(
        name="t", rollout=RolloutSection(environment="number_game", options={"low": 1, "high": 9})
    )
    content = msgspec.msgpack.encode(OpenUserCode(config))
    assert msgspec.msgpack.decode(content, type=OpenUserCode).config == config
