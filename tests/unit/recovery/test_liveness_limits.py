"""Time limits hold at the very moment they are reached; times that are exact in binary show it."""

from __future__ import annotations

from kintsugi.protocol.membership import Heartbeat
from kintsugi.recovery.liveness import (
    ALL_SILENT_GRACE_S,
    ALL_SILENT_S,
    REPEAT_S,
    SILENT_S,
    LivenessMonitor,
    OpenRequest,
    SuspicionKind,
)
from kintsugi.types import Progress

TICK_S = 0.25
ALIVE = Heartbeat(Progress({}), 0.0)


def first_suspicion(watch: LivenessMonitor, *, until: float) -> float | None:
    """When the watch first says something; it is asked every quarter of a second."""
    for tick in range(1, int(until / TICK_S) + 1):
        if watch.check(tick * TICK_S, asked={}):
            return tick * TICK_S
    return None


def test_silence_is_suspected_at_the_very_moment_that_it_has_lasted_long_enough() -> None:
    watch = LivenessMonitor()
    watch.joined("model-0", "1.0", 0.0, host="host-0")
    assert SILENT_S % TICK_S == 0
    assert first_suspicion(watch, until=5.0) == SILENT_S


def test_a_heartbeat_in_the_last_moment_is_in_time() -> None:
    watch = LivenessMonitor()
    watch.joined("model-0", "1.0", 0.0, host="host-0")
    assert first_suspicion(watch, until=SILENT_S - TICK_S) is None
    watch.on_heartbeat("model-0", "1.0", ALIVE, SILENT_S - TICK_S)
    assert watch.check(SILENT_S, asked={}) == []


def test_a_silence_of_all_that_has_just_lasted_long_enough_gives_everybody_a_fresh_start() -> None:
    watch = LivenessMonitor()
    for process in ("model-0", "model-1"):
        watch.joined(process, "1.0", 0.0, host="host-0")
    assert first_suspicion(watch, until=ALL_SILENT_S) is None
    watch.on_heartbeat("model-0", "1.0", ALIVE, ALL_SILENT_S)
    suspected: list[float] = []
    for tick in range(1, 10):
        now = ALL_SILENT_S + tick * TICK_S
        watch.on_heartbeat("model-0", "1.0", ALIVE, now)
        suspected += [now for suspicion in watch.check(now, asked={}) if suspicion.process == "model-1"]
    assert suspected
    assert suspected[0] >= ALL_SILENT_S + SILENT_S


def test_an_agent_and_its_only_process_that_are_both_silent_are_a_host_that_is_lost() -> None:
    watch = LivenessMonitor()
    watch.joined("agent-1", "0", 0.0, host="host-1")
    watch.joined("model-1", "1.0", 0.0, host="host-1")
    watch.joined("model-0", "1.0", 0.0, host="host-0")
    kinds: list[tuple[str, SuspicionKind]] = []
    for tick in range(1, 10):
        watch.on_heartbeat("model-0", "1.0", ALIVE, tick * TICK_S)
        kinds += [(found.process, found.kind) for found in watch.check(tick * TICK_S, asked={})]
    assert kinds == [("agent-1", SuspicionKind.HOST)]


def test_a_lone_process_that_speaks_seldom_is_stuck_by_the_masters_clock() -> None:
    watch = LivenessMonitor()
    watch.joined("model-0", "1.0", 0.0, host="host-0")
    asked = {"model-0": [OpenRequest("call", "RunCall", since=0.0, usual_s=0.5)]}
    for tick in range(1, 20):
        if tick % 5 == 0:
            watch.on_heartbeat("model-0", "1.0", ALIVE, tick * TICK_S)
        found = watch.check(tick * TICK_S, asked=asked)
        if found:
            break
    assert [(suspicion.kind, suspicion.lasting_s) for suspicion in found] == [(SuspicionKind.STUCK, 3.75)]
    assert tick * TICK_S == 3.75


def test_a_suspicion_is_told_again_at_the_very_moment_that_it_is_due() -> None:
    watch = LivenessMonitor()
    watch.joined("model-0", "1.0", 0.0, host="host-0")
    told = [tick * TICK_S for tick in range(1, 20) if watch.check(tick * TICK_S, asked={})]
    assert told == [SILENT_S, SILENT_S + REPEAT_S, SILENT_S + 2 * REPEAT_S, SILENT_S + 3 * REPEAT_S]


def test_when_nobody_is_heard_nobody_is_suspected_up_to_the_last_moment_of_grace() -> None:
    watch = LivenessMonitor()
    for process in ("model-0", "model-1"):
        watch.joined(process, "1.0", 0.0, host="host-0")
    assert ALL_SILENT_GRACE_S % TICK_S == 0
    assert first_suspicion(watch, until=ALL_SILENT_GRACE_S) is None
    assert watch.check(ALL_SILENT_GRACE_S + TICK_S, asked={})


def test_a_pause_of_everybody_does_not_delay_the_suspicion_of_who_falls_silent_after_it() -> None:
    watch = LivenessMonitor()
    for process in ("model-0", "model-1", "model-2"):
        watch.joined(process, "1.0", 0.0, host="host-0")
    assert first_suspicion(watch, until=1.25) is None
    suspected: list[tuple[str, float]] = []
    for tick in range(5, 16):
        now = tick * TICK_S
        for process in ("model-1", "model-0") if tick == 5 else ("model-0",):
            watch.on_heartbeat(process, "1.0", ALIVE, now)
        suspected += [(found.process, now) for found in watch.check(now, asked={})]
    assert ("model-1", 1.25 + SILENT_S) in suspected
    assert min(now for process, now in suspected if process == "model-1") == 1.25 + SILENT_S
