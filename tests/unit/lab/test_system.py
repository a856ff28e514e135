from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.errors import ProcessDied
from kintsugi.journal.facts import RolledBack, StepCommitted
from kintsugi.lab.scenarios.system import System, num_undone, saved_by_fragile


def test_steps_are_lost_that_were_committed_and_rolled_back() -> None:
    facts = (
        StepCommitted(step=1, state_digest=""),
        StepCommitted(step=2, state_digest=""),
        RolledBack(step=1, reason="no rank has it"),
        StepCommitted(step=2, state_digest=""),
        RolledBack(step=2, reason="nothing was undone"),
    )
    assert num_undone(facts) == 1
    assert num_undone(()) == 0


def test_a_step_is_saved_when_the_controller_did_not_give_up_on_it(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "master-0.log"
    log.parent.mkdir()
    log.write_text(
        "INFO: step 5: latest_recover_save begins\n"
        "INFO: step 5: latest_recover_save took 0.10 s\n"
        "INFO: step 10: latest_recover_save begins\n"
        "WARNING: latest_recover_save timeout, continuing to next step (Write timeout)\n"
        "INFO: step 10: latest_recover_save took 6.00 s\n"
    )
    assert saved_by_fragile(tmp_path) == {5}
    assert saved_by_fragile(tmp_path / "elsewhere") == set()


def test_in_plain_fine_tuning_a_step_is_saved_when_the_rank_went_on(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "model-0.log"
    log.parent.mkdir()
    log.write_text(
        "INFO: step 5: loss 2.0\nINFO: Saving checkpoint of step 5 to latest_odd\nINFO: step 6: loss 1.9\n"
        "INFO: step 10: loss 1.5\nINFO: Saving checkpoint of step 10 to latest_even\nOSError: No space left\n"
    )
    assert saved_by_fragile(tmp_path) == {5}


class Closed:
    """Tells that it was closed; one that is `stuck` fails at it."""

    def __init__(self, name: str, closed: list[str], *, stuck: bool = False) -> None:
        self._name, self._closed, self._stuck = name, closed, stuck

    def close(self) -> None:
        self._closed.append(self._name)
        if self._stuck:
            raise ProcessDied(self._name)


def test_an_injector_that_can_not_be_closed_keeps_neither_the_others_nor_the_run(tmp_path: Path) -> None:
    closed: list[str] = []
    run: Any = Closed("run", closed)
    system = System(run, folder=tmp_path)
    injectors: Any = [Closed("first", closed), Closed("second", closed, stuck=True)]
    system._injectors = injectors
    with pytest.raises(ProcessDied, match="second"):
        system.close()
    assert closed == ["second", "first", "run"]


def test_a_run_that_the_laboratory_ended_though_it_went_on_has_lost_nothing_by_that(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(run_dir=tmp_path, running=False, exit_code=lambda: -9)
    system = System(run, folder=tmp_path)
    assert system.steps_lost(reached=58) == 58
    system.interrupted = True
    assert system.steps_lost(reached=58) == 0
