from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.diagnosis.verdict import Cause, Diagnosis, FaultKind, Hop
from kintsugi.errors import Fault
from kintsugi.lab.campaign.blind import Look
from kintsugi.lab.injector.injection import Ability, Injected, Injection
from kintsugi.lab.scenarios import experiments, outcome
from kintsugi.lab.scenarios.experiments import Profile
from kintsugi.lab.scenarios.outcome import ObservedOutcome, format_record, record_of
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import EventLog, FaultSeen

START = 1_800_000_000.0


def injected(
    ability: Ability = Ability.NETWORK_DELAY, *, target: str = "model-1", start: float = START
) -> Injected:
    return Injected(
        injection=Injection(ability=ability, target=target),
        process=target,
        pid=7,
        host="host-1",
        mechanism="by hand",
        start=start,
        monotonic=0.0,
        phase="publishing",
        step=14,
        end=start + 10.0,
    )


def look(process: str, kind: FaultKind, *, after_s: float) -> Look:
    cause = Cause(
        process=process,
        host="host-1",
        kind=kind,
        onset=START,
        confidence=0.9,
        summary="it is slow",
        path=(
            Hop(process, "is slow", START),
            Hop("server-0", "waits", START),
            Hop("master-0", "waits", START),
        ),
        evidence=(),
    )
    diagnosis = Diagnosis(run="run", at=START + after_s, since=0.0, causes=(cause,))
    return Look(START + after_s, diagnosis)


def quiet(*, after_s: float) -> Look:
    nothing = Diagnosis(run="run", at=START + after_s, since=0.0, causes=(), abstained="nothing is wrong")
    return Look(START + after_s, nothing)


def tell(run_dir: Path, process: str, message: str, *, after_s: float) -> None:
    log = EventLog(
        RunFolder(run_dir).events_file(process),
        process=process,
        clock=VirtualClock(start=0.0, wall=START + after_s),
    )
    log.emit(FaultSeen(Fault(id="f", kind="ProcessDied", process="model-1", message=message, time=0.0)))
    log.close()


@pytest.fixture
def happened(tmp_path: Path) -> ObservedOutcome:
    """S1 on our system as it should go."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    tell(run_dir, "server-0", "weights are slow to come", after_s=1.0)
    return ObservedOutcome(
        loaded=experiments.find("S1"),
        profile=Profile.OURS,
        folder=tmp_path,
        injected=[injected()],
        looks=[quiet(after_s=-1.0), look("model-1", FaultKind.NETWORK_DELAY, after_s=2.5)],
        seconds=30.0,
        run_dir=run_dir,
        host_of={"model-1": "host-1"},
        completed=True,
        phases=[(START - 5.0, "training"), (START - 0.5, "publishing")],
    )


def test_a_right_verdict_in_time_of_a_run_that_completes_is_as_expected(happened: ObservedOutcome) -> None:
    record = record_of(happened)
    assert record.correct and record.as_expected and record.recovered
    assert (record.first_effect, record.diagnosed_after_s, record.hops) == (START + 1.0, 1.5, 2)
    assert record.surfaced is not None
    assert (record.surfaced.stage, record.surfaced.process) == ("publishing", "server-0")
    assert "right" in format_record(record)


def test_what_was_said_before_the_fault_is_no_verdict_on_it(happened: ObservedOutcome) -> None:
    happened.looks = [look("model-1", FaultKind.NETWORK_DELAY, after_s=-3.0)]
    record = record_of(happened)
    assert record.diagnosed is None and not record.correct


def test_the_first_verdict_counts_and_a_later_better_one_is_only_told(happened: ObservedOutcome) -> None:
    happened.looks = [
        look("server-0", FaultKind.CPU, after_s=1.5),
        look("model-1", FaultKind.NETWORK_DELAY, after_s=2.0),
    ]
    record = record_of(happened)
    assert not record.correct and len(record.verdicts) == 2


def test_a_late_verdict_is_right_but_not_as_expected(happened: ObservedOutcome) -> None:
    happened.looks = [look("model-1", FaultKind.NETWORK_DELAY, after_s=12.0)]
    record = record_of(happened)
    assert record.correct and not record.as_expected


def test_a_run_that_lost_a_step_is_not_as_expected(happened: ObservedOutcome) -> None:
    happened.steps_lost = 1
    assert not record_of(happened).as_expected


def test_an_experiment_in_which_no_fault_struck_is_no_success(happened: ObservedOutcome) -> None:
    happened.injected = []
    record = record_of(happened)
    assert not record.correct and not record.as_expected and record.problem == "no fault was injected"


def test_a_problem_makes_any_verdict_wrong(happened: ObservedOutcome) -> None:
    happened.problem = "memory on model-1: model-1 has ended by itself"
    record = record_of(happened)
    assert not record.correct and not record.as_expected
    assert "ended by itself" in format_record(record)


def test_of_several_faults_the_one_of_the_right_kind_is_the_culprit(happened: ObservedOutcome) -> None:
    cpu = injected(Ability.CPU, target="rollout-0", start=START - 3.0)
    happened.injected = [cpu, *happened.injected]
    assert happened.target_fault.process == "model-1"
    assert record_of(happened).correct


def test_of_a_fragile_run_the_last_error_of_the_master_is_what_is_seen_and_believed(
    happened: ObservedOutcome, tmp_path: Path
) -> None:
    assert happened.run_dir is not None
    message = "Weight update failed: HTTP error 500 (rollout-1/update_weights)"
    tell(happened.run_dir, "master-0", message, after_s=6.0)
    happened.profile, happened.completed = Profile.FRAGILE, False
    record = record_of(happened)
    assert record.as_expected and not record.correct and not record.recovered
    assert record.surfaced is not None and record.surfaced.t == START + 6.0
    assert record.diagnosed is not None and record.diagnosed.by == outcome.BY_LAST_ERROR


def test_fine_tuning_shows_a_fault_where_it_was_done_or_not_at_all(happened: ObservedOutcome) -> None:
    happened.profile = Profile.SFT
    assert record_of(happened).as_expected
    happened.phases = [(START - 5.0, "training"), (START + 0.5, "ending")]
    assert not record_of(happened).as_expected


def test_a_contrast_is_judged_by_what_it_is_the_contrast_of(happened: ObservedOutcome) -> None:
    own = happened.loaded.experiment
    contrast = msgspec.structs.replace(
        own, contrast_of="S5", cause=msgspec.structs.replace(own.cause, kinds=(FaultKind.CPU,))
    )
    happened.loaded = msgspec.structs.replace(happened.loaded, experiment=contrast)
    assert happened.truth.kinds == (FaultKind.DISK_FULL,)
    assert record_of(happened).contrast_of == "S5"


def test_a_verdict_before_the_first_effect_is_said_as_such(happened: ObservedOutcome) -> None:
    happened.looks = [look("model-1", FaultKind.NETWORK_DELAY, after_s=0.5)]
    record = record_of(happened)
    assert record.diagnosed_after_s == -0.5 and record.as_expected
    assert "0.5 s before the first effect" in format_record(record)


def test_where_no_error_was_seen_nobody_would_have_read_anything(happened: ObservedOutcome) -> None:
    assert record_of(happened).log_files is not None
    happened.logs, happened.injected = {}, [injected(start=START + 5.0)]
    record = record_of(happened)
    assert (record.surfaced, record.log_files, record.log_lines) == (None, None, None)


def test_the_start_of_the_fault_that_is_to_be_named_is_marked(happened: ObservedOutcome) -> None:
    cpu = injected(Ability.CPU, target="rollout-0", start=START - 3.0)
    happened.injected = [cpu, *happened.injected]
    assert [(fault.kind, fault.culprit) for fault in record_of(happened).injected] == [
        ("cpu", False),
        ("network_delay", True),
    ]


def test_a_save_belongs_to_the_step_that_was_committed_and_the_next_update_to_the_next(
    happened: ObservedOutcome,
) -> None:
    happened.commits = [(START - 2.0, 13), (START - 1.0, 14)]
    happened.phases = [(START - 3.0, "training"), (START - 0.5, "saving"), (START + 0.5, "publishing")]
    assert happened.step_at(START, "saving") == 14
    record = record_of(happened)
    assert record.surfaced is not None
    assert (record.surfaced.stage, record.surfaced.step) == ("publishing", 15)
    happened.injected = [msgspec.structs.replace(injected(), phase="saving", step=15)]
    assert record_of(happened).injected[0].step == 14
    happened.commits = []
    assert record_of(happened).injected[0].step == 15, "as the injector counted"


def test_there_are_as_many_names_on_the_way_as_hops_and_one(happened: ObservedOutcome) -> None:
    record = record_of(happened)
    assert (record.hops, record.way) == (2, ("model-1", "server-0", "master-0"))
    assert happened.run_dir is not None
    tell(happened.run_dir, "master-0", "Weight update failed", after_s=6.0)
    happened.profile = Profile.FRAGILE
    happened.injected = [injected(target="master-0")]
    assert record_of(happened).way == ("master-0", "server-0", "master-0")


def test_what_our_master_says_right_after_it_moved_on_is_of_the_phase_before(
    happened: ObservedOutcome,
) -> None:
    happened.phases = [(10.0, "saving"), (20.0, "collecting")]
    assert (happened.phase_at(20.0004), happened.phase_at(20.1)) == ("saving", "collecting")


def test_an_error_at_the_border_of_two_phases_belongs_to_the_one_that_failed(
    happened: ObservedOutcome,
) -> None:
    happened.profile = Profile.FRAGILE
    happened.phases = [(10.0, "publishing"), (20.0003, "training"), (20.0006, "ending")]
    assert happened.phase_at(20.0) == "training"
    assert happened.phase_at(19.0) == "publishing"
    assert happened.phase_at(25.0) == "ending"
    assert happened.phase_at(5.0) == ""


def test_a_record_survives_being_written_and_read(happened: ObservedOutcome) -> None:
    record = record_of(happened)
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
