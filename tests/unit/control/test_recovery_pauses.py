"""A failed recovery is repeated immediately, then after growing pauses."""

from __future__ import annotations

from kintsugi.control.phases.recover import FIRST_PAUSE_S
from kintsugi.control.phases.table import Phase
from kintsugi.protocol.recovery import PreLock
from kintsugi.recovery.states import RecoveryState
from tests.unit.control.driven import STEP_S, Driven


def fail_lock(driven: Driven) -> None:
    """The first rank says that the group is broken, as who is no cause says."""
    driven.fail(driven.asked(PreLock)[0], "a rank is gone", kind="GroupBroken")


def test_the_first_failure_is_repeated_at_once_the_next_ones_after_a_pause_that_doubles() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    fail_lock(driven)
    assert driven.asked(PreLock)
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
        fail_lock(driven)
        assert driven.asked(PreLock) == []
        assert driven.master.recovery_state == RecoveryState.PRE_LOCKING
        driven.pass_time(pause_s - 3 * STEP_S)
        assert driven.asked(PreLock) == []
        driven.pass_time(3 * STEP_S)
        assert driven.asked(PreLock)
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
