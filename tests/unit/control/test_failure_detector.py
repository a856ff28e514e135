from __future__ import annotations

import pytest

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.failure_detector import FailureDetector
from kintsugi.control.pending import PendingRequests
from kintsugi.control.phases.table import Phase
from kintsugi.protocol.membership import Heartbeat
from kintsugi.protocol.training import CallDone
from kintsugi.recovery.liveness import SuspicionKind
from kintsugi.types import Progress
from tests.unit.control.driven import new_state
from tests.unit.control.outcomes import begun

TICK_S = 0.2
RANKS = ("model-0", "model-1", "model-2")


def quiet() -> PendingRequests:
    """Nothing is asked of anybody."""
    return PendingRequests(DecisionBuilder(new_state()), first_s=60.0)


def watch(detector: FailureDetector, *, speaking: tuple[str, ...], seconds: float) -> set[tuple[str, str]]:
    """(process, kind) of all that was suspicious while only these spoke."""
    found: set[tuple[str, str]] = set()
    for number in range(int(seconds / TICK_S)):
        now = 100.0 + number * TICK_S
        for process in speaking:
            detector.on_heartbeat(process, "1", Heartbeat(Progress({"steps": number}), 0.0), now)
        found |= {(one.process, one.kind) for one in detector.check(now, quiet())}
    return found


def of(*processes: str) -> FailureDetector:
    detector = FailureDetector()
    for process in ("agent-0", *processes):
        detector.joined(process, "1", 100.0, host="host-0")
    return detector


def test_while_everybody_speaks_nobody_is_suspected() -> None:
    assert watch(of(*RANKS), speaking=("agent-0", *RANKS), seconds=8.0) == set()


def test_who_is_silent_is_suspected_until_it_is_forgotten() -> None:
    detector = of(*RANKS)
    speaking = ("agent-0", "model-0", "model-1")
    assert watch(detector, speaking=speaking, seconds=4.0) == {("model-2", SuspicionKind.SILENT)}
    detector.forget("model-2")
    assert watch(detector, speaking=speaking, seconds=4.0) == set()


def test_a_new_master_expects_to_hear_from_everybody_of_its_journal() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    detector = FailureDetector()
    detector.adopt(driven.state.members, 100.0)
    others = [name for name in driven.state.members.members if name != "model-1"]
    found: set[str] = set()
    for number in range(20):
        now = 100.0 + number * TICK_S
        for name in others:
            member = driven.state.members.members[name]
            detector.on_heartbeat(name, member.incarnation, Heartbeat(Progress({}), 0.0), now)
        found |= {one.process for one in detector.check(now, quiet())}
    assert found == {"model-1"}


@pytest.mark.parametrize("with_inference", [False, True])
def test_a_rank_that_becomes_far_slower_than_its_peers_and_its_own_past_is_told_and_only_that_one(
    with_inference: bool,
) -> None:
    detector = of(*RANKS)
    found: set[tuple[str, str]] = set()
    for number in range(60):
        now = 100.0 + number
        for process in RANKS:
            seconds = 10.0 if process == "model-1" and number >= 30 else 1.0
            done = CallDone(number, "state", {}, {"forward_backward": seconds, "reduce": 12.0 - seconds})
            detector.answered(process, "1", done, now)
            if with_inference:  # Before the next step's training call: quick on every rank.
                detector.answered(process, "1", CallDone(number, "", {}, {"forward": 0.01}), now)
        for process in ("agent-0", *RANKS):
            detector.on_heartbeat(process, "1", Heartbeat(Progress({"steps": number}), 0.0), now)
        found |= {(one.process, one.kind) for one in detector.check(now, quiet())}
    assert found == {("model-1", SuspicionKind.SLOW)}
