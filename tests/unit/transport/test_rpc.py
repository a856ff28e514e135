from __future__ import annotations

from collections.abc import Iterator

import pytest

from kintsugi.errors import DeadlineExceeded
from kintsugi.protocol.generation import Generate
from kintsugi.protocol.membership import Ok, Ping
from kintsugi.protocol.messages import Body
from kintsugi.protocol.training import CommitStep
from kintsugi.protocol.weights import LoadWeights
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.spans import SPANS
from kintsugi.telemetry.spans import known
from kintsugi.transport import PendingReply, Reply
from kintsugi.transport.rpc import (
    FIRST_RESEND_S,
    LAST_ANSWER_S,
    LATE_S,
    LONGEST_RESEND_S,
    SAVED_BYTES,
    SAVED_REPLIES,
    SLOW_S,
    RequestTimer,
    SavedReplies,
    subject,
)
from kintsugi.types import SamplingParams, WeightManifest

Recorded = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def spans() -> Iterator[Recorded]:
    found: Recorded = []
    SPANS.record_to(
        lambda name, attributes, since, until: found.append((name, until - since, known(attributes)))
    )
    yield found
    SPANS.record_to(None)


class Idle:
    def turn(self, timeout_s: float) -> None:
        pass


def asked(body: Body, *, ago_s: float) -> PendingReply:
    since = SYSTEM_CLOCK.monotonic() - ago_s
    timer = RequestTimer.begin(since, deadline_s=60.0)
    return PendingReply(Idle(), "model-0", body, None, None, since, timer)


def test_a_request_that_took_long_is_worth_a_span_that_says_what_it_was_about(spans: Recorded) -> None:
    asked(CommitStep(7), ago_s=SLOW_S + 2.0).settle(Reply(Ok()), None)
    ((name, duration_s, attributes),) = spans
    assert (name, attributes) == ("slow_request", {"to": "model-0", "what": "CommitStep", "step": "7"})
    assert duration_s >= SLOW_S + 2.0


def test_one_that_failed_says_in_what(spans: Recorded) -> None:
    error = DeadlineExceeded(whom="model-0", what="Ping", waited_s=60.0)
    asked(Ping(), ago_s=60.0).settle(None, error)
    assert spans[0][2]["error"] == "DeadlineExceeded"


def test_a_quick_one_is_not(spans: Recorded) -> None:
    asked(Ping(), ago_s=0.0).settle(Reply(Ok()), None)
    assert spans == []


def test_a_request_is_about_a_prompt_a_step_or_a_version() -> None:
    generate = Generate("grpo:0:17:0", 0, b"", SamplingParams(max_new_tokens=1), 3)
    assert subject(generate) == {"ticket": "grpo:0:17:0", "step": None, "version": 3}
    weights = LoadWeights(WeightManifest(4, 3, (), 0, ""), ())
    assert subject(weights)["version"] == 4


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
        replies.put(request(number), bytes(SAVED_BYTES // 4), now=0.0)
    assert kept(replies, count=count) == [2, 3, 4, 5]
    newest = replies.get(request(5))
    assert newest is not None and newest.frame == bytes(SAVED_BYTES // 4)


def test_an_endpoint_of_a_large_run_saves_replies_for_each_of_its_peers() -> None:
    replies, count = SavedReplies(num_peers=900), SAVED_REPLIES + 900
    for number in range(count):
        replies.put(request(number), b"answer", now=0.0)
    assert kept(replies, count=count) == list(range(count))


def fired_at(timer: RequestTimer, *, lateness_s: float = 0.0) -> list[float]:
    """Times at which a request is sent again, by a process that is always this late, and at last the one at which it
    expires."""
    times = []
    while True:
        times.append(timer.due + lateness_s)
        if not timer.fire(times[-1]):
            return times


def test_a_request_is_sent_again_at_growing_intervals_and_expires_at_its_deadline() -> None:
    timer = RequestTimer.begin(100.0, deadline_s=6.0)
    assert fired_at(timer) == [100.25, 100.75, 101.75, 103.75, 105.75, 106.0]
    assert timer.interval_s == LONGEST_RESEND_S
    assert fired_at(RequestTimer.begin(0.0, deadline_s=0.1)) == [0.1]


def test_a_process_that_did_not_run_past_a_deadline_sends_once_more_and_waits_as_long_as_it_had_left() -> (
    None
):
    timer = RequestTimer.begin(0.0, deadline_s=10.0)
    assert timer.fire(FIRST_RESEND_S + 12.0)
    assert timer.deadline == 22.0
    assert fired_at(timer)[-1] == 22.0


def test_a_deadline_that_passes_in_a_pause_of_the_own_process_leaves_time_for_one_answer() -> None:
    timer = RequestTimer.begin(0.0, deadline_s=0.2)
    assert timer.fire(5.0)
    assert timer.deadline == 5.0 + LAST_ANSWER_S
    assert fired_at(timer)[-1] == 6.0


def test_a_timer_that_is_only_a_little_late_extends_nothing() -> None:
    timer = RequestTimer.begin(0.0, deadline_s=10.0)
    assert timer.fire(timer.due + 0.9 * LATE_S)
    assert timer.deadline == 10.0


def test_a_process_that_is_late_every_time_still_comes_to_the_end_of_its_requests() -> None:
    timer = RequestTimer.begin(0.0, deadline_s=10.0)
    assert len(fired_at(timer, lateness_s=3.0)) < 15
