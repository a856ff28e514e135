from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.errors import UserError
from kintsugi.lab.injector.checks import check_trigger
from kintsugi.lab.injector.injection import Trigger
from kintsugi.lab.injector.triggers import LineWatch, TriggerWatch
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import EventLog, Span, Transition


class Life:
    """A run that only has events."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.log = EventLog(RunFolder(run_dir).events_file("master-0"), process="master-0")
        self.watch = RunWatch(run_dir)
        self.alive = True

    def phase(self, name: str) -> None:
        self.log.emit(Transition("master", "run", "", name, ""))

    def commit(self, step: int) -> None:
        self.log.emit(Span("step", 0.0, 1.0, attributes={"step": str(step)}))

    def trigger(self, trigger: Trigger) -> TriggerWatch:
        return TriggerWatch(trigger, watch=self.watch, run_dir=self.run_dir, alive=lambda: self.alive)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def test_without_words_it_holds_at_once(life: Life) -> None:
    life.trigger(Trigger(timeout_s=0.01)).until_holds()


def test_it_holds_in_the_phase_of_the_step_that_is_worked_on(life: Life) -> None:
    life.commit(4)
    life.phase("publishing")
    trigger = life.trigger(Trigger(step=5, phase="publishing", timeout_s=1.0))
    trigger.until_holds()
    life.phase("training")
    life.watch.glance()
    assert not trigger.holds


def test_a_step_that_is_past_is_refused(life: Life) -> None:
    life.commit(4)
    with pytest.raises(UserError, match="step 3 is past, 4 was committed"):
        life.trigger(Trigger(step=3)).until_holds()


def test_a_run_that_has_ended_is_not_waited_for(life: Life) -> None:
    life.alive = False
    with pytest.raises(UserError, match="the run has ended after step 0"):
        life.trigger(Trigger(phase="saving")).until_holds()


def test_what_does_not_come_is_refused_with_where_the_run_is(life: Life) -> None:
    life.phase("training")
    with pytest.raises(UserError, match=r"did not come within .* the run is at step 1, phase training"):
        life.trigger(Trigger(phase="saving", timeout_s=0.02)).until_holds()


@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        (Trigger(phase="sleeping"), "expected one of collecting"),
        (Trigger(step=0), "counted from 1"),
        (Trigger(after_s=-1.0), "after_s: expected seconds not below 0"),
        (Trigger(event="("), "expected a regular expression"),
    ],
)
def test_what_no_run_can_fulfil_is_refused_beforehand(trigger: Trigger, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_trigger(trigger)


def test_only_lines_that_came_later_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "model-0.jsonl"
    path.write_bytes(b'{"kind":"Alert"}\n')
    lines = LineWatch(tmp_path, "Alert")
    assert not lines.seen()
    with path.open("ab") as file:
        file.write(b'{"kind":"Al')
        file.flush()
        assert not lines.seen()
        file.write(b'ert"}\n')
    assert lines.seen()
    os.unlink(path)
    assert lines.seen()
