"""Runs on a real Slurm cluster of several slurmd end in the bits of a run on one machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cli.slurm import job_script
from kintsugi.config.schema import ClusterSection, Config, SlurmSection
from kintsugi.protocol.agents import StartProcess
from kintsugi.run_folder.reader import read_summary
from kintsugi.run_folder.summary import Summary
from kintsugi.telemetry.events import Alert, Span, read_events
from kintsugi.telemetry.process_reports import read_processes
from kintsugi.telemetry.verdict_files import read_notices
from kintsugi.types import Role
from tests.cluster import slurm_cluster
from tests.cluster.hosts_runs import (
    LONGEST_S,
    SLOWLY,
    faults_of_soak,
    finish,
    num_steps,
    train_alone,
    wait_for_step,
    weights_of,
    write_inputs,
)
from tests.cluster.lab_runs import assert_diagnosed, assert_faults_fired, state_of
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.tiny_runs import until
from tests.docs.pages import ROOT, blocks_of

PROGRAMS = Path(__file__).with_name("programs")

FOR_A_MINUTE = "algorithm.reward=[slower_rewards.py:odd_digits]"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(
        slurm_cluster.missing() is not None,
        reason=f"a Slurm cluster can not be had: {slurm_cluster.missing()}",
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"), count=4)
    pauses_s = {"rewards": 0.1, "slow_rewards": 2.0, "slower_rewards": 4.0}
    recipe = write_inputs(made.runs, pauses_s=pauses_s)
    recipe.write_text(f"{recipe.read_text()}\ncluster:\n  start_timeout_s: 600\n")
    yield made
    made.close()


@pytest.fixture
def all_idle(cluster: SlurmCluster) -> None:
    """Nodes that a test before this one has lost are back."""
    for node, state in cluster.states().items():
        if "DRAIN" in state or "DOWN" in state:
            cluster.slurm("scontrol", "update", f"nodename={node}", "state=resume")
    cluster.wait_for_nodes("IDLE", count=len(cluster.nodes), timeout_s=60.0)


@pytest.fixture(scope="module")
def weights_of_one_machine(cluster: SlurmCluster) -> str:
    return train_alone(cluster)


def start(
    cluster: SlurmCluster, name: str, *overrides: str, nodes: int = 3
) -> tuple[subprocess.Popen[str], Path]:
    run_dir = cluster.runs / name
    options = ("--on", "slurm", "--nodes", str(nodes))
    return cluster.start("train", "recipe.yaml", f"run_dir={run_dir}", *options, *overrides), run_dir


def steps_of(run_dir: Path) -> list[int]:
    """Steps in the order in which they were committed, repeated ones too."""
    found = read_events(run_dir, process="master-0")
    spans = [record.event for record in found if isinstance(record.event, Span)]
    return [int(span.attributes["step"]) for span in spans if span.name == "step"]


def live_pids(run_dir: Path) -> dict[str, tuple[str, int]]:
    """Process → its host and pid, as the master knows them."""
    reports = read_processes(run_dir)
    assert reports is not None
    return {each.process: (each.host, each.pid) for each in reports.processes if each.status == "live"}


def happened(run_dir: Path) -> list[list[Any]]:
    """What the fake master has noted."""
    path = run_dir / "master-0.happened.json"
    noted: list[list[Any]] = json.loads(path.read_text()) if path.exists() else []
    return noted


def registrations(run_dir: Path, agent: str) -> int:
    return sum(event[:2] == ["registered", agent] for event in happened(run_dir))


def alerts(run_dir: Path) -> list[tuple[float, str]]:
    """Wall clock and text of the alerts of the host manager."""
    found = read_events(run_dir, process="host_manager-0")
    return [(record.stamp.time, record.event.message) for record in found if isinstance(record.event, Alert)]


def start_tiny(cluster: SlurmCluster, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A run of tiny programs in place of ranks and servers on three nodes of an allocation: the hosts are real."""
    run_dir = cluster.runs / name
    run_dir.mkdir()
    table = {"entries": {Role.MASTER: "cluster_programs:master", Role.MODEL: "cluster_programs:idle"}}
    models = [StartProcess(f"model-{index}", Role.MODEL, "1.1") for index in range(3)]
    starts = {f"agent-{index + 1}": (model,) for index, model in enumerate(models)}
    for name, content in (
        ("orders", {"starts": starts, "exit_code": None, "kill_itself": False}),
        ("programs", {**table, "preload": (), "forked": [Role.MODEL]}),
    ):
        (run_dir / f"{name}.json").write_bytes(msgspec.json.encode(content))
    command = cluster.start(
        program=(
            *("salloc", "--quiet", "--nodes=3", "--no-kill", "--exclusive"),
            *(sys.executable, str(PROGRAMS / "slurm_launcher.py"), str(run_dir)),
        ),
        PYTHONPATH=f"{ROOT}:{PROGRAMS}",
    )

    def is_complete() -> bool:
        assert command.poll() is None, command.communicate()
        return ["complete"] in happened(run_dir)

    until(is_complete, "three nodes", timeout_s=LONGEST_S)
    return command, run_dir


def stop_tiny(cluster: SlurmCluster, command: subprocess.Popen[str]) -> None:
    (launcher,) = [
        pid for pid, text in cluster.pids().items() if "slurm_launcher.py" in text and "salloc" not in text
    ]
    os.kill(launcher, signal.SIGTERM)
    _, errors = command.communicate(timeout=LONGEST_S)
    assert command.returncode == 0, errors
    cluster.assert_nothing_left()


def test_a_killed_slurmd_with_its_step_is_noticed_within_ten_seconds_and_the_node_gets_a_new_step(
    cluster: SlurmCluster, all_idle: None
) -> None:
    command, run_dir = start_tiny(cluster, "tiny")
    there = cluster.processes_of("n1") | cluster.processes_of("n3")
    others = {pid for pid, text in there.items() if "kintsugi" in text}
    assert others
    since = time.time()
    killed = cluster.kill_slurmd_and_steps("n2")
    assert any("slurmd" in each for each in killed) and any("--join" in each for each in killed)
    until(lambda: alerts(run_dir), "the loss of host-2 to be noticed", timeout_s=LONGEST_S)
    (lost_at, said), *_ = alerts(run_dir)
    sys.stdout.write(f"noticed after s: {lost_at - since:.1f}\n")
    assert said.startswith("host-2 (n2, 10.77.0.12) is lost: its connection was closed")
    cluster.start_slurmd("n2")
    until(lambda: registrations(run_dir, "agent-2") == 2, "a new step on n2", timeout_s=LONGEST_S)
    sys.stdout.write(f"joined again after s: {time.time() - since:.1f}\n")
    now = cluster.processes_of("n1") | cluster.processes_of("n3")
    assert others <= now.keys(), "the other nodes keep their processes"
    assert [line.split()[1] for line in cluster.jobs()] == ["RUNNING"]
    stop_tiny(cluster, command)
    assert lost_at - since < 10.0


def test_a_drained_node_is_given_up_once_the_master_has_moved_its_processes(
    cluster: SlurmCluster, all_idle: None
) -> None:
    """The fake master moves nothing; the test takes the notice away, as a master does that has."""
    command, run_dir = start_tiny(cluster, "leaving")
    cluster.slurm("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    until(lambda: alerts(run_dir), "the drain to be noticed", timeout_s=LONGEST_S)
    assert [said for _, said in alerts(run_dir)] == [
        "host-3 (n3, 10.77.0.13) is to be left: n3 is being drained"
    ]
    ((path, notice),) = read_notices(run_dir)
    assert (notice.agent, notice.leaves) == ("agent-3", True)
    assert "cluster.agent agent-3 " in " ".join(cluster.processes_of("n3").values())
    path.unlink()
    until(lambda: len(alerts(run_dir)) > 1, "the host to be given up", timeout_s=LONGEST_S)
    assert alerts(run_dir)[1][1] == "host-3 (n3, 10.77.0.13) is lost: n3 is being drained"
    until(
        lambda: not any("kintsugi" in text for text in cluster.processes_of("n3").values()),
        "the end of its processes",
        timeout_s=LONGEST_S,
    )
    assert read_notices(run_dir) == [], "the master is not told twice"
    stop_tiny(cluster, command)


def test_the_warning_before_the_time_limit_reaches_the_script_alone_and_the_job_starts_again(
    cluster: SlurmCluster, all_idle: None
) -> None:
    run_dir = cluster.runs / "warned"
    (run_dir / "logs").mkdir(parents=True)
    slurm = SlurmSection(nodes=2, time_limit_min=2, stop_before_s=60)
    config = Config(name="warned", cluster=ClusterSection(on="slurm", slurm=slurm))
    stopped = Summary(
        outcome="stopped",
        name="warned",
        seed=0,
        run_dir=str(run_dir),
        steps=1,
        wall_s=1.0,
        samples_trained=0,
        tokens_generated=0,
        tokens_trained=0,
        reward_first=None,
        reward_last=None,
        eval_accuracy_before=None,
        eval_accuracy_after=None,
        weights_sha256="",
        weight_version=1,
        processes={},
        timing={},
        logprob_abs_diff_mean=None,
    )
    (run_dir / "stopped.json").write_bytes(msgspec.json.encode(stopped))
    *lines, _ = job_script(config, run_dir=run_dir).splitlines()
    body = [
        sys.executable,
        str(PROGRAMS / "slurm_job_script.py"),
        str(run_dir),
        str(run_dir / "stopped.json"),
    ]
    script = run_dir / "slurm_job.sh"
    script.write_text("\n".join([*lines, f"exec {shlex.join(body)}\n"]))
    submitted = cluster.start("--parsable", str(script), program=("sbatch",))
    job, errors = submitted.communicate(timeout=LONGEST_S)
    assert submitted.returncode == 0, errors
    noted = run_dir / "noted.txt"
    until(lambda: noted.exists() and "started 1" in noted.read_text(), "the job again", timeout_s=LONGEST_S)
    assert noted.read_text().splitlines() == ["started 0", "asked to stop, 2 children live", "started 1"]
    assert "Restarts=1" in cluster.slurm("scontrol", "show", "job", job.strip())
    cluster.assert_nothing_left()


def test_three_nodes_end_in_the_bits_of_one_machine_and_nothing_is_left_on_any(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str
) -> None:
    command, run_dir = start(cluster, "undisturbed")
    wait_for_step(run_dir, 1, command)
    assert {host for host, _ in live_pids(run_dir).values()} == {"host-0", "host-1", "host-2"}
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    cluster.assert_nothing_left()


def test_a_model_that_is_cut_over_three_nodes_ends_in_the_bits_of_one_machine(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str
) -> None:
    """The first node has the run folder; the ranks of the others bring their parts of checkpoints there."""
    command, run_dir = start(cluster, "cut", "actor.workers=4", "actor.layout.shards=4")
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    saved = sorted(path.name for path in (run_dir / "checkpoints" / "step-000007").glob("trainer-*"))
    assert saved == [f"trainer-{box:05d}-of-00004.safetensors" for box in range(1, 5)]
    cluster.assert_nothing_left()


def test_a_killed_slurmd_with_its_step_is_replaced_by_the_spare_node_within_ten_seconds(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str
) -> None:
    command, run_dir = start(cluster, "killed", "cluster.slurm.spare_nodes=1")
    wait_for_step(run_dir, 2, command)
    before = live_pids(run_dir)
    node = "n2"  # The job has all four nodes, and its script runs on the first.
    since = time.monotonic()
    killed = cluster.kill_slurmd_and_steps(node)
    assert any("slurmd" in each for each in killed) and any("--join" in each for each in killed)
    until(lambda: "agent-1" not in live_pids(run_dir), "the loss to be known", timeout_s=LONGEST_S)
    known_s, steps = time.monotonic() - since, num_steps(run_dir)
    until(lambda: num_steps(run_dir) > steps, "the next step", timeout_s=LONGEST_S)
    took_s = time.monotonic() - since
    after = live_pids(run_dir)
    sys.stdout.write(f"loss known after s: {known_s:.1f}\n")
    sys.stdout.write(f"next step after s: {took_s:.1f}\n")
    moved = [process for process, (host, _) in before.items() if host == "host-1" and "agent" not in process]
    assert moved and all(after[process][0] == "host-3" for process in moved)
    kept = {process: where for process, where in before.items() if where[0] != "host-1"}
    assert {process: after[process] for process in kept} == kept
    cluster.start_slurmd(node)
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    cluster.assert_nothing_left()
    assert took_s < 10.0, f"loss known after {known_s:.1f} s, next step after {took_s:.1f} s"


def test_a_run_that_reaches_its_time_limit_is_queued_again_and_resumes_by_itself(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str
) -> None:
    """The limit is cut while the run runs, since limits are in minutes."""
    command, run_dir = start(
        cluster, "limited", FOR_A_MINUTE, "cluster.slurm.time_limit_min=60", "cluster.slurm.stop_before_s=60"
    )
    wait_for_step(run_dir, 2, command)
    (job,) = [line.split()[0] for line in cluster.jobs()]
    elapsed = cluster.slurm("squeue", "--noheader", f"--jobs={job}", "--format=%M").split(":")
    minutes = int(elapsed[-2]) + 2
    cluster.slurm("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")
    output = finish(command)
    restarts = cluster.slurm("scontrol", "show", "job", job)
    # A busy machine may need more than one further job.
    assert re.search(r"Restarts=[1-9]", restarts) and "JobState=COMPLETED" in restarts, restarts
    assert "it is queued again and resumes by itself" in output
    assert weights_of(run_dir) == weights_of_one_machine
    cluster.assert_nothing_left()


def test_a_drained_node_is_left_between_two_steps_and_the_run_goes_on(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str
) -> None:
    command, run_dir = start(cluster, "drained", SLOWLY, "cluster.slurm.spare_nodes=1")
    wait_for_step(run_dir, 2, command)
    cluster.slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=test")

    def is_left() -> bool:
        assert command.poll() is None, command.communicate()
        return all(host != "host-1" for host, _ in live_pids(run_dir).values())

    until(is_left, "the move", timeout_s=LONGEST_S)
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    events = [record.event for record in read_events(run_dir, process="host_manager-0")]
    assert any(isinstance(event, Alert) and "n2 is being drained" in event.message for event in events)
    cluster.assert_nothing_left()


REFUSED = {
    "more nodes than there are": (("--nodes", "9"), (), "PartitionNodeLimit"),
    "a partition that does not exist": (("--nodes", "2", "--partition", "nowhere"), (), "invalid partition"),
    "more nodes than the partition gives to one job": (
        ("--nodes", "2", "--partition", "small"),
        (),
        "PartitionNodeLimit",
    ),
    "a longer time than the partition gives": (
        ("--nodes", "1", "--partition", "small"),
        ("cluster.slurm.time_limit_min=600",),
        "PartitionTimeLimit",
    ),
    "resources that no node has": (
        ("--nodes", "2"),
        ("cluster.slurm.options=[--mem=900G]",),
        "Slurm refused",
    ),
    "an option that the run sets itself": (
        ("--nodes", "2"),
        ("cluster.slurm.options=[--no-requeue]",),
        "cluster.slurm.options",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_job_that_can_not_start_is_refused_by_name_and_nothing_is_left(
    cluster: SlurmCluster, what: str
) -> None:
    options, overrides, said = REFUSED[what]
    run_dir = cluster.runs / what.replace(" ", "-")
    code, output = cluster.ask(
        "train",
        "recipe.yaml",
        f"run_dir={run_dir}",
        *overrides,
        "--on",
        "slurm",
        *options,
        timeout_s=LONGEST_S,
    )
    assert code == 2, output
    assert said in output, output
    assert not run_dir.exists()
    cluster.assert_nothing_left()


def test_a_slurmctld_that_does_not_answer_is_told_and_nothing_is_left(cluster: SlurmCluster) -> None:
    unreachable = cluster.conf.with_name("unreachable.conf")
    unreachable.write_text(
        cluster.conf.read_text().replace("SlurmctldHost=n0(10.77.0.10)", "SlurmctldHost=n9(10.77.0.99)")
    )
    run_dir = cluster.runs / "unreachable"
    command = cluster.start(
        "train", "recipe.yaml", f"run_dir={run_dir}", "--on", "slurm", SLURM_CONF=str(unreachable)
    )
    output, errors = command.communicate(timeout=LONGEST_S)
    assert command.returncode != 0
    assert "sbatch" in errors, output + errors
    assert not run_dir.exists()
    cluster.assert_nothing_left()


def test_hosts_shows_the_nodes_of_the_site_and_asks_those_of_an_allocation(
    cluster: SlurmCluster, all_idle: None
) -> None:
    code, output = cluster.ask("hosts", "--on", "slurm", timeout_s=LONGEST_S)
    assert code == 0 and all(f"{node} " in output for node in cluster.nodes), output
    kintsugi = (sys.executable, "-P", "-m", "kintsugi")
    allocated = cluster.start("hosts", "--on", "slurm", program=("salloc", "--quiet", "--nodes=2", *kintsugi))
    output, errors = allocated.communicate(timeout=LONGEST_S)
    assert allocated.returncode == 0, output + errors
    assert f"reaches {cluster.addresses['n0']} from {cluster.addresses['n2']}" in output
    cluster.assert_nothing_left()


def test_a_run_is_stopped_from_the_login_node_and_resumed_in_another_job(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str
) -> None:
    command, run_dir = start(cluster, "stopped", nodes=2)
    wait_for_step(run_dir, 2, command)
    code, output = cluster.ask("stop", str(run_dir), timeout_s=LONGEST_S)
    assert code == 0 and "asked to stop after its step" in output, output
    finish(command)
    summary = read_summary(run_dir)
    assert summary is not None and summary.outcome == "stopped"
    cluster.assert_nothing_left()
    code, output = cluster.ask("resume", str(run_dir), "cluster.slurm.nodes=3", timeout_s=LONGEST_S)
    assert code == 0, output
    assert weights_of(run_dir) == weights_of_one_machine
    cluster.assert_nothing_left()


def preempt(cluster: SlurmCluster) -> None:
    cluster.slurm(
        "sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"
    )


@pytest.mark.parametrize("warns_script", [True, False], ids=["script is warned", "steps are signalled"])
def test_a_run_whose_nodes_a_job_of_a_higher_priority_takes_stops_with_a_checkpoint_and_resumes_by_itself(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str, *, warns_script: bool
) -> None:
    """A site sends what a job has asked for (preempt_send_user_signal), or SIGTERM to its steps."""
    cluster.set_preemption(grace_s=60, warns_script=warns_script)
    command, run_dir = start(cluster, f"preempted-{warns_script:d}", SLOWLY)
    wait_for_step(run_dir, 2, command)
    preempt(cluster)
    output = finish(command)
    assert "it is queued again and resumes by itself" in output
    assert weights_of(run_dir) == weights_of_one_machine
    assert steps_of(run_dir) == sorted(steps_of(run_dir)), "no step was repeated"
    cluster.assert_nothing_left()


def test_a_run_that_is_preempted_without_a_grace_time_resumes_from_its_last_checkpoint(
    cluster: SlurmCluster, all_idle: None, weights_of_one_machine: str
) -> None:
    cluster.set_preemption(grace_s=0, warns_script=True)
    try:
        command, run_dir = start(cluster, "preempted-at-once", SLOWLY)
        wait_for_step(run_dir, 2, command)
        preempt(cluster)
        finish(command)
    finally:
        cluster.set_preemption(grace_s=60, warns_script=True)
    assert weights_of(run_dir) == weights_of_one_machine
    cluster.assert_nothing_left()


def test_a_soak_inside_of_an_allocation_loses_a_whole_node_and_ends_in_the_bits_of_its_twin(
    cluster: SlurmCluster, all_idle: None
) -> None:
    report = cluster.runs / "soak.json"
    soak = (
        *(sys.executable, "-P", "-m", "kintsugi", "soak", "recipe.yaml", f"run_dir={cluster.runs}/soak"),
        *("--faults", "1", "--role", "node", "--json", str(report), "--on", "slurm"),
    )
    allocated = cluster.start(*soak, program=("salloc", "--quiet", "--nodes=3", "--no-kill", "--exclusive"))
    output, errors = allocated.communicate(timeout=2 * LONGEST_S)
    assert allocated.returncode == 0, output + errors
    assert len(faults_of_soak(report, roles={"node"})) == 1
    cluster.assert_nothing_left()


@pytest.mark.parametrize("name", ["S1", "S2"])
def test_an_experiment_inside_of_an_allocation_is_diagnosed_and_undone_on_every_node(
    cluster: SlurmCluster, all_idle: None, name: str
) -> None:
    folder, result = cluster.runs / f"lab-{name}", cluster.runs / f"lab-{name}.json"
    before = state_of(cluster.places)
    lab = (
        *(sys.executable, "-P", "-m", "kintsugi", "lab", "run", name, "--profile", "ours", "--on", "slurm"),
        *("--folder", str(folder), "--json", str(result)),
    )
    allocated = cluster.start(*lab, program=("salloc", "--quiet", "--nodes=2", "--no-kill", "--exclusive"))
    output, errors = allocated.communicate(timeout=2 * LONGEST_S)
    assert result.exists(), output + errors
    assert_faults_fired(folder, name)
    assert_diagnosed(result)
    assert state_of(cluster.places) == before
    cluster.assert_nothing_left()


def test_the_section_about_slurm_can_be_followed_line_by_line(cluster: SlurmCluster, all_idle: None) -> None:
    for block in blocks_of(ROOT / "docs" / "cluster.md"):
        for command, _ in block.commands if block.attributes.get("engine") == "slurm" else ():
            code, output = cluster.ask(*command.split()[1:], timeout_s=LONGEST_S)
            assert code == 0, output
    cluster.assert_nothing_left()
