from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.checkpoint.snapshot import SlotHeader, Snapshots
from kintsugi.cluster.child import ChildrenTable
from kintsugi.cluster.shared_memory import SegmentClient
from kintsugi.errors import RefusedError, RemoteError
from kintsugi.protocol.agents import Inspect, Inspected, StartProcess, StopProcess
from kintsugi.protocol.membership import AddressBook, Shutdown
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import ForgetStates
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import process_start_time, process_stat
from kintsugi.telemetry.events import FaultSeen, ProcessGone, read_events
from kintsugi.telemetry.stack_dump import newest_dump
from kintsugi.types import Placement, Role
from tests.unit.cluster.conftest import until
from tests.unit.transport.harness import make_endpoint

MakeHost = Callable[..., Any]

FEW_DESCRIPTORS = 16
"""Fewer than an agent has open, and more than it polls: the kernel polls no more than may be open."""
FORKED = pytest.mark.parametrize("preload", [(), ("json",)], ids=["executed", "forked"])


def segment_service(pid: int) -> str:
    """The name of the abstract socket that a process listens on."""
    inodes = {os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if f"socket:[{fields[6]}]" in inodes and fields[-1].startswith("@kintsugi-"):
            return fields[-1].removeprefix("@")
    raise AssertionError(f"process {pid} has no segment service")


@FORKED
def test_a_kill_is_reported_with_its_signal_within_a_fifth_of_a_second(
    make_host: MakeHost, preload: tuple[str, ...]
) -> None:
    host = make_host(preload=preload, model="idle")
    latencies_s = []
    for index in range(3):
        started = host.start(f"model-{index}")
        begun = time.monotonic()
        os.kill(started.pid, signal.SIGKILL)
        exited = host.exit_of(f"model-{index}")
        latencies_s.append(time.monotonic() - begun)
        assert (exited.status, exited.incarnation) == (-signal.SIGKILL, started.incarnation)
    assert min(latencies_s) < 0.2, "sooner than the agent looks at its children"


def test_an_inspection_shows_state_work_and_recorded_heartbeats(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    started = host.start("model-0", incarnation="1.0")
    first = host.ask(Inspect("model-0", "1.0"))
    assert first.state in ("R", "S") and (first.frozen, first.recorded) == (False, 0.0)
    assert first.cpu_s > 0 and first.switches > 0
    readings = RunFolder(host.run_dir).readings_file("model-0")
    readings.parent.mkdir(exist_ok=True)
    readings.touch()
    assert host.ask(Inspect("model-0", "1.0")).recorded == readings.stat().st_mtime
    assert host.ask(Inspect("model-0", "1.1")) == Inspected("")
    os.kill(started.pid, signal.SIGSTOP)
    until(lambda: host.ask(Inspect("model-0", "1.0")).state == "T", "the stop")


def test_a_kill_is_reported_with_its_signal_while_the_kernel_still_frees_the_memory(
    make_host: MakeHost,
) -> None:
    host = make_host(model="slow_to_end")
    # A busy host may give the agent no turn until the memory is free; such an end does not show anything.
    for attempt in range(5):
        process = f"model-{attempt}"
        started = host.start(process, incarnation="1.0")
        host.wrote(process, "mapped")
        pidfd = os.pidfd_open(started.pid)
        os.kill(started.pid, signal.SIGKILL)
        exited = host.exit_of(process)
        assert (exited.status, exited.incarnation) == (-signal.SIGKILL, "1.0")
        if not select.select([pidfd], [], [], 0)[0]:
            break
        os.close(pidfd)
    else:
        raise AssertionError("the agent reported five ends only after the memory was free")
    assert host.start(process, incarnation="1.1").pid != started.pid
    assert select.select([pidfd], [], [], 0)[0], "its memory is free before another one starts"
    os.close(pidfd)
    assert [exit.incarnation for exit in host.exits if exit.process == process] == ["1.0"], "reported once"
    gone = [
        record.event
        for record in read_events(host.run_dir, process="agent-0")
        if isinstance(record.event, ProcessGone)
    ]
    assert [(each.status, each.ordered) for each in gone if each.of == process] == [(-signal.SIGKILL, False)]


@FORKED
def test_an_exit_is_reported_with_its_code_and_last_words(
    make_host: MakeHost, preload: tuple[str, ...]
) -> None:
    host = make_host(preload=preload, model="last_words")
    host.start("model-0")
    exited = host.exit_of("model-0")
    assert exited.status == 3
    assert exited.last_output == "these are my last words\n"


@FORKED
def test_every_child_belongs_to_the_agent_and_inherits_only_what_it_needs(
    make_host: MakeHost, preload: tuple[str, ...]
) -> None:
    host = make_host(preload=preload, model="describe_itself")
    host.start("model-0")
    placement = host.wrote("model-0", "placement")
    assert placement["parent"] == host.agent.pid
    assert placement["session"]
    assert placement["name"] == "model-0"
    assert placement["threads"] == "1"
    kinds = [target.split(":")[0] for target in placement["descriptors"].values()]
    assert kinds.count("pipe") == 1, placement["descriptors"]
    assert not {"socket", "anon_inode"} & {*kinds}, placement["descriptors"]
    assert placement["num_threads"] == 1


def test_limits_niceness_and_environment_hold_for_the_child_alone(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="describe_itself")
    host.start(
        "model-0", placement=Placement(limits={"NOFILE": 77}, nice=7, environment={"FLAVOUR": "sweet"})
    )
    host.start("model-1")
    placed, plain = host.wrote("model-0", "placement"), host.wrote("model-1", "placement")
    assert (placed["open_files"], placed["nice"], placed["flavour"]) == ([77, 77], 7, "sweet")
    assert plain["open_files"] != [77, 77]
    assert (plain["nice"], plain["flavour"]) == (os.getpriority(os.PRIO_PROCESS, 0), None)


@pytest.mark.parametrize(
    ("placement", "phase"),
    [
        (Placement(cgroup="/sys/fs/cgroup/no-such-group"), "placing: cgroup /sys/fs/cgroup/no-such-group"),
        (Placement(network_namespace="no-such-space"), "placing: network namespace no-such-space"),
    ],
)
@FORKED
def test_a_bad_placement_fails_the_start_with_its_phase_and_leaves_nothing(
    make_host: MakeHost, preload: tuple[str, ...], placement: Placement, phase: str
) -> None:
    host = make_host(preload=preload, model="idle")
    with pytest.raises(RemoteError) as failed:
        host.start("model-0", placement=placement)
    assert failed.value.cause is not None
    assert failed.value.cause.kind == "StartFailed"
    assert f"model-0 failed to start while {phase}: No such file or directory" in failed.value.cause.message
    table = msgspec.json.decode((host.run_dir / "agents" / "agent-0.json").read_bytes(), type=ChildrenTable)
    assert {record.process for record in table.children} <= {"template"}
    assert not host.exits, "what never started has not exited"


def test_a_process_that_runs_is_answered_for_and_not_started_twice(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    assert host.start("model-0", incarnation="1.0") == host.start("model-0", incarnation="1.0")


def test_an_earlier_incarnation_ends_before_the_one_that_was_ordered_starts(make_host: MakeHost) -> None:
    host = make_host(model="stubborn")
    old = host.start("model-0", incarnation="1.0")
    new = host.start("model-0", incarnation="1.1")
    assert (process_start_time(old.pid), new.incarnation) == (None, "1.1")
    assert process_start_time(new.pid) is not None
    assert host.exit_of("model-0").incarnation == "1.0"


@FORKED
def test_a_process_that_the_master_ends_without_grace_leaves_its_stacks_in_its_log(
    make_host: MakeHost, preload: tuple[str, ...]
) -> None:
    host = make_host(preload=preload, model="stubborn")
    hung = host.start("model-0")
    assert host.wrote("model-0", "stubborn")
    asked_at = time.time()
    host.stop(hung, grace_s=0.0)
    exited = host.exit_of("model-0")
    assert (exited.status, exited.last_output.strip()) == (-signal.SIGKILL, ""), "last words are not stacks"
    dump = newest_dump(RunFolder(host.run_dir).log_file("model-0"), since=asked_at - 1.0)
    assert dump is not None and "stubborn" in dump.main_thread


def test_a_process_that_is_stopped_by_a_signal_is_ended_without_a_stack_dump(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    stopped = host.start("model-0")
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: (stat := process_stat(stopped.pid)) is not None and stat.state == "T", "its stop")
    host.stop(stopped, grace_s=0.0)
    assert host.exit_of("model-0").status == -signal.SIGKILL
    assert newest_dump(RunFolder(host.run_dir).log_file("model-0")) is None


def test_stopping_is_answered_once_the_process_is_gone(make_host: MakeHost) -> None:
    host = make_host(model="idle", rollout="stubborn")
    gentle, stubborn = host.start("model-0"), host.start("rollout-0")
    host.stop(gentle)
    assert process_start_time(gentle.pid) is None
    assert host.exit_of("model-0").status == -signal.SIGTERM
    assert host.wrote("rollout-0", "stubborn")
    host.stop(stubborn, grace_s=0.05)
    assert process_start_time(stubborn.pid) is None
    assert host.exit_of("rollout-0").status == -signal.SIGKILL


def test_the_template_may_die_and_processes_start_all_the_same(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="describe_itself")
    first = host.start("model-0")
    children = Path(f"/proc/{host.agent.pid}/task/{host.agent.pid}/children").read_text().split()
    (template,) = [int(pid) for pid in children if int(pid) != first.pid]
    os.kill(template, signal.SIGKILL)
    host.start("model-1")
    assert host.wrote("model-1", "placement")["parent"] == host.agent.pid


def test_a_template_that_cannot_import_is_done_without(make_host: MakeHost) -> None:
    host = make_host(preload=("no_such_module",), model="idle")
    assert process_start_time(host.start("model-0").pid) is not None


def test_what_a_killed_child_leaves_in_its_group_is_killed_with_it(make_host: MakeHost) -> None:
    host = make_host(rollout="parent_of_sleepers")
    started = host.start("rollout-0")
    in_group, _ = host.wrote("rollout-0", "sleepers")
    os.kill(started.pid, signal.SIGKILL)
    host.exit_of("rollout-0")
    until(lambda: process_start_time(in_group) is None or None, "the end of what it left")


def test_the_table_names_every_living_child(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    started = [host.start("model-0"), host.start("model-1")]
    path = host.run_dir / "agents" / "agent-0.json"
    table = msgspec.json.decode(path.read_bytes(), type=ChildrenTable)
    assert [(record.process, record.incarnation, record.pid) for record in table.children] == [
        (one.process, one.incarnation, one.pid) for one in started
    ]
    assert [record.start_time for record in table.children] == [
        process_start_time(one.pid) for one in started
    ]


def test_segments_survive_the_process_that_wrote_them(make_host: MakeHost) -> None:
    host = make_host(model="segment_writer")
    started = host.start("model-0")
    host.wrote("model-0", "written")
    os.kill(started.pid, signal.SIGKILL)
    host.exit_of("model-0")
    client = SegmentClient(segment_service(host.agent.pid))
    descriptor = client.open("snapshot")
    assert os.pread(descriptor, 15, 0) == b"state of step 7"
    os.close(descriptor)
    client.close()


def test_an_agent_forgets_the_snapshots_of_ranks_that_are_gone_once_the_run_does_not_return_to_them(
    make_host: MakeHost,
) -> None:
    host = make_host(model="idle")
    host.start("model-0")
    client = SegmentClient(segment_service(host.agent.pid))
    for owner, step in (("model-0", 3), ("model-1@0-of-2x1x1", 3), ("model-2", 5)):
        slot = Snapshots(owner, size=64, segments=client).slots[0]
        slot.begin()
        slot.prepare(SlotHeader(step, "grpo", step, 0, "d", serial=1))
    host.master.send("agent-0", ForgetStates(4))

    def is_forgotten() -> bool | None:
        host.master.turn(0.01)
        try:
            os.close(client.open("snapshot/model-1@0-of-2x1x1/0"))
        except RefusedError:
            return True
        return None

    until(is_forgotten, "the end of the outdated snapshots")
    for owner in ("model-0", "model-2"):
        os.close(client.open(f"snapshot/{owner}/0"))
    client.close()


def test_two_hosts_share_no_segments(make_host: MakeHost) -> None:
    first, second = make_host(model="segment_writer"), make_host(model="idle")
    first.start("model-0")
    first.wrote("model-0", "written")
    ours, theirs = segment_service(first.agent.pid), segment_service(second.agent.pid)
    assert ours != theirs
    client = SegmentClient(theirs)
    with pytest.raises(RefusedError, match="no segment snapshot"):
        client.open("snapshot")
    client.close()


def test_the_table_names_the_template_too(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="idle")
    host.start("model-0")
    table = msgspec.json.decode((host.run_dir / "agents" / "agent-0.json").read_bytes(), type=ChildrenTable)
    (template,) = [record for record in table.children if record.process == "template"]
    assert process_start_time(template.pid) == template.start_time
    assert os.getpgid(template.pid) == template.pid


@pytest.mark.parametrize(
    "order",
    [StartProcess("model-1", Role.MODEL, "b"), StopProcess("model-0", "b", 0.0), Shutdown("forged")],
    ids=["start", "stop", "shutdown"],
)
def test_an_agent_takes_orders_from_nobody_but_the_master(make_host: MakeHost, order: Body) -> None:
    host = make_host(model="idle")
    forger = make_endpoint("model-9", job=host.master.job)
    forger.admit(next(iter(host.master.peers.values())))
    host.master.send("agent-0", AddressBook(1, (forger.peer(host="host-0"),)))
    host.start("model-0")
    asked = forger.request("agent-0", order, deadline_s=20.0)
    until(lambda: host.turn() and forger.poll(0.005) == [] and asked.done, "the agent to refuse")
    with pytest.raises(RemoteError, match="model-9 may not send"):
        asked.result()
    assert host.start("model-2").pid, "the agent goes on"
    assert not host.exits
    forger.close()


def test_a_shutdown_ends_the_agent_and_its_children(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="idle", rollout="parent_of_sleepers")
    started = [host.start("model-0"), host.start("rollout-0")]
    sleepers = host.wrote("rollout-0", "sleepers")
    host.master.send("agent-0", Shutdown("the run is over"))
    assert host.agent.wait_ended(whom="agent", timeout_s=5.0) == 0
    assert [process_start_time(pid) for pid in [*(one.pid for one in started), *sleepers]] == [None] * 4
    assert not (host.run_dir / "agents" / "agent-0.json").exists()


def faults_of(host: Any) -> list[str]:
    """What the agent has told of its own errors."""
    records = read_events(host.run_dir, process=host.name)
    return [record.event.fault.message for record in records if isinstance(record.event, FaultSeen)]


def test_an_agent_without_a_descriptor_left_says_so_once_goes_on_and_looks_again_when_it_can(
    make_host: MakeHost,
) -> None:
    host = make_host(model="idle")
    killed, stopped = host.start("model-0"), host.start("model-1")
    limits = resource.prlimit(host.agent.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(host.agent.pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, limits[1]))
    until(lambda: host.turn() and bool(faults_of(host)), "the agent to say what is wrong")
    os.kill(killed.pid, signal.SIGKILL)
    assert host.exit_of("model-0").status == -signal.SIGKILL
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(RemoteError, match="Too many open files"):
        host.start("model-2")
    assert not host.agent.ended()
    assert not host.suspicions
    resource.prlimit(host.agent.pid, resource.RLIMIT_NOFILE, limits)
    until(lambda: host.turn() and bool(host.suspicions), "the agent to look again")
    assert [suspicion.process for suspicion in host.suspicions] == ["model-1"]
    (told,) = faults_of(host)
    assert "Too many open files" in told
    host.start("model-2")


def test_an_agent_without_a_launcher_ends_in_order_whatever_became_of_the_launchers_file(
    make_host: MakeHost,
) -> None:
    host = make_host(model="idle")
    started = host.start("model-0")
    launcher_file = RunFolder(host.run_dir).launcher_file
    launcher_file.parent.mkdir(parents=True, exist_ok=True)
    launcher_file.touch()
    launcher_file.chmod(0o666)  # Others could have written it.
    os.close(host.lifeline)
    host.lifeline = os.open(os.devnull, os.O_RDONLY)
    host.agent.wait_ended(whom="agent", timeout_s=20.0)
    kinds = [json.loads(line)["type"] for line in os.read(host.report, 65536).splitlines()]
    assert kinds[-2:] == ["Ending", "Ended"]
    assert process_start_time(started.pid) is None
