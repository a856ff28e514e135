"""Monitor of one host, like the monitoring daemon of a node: one process per host.

It is the sampler of our own node agents, so that both systems are measured by the same program. It is not part of the
system under test: no process reads its results or waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kintsugi.cluster.exit_recorder import OomAttribution
from kintsugi.cluster.host_monitor import SAMPLE_S, HostSampler, MonitorTargets
from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.lab.fragile.directory import ADDRESSES_FOLDER, META_SERVER, STORE, Address
from kintsugi.lab.fragile.process import begin, placement_of, read_hosts
from kintsugi.lab.testbed.watch import MASTER, RunWatch
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.readings import ReadingsLog
from kintsugi.types import Role, process_id

LONGEST_S = 24 * 3600.0
SERVES = {META_SERVER: MASTER, STORE: process_id(Role.MODEL, 0)}
"""Services announced under another name than that of their process."""


def targets_of(
    placement: HostNamespaces,
    hosts: list[HostNamespaces],
    *,
    pids: Mapping[str, int],
    announced: Mapping[str, Address],
) -> MonitorTargets:
    """Return what to sample on one host; other hosts are identified by name where hosts have names."""
    address_of = {host.known_as: host.address for host in hosts if host.known_as}
    return MonitorTargets(
        pids={name: pid for name, pid in pids.items() if placement_of(name, hosts) == placement},
        book={
            (address_of.get(address.host, address.host), address.port): SERVES.get(name, name)
            for name, address in announced.items()
        },
        has_other_hosts=len(hosts) > 1,
    )


def announced_in(run_dir: Path) -> dict[str, Address]:
    """Return the addresses announced so far."""
    found = {}
    for path in _announcements(run_dir):
        try:
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Address)
        except (OSError, msgspec.DecodeError):
            continue
    return found


def _announcements(run_dir: Path) -> Iterable[Path]:
    return sorted((run_dir / ADDRESSES_FOLDER).glob("[!.]*.json"))


def main(bootstrap: Bootstrap) -> int:
    """Sample until the process ends with its launcher."""
    process = begin(bootstrap)
    hosts, watch = read_hosts(process.run_dir), RunWatch(process.run_dir)
    # Only the host name of this address is used: it is resolved periodically, to measure name resolution.
    first = hosts[0]
    master = msgspec.structs.replace(bootstrap.master, address=f"tcp://{first.known_as or first.address}:1")
    own = msgspec.structs.replace(bootstrap, host=process.placement.name, master=master)
    figures = ReadingsLog(process.run_dir, process=own.process)
    ooms = OomAttribution()
    sampling = HostSampler(own, readings=figures, ooms=ooms, note=lambda text: None)
    sampling.begin()

    def attempt(remaining_s: float) -> bool | None:
        watch.look(force=True)
        pids = {name: presence.pid for name, presence in watch.processes.items() if name != own.process}
        targets = targets_of(process.placement, hosts, pids=pids, announced=announced_in(process.run_dir))
        sampling.update_targets(targets)
        ooms.update_groups(targets.pids.values())
        time.sleep(min(SAMPLE_S / 2, remaining_s))
        return None

    wait(attempt, whom="launcher", what="its end", timeout_s=LONGEST_S)
    return 0
