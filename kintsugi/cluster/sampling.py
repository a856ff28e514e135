"""The node agent as a recorder: once a second it looks at its children, its host and their links, in a thread.

    agent's loop ─► what there is to look at ─► thread ─► samples ─► `<run>/figures/<agent>.jsonl`

The run does not depend on any of it: what can not be read is left out, what can not be written is counted, and nothing
here makes the agent's loop wait. Without `begin` (a simulated or a tested agent) nothing is recorded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.chips import ChipReading
from kintsugi.cluster.obituaries import OomLedger
from kintsugi.errors import DeadlineExceeded
from kintsugi.observe.cgroups import ControlGroups
from kintsugi.observe.ends import SharedEnds, ends_of
from kintsugi.observe.events import Stamp
from kintsugi.observe.figures import FiguresLog, Sample, figures_path
from kintsugi.observe.links import Address, Links, address_in
from kintsugi.observe.probes import DiskProbe, NameProbe, Probe, is_name
from kintsugi.observe.sampling import UNREADABLE, HostLook, OpenFiles, ProcessLook
from kintsugi.observe.tcp import TcpTable, socket_inodes
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, Clock, WaitTable, wait

SAMPLE_S = 1.0
CLOSE_S = 0.2


class Scene(msgspec.Struct, frozen=True):
    """What there is to look at, as the agent's loop knew it last."""

    pids: dict[str, int] = {}
    book: dict[Address, str] = {}
    """Where the processes of the run listen."""
    has_other_hosts: bool = False
    chips: tuple[ChipReading, ...] = ()


class Sampling:
    """The thread consumes the last scene, produces samples, waits for its next turn, and ends at `close`."""

    def __init__(
        self,
        own: Bootstrap,
        *,
        figures: FiguresLog,
        ooms: OomLedger,
        note: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`note` is told, once each, of errors that nobody thought of."""
        self._own, self._figures, self._ooms, self._note, self._clock = own, figures, ooms, note, clock
        self._noted: set[str] = set()
        self._control_groups = ControlGroups()
        self._looks: dict[str, ProcessLook] = {}
        self._files = OpenFiles()
        self._host = HostLook(own.host, run_dir=own.run_dir)
        self._links = Links()
        self._left_out: list[Sample] = []
        """Of the look before, and told now after all."""
        self._table: TcpTable | None = None
        self._owners: dict[int, str | None] = {}
        """Inode of a socket → whose it is; None for somebody who is none of ours."""
        self._disk = DiskProbe(figures_path(own.run_dir, own.process).with_suffix(".probe"))
        self._probes = [Probe("fsync", self._disk, note=note, clock=clock)]
        self._ends = SharedEnds(figures_path(own.run_dir, own.process))
        self._telling = Probe("ends", self._ends, note=note, clock=clock)
        master = address_in(own.master.address)
        if master is not None and is_name(master[0]):
            self._probes.append(Probe("resolve", NameProbe(master[0]), note=note, clock=clock))
        self._scene = Scene()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)

    def begin(self) -> None:
        for probe in (*self._probes, self._telling):
            probe.begin()
        self._thread.start()

    def show(self, scene: Scene) -> None:
        """Called by the agent's loop."""
        self._scene = scene

    def rss_bytes(self, process: str) -> float:
        """Of a child, when it was last looked at."""
        look = self._looks.get(process)
        return 0.0 if look is None else look.rss_bytes

    def _run(self) -> None:
        waits = WaitTable()
        before: Stamp | None = None
        while not self._closing.is_set():
            begun = self._clock.monotonic()
            samples = self.samples()
            self._figures.write(*self._left_out, stamp=before)
            before = self._figures.stamp()
            self._figures.write(*samples, stamp=before)
            with suppress(DeadlineExceeded):
                wait(
                    lambda remaining_s: self._closing.wait(remaining_s) or None,
                    whom="itself",
                    what="the next sample",
                    timeout_s=max(0.1, begun + SAMPLE_S - self._clock.monotonic()),
                    waits=waits,
                )

    def samples(self) -> list[Sample]:
        """Of this moment."""
        scene = self._scene
        self._left_out = []
        found: list[Sample] = []
        for part in (self._process_samples, self._host_samples, self._link_samples):
            try:
                found += part(scene)
            except UNREADABLE:
                COUNTERS.add("figures.unreadable")
            except Exception as error:  # noqa: BLE001 - the thread's outermost boundary: it goes on to look.
                COUNTERS.add("figures.unreadable")
                if part.__name__ not in self._noted:
                    self._note(f"figures are left out: {error!r}")
                self._noted.add(part.__name__)
        return found

    def _process_samples(self, scene: Scene) -> list[Sample]:
        self._control_groups.begin_round()
        # The agent last: what it holds for a child that may be restarted, the master's listener, is the child's.
        pids = {**scene.pids, self._own.process: os.getpid()}
        for name, pid in pids.items():
            if name not in self._looks or self._looks[name].pid != pid:
                if name in self._looks:
                    self._looks[name].close()
                look = ProcessLook(name, pid, control_groups=self._control_groups, files=self._files)
                self._looks[name] = look
        for gone in self._looks.keys() - pids.keys():
            self._looks.pop(gone).close()
        found: list[Sample] = []
        for name in pids:
            sample = self._looks[name].sample()
            if sample is not None:
                memory = sum(chip.memory_of.get(sample.pid, 0) for chip in scene.chips)
                if memory:
                    sample.values["device_memory_bytes"] = float(memory)
                found.append(sample)
        self._ooms.count(self._clock.monotonic())
        return found

    def _host_samples(self, scene: Scene) -> list[Sample]:
        more = {name: value for probe in self._probes for name, value in probe.values().items()}
        for index, chip in enumerate(scene.chips):
            more |= {f"device_{index}_{name}": value for name, value in chip.figures().items()}
        return [self._host.sample(more)]

    def _link_samples(self, scene: Scene) -> list[Sample]:
        if self._table is None:
            self._table = TcpTable()
        sockets = self._table.read()
        self._find_owners({each.inode for each in sockets if each.inode})
        owners = {inode: name for inode, name in self._owners.items() if name is not None}
        if scene.has_other_hosts:
            own = {each.local: owners[each.inode] for each in sockets if each.inode in owners}
            self._ends.own = ends_of(own)
        book = {**self._ends.others, **scene.book}
        look = self._links.look(sockets, owners=owners, book=book)
        self._left_out = [*look.before]
        return [*look.now]

    def _find_owners(self, inodes: set[int]) -> None:
        """Looking through all descriptors is what costs most: only done when there is a socket not seen before."""
        if inodes - self._owners.keys():
            found: dict[int, str] = {}
            for name, look in self._looks.items():
                for inode in socket_inodes(look.pid):
                    found.setdefault(inode, name)
            self._owners = {inode: found.get(inode) for inode in inodes}
        else:
            self._owners = {inode: self._owners[inode] for inode in inodes}

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            with suppress(DeadlineExceeded):
                wait(self._attempt_join, whom="sampling thread", what="its end", timeout_s=CLOSE_S)
        for probe in (*self._probes, self._telling):
            probe.close()
        self._disk.close()
        self._ends.close()
        if not self._thread.is_alive():
            self._files.forget("/proc/")
            if self._table is not None:
                self._table.close()
        self._figures.close()

    def _attempt_join(self, remaining_s: float) -> bool | None:
        self._thread.join(remaining_s)
        return None if self._thread.is_alive() else True
