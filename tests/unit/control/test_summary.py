from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection, WarmupSection
from kintsugi.control.phases.table import Phase
from kintsugi.control.state import Tally
from kintsugi.control.summary import OTHER_REASONS, REASONS_SHOWN, stage_seconds, summarize_run
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    FilterReason,
    ProcessLost,
    ProcessRequested,
    SampleQuarantined,
    SamplesScored,
    TicketAssigned,
    TicketFiltered,
    TicketsIssued,
)
from kintsugi.protocol.membership import Heartbeat
from kintsugi.run_folder.incidents import report_of
from kintsugi.run_folder.summary import IncidentLine, Summary
from kintsugi.runtime.peak_memory import PARAMETERS, PEAK_ALLOCATED, PEAK_RSS, PEAK_UPDATE
from kintsugi.types import Progress, Role, Ticket, sample_key
from tests.unit.control.driven import CONFIG, Driven, scored


def summary_of(driven: Driven, *faults: Fault) -> dict[str, object]:
    return summarize_run(
        driven.master.config,
        driven.state,
        run_dir="runs/a",
        processes={"model": [1, 2]},
        rest=driven.master.timing,
        faults=faults,
    )


def test_phases_become_stages_and_what_took_no_time_is_left_out() -> None:
    timing = {"starting": 1.0, "preparing": 2.0, "training": 3.0, "publishing": 4.0, "saving": 0.0}
    assert stage_seconds(timing) == {"start": 3.0, "train": 3.0, "weights": 4.0}


def test_collecting_time_is_divided_by_what_the_workers_spent_and_none_of_it_is_lost() -> None:
    timing = {"collecting": 10.0, "episode_actor_generate": 30.0, "episode_reward": 10.0}
    assert stage_seconds(timing) == {"generate": 7.5, "reward": 2.5}
    assert stage_seconds({"collecting": 10.0, "episode_demonstrate": 0.2}) == {"data": 10.0}


def test_parts_of_a_training_call_are_not_counted_beside_it() -> None:
    assert stage_seconds({"training": 3.0, "train_forward": 2.0}) == {"train": 3.0}


def test_a_finished_run_is_summed_up_over_its_stages() -> None:
    driven = Driven(
        msgspec.structs.replace(CONFIG, warmup=WarmupSection(steps=2, batch_size=2)), num_eval_rows=2
    )
    driven.begin()
    driven.until(Phase.ENDED)
    summary = summary_of(driven)
    expected = {
        "name": "driven",
        "algorithm": "grpo",
        "outcome": "finished",
        "samples_filtered": {},
        "samples_quarantined": {},
        "run_dir": "runs/a",
        "steps": 5,
        "samples_trained": 2 * 2 * 1 + 3 * 2 * 2,
        "tokens_trained": 8 * 16,
        "tokens_generated": 4 * 16,
        "reward_first": 0.5,
        "reward_last": 0.5,
        "eval_accuracy_before": 0.0,
        "eval_accuracy_after": 0.0,
        "weights_sha256": driven.state.weights_sha256,
        "weight_version": 5,
        "processes": {"model": [1, 2]},
        "faults": [],
        "logprob_abs_diff_mean": None,
    }
    assert {name: summary[name] for name in expected} == expected
    evaluations = summary["evaluations"]
    assert isinstance(evaluations, list) and [done["step"] for done in evaluations] == [2, 5]


def test_every_second_of_a_run_is_in_exactly_one_stage_or_was_spent_collecting() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.ENDED)
    timing = summary_of(driven)["timing"]
    assert isinstance(timing, dict)
    collecting = sum(tally.totals()[0]["timing/collecting"] for tally in driven.state.tallies.values())
    ending = driven.master.timing["ending"]
    assert sum(timing.values()) + collecting + ending == pytest.approx(driven.state.wall_s)


def test_the_duration_of_a_session_includes_the_masters_before_the_last_one_and_the_time_without_one() -> (
    None
):
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    successor = driven.succeed(carried_out=True)
    successor.now += 7.0
    successor.take_over()
    successor.until(Phase.ENDED)
    assert successor.state.wall_s == pytest.approx(successor.now, abs=0.02)
    wall_s = summary_of(successor)["wall_s"]
    assert isinstance(wall_s, float) and wall_s > sum(successor.master.timing.values()) + 7.0


def test_agreement_is_averaged_over_the_steps_that_measured_it() -> None:
    driven = Driven()
    driven.state.tallies["grpo"] = tally = Tally()
    for step, metrics in enumerate(
        ({"logprob_abs_diff_mean": 0.1}, {}, {"logprob_abs_diff_mean": 0.3}), start=1
    ):
        tally.add(step, {"reward_mean": 0.25 + 0.25 * step, **metrics})
    summary = summary_of(driven)
    assert summary["logprob_abs_diff_mean"] == pytest.approx(0.2)
    assert (summary["reward_first"], summary["reward_last"]) == (0.5, 1.0)


def test_a_run_that_failed_before_its_first_step_has_faults_and_no_figures() -> None:
    driven = Driven()
    driven.begin()
    summary = summary_of(driven, Fault("a", "StartFailed", "master-0", "not registered", 0.0))
    assert summary["faults"] == [{"kind": "StartFailed", "process": "master-0", "message": "not registered"}]
    empty = ("reward_first", "reward_last", "eval_accuracy_before", "eval_accuracy_after")
    assert [summary[name] for name in empty] == [None] * 4
    assert (summary["steps"], summary["samples_trained"]) == (0, 0)


def test_a_mended_incident_is_one_line_of_the_summary() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    assert summary_of(driven)["incidents_open"] == 1
    driven.until(Phase.ENDED)
    summary = summary_of(driven)
    assert summary["incidents_open"] == 0
    (line,) = msgspec.convert(summary["incidents"], type=list[IncidentLine])
    assert (line.incident, line.process, line.strategy, line.step) == (1, "model-1", "recover", 0)
    assert line.processes == ("model-1",)
    assert "killed by SIGKILL" in line.cause and line.seconds is not None and line.seconds > 0.0


def test_a_run_that_an_incident_ended_did_not_mend_it() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    while driven.master.phase is not Phase.ENDED:
        if any(process == "model-1" for process, _, _ in driven.world.living()):
            driven.lose("model-1")
        driven.go_on()
    summary = summary_of(driven)
    assert (summary["outcome"], summary["incidents_open"]) == ("failed", 1)


def test_every_fault_of_an_incident_is_in_the_journal() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    driven.lose("rollout-0")
    driven.until(Phase.ENDED)
    (incident,) = report_of(driven.facts).incidents
    assert {fault.process for fault in incident.faults} == {"model-1", "rollout-0"}
    assert incident == driven.state.incidents.report().incidents[0]


@pytest.mark.parametrize("name", ["sft", "reward_model", "dpo", "ppo", "dapo", "grpo"])
def test_a_summary_has_the_same_fields_for_every_algorithm(name: str) -> None:
    section = msgspec.convert({"name": name, "steps": 1, "batch_size": 2}, AlgorithmSection)
    driven = Driven(msgspec.structs.replace(CONFIG, algorithm=section), num_eval_rows=2)
    driven.begin()
    driven.until(Phase.ENDED)
    summary = summary_of(driven)
    assert summary.keys() == set(Summary.__struct_fields__)
    assert summary["algorithm"] == name
    assert summary["eval_accuracy_after"] is not None
    msgspec.convert(summary, Summary)


def test_samples_that_were_not_trained_are_counted_by_their_reasons() -> None:
    driven, reasons = Driven(), REASONS_SHOWN + 5
    ticket = Ticket("grpo:0:0:0", "grpo", 0, 0, 0, reasons + 2)
    driven.state.apply(TicketsIssued((ticket,)))
    driven.state.apply(TicketAssigned(ticket.id, "rollout-0", "a"))
    for index in range(reasons):
        driven.state.apply(SampleQuarantined(sample_key(ticket.id, index), f"reason {index}\nwith details"))
    driven.state.apply(SamplesScored(ticket.id, scored(ticket, version=0).samples[reasons:]))
    driven.state.apply(TicketFiltered(ticket.id, FilterReason.EQUAL_REWARDS))
    summary = summary_of(driven)
    assert summary["samples_filtered"] == {FilterReason.EQUAL_REWARDS: 2}
    quarantined = summary["samples_quarantined"]
    assert isinstance(quarantined, dict) and sum(quarantined.values()) == reasons
    assert len(quarantined) == REASONS_SHOWN + 1 and quarantined[OTHER_REASONS] == 5
    assert not any("\n" in reason for reason in quarantined)


def test_peaks_of_memory_are_the_largest_of_all_incarnations_and_a_ranks_also_per_parameter() -> None:
    driven = Driven(CONFIG)
    members, rank = driven.state.members, "model-7"
    fault = Fault("a", "ProcessDied", rank, "it died", 0.0)
    for name, role in ((rank, Role.MODEL), ("rollout-7", Role.ROLLOUT)):
        members.apply(ProcessRequested(name, role, "host-0", "1"))
    for allocated, update in ((40e9, 18e9), (30e9, 17e9)):
        peaks = {PEAK_RSS: 5e9, PEAK_ALLOCATED: allocated, PEAK_UPDATE: update, PARAMETERS: 1e9}
        members.on_heartbeat(rank, Heartbeat(Progress({}), 0.0, gauges=peaks), now=1.0)
        members.apply(ProcessLost(rank, members.members[rank].incarnation, fault))
        members.apply(ProcessRequested(rank, Role.MODEL, "host-0", "2"))
    members.on_heartbeat("rollout-7", Heartbeat(Progress({}), 0.0, gauges={PEAK_RSS: 7e7}), now=1.0)
    memory = summary_of(driven)["memory"]
    assert memory == {
        rank: {
            "host_bytes": 5_000_000_000,
            "device_allocated_bytes": 40_000_000_000,
            "device_update_bytes": 18_000_000_000,
            "bytes_per_parameter": 40.0,
            "update_bytes_per_parameter": 18.0,
        },
        "rollout-7": {"host_bytes": 70_000_000},
    }
    assert msgspec.convert({**summary_of(driven), "outcome": "stopped"}, Summary).memory == memory
