from __future__ import annotations

from kintsugi.transport.exchange import SAVED_BYTES, SAVED_REPLIES, SavedReplies
from kintsugi.wire import Envelope, MessageKind


def request(sequence: int) -> Envelope:
    return Envelope("job", 1, "master-0", "a", sequence, MessageKind.REQUEST)


def kept(replies: SavedReplies, *, count: int) -> list[int]:
    return [number for number in range(count) if replies.get(request(number)) is not None]


def test_the_oldest_answers_leave_when_there_are_too_many() -> None:
    replies, count = SavedReplies(), SAVED_REPLIES + 3
    for number in range(count):
        replies.put(request(number), b"answer", now=0.0)
    assert kept(replies, count=count) == list(range(3, count))


def test_the_oldest_answers_leave_when_they_are_too_large_together() -> None:
    replies, count = SavedReplies(), 6
    for number in range(count):
        replies.put(request(number), bytes(SAVED_BYTES // 8), blobs=[bytes(SAVED_BYTES // 8)], now=0.0)
    assert kept(replies, count=count) == [2, 3, 4, 5]
    newest = replies.get(request(5))
    assert newest is not None and newest.frame == bytes(SAVED_BYTES // 8)
