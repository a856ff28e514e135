"""Faults on hosts of other machines: what is signalled there, and which engines the laboratory can not reach."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from kintsugi.cluster.host_supervisor import RECORD, ScratchRecord, own_machine
from kintsugi.config.schema import ClusterSection, Config, KubernetesSection, RaySection
from kintsugi.errors import UserError, WorldError
from kintsugi.lab.testbed import remote_hosts
from kintsugi.lab.testbed.remote_hosts import HERE, RemoteHosts, check_reach, commands_of
from kintsugi.lab.testbed.remote_orders import SignalOrder
from kintsugi.lab.testbed.remote_signals import carry_out
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import process_start_time
from kintsugi.telemetry.process_reports import ProcessReport, ProcessReports, write_processes
from tests.cluster.tiny_runs import until

TREE = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"


class Machine:
    """A supervisor with one process below it, and the record of it in a scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.supervisor = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True)
        assert self.supervisor.stdout is not None
        self.child = int(self.supervisor.stdout.readline())
        folder = scratch / "run1-host-2-1"
        folder.mkdir(parents=True)
        pid = self.supervisor.pid
        record = ScratchRecord(pid, process_start_time(pid) or 0, own_machine())
        (folder / RECORD).write_bytes(msgspec.json.encode(record))

    def carry_out(self, order: SignalOrder) -> tuple[str, ...]:
        return carry_out(order, host="host-2", scratch=self.scratch).hit

    @property
    def child_runs(self) -> bool:
        return psutil.pid_exists(self.child) and psutil.Process(self.child).status() != psutil.STATUS_ZOMBIE

    def close(self) -> None:
        if self.child_runs:
            psutil.Process(self.child).kill()
        with self.supervisor:
            self.supervisor.kill()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "scratch")
    yield made
    made.close()


def test_a_process_below_the_supervisor_is_signalled_and_no_other(machine: Machine) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        order = SignalOrder("run1", signal.SIGKILL, {"model-0": machine.child, "model-1": stranger.pid})
        assert machine.carry_out(order) == ("model-0",)
        assert stranger.poll() is None
        stranger.kill()
    assert machine.supervisor.wait(timeout=5.0) == 0, "it has seen its child end"


def test_a_whole_host_ends_with_its_supervisor(machine: Machine) -> None:
    order = SignalOrder("run1", signal.SIGKILL, {"agent-2": machine.child}, is_whole=True)
    assert machine.carry_out(order) == ("agent-2",)
    assert machine.supervisor.wait(timeout=5.0) == -signal.SIGKILL
    until(lambda: not machine.child_runs, "the end of what was below it")


def test_another_run_on_the_same_machine_is_left_alone(machine: Machine) -> None:
    order = SignalOrder("run2", signal.SIGKILL, {"agent-2": machine.child}, is_whole=True)
    assert machine.carry_out(order) == ()
    assert machine.supervisor.poll() is None


def test_slurm_outside_of_an_allocation_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="--on slurm: expected an allocation"):
        check_reach(Config(name="lab", cluster=ClusterSection(on="slurm")))


def test_nodes_of_ray_and_pods_are_asked_through_a_process_of_this_machine_for_each() -> None:
    nodes = ClusterSection(on="ray", hosts=3, ray=RaySection(address="192.0.2.1:6379"))
    commands = commands_of(Config(name="lab", cluster=nodes))
    assert list(commands) == ["host-1", "host-2"]
    assert commands["host-2"][-3:] == ["kintsugi.lab.testbed.ray_signals", "host-2", "192.0.2.1:6379"]
    pods = ClusterSection(on="k8s", hosts=2, kubernetes=KubernetesSection(namespace="runs"))
    (command,) = commands_of(Config(name="lab", cluster=pods)).values()
    assert command[-3:] == ["kintsugi.lab.testbed.pod_signals", "host-1", "runs"]


def test_pods_whose_cluster_can_not_be_asked_are_refused_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UserError, match="KUBECONFIG: expected a file"):
        check_reach(Config(name="lab", cluster=ClusterSection(on="k8s")))


def test_a_host_where_no_fault_can_be_injected_ends_the_soak_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = ["sh", "-c", """read order; echo '{"hit": [], "why": "no command may be run in pods (403)"}'"""]
    monkeypatch.setattr(remote_hosts, "commands_of", lambda config: {"host-1": refuses})
    remote = RemoteHosts(Config(name="lab", cluster=ClusterSection(on="k8s", hosts=2)), run_dir=tmp_path)
    with pytest.raises(WorldError, match=r"host-1: no command may be run in pods \(403\)"):
        remote.connect("host-1")
    remote.close()


def test_agents_are_on_the_hosts_of_their_numbers_and_others_where_the_master_says(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("b 192.0.2.12 python=/venv/bin/python scratch=/tmp/s port=2222\n")
    config = Config(name="lab", cluster=ClusterSection(on=str(tmp_path / "hosts.txt")))
    command = commands_of(config)["host-1"]
    assert command[-1].endswith("kintsugi host-signals host-1 /tmp/s") and "2222" in command
    remote = RemoteHosts(config, run_dir=tmp_path)
    assert remote.host_of("agent-1") == "host-1" and not remote.is_elsewhere("model-0")
    report = ProcessReport(
        process="model-0", role="model", host="host-1", pid=7, incarnation="1.1", status="live"
    )
    RunFolder(tmp_path).processes_file.parent.mkdir(exist_ok=True)
    write_processes(tmp_path, ProcessReports(1.0, (report,)))
    assert remote.is_elsewhere("model-0") and remote.host_of("launcher") == HERE
    assert remote.processes_on("host-1") == {"model-0": 7}
    remote.close()
