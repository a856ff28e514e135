from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.errors import UserError
from kintsugi.lab.injector.injection import Injected, Injection
from kintsugi.lab.scenarios import experiments, runner
from kintsugi.lab.scenarios.experiments import Profile
from kintsugi.lab.scenarios.outcome import ObservedOutcome, record_of
from kintsugi.lab.scenarios.records import RUNS_FILE
from kintsugi.lab.testbed.watch import StepCommit
from kintsugi.runtime.clock import SYSTEM_CLOCK


def no_place(*arguments: Any, **named: Any) -> None:
    raise UserError("hosts of their own can not be made here: expected root")


def test_a_system_that_can_not_be_set_up_is_a_problem_that_is_told_and_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "system_for", no_place)
    said: list[str] = []
    chosen = [(experiments.find("S1"), Profile.OURS), (experiments.find("S2"), Profile.OURS)]
    result = runner.run_all(chosen, folder=tmp_path, say=said.append)
    assert [record.correct or record.as_expected or record.recovered for record in result.runs] == [
        False,
        False,
    ]
    assert all("expected root" in record.problem for record in result.runs)
    assert any("void" in line and "expected root" in line for line in said)
    assert len(json.loads((tmp_path / RUNS_FILE).read_text())["runs"]) == 2


class Stepped:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def test_an_experiment_under_way_says_every_few_seconds_where_it_is() -> None:
    said: list[str] = []
    clock = Stepped()
    progress = runner.ProgressLines(said.append, clock=clock)
    progress.line("started: 32 steps")
    for second, step in ((1, 0), (6, 0), (7, 1), (11, 9), (12, 10), (13, 11)):
        clock.now = 100.0 + second
        progress.step(step, of=32)
    assert said == [
        "    0 s  started: 32 steps",
        "    6 s  starting the processes",
        "   11 s  step 9 of 32",
    ]


class Refusing:
    """An injector whose trigger never came."""

    def begin(self, injection: Injection) -> Injected:
        raise UserError("cpu on rollout-1: trigger: step 14 never came: the run has ended after step 32")


class Ended:
    """A system whose run is over."""

    def __init__(self, run_dir: Path) -> None:
        self.run = SimpleNamespace(running=False, run_dir=run_dir)
        self.interrupted = False


def scenario_without_a_fault(folder: Path, profile: Profile, *, completed: bool) -> runner.ScenarioRun:
    loaded = experiments.find("S2")
    scenario = runner.ScenarioRun(loaded, profile, folder=folder)
    scenario._step = 100
    system: Any = Ended(folder)
    injector: Any = Refusing()
    scenario._inject(system, injector, loaded.experiment.faults[0])
    scenario._judge_not_injected(completed=completed)
    return scenario


def test_a_fault_that_never_struck_a_run_that_was_completed_is_a_problem(tmp_path: Path) -> None:
    scenario = scenario_without_a_fault(tmp_path, Profile.OURS, completed=True)
    assert scenario._problem.startswith("not injected: cpu on rollout-1: trigger: step 14 never came")
    assert scenario._problem.count("cpu on rollout-1") == 1
    happened = ObservedOutcome(
        loaded=scenario._loaded, profile=Profile.OURS, folder=tmp_path, problem=scenario._problem
    )
    assert not record_of(happened).as_expected


def test_a_fault_that_came_too_late_for_a_system_that_was_broken_before_is_told_as_not_struck(
    tmp_path: Path,
) -> None:
    scenario = scenario_without_a_fault(tmp_path, Profile.FRAGILE, completed=False)
    assert scenario._problem == ""
    written = json.loads((tmp_path / runner.NOT_INJECTED_FILE).read_text())
    assert written == scenario.not_injected
    assert list(written) == ["cpu on rollout-1"]


def test_a_fault_whose_run_was_over_before_it_was_prepared_is_not_struck_either(tmp_path: Path) -> None:
    loaded = experiments.find("S2")
    scenario = runner.ScenarioRun(loaded, Profile.OURS, folder=tmp_path)
    scenario._over.set()
    system: Any = Ended(tmp_path)
    injector: Any = Refusing()
    scenario._inject(system, injector, loaded.experiment.faults[0])
    assert "over before its trigger came" in scenario.not_injected["cpu on rollout-1"]


def commits(*moments: float) -> list[StepCommit]:
    return [StepCommit(number, at) for number, at in enumerate(moments, start=1)]


def test_a_slow_machine_gives_a_run_more_time_but_not_for_ever() -> None:
    faults = experiments.find("S5").experiment.faults
    timeout_s = partial(runner.run_timeout_s, faults=faults)
    assert timeout_s(0.4, steps_left=30) == runner.RUN_TIMEOUT_S
    assert timeout_s(1.0, steps_left=30) == 3 * 30 + 12.0
    assert timeout_s(10.0, steps_left=30) == runner.LONGEST_RUN_S


def test_the_usual_step_is_that_of_the_baseline() -> None:
    assert runner.usual_step_s(commits(9.0, 10.0, 11.0, 11.5, 12.0, 15.0)) == 0.5
    assert runner.usual_step_s([]) == 0.0


def test_a_run_that_went_on_at_its_deadline_is_the_laboratorys_problem(tmp_path: Path) -> None:
    loaded = experiments.find("S5")
    scenario = runner.ScenarioRun(loaded, Profile.OURS, folder=tmp_path)
    now = SYSTEM_CLOCK.monotonic()
    system: Any = Ended(tmp_path)
    watch: Any = SimpleNamespace(commits=[StepCommit(43, now - 1.0)], step=43)
    scenario._interrupt(system, watch, step_s=0.5, timeout_s=75.0)
    assert "the laboratory ended the run at step 43 of 44: it still made progress" in scenario._problem
    assert system.interrupted


def test_a_run_that_stands_still_at_its_deadline_has_failed_by_itself(tmp_path: Path) -> None:
    scenario = runner.ScenarioRun(experiments.find("S5"), Profile.FRAGILE, folder=tmp_path)
    system: Any = Ended(tmp_path)
    watch: Any = SimpleNamespace(commits=[StepCommit(16, SYSTEM_CLOCK.monotonic() - 60.0)], step=16)
    scenario._interrupt(system, watch, step_s=0.5, timeout_s=75.0)
    assert scenario._problem == ""
    assert not system.interrupted
