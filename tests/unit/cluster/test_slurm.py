"""Pure decisions of the Slurm back end, on what Slurm 22.05 and 24.05 print."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from kintsugi.cli.slurm import JobState, check_section, job_script
from kintsugi.cluster.backends.slurm import (
    Allocation,
    JobFate,
    SlurmNode,
    choose_node,
    client_words,
    fate_of,
    parse_nodes,
    read_allocation,
    step_command,
)
from kintsugi.cluster.host_manager import GONE_S, HostPhase, HostRecord, decide
from kintsugi.config.schema import ClusterSection, Config, SlurmSection
from kintsugi.errors import ConfigError, UserError

NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=4 CPUTot=8 Gres=gpu:h200:8(S:0-1) NodeAddr=10.77.0.11 NodeHostName=n1 \
RealMemory=2000 State=MIXED Reason=bad fan State=never
NodeName=n2 CPUTot=4 Gres=(null) NodeAddr=10.77.0.12 RealMemory=2000 State=MIXED*+DRAIN ThreadsPerCore=1
NodeName=n3 CPUTot=4 Gres=(null) NodeAddr=10.77.0.13 RealMemory=2000 State=DOWN+NOT_RESPONDING ThreadsPerCore=1
NodeName=n4 CPUTot=4 Gres=(null) NodeAddr=10.77.0.14 RealMemory=2000 State=ALLOCATED ThreadsPerCore=1
"""


def node(name: str, *states: str) -> SlurmNode:
    return SlurmNode(name, f"10.0.0.{name[1:]}", frozenset(states or {"ALLOCATED"}))


def test_nodes_are_read_with_address_resources_and_states() -> None:
    first, second, third, fourth = parse_nodes(NODES)
    assert first == SlurmNode("n1", "10.77.0.11", frozenset({"MIXED"}), 8, 2000, "gpu:h200:8(S:0-1)")
    assert second.states == {"MIXED", "DRAIN", "NOT_RESPONDING"} and second.is_leaving
    assert third.states == {"DOWN", "NOT_RESPONDING"} and not third.is_usable and not third.is_leaving
    assert fourth.is_usable and fourth.gres == ""
    assert parse_nodes("slurm_load_node error: Unable to contact slurm controller\n") == ()


JOB = """\
JobId=7 JobName=kintsugi-tiny UserId=me(1000) Priority=1 JobState=RUNNING Reason=None Dependency=(null) Requeue=1 \
StartTime=2026-11-19T15:00:00 EndTime=2026-11-19T15:10:00 PreemptEligibleTime=2026-11-19T15:00:00 PreemptTime=None
"""


@pytest.mark.parametrize(
    ("text", "fate"),
    [
        (JOB, JobFate.GOES_ON),
        (JOB.replace("PreemptTime=None", "PreemptTime=2026-11-19T15:05:00"), JobFate.PREEMPTED),
        (JOB.replace("RUNNING", "PENDING"), JobFate.ENDS),
        (JOB.replace("RUNNING", "CANCELLED"), JobFate.ENDS),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", None),
    ],
)
def test_a_job_that_is_preempted_or_ends_is_told_from_one_that_goes_on(
    text: str, fate: JobFate | None
) -> None:
    assert fate_of(text) == fate


ENVIRONMENT = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": "n4"}


def test_an_allocation_has_every_node_that_is_not_this_machine_and_not_down() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*command: str) -> str:
        asked.append(command)
        return NODES.replace("MIXED*", "MIXED")

    allocation = read_allocation(ENVIRONMENT, ask=ask)
    assert (allocation.job, allocation.own) == ("12", "n4")
    assert [each.name for each in allocation.others] == ["n1", "n2"]
    assert asked == [("scontrol", "show", "nodes", "n[1-4]", "--oneliner")]
    outside = read_allocation({**ENVIRONMENT, "SLURMD_NODENAME": ""}, ask=ask)
    assert [each.name for each in outside.others] == ["n1", "n2", "n4"]


def test_a_process_outside_of_a_job_is_refused() -> None:
    with pytest.raises(UserError, match="SLURM_JOB_ID"):
        read_allocation({}, ask=lambda *_: "")
    assert isinstance(Allocation("1", (), "").others, tuple)


def test_a_lost_host_gets_its_node_again_else_a_free_one_else_none_with_the_reason() -> None:
    nodes = [node("n1"), node("n2", "DOWN", "NOT_RESPONDING"), node("n3"), node("n4")]
    assert choose_node("n1", nodes=nodes, taken=frozenset({"n3"})) == ("n1", "n1 is usable")
    name, why = choose_node("n2", nodes=nodes, taken=frozenset({"n1", "n3"}))
    assert (name, why) == ("n4", "n2 is down+not_responding; n4 is free")
    assert choose_node("n1", nodes=nodes, taken=frozenset({"n3"}), avoid=frozenset({"n1"}))[0] == "n4"
    assert choose_node("n1", nodes=nodes[:1], taken=frozenset(), avoid=frozenset({"n1"}))[0] == "n1"
    name, why = choose_node("n2", nodes=nodes[:3], taken=frozenset({"n1", "n3"}))
    assert name == "" and "n2 down+not_responding" in why


def test_a_step_is_alone_on_its_node_and_leaves_the_job_alone_when_it_ends() -> None:
    argv = step_command("12", "n2", host="host-1", command=["python", "-m", "kintsugi"])
    for option in (
        "--jobid=12",
        "--nodelist=n2",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--ntasks=1",
    ):
        assert option in argv
    assert argv[-3:] == ["python", "-m", "kintsugi"]


def test_the_words_of_a_client_command_are_told_without_its_name() -> None:
    said = "sbatch: error: Batch job submission failed: Requested node configuration is not available\n"
    assert client_words(said) == "Batch job submission failed: Requested node configuration is not available"
    assert client_words("") == "no word"


def test_the_script_asks_for_nodes_a_warning_and_a_requeue_and_quotes_what_it_is_given(
    tmp_path: Path,
) -> None:
    slurm = SlurmSection(
        nodes=3, spare_nodes=1, partition="gpu", time_limit_min=240, options=("--comment=two words",)
    )
    config = Config(name="tiny", cluster=ClusterSection(on="slurm", slurm=slurm))
    lines = job_script(config, run_dir=tmp_path).splitlines()
    assert lines[0] == "#!/bin/sh"
    for option in (
        "--nodes=4",
        "--no-kill",
        "--requeue",
        "--signal=B:USR2@180",
        "--partition=gpu",
        "--time=240",
        "'--comment=two words'",
        "--open-mode=append",
    ):
        assert f"#SBATCH {option}" in lines
    assert lines[-1].startswith("exec ") and lines[-1].endswith(f"-m kintsugi slurm-job {tmp_path}")


@pytest.mark.parametrize(
    "option", ["account=lab", "--nodes=9", "-N9", "--no-requeue", "--comment=a\n#SBATCH -N9"]
)
def test_options_that_the_script_relies_on_can_not_be_given(option: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.slurm\.options"):
        check_section(SlurmSection(options=(option,)))
    check_section(SlurmSection(options=("--account=lab", "--gpus-per-node=8")))


@pytest.mark.parametrize(
    ("state", "reason", "never"),
    [
        ("PENDING", "PartitionNodeLimit", True),
        ("PENDING", "QOSMaxNodePerJobLimit", True),
        ("PENDING", "AssocMaxWallDurationPerJobLimit", True),
        ("PENDING", "Resources", False),
        ("PENDING", "QOSMaxJobsPerUserLimit", False),
        ("PENDING", "BeginTime", False),
        ("RUNNING", "PartitionTimeLimit", False),
    ],
)
def test_a_job_that_can_never_start_is_told_from_one_that_waits(state: str, reason: str, never: bool) -> None:
    assert JobState(state, reason).can_never_start is never


def test_a_job_that_slurm_has_forgotten_has_ended() -> None:
    assert JobState("").has_ended and JobState("TIMEOUT").has_ended
    assert not JobState("COMPLETING").has_ended and not JobState("PENDING").has_ended


# Hosts whose connection was closed (`host_manager.decide`).


def decided(*, silent_s: float, closed_before_s: float, phase: HostPhase = HostPhase.READY) -> str:
    record = HostRecord("host-1", phase, was_ready=True)
    now = 1000.0
    return decide(
        record, now=now, since=0.0, heard_at=now - silent_s, join_s=math.inf, closed_at=now - closed_before_s
    ).action


def test_a_host_is_lost_when_its_connection_was_closed_and_it_stays_silent() -> None:
    assert decided(silent_s=GONE_S + 0.1, closed_before_s=GONE_S - 0.3) == "lose"
    assert decided(silent_s=GONE_S - 0.1, closed_before_s=GONE_S - 0.3) == ""


def test_a_silent_host_whose_connection_was_not_closed_has_the_whole_time() -> None:
    assert decided(silent_s=6.0, closed_before_s=math.inf) == ""
    # A connection that the kernel gives up long after the last heartbeat is that of a link that was cut.
    assert decided(silent_s=13.0, closed_before_s=1.0) == ""
    # Heard of since: another host's connection was closed, or this one was made again.
    assert decided(silent_s=3.0, closed_before_s=4.0) == ""


def test_a_host_that_joins_is_not_lost_for_a_closed_connection() -> None:
    assert decided(silent_s=4.0, closed_before_s=3.5, phase=HostPhase.JOINED) == ""


def test_the_section_of_a_run_survives_its_file() -> None:
    section = SlurmSection(nodes=2, options=("--account=lab",))
    assert msgspec.json.decode(msgspec.json.encode(section), type=SlurmSection) == section
