"""Limits of time are met when they are reached, not a moment later: times that are exact in binary show it."""

from __future__ import annotations

from kintsugi.messages import Heartbeat
from kintsugi.recovery.detection import ALL_SILENT_S, SILENT_S, Watch
from kintsugi.types import Progress

TICK_S = 0.25
ALIVE = Heartbeat(Progress({}), 0.0)


def first_suspicion(watch: Watch, *, until: float) -> float | None:
    """When the watch first says something; it is asked every quarter of a second."""
    for tick in range(1, int(until / TICK_S) + 1):
        if watch.check(tick * TICK_S, asked={}):
            return tick * TICK_S
    return None


def test_silence_is_suspected_at_the_very_moment_that_it_has_lasted_long_enough() -> None:
    watch = Watch()
    watch.joined("model-0", "1.0", 0.0, host="host-0")
    assert SILENT_S % TICK_S == 0
    assert first_suspicion(watch, until=5.0) == SILENT_S


def test_a_heartbeat_in_the_last_moment_is_in_time() -> None:
    watch = Watch()
    watch.joined("model-0", "1.0", 0.0, host="host-0")
    assert first_suspicion(watch, until=SILENT_S - TICK_S) is None
    watch.heard("model-0", "1.0", ALIVE, SILENT_S - TICK_S)
    assert watch.check(SILENT_S, asked={}) == []


def test_a_silence_of_all_that_has_just_lasted_long_enough_gives_everybody_a_fresh_start() -> None:
    watch = Watch()
    for process in ("model-0", "model-1"):
        watch.joined(process, "1.0", 0.0, host="host-0")
    assert first_suspicion(watch, until=ALL_SILENT_S) is None
    watch.heard("model-0", "1.0", ALIVE, ALL_SILENT_S)
    for tick in range(1, int(SILENT_S / TICK_S)):
        now = ALL_SILENT_S + tick * TICK_S
        watch.heard("model-0", "1.0", ALIVE, now)
        assert watch.check(now, asked={}) == []
    now = ALL_SILENT_S + SILENT_S + TICK_S
    watch.heard("model-0", "1.0", ALIVE, now)
    assert [suspicion.process for suspicion in watch.check(now, asked={})] == ["model-1"]
