"""Ends, stops and errors: the first failure is the cause, and what the run did about it is not."""

from __future__ import annotations

import pytest

from kintsugi.diagnosis.diagnose import look
from kintsugi.errors import DataDamaged, EndedByError, GroupFailed, Miscomputed, StatesDiverged
from kintsugi.runtime.shortages import EXIT_FILE_LIMIT, EXIT_NO_DESCRIPTORS, EXIT_NO_MEMORY, describe_exit
from kintsugi.telemetry.events import (
    AcceleratorWarning,
    Alert,
    AlertEvent,
    BytesDamaged,
    FaultHandled,
    HostLost,
    JournalPaused,
    LeaseUnanswered,
    OperationFailed,
    ProcessBegan,
    ProcessEnded,
    ProcessGone,
    QuarantineCause,
    SamplesQuarantined,
    SlowLink,
    SlowProcess,
    StateCommitted,
    Transition,
    UpdateSkipped,
    WeightsFromFallback,
)
from tests.unit.diagnosis.healthy import START, HealthyRun
from tests.unit.diagnosis.looking import diagnosis_of, named


@pytest.mark.parametrize("process", ["model-0", "rollout-1", "server-0", "manager-0", "master-0"])
def test_a_killed_process_is_named_though_it_was_replaced_at_once(process: str) -> None:
    run = HealthyRun().play(30)
    run.kill(process)
    assert named(run.play(1)) == [(process, "killed")]
    (cause,) = diagnosis_of(run).causes
    assert cause.onset == START + 30
    assert cause.path[0].process == process
    assert cause.path[-1].process == "master-0"


def test_one_whom_the_kernel_killed_for_memory_had_no_memory_left() -> None:
    run = HealthyRun().play(30)
    run.kill("server-1", oom=True)
    assert named(run.play(1)) == [("server-1", "memory")]


def test_a_process_that_segfaults_has_crashed() -> None:
    run = HealthyRun().play(30)
    run.kill("server-1", status=-11, how="killed by SIGSEGV")
    assert named(run.play(1)) == [("server-1", "crashed")]


def gone_for_six_seconds(*processes: str) -> HealthyRun:
    """These processes say nothing more, no end of them is recorded, and later they begin again."""
    run = HealthyRun().play(30)
    run.silent, run.stalled = set(processes), True
    run.play(6)
    for process in processes:
        run.pids[process] += 1000
        run.say(process, ProcessBegan(process.rpartition("-")[0], "2", run.pids[process]))
    run.silent = set()
    return run.play(5)


def test_an_agent_that_did_not_run_for_seconds_was_stopped() -> None:
    assert named(gone_for_six_seconds("agent-1"))[0] == ("agent-1", "stopped")


def test_processes_that_were_gone_in_the_same_moment_as_their_agent_were_killed_and_not_stopped() -> None:
    found = named(gone_for_six_seconds(*HealthyRun().hosts["host-1"]))
    assert found and {kind for _, kind in found} == {"killed"}


def test_an_end_that_the_run_ordered_is_no_cause() -> None:
    run = HealthyRun().play(30)
    run.say("agent-0", ProcessGone("server-0", "1", 1, -9, "killed by SIGKILL", ordered=True))
    assert named(run.play(1)) == []


def test_processes_that_end_with_the_run_are_no_cause() -> None:
    run = HealthyRun().play(30)
    run.say("master-0", Transition("master", "run", "saving", "ended", "finished at step 30"), ago_s=0.1)
    run.say("agent-0", ProcessGone("server-0", "1", 1, -15, "killed by SIGTERM"))
    run.bundle.sort()
    assert named(run) == []


def resumed() -> HealthyRun:
    """A run that ended, and whose processes are there again."""
    run = HealthyRun().play(30)
    run.say("master-0", Transition("master", "run", "saving", "ended", "stopped at step 30"))
    run.now += 1.0
    run.say("agent-0", ProcessGone("server-0", "1", run.pids["server-0"], -15, "killed by SIGTERM"))
    run.now += 1.0
    for process in run.pids:
        run.pids[process] += 1000
        run.say(process, ProcessBegan(process.rsplit("-", 1)[0], "2", run.pids[process]))
    return run


def test_a_run_that_is_resumed_is_not_over_before_its_master_has_left_its_first_phase() -> None:
    run = resumed()
    run.stalled = True
    run.play(2)
    run.kill("server-0")
    assert named(run.play(1)) == [("server-0", "killed")]


def test_what_ended_with_a_run_is_no_cause_after_it_is_resumed() -> None:
    assert named(resumed().play(4)) == []


def test_an_agent_that_once_said_goodbye_can_still_be_killed_later() -> None:
    run = HealthyRun().play(10)
    run.say("agent-1", ProcessEnded(0, ""))
    run.say("agent-1", ProcessBegan("agent", "2", 998), ago_s=-0.3)
    run.play(20)
    run.say("agent-1", ProcessBegan("agent", "3", 999), ago_s=-0.3)
    assert named(run.play(4)) == [("agent-1", "killed")]


def test_a_process_that_ended_by_itself_was_not_ended() -> None:
    run = HealthyRun().play(30)
    run.kill("server-1", status=3, how="exited with code 3")
    (cause,) = diagnosis_of(run.play(1)).causes
    assert cause.summary == "server-1: exited with code 3"


def quarantine(
    run: HealthyRun,
    *reasons: str,
    cause: QuarantineCause,
    worker: str = "rollout-1",
    ticket: str = "grpo:0:1:0",
) -> None:
    for reason in reasons:
        run.say(worker, SamplesQuarantined(f"{ticket} quarantined: {reason}", ticket=ticket, cause=cause))


@pytest.mark.parametrize(
    "reason",
    [
        "reward 'brevity' raised KeyError: 'checksum'",
        "`step` of the environment raised ValueError: nan",
        "agent `mine` did not ask or end for `rollout.turn_timeout_s`=10 s",
    ],
)
def test_users_code_that_fails_group_after_group_is_named_and_once_is_an_odd_sample(reason: str) -> None:
    run = HealthyRun().play(30)
    quarantine(run, reason, cause=QuarantineCause.USER_CODE)
    assert named(run.play(1)) == []
    quarantine(run, reason, reason, cause=QuarantineCause.USER_CODE)
    assert named(run.play(1)) == [("rollout-1", "user_code")]


def test_groups_that_the_model_said_nothing_in_are_no_fault_of_the_users_code() -> None:
    run = HealthyRun().play(30)
    quarantine(run, *["reward 'x' raised: the model said nothing"] * 5, cause=QuarantineCause.SAMPLE)
    assert named(run.play(1)) == []


def test_a_stopped_process_is_named_and_not_the_kill_that_followed() -> None:
    run = HealthyRun().play(30)
    run.silent.add("server-0")
    run.states["server-0"] = "T"
    assert named(run.play(1)) == [("server-0", "stopped")]
    stopped = run.fault("Stopped", "server-0", "server-0: process 1 is stopped (state T)")
    run.fault("ProcessDied", "server-0", "server-0 was lost: killed by SIGKILL", cause=stopped)
    run.kill("server-0")
    run.silent.clear()
    run.states.clear()
    assert named(run.play(2)) == [("server-0", "stopped")]


def test_a_process_that_is_stopped_for_a_moment_and_speaks_is_left_alone() -> None:
    run = HealthyRun().play(30)
    run.states["master-0"] = "T"
    run.play(1)
    run.states.clear()
    assert named(run.play(1)) == []


def test_a_frozen_process_neither_runs_nor_wants_to() -> None:
    run = HealthyRun().play(30)
    run.silent.add("rollout-1")
    run.states["rollout-1"] = "D"
    run.changes["rollout-1"] = lambda now, rates: rates.update(frozen=1.0)
    assert named(run.play(4)) == [("rollout-1", "stopped")]


def test_one_that_waits_for_a_disk_that_hangs_is_not_stopped() -> None:
    run = HealthyRun().play(30)
    run.silent.add("model-1")
    run.states["model-1"] = "D"
    run.changes["host-1"] = lambda now, rates: rates.update(fsync_s=3.0, disk_busy_s=0.99)
    found = named(run.play(5))
    assert found
    assert {kind for _, kind in found} == {"disk_slow"}


def test_of_a_chain_of_errors_the_first_is_the_cause() -> None:
    run = HealthyRun().play(30)
    memory = run.fault("DeviceOutOfMemory", "model-1", "CUDA out of memory", by="model-1")
    run.fault("GroupBroken", "model-0", "all-reduce with model-1 failed", by="model-0")
    run.fault("DeadlineExceeded", "master-0", "waited 30 s for model-1: stop", cause=memory)
    assert named(run.play(1)) == [("model-1", "device_memory")]


def test_those_who_only_noticed_are_no_cause() -> None:
    run = HealthyRun().play(30)
    run.fault("GroupBroken", "model-0", "all-reduce with model-1 failed", by="model-0")
    run.fault("DeadlineExceeded", "server-0", "waited 1.0 s for agent-0: weights", by="server-0")
    assert named(run.play(1)) == []


def test_an_agent_that_began_again_without_a_word_was_killed() -> None:
    run = HealthyRun().play(30)
    run.say("agent-1", ProcessBegan("agent", "2", 999), ago_s=-0.3)
    assert named(run.play(1)) == []
    assert named(run.play(3)) == [("agent-1", "killed")]


def test_a_full_disk_that_an_alert_tells_of_is_named() -> None:
    run = HealthyRun().play(30)
    error = "[Errno 28] No space left on device"
    run.say("master-0", OperationFailed("metrics can not be written", operation="metrics", error=error))
    assert named(run.play(1)) == [("master-0", "disk_full")]


@pytest.mark.parametrize(
    ("alert", "process", "kind"),
    [
        (JournalPaused("paused", error="Permission denied"), "master-0", "disk_error"),
        (JournalPaused("paused", error="No space left on device"), "master-0", "disk_full"),
        (UpdateSkipped("an update was skipped"), "master-0", "numeric"),
        (
            AcceleratorWarning("odd", of="agent-1", device="a1", signal="xid", is_broken=False),
            "agent-1",
            "device",
        ),
        (
            AcceleratorWarning("broken", of="agent-1", device="a1", signal="lost", is_broken=True),
            "agent-1",
            "device",
        ),
    ],
)
def test_an_alert_names_the_fault_by_its_type(alert: AlertEvent, process: str, kind: str) -> None:
    run = HealthyRun().play(30)
    run.say("master-0", alert)
    assert named(run.play(1)) == [(process, kind)]


@pytest.mark.parametrize(
    "alert",
    [
        Alert("server-0 is slow: No space left on device, checksum differs, nan"),
        FaultHandled("checkpoint failed: No space left on device", of="model-0", fault="f"),
        OperationFailed("weights were not broadcast", operation="broadcast", error="Connection refused"),
        AcceleratorWarning(
            "3 corrected errors", of="agent-1", device="a1", signal="corrected errors", is_broken=False
        ),
    ],
)
def test_the_sentence_of_an_alert_names_nothing(alert: AlertEvent) -> None:
    run = HealthyRun().play(30)
    run.say("master-0", alert)
    assert named(run.play(1)) == []


def test_a_slow_process_is_named_by_the_masters_event() -> None:
    run = HealthyRun().play(30)
    run.stalled = True
    run.say("master-0", SlowProcess("it takes 3 s", of="server-0"))
    assert ("server-0", "slow") in named(run.play(5))


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        (Miscomputed("logits"), "numeric"),
        (DataDamaged("model-0"), "corruption"),
        (EndedByError("StorageFull"), "disk_full"),
    ],
)
def test_the_detail_of_a_fault_names_its_kind(
    detail: Miscomputed | DataDamaged | EndedByError, kind: str
) -> None:
    run = HealthyRun().play(30)
    run.fault("ProcessDied", "server-0", "server-0 was lost", detail=detail)
    assert named(run.play(1)) == [("server-0", kind)]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(EXIT_NO_MEMORY, "memory"), (EXIT_NO_DESCRIPTORS, "descriptors"), (EXIT_FILE_LIMIT, "disk_full")],
)
def test_an_exit_code_says_what_the_host_did_not_give(status: int, kind: str) -> None:
    run = HealthyRun().play(30)
    run.kill("master-0", status=status, how=describe_exit(status))
    assert ("master-0", kind) in named(run.play(1))


def test_who_did_not_answer_the_recall_of_a_device_is_named() -> None:
    run = HealthyRun().play(30)
    message = "server-0 has not answered LeaseRecalled 7 of cuda:0 for 1.1 s; waiting for it: model-0"
    run.say("agent-0", LeaseUnanswered(message, of="server-0", device="cuda:0", request="LeaseRecalled"))
    assert named(run.play(1)) == [("server-0", "handover")]


def test_of_three_ranks_the_one_that_stands_alone_computes_wrongly() -> None:
    run = HealthyRun().play(30)
    states = {"model-0": "aaaaaa", "model-1": "bbbbbb", "model-2": "aaaaaa"}
    run.fault("IntegrityError", "model-0", "different states", detail=StatesDiverged("actor_train", states))
    assert named(run.play(1)) == [("model-1", "numeric")]


def test_of_two_ranks_the_next_commit_proves_one_wrong() -> None:
    run = HealthyRun().play(30)
    states = {"model-0": "aaaaaa", "model-1": "bbbbbb"}
    run.fault("IntegrityError", "model-0", "different states", detail=StatesDiverged("actor_train", states))
    assert set(named(run.play(1))) == {("model-0", "numeric"), ("model-1", "numeric")}
    run.say("master-0", StateCommitted("step 31 was committed", step=31, state="aaaaaa"))
    assert named(run.play(1)) == [("model-1", "numeric")]


def test_wrong_bytes_are_those_of_whoever_published_them() -> None:
    run = HealthyRun().play(30)
    message = "version 9 came by stream of model-1"
    run.say("server-0", WeightsFromFallback(message, version=9, is_damaged=True, origin="model-0"))
    assert named(run.play(1)) == [("model-0", "corruption")]


def test_weights_from_a_fallback_whose_source_only_was_slow_are_no_damage() -> None:
    run = HealthyRun().play(30)
    run.say("server-0", WeightsFromFallback("version 9 came by stream of model-1", version=9))
    assert named(run.play(1)) == []


def test_damaged_bytes_of_unknown_origin_are_those_of_the_process_that_found_them() -> None:
    run = HealthyRun().play(30)
    run.say("model-1", BytesDamaged("sample grpo:0:1:0:3 was damaged"))
    assert named(run.play(1)) == [("model-1", "corruption")]


def test_an_error_of_nobody_in_particular_is_the_masters() -> None:
    run = HealthyRun().play(30)
    run.fault("StorageFull", "", "could not write the journal on disk: No space left on device")
    assert named(run.play(1)) == [("master-0", "disk_full")]


def test_a_rank_that_says_that_its_link_is_slow_means_its_network() -> None:
    run = HealthyRun().play(30)
    run.stalled = True
    run.say("model-1", SlowLink("uploading version 14 takes 1.4 s", of="model-1", peer="agent-0"))
    assert named(run.play(1)) == [("model-1", "network_delay")]


def test_code_that_fails_everywhere_is_one_cause_and_the_master_has_not_crashed() -> None:
    run = HealthyRun().play(30)
    for worker in ("rollout-0", "rollout-1"):
        reason = "reward 'boom' raised KeyError: 'answer'"
        quarantine(run, reason, cause=QuarantineCause.USER_CODE, worker=worker, ticket="eval:0:2:1")
    run.fault(
        "EpisodesFailed",
        "master-0",
        "no evaluation problem could be scored; eval:0:2:1: reward 'boom' raised",
    )
    run.play(1)
    assert named(run) == [("rollout-1", "user_code")]
    assert "rollout-0" in diagnosis_of(run).causes[0].summary


def test_that_everybody_fell_silent_at_once_is_named_when_nobody_records_any_more() -> None:
    run = HealthyRun().play(30)
    found = look(run.bundle, at=run.bundle.at, is_over=True)
    assert [(cause.process, cause.kind) for cause in found.causes] == [("master-0", "killed")]
    assert "ended all processes together" in found.causes[0].summary
    assert "kintsugi resume" in found.causes[0].advice
    run.say("master-0", Transition("master", "run", "", "ended", "finished"))
    assert look(run.bundle, at=run.bundle.at, is_over=True).causes == ()


def test_a_machine_that_is_gone_is_named_and_not_the_processes_that_were_on_it() -> None:
    run = HealthyRun().play(30)
    there = run.hosts["host-1"]
    run.silent, run.stalled = set(there), True
    run.play(3)
    why = "host-1 (b, 10.0.0.12) is lost: its connection was closed, and it is silent for 2.6 s"
    run.say("host_manager-0", HostLost(why, of="agent-1", host="host-1"))
    for process in there:
        run.fault("HostLost", process, "its connection was closed")
    # They begin again on the other host; the agent comes back later.
    run.hosts = {"host-0": (*run.hosts["host-0"], *there[1:]), "host-1": ("agent-1",)}
    for process in there[1:]:
        run.pids[process] += 1000
        run.say(process, ProcessBegan(process.rpartition("-")[0], "2", run.pids[process]))
    run.silent, run.stalled = {"agent-1"}, False
    run.play(2)
    (cause,) = diagnosis_of(run).causes
    assert (cause.process, cause.kind) == ("agent-1", "host_lost")
    assert cause.onset == START + 30 and "10.0.0.12" in cause.summary


def broken(run: HealthyRun, *, generation: int, by: str, peer: str, why: str) -> None:
    detail = GroupFailed(generation, (peer,), why)
    run.fault("GroupBroken", by, f"all-gather with {peer} failed: {why}", by=by, detail=detail)


def test_connections_of_a_rank_that_break_again_and_again_are_named_though_nobody_has_ended() -> None:
    run = HealthyRun().play(30)
    for generation in (1, 2, 3):
        broken(run, generation=generation, by="model-0", peer="model-1", why="Connection reset by peer.")
        broken(
            run, generation=generation, by="model-1", peer="model-0", why="Software caused connection abort."
        )
        run.play(1)
    assert named(run) == [("model-1", "network_cut")]


def test_a_group_that_breaks_because_a_rank_was_killed_is_nothing_else() -> None:
    run = HealthyRun().play(30)
    for generation in (1, 2):
        run.kill("model-1")
        broken(run, generation=generation, by="model-0", peer="model-1", why="Connection closed by peer.")
        run.play(2)
    assert set(named(run)) == {("model-1", "killed")}


def test_a_file_that_may_not_grow_is_an_error_of_the_disk() -> None:
    run = HealthyRun().play(30)
    error = "run/inputs: File too large"
    run.say("master-0", OperationFailed("inputs can not be written", operation="inputs", error=error))
    assert named(run.play(1)) == [("master-0", "disk_error")]


def test_one_that_runs_and_does_not_say_a_word_hangs() -> None:
    run = HealthyRun().play(30)
    run.silent.add("model-1")
    run.changes["model-1"] = lambda now, rates: rates.update(cpu_s=0.05, run_delay_s=0.01)
    assert named(run.play(3)) == []
    assert named(run.play(2)) == [("model-1", "hung")]


def test_one_that_computes_in_one_long_call_does_not_hang_until_it_has_taken_far_too_long() -> None:
    run = HealthyRun().play(30)
    run.silent.add("model-1")
    run.states["model-1"] = "R"
    run.changes["model-1"] = lambda now, rates: rates.update(cpu_s=0.95, run_delay_s=0.01)
    for _ in range(39):
        assert named(run.play(1)) == []
    assert named(run.play(3)) == [("model-1", "hung")]


def test_one_that_gets_no_cpu_for_its_long_call_does_not_hang() -> None:
    """Observed on two cores with a load of 15: a master that handled 8,000 samples was called hung."""
    run = HealthyRun().play(30)
    run.silent.add("master-0")
    run.states["master-0"] = "R"
    run.changes["master-0"] = lambda now, rates: rates.update(cpu_s=0.19, run_delay_s=0.75)
    assert ("master-0", "hung") not in named(run.play(8))


@pytest.mark.parametrize("status", [-9, None], ids=["its parent took over", "another process took over"])
def test_a_killed_launcher_is_named_while_the_run_goes_on_under_its_successor(status: int | None) -> None:
    run = HealthyRun().play(30)
    run.say("launcher-0", ProcessGone("launcher-0", "", 77, status, "killed by SIGKILL"))
    assert named(run.play(2)) == [("launcher-0", "killed")]


def test_a_launcher_that_is_lost_with_its_standby_is_the_cause_of_all_ends_that_follow() -> None:
    run = HealthyRun().play(30)
    lost = ProcessGone("launcher-0", "", 77, None, "ended together with its standby")
    for agent in ("agent-0", "agent-1"):
        run.say(agent, lost)
    run.now += 0.3
    for process in ("master-0", "manager-0", "model-0", "rollout-0", "server-0"):
        run.say(
            "agent-0", ProcessGone(process, "1", run.pids[process], -9, "killed by SIGKILL", ordered=True)
        )
    for agent in ("agent-0", "agent-1"):
        run.say(agent, ProcessEnded(1, ""))
    found = look(run.bundle, at=run.bundle.at, is_over=True)
    assert [(cause.process, cause.kind.value) for cause in found.causes] == [("launcher-0", "killed")]
