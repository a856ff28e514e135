"""Runs over ssh, on hosts of their own that do not see the run folder, end in the bits of a run on one machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kintsugi.diagnosis.diagnose import diagnose
from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.lab.testbed import cgroups
from kintsugi.page.timeline import clock_offsets
from kintsugi.run_folder.reader import Launcher
from kintsugi.telemetry.events import Alert, Span, read_events
from tests.cluster import ssh_hosts
from tests.cluster.hosts_runs import (
    LONGEST_S,
    assert_lost_host_is_diagnosed,
    faults_of_soak,
    finish,
    pid_of,
    rewards,
    train_alone,
    wait_for_step,
    weights_of,
    write_inputs,
)
from tests.cluster.ssh_hosts import SshHosts
from tests.cluster.tiny_runs import until
from tests.docs.pages import ROOT, blocks_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        ssh_hosts.missing() is not None, reason=f"hosts with an sshd can not be had: {ssh_hosts.missing()}"
    ),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    made = SshHosts(tmp_path_factory.mktemp("ssh"), count=3)
    write_inputs(made.runs, pauses_s={"rewards": 0.1, "slow_rewards": 1.0})
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights_of_one_machine(machines: SshHosts) -> str:
    return train_alone(machines)


def start(machines: SshHosts, name: str, *overrides: str) -> tuple[subprocess.Popen[str], Path]:
    run_dir = machines.runs / name
    hosts_file = str(machines.hosts_file())
    command = machines.start("train", "recipe.yaml", f"run_dir={run_dir}", "--on", hosts_file, *overrides)
    return command, run_dir


def test_three_hosts_end_in_the_bits_of_one_machine_and_nothing_is_left_on_any(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "undisturbed")
    wait_for_step(run_dir, 2, command)
    assert all(machines.scratch_of(place.name) for place in machines.places)
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    # Written by a rank that does not see the run folder, and telemetry of every process.
    assert (run_dir / "checkpoints" / "step-000007" / "trainer.safetensors").exists()
    for process in ("model-0", "model-1", "server-1", "rollout-1", "agent-3"):
        assert (run_dir / "events" / f"{process}.jsonl").stat().st_size > 0
        assert (run_dir / "figures" / f"{process}.jsonl").stat().st_size > 0
    assert not (run_dir / "joined_hosts.json").exists()
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_killed_agent_and_a_link_that_is_cut_for_five_seconds_change_no_bit(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "cut")
    wait_for_step(run_dir, 2, command)
    os.kill(pid_of(machines, "kintsugi.cluster.agent agent-1 "), signal.SIGKILL)
    wait_for_step(run_dir, 4, command)
    machines.drop("host-2")
    try:
        time.sleep(5)  # The fault itself.
    finally:
        machines.heal("host-2")
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    ends = [
        record for record in read_events(run_dir, process="supervisor-1") if "SIGKILL" in str(record.event)
    ]
    assert ends, "the supervisor has seen its agent killed"
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_host_that_is_powered_off_for_good_changes_no_bit(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "off")
    wait_for_step(run_dir, 3, command)
    machines.power_off("host-3")
    try:
        finish(command)
    finally:
        machines.power_on("host-3")
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_host_that_is_asked_to_end_is_left_between_two_steps(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "asked")
    wait_for_step(run_dir, 2, command)
    (supervisor,) = machines.supervisors_of("host-2")
    os.kill(supervisor, signal.SIGTERM)
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    told = [
        record.event.message
        for record in read_events(run_dir, process="host_manager-0")
        if isinstance(record.event, Alert)
    ]
    assert "is to be left: its supervisor was asked to end by a signal" in told[0]
    committed = [
        record.event.attributes["step"]
        for record in read_events(run_dir, process="master-0")
        if isinstance(record.event, Span) and record.event.name == "step"
    ]
    assert len(committed) == len(set(committed)), "no step was repeated"
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_link_that_loses_one_direction_for_good_ends_that_host_by_itself(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "one-way", "cluster.away_s=20")
    wait_for_step(run_dir, 3, command)
    machines.drop("host-2", from_head=False)
    try:
        finish(command)
        assert weights_of(run_dir) == weights_of_one_machine
        # The far side can not be told; it ends because it hears no answer.
        machines.assert_nothing_left(timeout_s=60.0)
    finally:
        machines.heal("host-2")
    events = [record.event for record in read_events(run_dir, process="host_manager-0")]
    assert any(isinstance(event, Alert) and "host-2" in event.message for event in events)


@pytest.mark.hosts
def test_a_killed_launcher_and_a_killed_host_manager_are_survived(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "launcher")
    wait_for_step(run_dir, 2, command)
    record = msgspec.json.decode((run_dir / "launcher.json").read_bytes(), type=Launcher)
    os.kill(record.pid, signal.SIGKILL)
    wait_for_step(run_dir, 4, command)
    os.kill(pid_of(machines, "kintsugi.cluster.host_manager "), signal.SIGKILL)
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_host_and_a_host_manager_that_start_again_after_files_were_edited_change_no_bit(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    code = machines.runs / "edited_rewards.py"
    code.write_text(rewards(1.0))
    command, run_dir = start(machines, "edited", "algorithm.reward=[edited_rewards.py:odd_digits]")
    wait_for_step(run_dir, 2, command)
    code.write_text("def odd_digits(completions, **columns): return [0.0] * len(completions)\n")
    (machines.runs / "hosts.txt").write_text("b no-such-host.invalid\n")
    os.kill(pid_of(machines, "kintsugi.cluster.host_manager "), signal.SIGKILL)
    (supervisor,) = machines.supervisors_of("host-2")
    os.kill(supervisor, signal.SIGKILL)

    def copies() -> list[Path]:
        """Code in the scratch folder of the host that was ordered again."""
        found = machines.scratch_folder("host-2").glob("*-host-2-2/files/*/edited_rewards.py")
        return [path for path in found if path.stat().st_size]

    def has_joined() -> bool:
        assert command.poll() is None, command.communicate()
        return bool(copies())

    until(has_joined, "the code on a host that is ordered again", timeout_s=LONGEST_S)
    assert "odd_digits(completions, **columns):\n    time.sleep(1.0)" in copies()[0].read_text()
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    assert not (run_dir / "host_files").exists()
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_launcher_and_standby_killed_together_leave_nothing_on_any_host_and_the_run_can_be_resumed(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    command, run_dir = start(machines, "both")
    wait_for_step(run_dir, 5, command)
    record = msgspec.json.decode((run_dir / "launcher.json").read_bytes(), type=Launcher)
    for pid in (record.pid, record.standby_pid):
        os.kill(pid, signal.SIGKILL)
    command.communicate(timeout=LONGEST_S)
    assert command.returncode != 0
    machines.assert_nothing_left(timeout_s=30.0)
    assert any((run_dir / "checkpoints").glob("step-*")), "there is something to fetch"
    code, output = machines.ask("resume", str(run_dir), timeout_s=LONGEST_S)
    assert code == 0, output
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_soak_loses_whole_machines_and_ends_in_the_bits_of_its_undisturbed_twin(machines: SshHosts) -> None:
    folder, report, began = machines.runs / "soak", machines.runs / "soak.json", time.time()
    code, output = machines.ask(
        *("soak", "recipe.yaml", f"run_dir={folder}", "--faults", "2", "--role", "node"),
        *("--json", str(report), "--on", str(machines.hosts_file())),
        timeout_s=LONGEST_S,
    )
    assert code == 0, output
    assert {fault["kind"] for fault in faults_of_soak(report, roles={"node"})} == {"kill"}
    diagnosis = diagnose(folder / "disturbed-1", since=began)
    lost = [cause for cause in diagnosis.causes if cause.kind is FaultKind.HOST_LOST]
    assert {cause.process for cause in lost} <= {"agent-1", "agent-2", "agent-3"} and lost, diagnosis
    assert {cause.process for cause in diagnosis.causes} == {cause.process for cause in lost}, diagnosis
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_an_experiment_that_loses_a_machine_is_diagnosed_and_one_that_needs_this_machine_is_refused(
    machines: SshHosts,
) -> None:
    hosts_file, result = str(machines.hosts_file()), machines.runs / "lab.json"
    where = ("--profile", "ours", "--on", hosts_file)
    code, output = machines.ask("lab", "run", "S4_dns", *where)
    assert code == 2 and "S4_dns: --on" in output and "hosts that resolve names" in output, output
    code, output = machines.ask(
        *("lab", "run", "node_loss", "--folder", str(machines.runs / "lab"), "--json", str(result)),
        *where,
        timeout_s=LONGEST_S,
    )
    assert code == 0, output
    assert_lost_host_is_diagnosed(result)
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_clock_that_is_a_minute_off_is_told_measured_and_corrected(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    ahead = machines.interpreter_with(
        "import time\nreal = time.time\ntime.time = lambda: real() + 90.0\n", name="ahead"
    )
    hosts_file = machines.hosts_file(python=ahead, name="ahead.txt", only=1)
    code, output = machines.ask("hosts", "--on", str(hosts_file))
    assert code == 0 and "+90.0" in output and "warning: its clock is 90.0 s ahead" in output, output
    run_dir = machines.runs / "clock"
    command = machines.start("train", "recipe.yaml", f"run_dir={run_dir}", "--on", str(hosts_file))
    wait_for_step(run_dir, 2, command)
    kept = json.loads((run_dir / "joined_hosts.json").read_bytes())
    measured = {host["host"]: host["clock_s"] for host in kept["hosts"]}
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    assert abs(measured["host-1"] - 90.0) < 1.0 and abs(measured["host-2"]) < 1.0
    assert abs(clock_offsets(run_dir)["host-1"] - 90.0) < 1.0, "the page corrects its records"
    told = [
        record.event
        for record in read_events(run_dir, process="host_manager-0")
        if isinstance(record.event, Alert)
    ]
    assert [abs(alert.values["clock_s"] - 90.0) < 1.0 for alert in told] == [True]
    assert "s ahead of the launcher's" in told[0].message
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_host_that_can_not_be_reached_at_its_own_address_is_refused_with_a_clear_word(
    machines: SshHosts,
) -> None:
    """As behind NAT: it reaches the others, and they do not reach it."""
    machines.refuse_new("host-2")
    try:
        code, output = machines.ask(
            "train", "recipe.yaml", f"run_dir={machines.runs}/nat", "--on", str(machines.hosts_file())
        )
    finally:
        machines.heal("host-2")
    assert code != 0
    assert f"it can not be reached at {machines.address('host-2')}" in output and "behind NAT" in output
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_the_range_of_ephemeral_ports_and_that_of_ssh_are_all_that_has_to_be_open(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    everywhere = [machines.head.name, *(place.name for place in machines.places)]
    for host in everywhere:
        machines.open_only(host, f"{low}-{high}", "22")
    try:
        command, run_dir = start(machines, "ports")
        finish(command)
    finally:
        for host in everywhere:
            machines.heal(host)
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


@pytest.mark.hosts
@pytest.mark.parametrize(
    ("address", "said"),
    [("no-such-host.invalid", "does not resolve"), ("fd00::12", "expected an IPv4 address, got fd00::12")],
)
def test_a_name_that_does_not_resolve_and_an_ipv6_address_are_named(
    machines: SshHosts, address: str, said: str
) -> None:
    (machines.runs / "names.txt").write_text(f"b {address}\n")
    code, output = machines.ask("train", "recipe.yaml", f"run_dir={machines.runs}/names", "--on", "names.txt")
    assert code == 2 and said in output and "host b" in output, output


@pytest.mark.hosts
def test_checkpoints_are_copied_to_a_shared_folder_and_taken_back_by_a_run_that_has_lost_its_own(
    machines: SshHosts, weights_of_one_machine: str
) -> None:
    shared = machines.runs.parent / "shared"
    slowly = "algorithm.reward=[slow_rewards.py:odd_digits]"
    command, run_dir = start(machines, "copied", slowly, f"checkpoint.copy_to={shared}")
    wait_for_step(run_dir, 3, command)
    code, output = machines.ask("stop", str(run_dir), timeout_s=LONGEST_S)
    assert code == 0, output
    command.communicate(timeout=LONGEST_S)
    copies = sorted(path.name for path in (shared / "copied").glob("step-*"))
    own = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert copies == own and own, "the last one was copied before the end"
    shutil.rmtree(run_dir / "checkpoints")
    code, output = machines.ask("resume", str(run_dir), timeout_s=LONGEST_S)
    assert code == 0 and f"was taken back from {shared}" in output, output
    assert weights_of(run_dir) == weights_of_one_machine
    machines.assert_nothing_left()


WRONG = {
    "unreachable": ("host-9-machine 10.77.0.99", "10.77.0.99"),
    "too few GPUs": ("gpus=8", "expected 8 GPUs, as the hosts file says, found 0"),
    "too little memory": ("memory_gib=100000", "GiB of memory, as the hosts file says"),
    "no such interpreter": ("python=/nowhere/python", "/nowhere/python"),
}


@pytest.mark.parametrize(
    "what",
    # Memory is checked beside the number of GPUs.
    [pytest.param(what, marks=pytest.mark.hosts if "memory" in what else ()) for what in WRONG],
)
def test_a_host_that_can_not_take_part_is_named_within_seconds_and_nothing_is_left(
    machines: SshHosts, what: str
) -> None:
    line, said = WRONG[what]
    path = machines.hosts_file(line if "=" in line else "", name="wrong.txt")
    if "=" not in line:
        path.write_text(path.read_text() + line + "\n")
    since = time.monotonic()
    run_dir = machines.runs / what.replace(" ", "-")
    code, output = machines.ask("train", "recipe.yaml", f"run_dir={run_dir}", "--on", str(path))
    assert code != 0
    assert said in output and "host-" in output, output
    assert time.monotonic() - since < 40.0
    machines.assert_nothing_left()


@pytest.mark.hosts
@pytest.mark.skipif(cgroups.missing("memory") is not None, reason=str(cgroups.missing("memory")))
def test_a_host_that_lies_about_its_memory_is_refused_by_name(machines: SshHosts) -> None:
    """The machine has the memory that the hosts file says; the control group of its processes does not."""
    group = machines.limit_memory("host-1", limit_bytes=1 << 30)
    try:
        path = machines.hosts_file("memory_gib=2", name="lies.txt")
        said = "expected 2.0 GiB of memory, as the hosts file says, found 1.0 GiB that its processes may use"
        code, output = machines.ask("hosts", "--on", str(path))
        assert code == 1 and said in output, output
        code, output = machines.ask(
            "train", "recipe.yaml", f"run_dir={machines.runs}/lies", "--on", str(path)
        )
        assert code != 0 and said in output and "host-1" in output, output
        machines.assert_nothing_left()
    finally:
        machines.power_off("host-1")
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of its processes", timeout_s=20.0)
        group.rmdir()
        machines.power_on("host-1")


@pytest.mark.hosts
def test_another_version_is_refused_with_both_sides_named(machines: SshHosts) -> None:
    other = machines.interpreter_with("import kintsugi\nkintsugi.__version__ = '9.9.9'\n", name="other")
    path = machines.hosts_file(name="other.txt", python=other)
    code, output = machines.ask("train", "recipe.yaml", f"run_dir={machines.runs}/other", "--on", str(path))
    assert code != 0
    assert "expected kintsugi 0.1.0, as on the launcher's machine, found 9.9.9" in output
    code, output = machines.ask("hosts", "--on", str(path))
    assert code == 1 and "found 9.9.9" in output
    machines.assert_nothing_left()


@pytest.mark.hosts
def test_a_package_that_is_missing_on_a_host_is_named_before_the_run_begins(machines: SshHosts) -> None:
    (machines.runs / "importing.py").write_text(
        "import pathlib\n"
        f"assert pathlib.Path({str(machines.runs / 'recipe.yaml')!r}).exists(), 'only importable on one machine'\n"
        + rewards(0.1)
    )
    code, output = machines.ask(
        "train",
        "recipe.yaml",
        f"run_dir={machines.runs}/importing",
        "algorithm.reward=[importing.py:odd_digits]",
        "--on",
        str(machines.hosts_file()),
    )
    assert code != 0
    assert "only importable on one machine" in output
    machines.assert_nothing_left()


def test_hosts_shows_every_host_and_what_it_has(machines: SshHosts) -> None:
    code, output = machines.ask("hosts", "--on", str(machines.hosts_file()))
    assert code == 0, output
    for place in machines.places:
        assert (
            f"{place.name}-machine" in output
            and f"reaches {machines.head.address} from {place.address}" in output
        )


@pytest.mark.hosts
def test_the_page_about_clusters_can_be_followed_line_by_line(machines: SshHosts) -> None:
    page = ROOT / "docs" / "cluster.md"
    for block in blocks_of(page):
        if block.attributes.get("title") == "hosts.txt":
            there = f" python={machines.python} scratch={machines.runs}/scratch"
            lines = [line if line.startswith("#") else line + there for line in block.body.splitlines()]
            (machines.runs / "hosts.txt").write_text("\n".join(lines))
        # Commands with an attribute, or without the file, are about other engines.
        is_ours = block.kind == "console" and "engine" not in block.attributes
        for command, _ in block.commands if is_ours else ():
            if "hosts.txt" in command:
                code, output = machines.ask(*command.split()[1:], timeout_s=LONGEST_S)
                assert code == 0, output
    machines.assert_nothing_left()
