"""Start-up of every process of this system: configuration, logging, and exit when the launcher ends."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kintsugi.cluster.namespaces import HostNamespaces, enter
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.fragile.timeouts import Scale, read_scale
from kintsugi.process.exit_codes import EXIT_ORPHANED
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import reserve
from kintsugi.runtime.waits import wait
from kintsugi.types import Role

HOSTS_FILE = "hosts.json"
MONITOR = "monitor"
DISTRIBUTED_ROLES = (Role.MODEL, Role.ROLLOUT, MONITOR)
_LOOK_S = 3600.0
_LOG_BYTES = 1 << 20


class FragileProcess(msgspec.Struct, frozen=True):
    """One process and what it knows of its run."""

    name: str
    run_dir: Path
    placement: HostNamespaces
    config: Config
    scale: Scale

    @property
    def host(self) -> str:
        """Address of the interface that it serves on."""
        return self.placement.address

    def port(self, usual: int) -> int:
        """Return the port to serve at: the usual one on an isolated host, any free one on a shared host."""
        return usual if self.placement.namespaces else 0

    @property
    def known_as(self) -> str:
        """Host name or address by which others reach it."""
        return self.placement.known_as or self.placement.address

    @property
    def is_plain(self) -> bool:
        """Whether the run is plain fine-tuning."""
        return self.config.algorithm.name == "sft"

    @property
    def index(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def num_shared(self) -> int:
        """Number of devices shared by the train worker and the rollout worker of the same index."""
        config = self.config
        if config.cluster.share_device == "no" or self.is_plain:
            return 0
        return min(config.actor.workers, config.rollout.workers)

    @property
    def shares_device(self) -> bool:
        """Whether this worker shares a device."""
        return self.index < self.num_shared

    @property
    def uses_disk(self) -> bool:
        """Whether weights reach the rollout workers through checkpoints."""
        return self.config.weights.transport == "disk"


def begin(bootstrap: Bootstrap) -> FragileProcess:
    """Initialise the process; it exits when the lifeline pipe ends."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="[%(asctime)s.%(msecs)03d] %(levelname)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    run_dir = Path(bootstrap.run_dir)
    config = load_config(RunFolder(run_dir).config_file)
    placement = placement_of(bootstrap.process, read_hosts(run_dir))
    # Before a second thread exists: a multi-threaded process can not change its namespaces.
    enter(placement.namespaces)
    # Logs of such systems are usually on another disk than checkpoints. Reserve space, so that they survive a
    # full disk.
    logging.raiseExceptions = False
    with suppress(OSError):
        reserve(sys.stderr.fileno(), offset=os.fstat(sys.stderr.fileno()).st_size, size=_LOG_BYTES)
    threading.Thread(target=_end_with, args=(bootstrap.lifeline,), name="lifeline", daemon=True).start()
    return FragileProcess(bootstrap.process, run_dir, placement, config, read_scale(run_dir))


def placement_of(process: str, hosts: Sequence[HostNamespaces]) -> HostNamespaces:
    """Return the host of a process: workers and monitors are distributed by index, all others are on the first host."""
    role, _, number = process.rpartition("-")
    return hosts[int(number) % len(hosts)] if role in DISTRIBUTED_ROLES else hosts[0]


def write_hosts(run_dir: Path, hosts: Sequence[HostNamespaces]) -> None:
    (run_dir / HOSTS_FILE).write_bytes(msgspec.json.encode(hosts or [HostNamespaces("host-0")]))


def read_hosts(run_dir: Path) -> list[HostNamespaces]:
    return msgspec.json.decode((run_dir / HOSTS_FILE).read_bytes(), type=list[HostNamespaces])


def _end_with(lifeline: int) -> None:
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    while True:
        try:
            wait(
                lambda remaining_s: poller.poll(remaining_s * 1000) or None,
                whom="launcher",
                what="its end",
                timeout_s=_LOOK_S,
            )
        except DeadlineExceeded:
            continue
        os._exit(EXIT_ORPHANED)
