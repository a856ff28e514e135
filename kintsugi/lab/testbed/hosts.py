"""Isolated hosts on one machine: a network namespace each, joined by a switch in a namespace of its own.

    host-0 eth0 10.77.0.10 ──┐
    host-1 eth0 10.77.0.11 ──┼── bridge (switch, 10.77.0.2: name server) ── no route to the outside
    host-2 eth0 10.77.0.12 ──┘

Packets between hosts are real and can be delayed, dropped and cut. The namespaces have no name or file on this machine:
each exists as long as a process that holds it, which ends with the laboratory (EOF of a pipe that only the laboratory
can write). So there is nothing to undo.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.errors import UserError
from kintsugi.lab.testbed import tools
from kintsugi.lab.testbed.tools import ToolFailed
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.waits import wait

SUBNET = "10.77.0"
FIRST = 10
NAME_SERVER = f"{SUBNET}.2"
TESTBED_JOURNAL = "places-undo.jsonl"
"""Name of the undo journal, next to the disk of a testbed."""
START_TIMEOUT_S = 5.0
POLL_S = 0.002


class Hosts:
    """A number of hosts; with `named`, they resolve each other's names (`host-1.lab`) through a name server on the
    switch."""

    def __init__(self, count: int, *, folder: Path, named: bool = False, disk: Path | None = None) -> None:
        """Create the hosts. `folder` contains the files mounted over /etc and must outlive them; `disk` is the
        testbed's disk."""
        if why := missing():
            raise UserError(f"hosts of their own can not be made here: {why}")
        folder.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        try:
            self._switch = self._hold("switch")
            holders = [self._hold(f"host-{index}") for index in range(count)]
            for holder in (self._switch, *holders):
                _leave_other_disks(holder, own=disk)
            self._connect(holders)
            self._names = self._serve_names(count, folder=folder) if named else None
            if named:
                for holder in holders:
                    _use_names(holder, folder=folder)
        except BaseException:
            self._stack.close()
            raise
        self.places = tuple(
            HostNamespaces(
                f"host-{index}",
                address=f"{SUBNET}.{FIRST + index}",
                known_as=f"host-{index}.lab" if named else "",
                namespaces=(f"/proc/{holder.pid}/ns/net", f"/proc/{holder.pid}/ns/mnt"),
            )
            for index, holder in enumerate(holders)
        )
        self._numbers = {os.stat(place.namespaces[0]).st_ino: place.name for place in self.places}

    def host_of(self, network: int) -> str | None:
        """Return the host with this network namespace (inode number)."""
        return self._numbers.get(network)

    def _hold(self, name: str) -> Child:
        """Start a process that keeps new namespaces alive until the laboratory ends."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            holder = SystemProcesses().spawn(
                ["unshare", "--net", "--mount", "cat", f"/proc/self/fd/{reader}"],
                pass_fds=(reader,),
                new_session=True,
            )
        finally:
            os.close(reader)
        self._stack.callback(_release, holder, writer)
        own = os.stat("/proc/self/ns/mnt").st_ino

        def attempt(remaining_s: float) -> bool | None:
            # The mount namespace is created after the network namespace.
            with suppress(FileNotFoundError):
                if holder.ended() or os.stat(f"/proc/{holder.pid}/ns/mnt").st_ino != own:
                    return True
            time.sleep(min(remaining_s, POLL_S))
            return None

        wait(attempt, whom=name, what="its namespaces", timeout_s=START_TIMEOUT_S)
        if holder.ended():
            raise UserError(f"no namespaces for {name}: unshare {holder.status()}; expected root")
        return holder

    def _connect(self, holders: list[Child]) -> None:
        lines = ["link set lo up", "link add name bridge type bridge forward_delay 0", "link set bridge up"]
        lines.append(f"addr add {NAME_SERVER}/24 dev bridge")
        for index, holder in enumerate(holders):
            lines += [
                f"link add name port{index} type veth peer name eth0 netns {holder.pid}",
                f"link set port{index} master bridge up",
            ]
        _ip(self._switch, lines)
        for index, holder in enumerate(holders):
            address = f"addr add {SUBNET}.{FIRST + index}/24 dev eth0"
            _ip(holder, ["link set lo up", address, "link set eth0 up"])

    def _serve_names(self, count: int, *, folder: Path) -> Child:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        table = [f"host-{index}.lab={SUBNET}.{FIRST + index}" for index in range(count)]
        there = ["nsenter", "--target", str(self._switch.pid), "--net"]
        server = SystemProcesses().spawn(
            [
                *there,
                sys.executable,
                "-P",
                "-m",
                "kintsugi.lab.testbed.name_server",
                NAME_SERVER,
                str(reader),
                *table,
            ],
            pass_fds=(reader,),
            new_session=True,
        )
        os.close(reader)
        self._stack.callback(_release, server, writer)
        (folder / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:2\n")
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        (folder / "nsswitch.conf").write_text("hosts: files dns\npasswd: files\ngroup: files\n")
        return server

    def close(self) -> None:
        """End the processes that hold the namespaces; the kernel removes a namespace with its last process."""
        self._stack.close()


def _use_names(holder: Child, *, folder: Path) -> None:
    there = ("nsenter", "--target", str(holder.pid), "--mount")
    for name in ("resolv.conf", "hosts", "nsswitch.conf"):
        if Path("/etc", name).exists():
            tools.call(*there, "mount", "--bind", str((folder / name).resolve()), f"/etc/{name}")


def _leave_other_disks(holder: Child, *, own: Path | None) -> None:
    """Unmount disks of other testbeds in new namespaces, which inherit all mounts and would keep those disks busy."""
    for line in Path(f"/proc/{holder.pid}/mounts").read_text().splitlines():
        path = Path(line.split()[1])
        if (path.parent / TESTBED_JOURNAL).exists() and (own is None or path != own.resolve()):
            with suppress(ToolFailed):
                tools.call("nsenter", "--target", str(holder.pid), "--mount", "umount", "--lazy", str(path))


def _ip(holder: Child, lines: list[str]) -> None:
    tools.call("nsenter", "--target", str(holder.pid), "--net", "ip", "-batch", "-", text="\n".join(lines))


def _release(child: Child, writer: int) -> None:
    os.close(writer)
    child.wait_ended(whom="a host", timeout_s=START_TIMEOUT_S)
    child.close()


def missing() -> str | None:
    """Return why this machine can not have isolated hosts; None when it can."""
    absent = [program for program in ("unshare", "nsenter", "ip") if not tools.has(program)]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: util-linux, iproute2)"
    if os.geteuid() != 0:
        return "expected root, to make network namespaces"
    try:
        tools.call(
            "unshare",
            "--net",
            "sh",
            "-c",
            "ip link add name n0 type bridge && ip link add name n1 type veth peer name n2",
        )
    except ToolFailed as error:
        return str(error)
    return None
