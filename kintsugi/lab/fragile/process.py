"""What every process of this system begins with: its settings, its log, and an end when its launcher has ended."""

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

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.hosts import HostPlace, enter
from kintsugi.config import Config
from kintsugi.disk import reserve
from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.fragile.scale import Scale, read_scale
from kintsugi.recipe import load_config
from kintsugi.runs import CONFIG_FILE
from kintsugi.runtime import wait
from kintsugi.types import Role
from kintsugi.worker import EXIT_ORPHANED

HOSTS_FILE = "hosts.json"
MONITOR = "monitor"
GO_ROUND = (Role.MODEL, Role.ROLLOUT, MONITOR)
_LOOK_S = 3600.0
_LOG_BYTES = 1 << 20


class Process(msgspec.Struct, frozen=True):
    """One process and what it knows of its run."""

    name: str
    run_dir: Path
    place: HostPlace
    config: Config
    scale: Scale

    @property
    def host(self) -> str:
        """The address of the interface that it serves on."""
        return self.place.address

    def port(self, usual: int) -> int:
        """To serve at: the usual one on a host of its own, any free one where others are."""
        return usual if self.place.namespaces else 0

    @property
    def known_as(self) -> str:
        """How others reach it."""
        return self.place.known_as or self.place.address

    @property
    def is_plain(self) -> bool:
        """Whether it is fine-tuning alone."""
        return self.config.algorithm.name == "sft"

    @property
    def index(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def num_shared(self) -> int:
        """Devices that a train worker and the rollout worker of the same number share."""
        config = self.config
        if config.cluster.share_device == "no" or self.is_plain:
            return 0
        return min(config.actor.workers, config.rollout.workers)

    @property
    def shares_device(self) -> bool:
        """Whether this worker does."""
        return self.index < self.num_shared

    @property
    def uses_disk(self) -> bool:
        """Whether weights reach the rollout workers through checkpoints."""
        return self.config.weights.transport == "disk"


def begin(bootstrap: Bootstrap) -> Process:
    """Also lets the process end when the lifeline does."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="[%(asctime)s.%(msecs)03d] %(levelname)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    run_dir = Path(bootstrap.run_dir)
    config = load_config(run_dir / CONFIG_FILE)
    place = place_of(bootstrap.process, read_hosts(run_dir))
    # Before there is a second thread, with which one can not go elsewhere.
    enter(place.namespaces)
    # What these systems log lies elsewhere than their checkpoints; on one full disk it would say nothing of its own.
    logging.raiseExceptions = False
    with suppress(OSError):
        reserve(sys.stderr.fileno(), offset=os.fstat(sys.stderr.fileno()).st_size, size=_LOG_BYTES)
    threading.Thread(target=_end_with, args=(bootstrap.lifeline,), name="lifeline", daemon=True).start()
    return Process(bootstrap.process, run_dir, place, config, read_scale(run_dir))


def place_of(process: str, hosts: Sequence[HostPlace]) -> HostPlace:
    """Workers go round the hosts by their number, and each has its monitor; whoever there is one of is on the first."""
    role, _, number = process.rpartition("-")
    return hosts[int(number) % len(hosts)] if role in GO_ROUND else hosts[0]


def write_hosts(run_dir: Path, hosts: Sequence[HostPlace]) -> None:
    (run_dir / HOSTS_FILE).write_bytes(msgspec.json.encode(hosts or [HostPlace("host-0")]))


def read_hosts(run_dir: Path) -> list[HostPlace]:
    return msgspec.json.decode((run_dir / HOSTS_FILE).read_bytes(), type=list[HostPlace])


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
