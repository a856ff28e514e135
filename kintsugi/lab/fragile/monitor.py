"""Who looks at a host of this system from outside, as a monitoring daemon of a node does: one process per host.

It is the recorder of our own node agents, so that both systems are measured by the same program, and it is no part of
the system: nobody is told what it sees, and nothing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.hosts import HostPlace
from kintsugi.cluster.obituaries import OomLedger
from kintsugi.cluster.sampling import SAMPLE_S, Sampling, Scene
from kintsugi.lab.fragile.places import ADDRESSES_FOLDER, META_SERVER, STORE, Address
from kintsugi.lab.fragile.process import begin, place_of, read_hosts
from kintsugi.lab.watching import MASTER, Watch
from kintsugi.observe.figures import FiguresLog
from kintsugi.runtime import wait
from kintsugi.types import Role, process_id

LONGEST_S = 24 * 3600.0
SERVES = {META_SERVER: MASTER, STORE: process_id(Role.MODEL, 0)}
"""What is announced under another name than that of its process."""


def scene_of(
    place: HostPlace, hosts: list[HostPlace], *, pids: Mapping[str, int], announced: Mapping[str, Address]
) -> Scene:
    """What there is to look at on one host. Others are known by their names where hosts have names."""
    address_of = {host.known_as: host.address for host in hosts if host.known_as}
    return Scene(
        pids={name: pid for name, pid in pids.items() if place_of(name, hosts) == place},
        book={
            (address_of.get(address.host, address.host), address.port): SERVES.get(name, name)
            for name, address in announced.items()
        },
        has_other_hosts=len(hosts) > 1,
    )


def announced_in(run_dir: Path) -> dict[str, Address]:
    """Who is to be found where, as far as it is known yet."""
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
    """Looks without end: the process ends with its launcher."""
    process = begin(bootstrap)
    hosts, watch = read_hosts(process.run_dir), Watch(process.run_dir)
    # Only the name in it is used: it is resolved again and again, and how long that takes is measured.
    first = hosts[0]
    master = msgspec.structs.replace(bootstrap.master, address=f"tcp://{first.known_as or first.address}:1")
    own = msgspec.structs.replace(bootstrap, host=process.place.name, master=master)
    figures = FiguresLog(process.run_dir, process=own.process)
    ooms = OomLedger()
    sampling = Sampling(own, figures=figures, ooms=ooms, note=lambda text: None)
    sampling.begin()

    def attempt(remaining_s: float) -> bool | None:
        watch.look(at_once=True)
        pids = {name: presence.pid for name, presence in watch.staff.items() if name != own.process}
        scene = scene_of(process.place, hosts, pids=pids, announced=announced_in(process.run_dir))
        sampling.show(scene)
        ooms.look_at(scene.pids.values())
        time.sleep(min(SAMPLE_S / 2, remaining_s))
        return None

    wait(attempt, whom="launcher", what="its end", timeout_s=LONGEST_S)
    return 0
