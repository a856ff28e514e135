"""Faults by means that the laboratory does not have: is the cause named, and does the run go on?

    python benchmarks/other_faults.py [--json FILE] [--only TEXT ...]

A run like a campaign's, on hosts and a disk of its own, is broken by what a person has at hand: signals, a debugger,
`strace`, filters and shapers of a whole host, limits of the system, folders that disappear. No injector, no scoring and
no tuning of the laboratory has a part in it; the diagnosis is the same, given the run folder only. The first answer
counts, as in a campaign. Needs root, iproute2, nftables, util-linux, e2fsprogs, strace; without gdb its faults are left
out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kintsugi.config.recipe import load
from kintsugi.diagnosis.verdict import Cause
from kintsugi.lab.campaign.campaign import CampaignCluster
from kintsugi.lab.commands import CAMPAIGN, CAMPAIGN_PLACES
from kintsugi.lab.scenarios import experiments

WINDOW_S = 12.0
FAR = "agent-1"
"""Stands for the host that the master is not on."""
HELD_S = 30
TABLE = "inet other"

Undo = Callable[[], object]
Begin = Callable[[CampaignCluster], Undo]


class Fault(NamedTuple):
    begin: Begin
    who: frozenset[str]
    """Whoever of these is named is right."""
    kinds: frozenset[str]


def pid_of(cluster: CampaignCluster, process: str) -> int:
    return cluster.watch.processes[process].pid


def run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=20, check=False
    )
    return done.stdout


def on_host(cluster: CampaignCluster, *command: str) -> str:
    return run("nsenter", "-t", pid_of(cluster, FAR), "-n", *command)


def sends(number: signal.Signals, *processes: str) -> Begin:
    def begin(cluster: CampaignCluster) -> Undo:
        pids = [pid_of(cluster, process) for process in processes]
        for pid in pids:
            os.kill(pid, number)
        return lambda: [run("kill", "-CONT", pid) for pid in pids] if number is signal.SIGSTOP else None

    return begin


def filtered(*rules: str) -> Begin:
    """By the far host's own filter; `i` is what comes in, `o` what goes out."""

    def begin(cluster: CampaignCluster) -> Undo:
        on_host(cluster, "nft", f"add table {TABLE}")
        for chain, hook in (("i", "input"), ("o", "output")):
            on_host(cluster, "nft", f"add chain {TABLE} {chain} {{ type filter hook {hook} priority 0; }}")
        for rule in rules:
            on_host(cluster, "nft", f"add rule {TABLE} {rule}")
        return lambda: on_host(cluster, "nft", f"delete table {TABLE}")

    return begin


def interface(cluster: CampaignCluster, *, of: str = FAR) -> str:
    links = run("nsenter", "-t", pid_of(cluster, of), "-n", "ip", "-o", "link", "show", "up").splitlines()
    return next(line.split(": ")[1].partition("@")[0] for line in links if ": lo" not in line)


SET_CHECKSUMS = """
import array, fcntl, socket, struct, sys
value = array.array("B", struct.pack("II", 0x17, int(sys.argv[2])))  # ETHTOOL_STXCSUM
request = struct.pack("16sP", sys.argv[1].encode(), value.buffer_info()[0])
fcntl.ioctl(socket.socket(), 0x8946, request)  # SIOCETHTOOL
"""
"""Program that lets a device compute checksums (1), or the kernel (0)."""


def damaged(percent: int) -> Begin:
    """A part of the segments arrive at the far host with other bytes than were sent, and the checksum of those.

    A device of a namespace leaves checksums out, and its peer believes it: the kernel has to compute them.
    """

    def begin(cluster: CampaignCluster) -> Undo:
        near, device = pid_of(cluster, "agent-0"), interface(cluster, of="agent-0")

        def set_checksums(by_device: int) -> None:
            run("nsenter", "-t", near, "-n", sys.executable, "-c", SET_CHECKSUMS, device, by_device)

        set_checksums(0)
        chain = "type filter hook prerouting priority mangle;"
        on_host(cluster, "nft", f"add table {TABLE}")
        on_host(cluster, "nft", f"add chain {TABLE} i {{ {chain} }}")
        what = f"meta l4proto tcp meta length > 200 numgen random mod 100 < {percent}"
        on_host(cluster, "nft", f"add rule {TABLE} i {what} @th,256,32 set 0xdeadbeef")

        def undo() -> None:
            on_host(cluster, "nft", f"delete table {TABLE}")
            set_checksums(1)

        return undo

    return begin


def shaped(rate: str) -> Begin:
    def begin(cluster: CampaignCluster) -> Undo:
        device = interface(cluster)
        limits = f"root tbf rate {rate} burst 3000 latency 2s".split()
        on_host(cluster, "tc", "qdisc", "add", "dev", device, *limits)
        return lambda: on_host(cluster, "tc", "qdisc", "del", "dev", device, "root")

    return begin


def down(cluster: CampaignCluster) -> Undo:
    device = interface(cluster)
    on_host(cluster, "ip", "link", "set", device, "down")
    return lambda: on_host(cluster, "ip", "link", "set", device, "up")


def beside(*command: str) -> Begin:
    """A program that is attached to a process, `{PROCESS}` in its arguments, until it is ended."""

    def begin(cluster: CampaignCluster) -> Undo:
        pids = {process: str(presence.pid) for process, presence in cluster.watch.processes.items()}
        argv = [pids.get(part.strip("{}"), part) for part in command]
        quiet = subprocess.DEVNULL
        program = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet)

        def undo() -> None:
            program.terminate()
            program.wait(HELD_S)

        return undo

    return begin


def without_descriptors(process: str) -> Begin:
    """Half as many as it has open already."""

    def begin(cluster: CampaignCluster) -> Undo:
        pid = pid_of(cluster, process)
        before = run("prlimit", "--pid", pid, "--nofile", "--noheadings", "--raw", "--output", "SOFT").strip()
        run("prlimit", "--pid", pid, f"--nofile={len(os.listdir(f'/proc/{pid}/fd')) // 2}:")
        return lambda: run("prlimit", "--pid", pid, f"--nofile={before}:")

    return begin


def immutable(name: str) -> Begin:
    """A file or folder of the run folder."""

    def begin(cluster: CampaignCluster) -> Undo:
        path = cluster.run_dir / name
        run("chattr", "+i", path)
        return lambda: run("chattr", "-i", path)

    return begin


def without_files(process: str) -> Begin:
    """None may become longer."""

    def begin(cluster: CampaignCluster) -> Undo:
        pid = pid_of(cluster, process)
        run("prlimit", "--pid", pid, "--fsize=0:")
        return lambda: run("prlimit", "--pid", pid, "--fsize=unlimited:")

    return begin


def stopped_beside(process: str) -> Begin:
    """The process that it has started: the user's code."""

    def begin(cluster: CampaignCluster) -> Undo:
        pid = pid_of(cluster, process)
        child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        os.kill(child, signal.SIGSTOP)
        return lambda: run("kill", "-CONT", child)

    return begin


def narrow(cluster: CampaignCluster) -> Undo:
    """The far host's interface takes no more than 68 bytes at once."""
    device = interface(cluster)
    on_host(cluster, "ip", "link", "set", device, "mtu", "68")
    return lambda: on_host(cluster, "ip", "link", "set", device, "mtu", "1500")


def disconnected(process: str) -> Begin:
    """All of its connections are ended by the kernel, once a second."""

    def begin(cluster: CampaignCluster) -> Undo:
        pid = pid_of(cluster, process)
        each = "while read -r _ _ _ here there _; do ss -K src $here dst $there; done"
        again = f"while :; do ss -tnpH | grep pid={pid}, | {each}; sleep 1; done"
        quiet = subprocess.DEVNULL
        program = subprocess.Popen(
            ["nsenter", "-t", str(pid), "-n", "sh", "-c", again],
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )

        def undo() -> None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()

        return undo

    return begin


def replaced_by_a_file(cluster: CampaignCluster) -> Undo:
    folder, aside = cluster.run_dir / "checkpoints", cluster.run_dir / "aside"
    folder.rename(aside)
    folder.write_text("no folder")

    def undo() -> None:
        folder.unlink()
        aside.rename(folder)

    return undo


def disk_in_use(cluster: CampaignCluster) -> Undo:
    ballast = cluster.run_dir / "ballast"
    write = f"while :; do dd if=/dev/zero of={ballast} bs=1M count=64 oflag=dsync; done"
    quiet = subprocess.DEVNULL
    writers = [
        subprocess.Popen(["sh", "-c", write], stdout=quiet, stderr=quiet, start_new_session=True)
        for _ in range(3)
    ]

    def undo() -> None:
        for writer in writers:
            os.killpg(writer.pid, signal.SIGKILL)
            writer.wait()
        ballast.unlink(missing_ok=True)

    return undo


def _of(begin: Begin, who: str, kinds: str) -> Fault:
    return Fault(begin, frozenset(who.split()), frozenset(kinds.split()))


SLOWED = "inject=all:delay_enter=20000"
HOST_1 = "agent-1 model-1 rollout-1 server-1"
FAULTS: dict[str, Fault] = {
    "SIGSEGV": _of(sends(signal.SIGSEGV, "server-0"), "server-0", "crashed killed"),
    "SIGTERM": _of(sends(signal.SIGTERM, "rollout-0"), "rollout-0", "killed"),
    "SIGABRT": _of(sends(signal.SIGABRT, "model-1"), "model-1", "crashed killed"),
    "both servers stopped": _of(
        sends(signal.SIGSTOP, "server-0", "server-1"), "server-0 server-1", "stopped"
    ),
    "both ranks killed": _of(sends(signal.SIGKILL, "model-0", "model-1"), "model-0 model-1", "killed"),
    "master and a rank killed": _of(
        sends(signal.SIGKILL, "master-0", "model-1"), "master-0 model-1", "killed"
    ),
    "agent stopped": _of(sends(signal.SIGSTOP, "agent-1"), "agent-1", "stopped"),
    "host: large packets vanish": _of(
        filtered("i meta length > 700 drop", "o meta length > 700 drop"), HOST_1, "network_cut network_loss"
    ),
    "host: nothing comes in": _of(filtered("i meta l4proto tcp drop"), "agent-1", "network_cut"),
    "host: connections are reset": _of(
        filtered("o meta l4proto tcp reject with tcp reset"), "agent-1", "network_cut"
    ),
    "host: 15 % of packets lost": _of(
        filtered("i numgen random mod 100 < 15 drop", "o numgen random mod 100 < 15 drop"),
        "agent-1",
        "network_loss",
    ),
    "host: interface down": _of(down, "agent-1", "network_cut"),
    "host: 200 kbit/s": _of(shaped("200kbit"), "agent-1", "network_delay network_loss"),
    "host: 2 Mbit/s": _of(shaped("2mbit"), "agent-1", "network_delay network_loss"),
    "traced, each call 20 ms": _of(
        beside("strace", "-f", "-qq", "-o", "/dev/null", "-e", SLOWED, "-p", "{model-1}"),
        "model-1",
        "stopped slow",
    ),
    "held by a debugger": _of(
        beside("gdb", "-q", "-nx", "-p", "{model-1}", "-ex", f"shell sleep {HELD_S}"), "model-1", "stopped"
    ),
    "no descriptors, a rank": _of(without_descriptors("model-0"), "model-0", "descriptors"),
    "no descriptors, a worker": _of(without_descriptors("rollout-0"), "rollout-0", "descriptors"),
    "no descriptors, an agent": _of(without_descriptors("agent-1"), "agent-1", "descriptors"),
    "no file may grow, the master's": _of(without_files("master-0"), "master-0", "disk_error hung"),
    "reward process stopped": _of(stopped_beside("rollout-1"), "rollout-1", "user_code"),
    "host: packets of 68 bytes": _of(narrow, "agent-1", "network_cut network_delay network_loss"),
    "host: 3 % of bytes damaged": _of(
        filtered("o meta l4proto tcp meta length > 200 numgen random mod 100 < 3 @th,256,32 set 0xdeadbeef"),
        f"agent-0 master-0 manager-0 model-0 rollout-0 server-0 {HOST_1}",
        "corruption numeric network_cut network_loss slow",  # Data of gloo has no checksum: ranks differ.
    ),
    "host: 3 % of segments with a wrong checksum": _of(damaged(3), HOST_1, "corruption"),
    "connections ended again and again": _of(disconnected("model-1"), "model-1", "network_cut crashed"),
    "journal immutable": _of(immutable("journal"), "master-0", "disk_error"),
    "checkpoints immutable": _of(immutable("checkpoints"), "model-0 model-1 master-0", "disk_error"),
    "checkpoints no folder": _of(replaced_by_a_file, "model-0 model-1 master-0", "disk_error"),
    "disk in use by others": _of(disk_in_use, f"agent-0 master-0 {HOST_1}", "disk_slow"),
}


def first_answer(cluster: CampaignCluster, since: float) -> tuple[float, tuple[Cause, ...]] | None:
    """When a cause was first named, and which; the run is watched for the whole time."""
    found: list[tuple[float, tuple[Cause, ...]]] = []

    def look() -> bool:
        found.extend(
            (each.t - since, each.diagnosis.causes)
            for each in cluster.looks()
            if each.t > since and each.diagnosis is not None and each.diagnosis.causes
        )
        return False

    cluster.until(look, timeout_s=WINDOW_S)
    return found[0] if found else None


def one(cluster: CampaignCluster, name: str, fault: Fault) -> dict[str, Any]:
    cluster.looks()
    before, since = cluster.watch.step, time.time()
    undo = fault.begin(cluster)
    try:
        answer = first_answer(cluster, since)
    finally:
        undo()
    after_s, causes = answer if answer is not None else (None, ())
    named = f"{causes[0].kind.value} {causes[0].process}" if causes else "nothing"
    is_right = bool(causes) and causes[0].process in fault.who and causes[0].kind in fault.kinds
    return {
        "fault": name,
        "said": named,
        "after_s": None if after_s is None else round(after_s, 1),
        "right": is_right,
        "steps_meanwhile": cluster.watch.step - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("expected root: hosts, a disk, and limits of processes are made and changed")
    config = load(experiments.experiments_folder() / CAMPAIGN).config
    wanted = {
        name: fault
        for name, fault in FAULTS.items()
        if not arguments.only or any(text in name for text in arguments.only)
        if "debugger" not in name or shutil.which("gdb") is not None
    }
    rows: list[dict[str, Any]] = []
    clusters = 0
    cluster: CampaignCluster | None = None
    with tempfile.TemporaryDirectory(prefix="other-faults-") as folder:
        try:
            for name, fault in wanted.items():
                if cluster is not None and cluster.until_healthy() is not None:
                    rows[-1]["well_again"] = False
                    cluster.close()
                    cluster = None
                elif rows:
                    rows[-1]["well_again"] = True
                if cluster is None:
                    clusters += 1
                    cluster = CampaignCluster(
                        config, places=CAMPAIGN_PLACES, folder=Path(folder, str(clusters))
                    )
                    cluster.until_healthy()
                rows.append(one(cluster, name, fault))
                print(
                    "{fault:26} said {said:24} after {after_s} s, right: {right}".format(**rows[-1]),
                    flush=True,
                )
            if cluster is not None:
                rows[-1]["well_again"] = cluster.until_healthy() is None
        finally:
            if cluster is not None:
                cluster.close()
    right, well = (sum(bool(row.get(what)) for row in rows) for what in ("right", "well_again"))
    print(f"{right} of {len(rows)} right at the first answer; well again by itself after {well}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
