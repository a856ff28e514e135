"""The experiments of the laboratory over ssh: their faults are injected on the hosts themselves and undone there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import ssh_hosts
from tests.cluster.hosts_runs import LONGEST_S
from tests.cluster.lab_runs import assert_diagnosed, assert_faults_fired, assert_went_on, state_of
from tests.cluster.ssh_hosts import SshHosts
from tests.cluster.tiny_runs import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.skipif(
        ssh_hosts.missing() is not None, reason=f"hosts with an sshd can not be had: {ssh_hosts.missing()}"
    ),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    made = SshHosts(tmp_path_factory.mktemp("ssh"), count=2)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["S1", "S2", "S3", "S4", "S5"])
def test_an_experiment_is_diagnosed_on_other_machines_and_everything_is_undone_there(
    machines: SshHosts, name: str
) -> None:
    assert_diagnosed(run(machines, name))


def test_lost_packets_are_dropped_on_the_machine_of_the_target_and_the_rule_is_undone(
    machines: SshHosts,
) -> None:
    # How few of them are retransmitted is not always told from a delay on a busy machine.
    assert_went_on(run(machines, "S1_loss"))


def run(machines: SshHosts, name: str) -> Path:
    """Run an experiment, whose faults fire and are undone on every host; return the file with the result."""
    folder, result = machines.runs / name, machines.runs / f"{name}.json"
    places = (machines.head, *machines.places)
    before = state_of(places)
    code, output = machines.ask(
        *("lab", "run", name, "--profile", "ours", "--folder", str(folder), "--json", str(result)),
        *("--on", str(machines.hosts_file())),
        timeout_s=LONGEST_S,
    )
    assert (folder / "runs.json").exists(), (code, output)
    assert_faults_fired(folder, name)
    assert state_of(places) == before
    machines.assert_nothing_left()
    return result


def test_a_machine_whose_user_may_not_change_its_network_is_named_before_anything_starts(
    machines: SshHosts,
) -> None:
    python = machines.interpreter_without("net_admin")
    hosts_file = machines.hosts_file(name="unable.txt", python=python)
    folder = machines.runs / "unable"
    code, output = machines.ask(
        *("lab", "run", "node_loss", "S1", "--profile", "ours", "--folder", str(folder)),
        *("--on", str(hosts_file)),
    )
    assert code != 0 and not folder.exists()
    assert f"S1: --on {hosts_file}: host-2: network_delay can not be done on this machine" in output
    assert "expected CAP_NET_ADMIN, to set rules about packets" in output
    machines.assert_nothing_left()


def test_a_killed_laboratory_leaves_no_rule_and_no_process_on_any_machine(machines: SshHosts) -> None:
    places = (machines.head, *machines.places)
    before, own = state_of(places), os.readlink("/proc/self/ns/pid")
    command = machines.start(
        *("lab", "run", "S1", "--profile", "ours", "--folder", str(machines.runs / "killed")),
        *("--on", str(machines.hosts_file()), "cluster.away_s=10"),
    )

    def has_rules() -> bool:
        assert command.poll() is None, command.communicate()
        return "queue" in state_of(places)["host-2 nft"]

    until(has_rules, "the fault on the host of model-1", timeout_s=LONGEST_S)
    for pid in machines.pids():
        with suppress(ProcessLookupError, FileNotFoundError):
            if os.readlink(f"/proc/{pid}/ns/pid") == own:
                os.kill(pid, signal.SIGKILL)
    until(lambda: state_of(places) == before, f"the state before: {before}", timeout_s=30.0)
    machines.assert_nothing_left()
