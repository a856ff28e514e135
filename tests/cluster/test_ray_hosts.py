"""Runs on the nodes of a Ray cluster, on hosts of their own, end in the bits of a run on one machine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kintsugi.run_folder.reader import Launcher
from kintsugi.telemetry.events import Alert, Note, read_events
from tests.cluster import ray_hosts
from tests.cluster.hosts_runs import (
    LONGEST_S,
    SLOWLY,
    assert_lost_host_is_diagnosed,
    boxes,
    faults_of_soak,
    finish,
    pid_of,
    places_of_fault,
    ranks_joined,
    saved_files,
    train_alone,
    wait_for_step,
    weights_of,
    write_inputs,
)
from tests.cluster.lab_runs import assert_diagnosed, assert_faults_fired, state_of
from tests.cluster.ray_hosts import RayHosts
from tests.cluster.real_runs import kill_all
from tests.cluster.tiny_runs import until
from tests.docs.pages import ROOT, blocks_of

LOG = logging.getLogger(__name__)
"""Measured times: `--log-cli-level=INFO` shows them."""
STEPS = 16
LAST_STEP = 3 + STEPS
"""With those of the warmup."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(
        ray_hosts.missing() is not None, reason=f"hosts with a Ray node can not be had: {ray_hosts.missing()}"
    ),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    made = RayHosts(tmp_path_factory.mktemp("ray"), count=3)
    recipe = write_inputs(made.runs, pauses_s={"rewards": 0.1, "slow_rewards": 2.0})
    recipe.write_text(recipe.read_text().replace("  steps: 4\n", f"  steps: {STEPS}\n"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights_of_one_machine(machines: RayHosts) -> str:
    return train_alone(machines)


def start(machines: RayHosts, name: str, *overrides: str) -> tuple[subprocess.Popen[str], Path]:
    run_dir = machines.runs / name
    at = ("--on", "ray", "--address", machines.address_of_cluster, "cluster.start_timeout_s=300")
    return machines.start("train", "recipe.yaml", f"run_dir={run_dir}", *at, *overrides), run_dir


def told(run_dir: Path, kind: type[Alert | Note], text: str) -> list[str]:
    """Messages of the host manager."""
    events = [record.event for record in read_events(run_dir, process="host_manager-0")]
    return [event.message for event in events if isinstance(event, kind) and text in event.message]


def test_three_nodes_end_in_the_bits_of_one_machine_and_nothing_is_left_on_any_nor_in_ray(
    machines: RayHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "undisturbed")
    wait_for_step(run_dir, 2, command)
    assert all(machines.scratch_of(place.name) for place in machines.places)
    in_ray = machines.left_in_ray()
    assert "kintsugi-" in in_ray and in_ray.count("host-") == 3, in_ray
    for place in machines.places:
        (raylet,) = machines.pids_of_ray(place.name, "raylet/raylet ")
        for pid in machines.pids_on(place.name):
            assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, raylet)
            assert b"RAY_AUTH" not in Path(f"/proc/{pid}/environ").read_bytes()
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


def test_a_killed_raylet_is_a_lost_host_by_name_and_a_node_that_is_added_later_takes_its_place(
    machines: RayHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "raylet", SLOWLY)
    wait_for_step(run_dir, 4, command)
    (joined,) = told(run_dir, Note, "host-2-machine")
    host = joined.partition(" ")[0]
    since = time.monotonic()
    machines.kill_ray("host-2", "raylet/raylet")
    assert machines.pids_on("host-2"), "no process of the run ends with its raylet"
    until(lambda: bool(told(run_dir, Alert, f"{host} ")), "the loss of a host", timeout_s=60.0)
    noticed_s = time.monotonic() - since
    (alert, *_) = told(run_dir, Alert, f"{host} ")
    assert "host-2-machine" in alert and "is dead" in alert, alert
    # The machine is still there: its supervisor hears that it is not part of the run any more.
    until(lambda: not machines.pids_on("host-2"), "the end of its processes", timeout_s=60.0)
    machines.power_off("host-2")
    machines.power_on("host-2")
    machines.wait_for_node("host-2")
    added_at = time.monotonic()
    until(lambda: len(told(run_dir, Note, f"{host} joined")) > 1, "the new node", timeout_s=120.0)
    LOG.info("noticed after %.1f s, joined after %.1f s", noticed_s, time.monotonic() - added_at)
    assert command.poll() is None, "the run went on meanwhile"
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


def test_a_host_that_is_powered_off_for_good_changes_no_bit(
    machines: RayHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "off")
    wait_for_step(run_dir, 4, command)
    machines.power_off("host-3")
    try:
        finish(command)
    finally:
        machines.power_on("host-3")
        machines.wait_for_node("host-3")
    assert weights_of(run_dir) == weights_of_one_machine
    assert told(run_dir, Alert, "host-3-machine")
    machines.assert_nothing_left()


def test_a_spare_node_takes_the_place_of_a_lost_one_by_itself(
    machines: RayHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "spare", SLOWLY, "cluster.ray.nodes=2")
    wait_for_step(run_dir, 4, command)
    used = {place.name for place in machines.places if machines.scratch_of(place.name)}
    assert len(used) == 2
    lost = min(used)
    (spare,) = {place.name for place in machines.places} - used
    machines.power_off(lost)
    try:
        until(lambda: bool(told(run_dir, Note, f"{spare}-machine")), "the spare node", timeout_s=120.0)
        finish(command)
    finally:
        machines.power_on(lost)
        machines.wait_for_node(lost)
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


def test_a_node_that_is_lost_with_the_only_part_of_a_cut_state_changes_no_bit_of_one_rank(
    machines: RayHosts,
) -> None:
    weights_of_one_rank = train_alone(machines, "actor.workers=1", name="one-rank")
    two_shards = ("actor.workers=2", "actor.layout.shards=2")
    command, run_dir = start(machines, "cut", "cluster.ray.nodes=2", *two_shards)
    wait_for_step(run_dir, 5, command)
    lost = max(place.name for place in machines.places if machines.scratch_of(place.name))
    machines.power_off(lost)
    try:
        until(lambda: bool(told(run_dir, Alert, f"{lost}-machine")), "the loss of a host", timeout_s=60.0)
        finish(command)
    finally:
        machines.power_on(lost)
        machines.wait_for_node(lost)
    assert sorted(ranks_joined(run_dir, 2)) == [1, 2], "each node had one rank, and one node was lost"
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(2)
    machines.assert_nothing_left()


def test_a_killed_driver_launcher_and_host_manager_are_survived_and_no_host_is_started_again(
    machines: RayHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "driver")
    wait_for_step(run_dir, 2, command)
    before = {pid for pid, line in machines.pids().items() if "agent --join" in line}
    assert len(before) == 3
    for step, text in ((5, "ray_driver"), (8, "kintsugi.cluster.host_manager ")):
        os.kill(pid_of(machines, text), signal.SIGKILL)
        wait_for_step(run_dir, step, command)
    record = msgspec.json.decode((run_dir / "launcher.json").read_bytes(), type=Launcher)
    os.kill(record.pid, signal.SIGKILL)
    wait_for_step(run_dir, 11, command)
    assert {pid for pid, line in machines.pids().items() if "agent --join" in line} == before
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


def test_launcher_and_standby_killed_together_leave_nothing_and_the_run_can_be_resumed(
    machines: RayHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "both")
    wait_for_step(run_dir, 6, command)
    record = msgspec.json.decode((run_dir / "launcher.json").read_bytes(), type=Launcher)
    for pid in (record.pid, record.standby_pid):
        os.kill(pid, signal.SIGKILL)
    command.communicate(timeout=LONGEST_S)
    assert command.returncode != 0
    machines.assert_nothing_left()
    code, output = machines.ask("resume", str(run_dir), timeout_s=LONGEST_S)
    assert code == 0, output
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


def test_a_lost_machine_of_the_launcher_leaves_neither_a_process_nor_a_reserved_node(
    machines: RayHosts,
) -> None:
    command, run_dir = start(machines, "lost", "cluster.away_s=10")
    wait_for_step(run_dir, 2, command)
    elsewhere = {pid for place in machines.places for pid in machines.pids_on(place.name)}
    here = machines.pids().keys() - elsewhere
    assert here and elsewhere
    since = time.monotonic()
    kill_all(here)
    command.communicate(timeout=LONGEST_S)
    assert "kintsugi-" in machines.left_in_ray()
    machines.assert_nothing_left(timeout_s=120.0)
    LOG.info("nothing left after %.0f s", time.monotonic() - since)


def in_the_laboratory(machines: RayHosts, *arguments: str) -> None:
    """Run a command of the laboratory on the nodes of the cluster."""
    at = ("--on", "ray", f"cluster.ray.address={machines.address_of_cluster}", "cluster.start_timeout_s=300")
    code, output = machines.ask(*arguments, *at, timeout_s=2 * LONGEST_S)
    assert code == 0, output
    machines.assert_nothing_left()


def test_a_soak_loses_whole_nodes_and_ends_in_the_bits_of_its_undisturbed_twin(machines: RayHosts) -> None:
    folder, report = machines.runs / "soak", machines.runs / "soak.json"
    soak = ("soak", "recipe.yaml", f"run_dir={folder}", "--faults", "3", "--role", "node")
    in_the_laboratory(machines, *soak, "--json", str(report))
    for fault in faults_of_soak(report, roles={"node", "model"}):
        LOG.info("%s", fault)
        assert places_of_fault(folder, fault) <= {"host-1", "host-2", "host-3"}, "it was injected on a node"


def test_an_experiment_that_loses_a_node_is_diagnosed(machines: RayHosts) -> None:
    folder, result = machines.runs / "lab", machines.runs / "lab.json"
    lab = ("lab", "run", "node_loss", "--profile", "ours", "--folder", str(folder), "--json", str(result))
    in_the_laboratory(machines, *lab)
    assert_lost_host_is_diagnosed(result)


def test_an_experiment_that_slows_a_link_is_diagnosed_and_undone_on_every_node(machines: RayHosts) -> None:
    folder, result = machines.runs / "S1", machines.runs / "S1.json"
    places = (machines.head, *machines.places)
    before = state_of(places)
    lab = ("lab", "run", "S1", "--profile", "ours", "--folder", str(folder), "--json", str(result))
    in_the_laboratory(machines, *lab)
    assert_faults_fired(folder, "S1")
    assert_diagnosed(result)
    assert state_of(places) == before


WRONG = {
    "wrong token": ({"RAY_AUTH_TOKEN_PATH": "wrong"}, (), "Ray refused the token"),
    "no token": ({"RAY_AUTH_TOKEN_PATH": "none"}, (), "token"),
    "authentication off": ({"RAY_AUTH_MODE": "disabled"}, (), "Ray refused the token"),
    "no such address": ({}, ("--address", "10.77.0.99:6379"), "no process listens there"),
    "no port": ({}, ("--address", "ray://10.77.0.10"), "expected HOST:PORT"),
    "too few nodes": ({}, ("cluster.ray.nodes=4",), "expected 4 nodes with 1 CPUs and 0 GPUs, found 3 of 4"),
    "too few GPUs": ({}, ("cluster.ray.gpus=8",), "expected 1 node with 1 CPUs and 8 GPUs, found 0 of 4"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_cluster_that_can_not_be_used_is_named_within_seconds_and_nothing_is_left(
    machines: RayHosts, what: str
) -> None:
    environment, arguments, said = WRONG[what]
    (machines.keys / "wrong").write_text("0" * 64)
    paths = {
        name: str(machines.keys / value) if name.endswith("PATH") else value
        for name, value in environment.items()
    }
    since = time.monotonic()
    given = arguments if "--address" in arguments else ("--address", machines.address_of_cluster, *arguments)
    run_dir = machines.runs / what.replace(" ", "-")
    code, output = machines.ask(
        "train", "recipe.yaml", f"run_dir={run_dir}", "--on", "ray", *given, environment=paths
    )
    took_s = time.monotonic() - since
    LOG.info("refused after %.1f s", took_s)
    assert code == 2, output
    assert said in " ".join(output.split()), output
    assert not run_dir.exists()
    assert took_s < 60.0
    assert not machines.pids()


def test_nodes_that_others_use_are_waited_for_and_then_named(machines: RayHosts) -> None:
    connect = f"import ray; ray.init({machines.address_of_cluster!r}, namespace='others')\n"
    taken = "ray.util.placement_group([{'CPU': 2}] * 3, strategy='SPREAD', name='taken', lifetime='detached').ready()"
    machines.run_python(f"{connect}ray.get({taken})")
    try:
        command, _ = start(machines, "in-use")
        output, errors = command.communicate(timeout=LONGEST_S)
        assert command.returncode != 0
        assert "Ray has not placed 3 hosts of 1 CPUs and 0 GPUs" in " ".join((output + errors).split()), (
            output
        )
        until(lambda: not machines.pids(), "the end of all processes", timeout_s=60.0)
        assert machines.left_in_ray() == "['taken']"
    finally:
        machines.run_python(
            f"{connect}ray.util.remove_placement_group(ray.util.get_placement_group('taken'))\n"
        )


def test_a_run_can_be_submitted_as_a_job_of_ray(machines: RayHosts, weights_of_one_machine: str) -> None:
    run_dir = machines.runs / "job"
    submitted = machines.run_python(
        "import sys, time\n"
        "from ray.job_submission import JobSubmissionClient\n"
        f"client = JobSubmissionClient('http://{machines.head.address}:8265')\n"
        "job = client.submit_job(entrypoint=sys.argv[1])\n"
        "until = time.monotonic() + 380\n"
        "while not client.get_job_status(job).is_terminal() and time.monotonic() < until: time.sleep(0.5)\n"
        "print(client.get_job_status(job).value, client.get_job_logs(job))\n",
        f"cd {machines.runs} && {sys.executable} -m kintsugi train recipe.yaml run_dir={run_dir} --on ray",
        timeout_s=LONGEST_S,
    )
    assert submitted.startswith("SUCCEEDED"), submitted
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


def test_hosts_shows_every_node_and_what_it_has(machines: RayHosts) -> None:
    code, output = machines.ask("hosts", "--on", "ray")
    assert code == 0, output
    for place in machines.places:
        assert f"{place.name}-machine" in output
        assert f"reaches {machines.head.address} from {place.address}; Ray: 2 CPUs" in output


def test_the_section_about_ray_can_be_followed_line_by_line(machines: RayHosts) -> None:
    commands = [
        command
        for block in blocks_of(ROOT / "docs" / "cluster.md")
        if block.kind == "console"
        for command, _ in block.commands
        if "--on ray" in command
    ]
    assert len(commands) == 2
    for command in commands:
        code, output = machines.ask(*command.split()[1:], timeout_s=LONGEST_S)
        assert code == 0, output
    machines.assert_nothing_left()


def test_a_run_outlives_the_head_of_its_cluster(machines: RayHosts, weights_of_one_machine: str) -> None:
    """The last test: there is no cluster after it."""
    command, run_dir = start(machines, "head")
    wait_for_step(run_dir, 2, command)
    machines.kill_ray("host-0", "gcs_server")
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    assert not told(run_dir, Alert, "lost")
    until(lambda: not machines.pids(), "the end of all processes", timeout_s=60.0)
