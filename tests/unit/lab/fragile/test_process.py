from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.config.schema import ActorSection, AlgorithmSection, ClusterSection, Config, RolloutSection
from kintsugi.lab.fragile.process import FragileProcess, placement_of, read_hosts, write_hosts
from kintsugi.lab.fragile.timeouts import Scale

WHO = ("master-0", "scheduler-0", "model-1", "rollout-2", "monitor-1")
HOSTS = (
    HostNamespaces("host-0", address="10.0.0.1", namespaces=("/proc/1/ns/net",)),
    HostNamespaces("host-1"),
)


def process(name: str, config: Config, *, placement: HostNamespaces = HOSTS[1]) -> FragileProcess:
    return FragileProcess(name, Path("run"), placement, config, Scale())


def test_workers_go_round_the_hosts_and_the_others_are_on_the_first(tmp_path: Path) -> None:
    write_hosts(tmp_path, HOSTS)
    hosts = read_hosts(tmp_path)
    found = {name: placement_of(name, hosts).name for name in WHO}
    assert found == {
        "master-0": "host-0",
        "scheduler-0": "host-0",
        "model-1": "host-1",
        "rollout-2": "host-0",
        "monitor-1": "host-1",
    }


def test_a_run_without_hosts_is_on_this_machine(tmp_path: Path) -> None:
    write_hosts(tmp_path, ())
    assert read_hosts(tmp_path) == [HostNamespaces("host-0")]


def test_ports_are_the_usual_ones_on_hosts_of_their_own_only() -> None:
    config = Config(name="test")
    assert process("master-0", config, placement=HOSTS[0]).port(8080) == 8080
    assert process("master-0", config, placement=HOSTS[1]).port(8080) == 0


@pytest.mark.parametrize(("name", "shares"), [("rollout-0", True), ("rollout-1", False), ("model-0", True)])
def test_a_device_is_shared_by_workers_of_one_number(name: str, shares: bool) -> None:
    config = Config(
        name="test",
        actor=ActorSection(workers=1),
        rollout=RolloutSection(workers=2),
        cluster=ClusterSection(share_device="keep"),
    )
    assert process(name, config).shares_device is shares


def test_plain_fine_tuning_shares_nothing() -> None:
    config = Config(
        name="test", algorithm=AlgorithmSection(name="sft"), cluster=ClusterSection(share_device="keep")
    )
    assert process("model-0", config).is_plain
    assert not process("model-0", config).shares_device
