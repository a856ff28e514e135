from __future__ import annotations

from pathlib import Path

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.lab.fragile.directory import Address, announce
from kintsugi.lab.fragile.monitor import announced_in, targets_of

HOSTS = [
    HostNamespaces("host-0", address="10.0.0.1", known_as="first"),
    HostNamespaces("host-1", address="10.0.0.2", known_as="second"),
]
PIDS = {"master-0": 1, "model-0": 2, "model-1": 3, "rollout-1": 4}


def test_a_monitor_looks_at_the_processes_of_its_host(tmp_path: Path) -> None:
    assert targets_of(HOSTS[1], HOSTS, pids=PIDS, announced={}).pids == {"model-1": 3, "rollout-1": 4}
    alone = targets_of(HOSTS[0], HOSTS[:1], pids=PIDS, announced={})
    assert alone.pids == PIDS and not alone.has_other_hosts


def test_who_listens_where_is_known_by_address_and_by_the_name_of_its_process(tmp_path: Path) -> None:
    announce(tmp_path, "meta", Address("first", 8080))
    announce(tmp_path, "model-1", Address("10.0.0.2", 8101))
    (tmp_path / "addresses" / "torn.json").write_text("{")
    targets = targets_of(HOSTS[0], HOSTS, pids=PIDS, announced=announced_in(tmp_path))
    assert targets.book == {("10.0.0.1", 8080): "master-0", ("10.0.0.2", 8101): "model-1"}
    assert targets.has_other_hosts
