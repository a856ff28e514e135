"""Snapshot of a machine and its difference to a later one: evidence that an experiment left nothing behind.

Compared: processes that carry a mark; of all other processes placement and whether they are stopped; control groups;
mounts; network namespaces; packet filter rules and traffic shaping of the machine's own network; interfaces; loop
devices; files used by name resolution; kernel settings; temporary files, shared memory, and the list of journals in
use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kintsugi.lab.injector.reaper import lists_folder
from kintsugi.lab.testbed import tools
from kintsugi.lab.testbed.process_tags import carries
from kintsugi.runtime.proc import stat_fields

ETC = ("hosts", "resolv.conf", "nsswitch.conf", "netns")
VOLATILE = re.compile(
    r"random/|/(nr_|.*_nr$|.*-nr$|.*-state$|ns_last_pid|dentry-state|inode|file-nr|aio-nr|pty/nr)"
    r"|netfilter/nf_conntrack_count|net/ipv[46]/route/|kernel/(pid_max|sched_domain|perf_event_max_sample_rate)"
    r"|fs/(inode|dentry|file|quota|binfmt)"
)
"""Kernel settings that change without a cause of ours."""


class HostSnapshot(msgspec.Struct, frozen=True):
    """Kind of object → name → description."""

    parts: dict[str, dict[str, str]]


def host_snapshot(*, mark: str = "") -> HostSnapshot:
    """Take a snapshot. Processes with `mark` in their environment belong to the experiment: one that is left is
    residue."""
    marked, others = _processes(mark)
    parts = {
        "process of the experiment": marked,
        "placement of process": others,
        "control group": dict.fromkeys(_control_groups(), ""),
        "mount": dict.fromkeys(Path("/proc/self/mounts").read_text().splitlines(), ""),
        "network namespace": _network_namespaces(),
        "rules": _rules(),
        "loop device": _loop_devices(),
        "file": dict(_files()),
        "setting": dict(_settings()),
    }
    return HostSnapshot(parts)


def difference(before: HostSnapshot, after: HostSnapshot) -> list[str]:
    """Return the differences, one a line; empty when nothing is left and nothing was changed.

    New and ended processes that do not belong to the experiment are ignored.
    """
    found = []
    for kind, was in before.parts.items():
        now = after.parts[kind]
        both = sorted(was.keys() & now.keys())
        found += [
            f"{kind} {name}: was {was[name]!r}, is {now[name]!r}" for name in both if was[name] != now[name]
        ]
        if kind != "placement of process":
            found += [
                f"{kind} {name}: is new {now[name]}".rstrip() for name in sorted(now.keys() - was.keys())
            ]
            found += [f"{kind} {name}: is gone" for name in sorted(was.keys() - now.keys())]
    return found


def _processes(mark: str) -> tuple[dict[str, str], dict[str, str]]:
    marked: dict[str, str] = {}
    others: dict[str, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError, IndexError):
            folder = Path("/proc", entry)
            stat = (folder / "stat").read_text()
            fields = stat_fields(stat)
            name = f"{entry} ({stat.partition('(')[2].rpartition(')')[0]}) born {fields[19]}"
            if fields[0] in "ZX":
                continue
            if mark and carries(int(entry), mark):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                marked[name] = command.strip()[:200]
            else:
                others[name] = placement(folder)
    return marked, others


def placement(folder: Path) -> str:
    """Describe the properties of a process that an injection may change, from its folder in /proc."""
    state = stat_fields((folder / "stat").read_text())[0]
    stopped = "stopped" if state in "Tt" else "running"
    processors = os.sched_getaffinity(int(folder.name))
    nice = os.getpriority(os.PRIO_PROCESS, int(folder.name))
    score = (folder / "oom_score_adj").read_text().strip()
    groups = (folder / "cgroup").read_text().split()
    limits = hashlib.blake2b((folder / "limits").read_bytes(), digest_size=4).hexdigest()
    network = os.stat(folder / "ns" / "net").st_ino
    return f"{stopped} {sorted(processors)} nice {nice} score {score} limits {limits} net {network} {groups}"


def _control_groups() -> Iterator[str]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, path, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            for folder, _, _ in os.walk(path):
                yield folder


def _network_namespaces() -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                found[str(os.stat(f"/proc/{entry}/ns/net").st_ino)] = ""
    return found


def _rules() -> dict[str, str]:
    """Return the rules of the network namespace of this process, without counters."""
    commands = {
        "nftables": ("nft", "--stateless", "list", "ruleset"),
        "iptables": ("iptables-save",),
        "queues": ("tc", "qdisc", "show"),
        "interfaces": ("ip", "-oneline", "link", "show"),
    }
    found = {}
    for name, command in commands.items():
        if tools.has(command[0]):
            with contextlib.suppress(tools.ToolFailed):
                lines = tools.call(*command).splitlines()
                found[name] = "\n".join(re.sub(r"\[\d+:\d+\]", "", line) for line in lines if line[:1] != "#")
    return found


def _loop_devices() -> dict[str, str]:
    found = {}
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found[path.parts[3]] = path.read_text().strip()
    return found


def _files() -> Iterator[tuple[str, str]]:
    for name in ETC:
        path = Path("/etc", name)
        if path.is_dir():
            yield str(path), ", ".join(sorted(os.listdir(path)))
        elif path.exists():
            yield str(path), hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    for folder in (tempfile.gettempdir(), "/dev/shm", "/run/netns", str(lists_folder())):
        with contextlib.suppress(OSError):
            yield from ((f"{folder}/{name}", "") for name in os.listdir(folder))


def _settings() -> Iterator[tuple[str, str]]:
    for folder, _, names in os.walk("/proc/sys"):
        for name in names:
            path = f"{folder}/{name}"
            if VOLATILE.search(path.removeprefix("/proc/sys")):
                continue
            with contextlib.suppress(OSError):
                if os.stat(path).st_mode & 0o444:
                    yield path, Path(path).read_text(errors="replace")[:500]
