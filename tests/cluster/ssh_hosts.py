"""Hosts of their own on this machine, with an sshd each: network, processes, mounts and host name are private.

The launcher's machine is one more of them, without an sshd. The folder of the runs is hidden from the hosts by an empty
file system: whatever they know of a run has travelled to them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

from kintsugi.lab.testbed import cgroups, hosts, tools
from kintsugi.lab.testbed.process_tags import carriers
from tests.cluster.tiny_runs import until

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "ip", "nft")
ROOT = Path(__file__).parents[2]
NEW = "tcp flags & (syn | ack) == syn"
"""The first packet of a connection."""
HOST = """
set -e
hostname "$1"
mount -t tmpfs tmpfs "$2"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd "$2/scratch"
exec "$3" -D -e -f "$4"
"""


def missing() -> str | None:
    """Why hosts with an sshd can not be had here."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else hosts.missing()


class SshHosts:
    """`count` hosts with an sshd, beside the launcher's machine."""

    def __init__(self, folder: Path, *, count: int) -> None:
        self.mark = uuid4().hex
        self.runs = folder / "runs"
        """Folder of the runs, which the hosts can not see."""
        self._keys = folder / "keys"
        for each in (self.runs, self._keys):
            each.mkdir(parents=True, mode=0o700)
        self._stack = ExitStack()
        self._network = hosts.Hosts(count + 1, folder=folder / "etc")
        self._stack.callback(self._network.close)
        self.head, *self.places = self._network.places
        self._make_keys()
        self._commands: list[subprocess.Popen[str]] = []
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        for place in self.places:
            self.power_on(place.name)
        self._use_keys_at_the_head()
        self.python = self._wrapper("python")

    def _make_keys(self) -> None:
        for name in ("host", "user"):
            tools.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / name))
        options = {
            "HostKey": self._keys / "host",
            "AuthorizedKeysFile": self._keys / "user.pub",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PidFile": "none",
        }
        (self._keys / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in options.items()))

    def _use_keys_at_the_head(self) -> None:
        config = self._keys / "ssh_config"
        config.write_text(
            f"Host *\n IdentityFile {self._keys / 'user'}\n StrictHostKeyChecking no\n"
            f" UserKnownHostsFile /dev/null\n LogLevel ERROR\n IdentitiesOnly yes\n"
        )
        tools.call(*self._in(self.head.name, "mount"), "mount", "--bind", str(config), "/etc/ssh/ssh_config")

    def _in(self, host: str, *kinds: str) -> list[str]:
        place = next(place for place in self._network.places if place.name == host)
        paths = {path.rpartition("/")[2]: path for path in place.namespaces}
        names = {"net": "--net", "mount": "--mount"}
        return ["nsenter", *(f"{names[kind]}={paths['mnt' if kind == 'mount' else kind]}" for kind in kinds)]

    def _wrapper(self, name: str, *, lines: str = "") -> Path:
        """An interpreter for the hosts that finds this package and carries the mark of this test."""
        path = self._keys / name
        path.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={ROOT} KINTSUGI_TEST_MARK={self.mark}\n{lines}\n"
            f'exec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def power_on(self, host: str) -> None:
        arguments = (host, str(self.runs), shutil.which("sshd") or "sshd", str(self._keys / "sshd_config"))
        alone = ["unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with (self._keys / f"{host}.log").open("ab") as log:
            self._machines[host] = subprocess.Popen(
                [*self._in(host, "net", "mount"), *alone, "sh", "-c", HOST, "host", *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        probe = [*self._in(self.head.name, "net"), sys.executable, "-c"]
        address = self.address(host)
        program = f"import socket; socket.create_connection(({address!r}, 22), 1).recv(1)"
        deadline = time.monotonic() + 10
        while subprocess.run([*probe, program], capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < deadline, (self._keys / f"{host}.log").read_text()

    def limit_memory(self, host: str, *, limit_bytes: int) -> Path:
        """Put what is started on a host from now on into a control group; return it. It is removed after the host is
        powered off."""
        (inner,) = self._inner_pids(host)
        memory = cgroups.hierarchy("memory")
        assert memory is not None, "the test is skipped without"
        group = memory.new_path(inner)
        group.mkdir()
        limit = "memory.max" if memory.version == 2 else "memory.limit_in_bytes"
        (group / limit).write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(inner))
        return group

    def _inner_pids(self, host: str) -> list[int]:
        """The first process of a host, as seen from this machine."""
        pid = self._machines[host].pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def power_off(self, host: str) -> None:
        """End everything on a host at once."""
        machine = self._machines.pop(host)
        machine.kill()
        machine.wait()

    def address(self, host: str) -> str:
        return next(place.address for place in self._network.places if place.name == host)

    def interpreter_with(self, customization: str, *, name: str) -> Path:
        """An interpreter for the hosts that runs some code when it starts."""
        site = self._keys / f"site-{name}"
        site.mkdir()
        (site / "sitecustomize.py").write_text(customization)
        other = self._keys / f"{name}-python"
        other.write_text(self.python.read_text().replace("PYTHONPATH=", f"PYTHONPATH={site}:"))
        other.chmod(0o755)
        return other

    def interpreter_without(self, capability: str) -> Path:
        """An interpreter for the hosts that lacks a capability, although it runs as root."""
        less = f'exec setpriv --bounding-set=-{capability} {sys.executable} "$@"'
        return self._wrapper(f"{capability}-python", lines=less)

    def hosts_file(
        self,
        *options: str,
        name: str = "hosts.txt",
        python: Path | None = None,
        only: int | None = None,
    ) -> Path:
        """A hosts file with all hosts; `options` are those of the first, the second, …; with `only` the first hosts
        have the other interpreter and the rest the usual one."""
        path = self.runs / name
        lines = [
            f"{place.name}-machine {place.address} scratch={self.runs}/scratch "
            f"python={self.python if python is None or number >= (only or len(self.places)) else python} {more}"
            for number, (place, more) in enumerate(
                zip(self.places, [*options, *[""] * len(self.places)], strict=False)
            )
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A `kintsugi` command at the launcher's machine."""
        environment = {
            **os.environ,
            "COLUMNS": "200",
            "PYTHONPATH": str(ROOT),
            "KINTSUGI_TEST_MARK": self.mark,
        }
        command = subprocess.Popen(
            [
                *self._in(self.head.name, "net", "mount"),
                f"--wdns={self.runs}",
                sys.executable,
                "-m",
                "kintsugi",
                *arguments,
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._commands.append(command)
        return command

    def ask(self, *arguments: str, timeout_s: float = 60.0) -> tuple[int, str]:
        command = self.start(*arguments)
        output, errors = command.communicate(timeout=timeout_s)
        return command.returncode, output + errors

    def drop(self, host: str, *, to_head: bool = True, from_head: bool = True) -> None:
        """Drop the packets of a host, in one direction or both."""
        rules = "table inet cut {\n"
        if to_head:
            rules += "chain sent { type filter hook output priority 0; policy drop; }\n"
        if from_head:
            rules += "chain received { type filter hook input priority 0; policy drop; }\n"
        tools.call(*self._in(host, "net"), "nft", "-f", "-", text=rules + "}\n")

    def refuse_new(self, host: str) -> None:
        """Drop new connections to a host, but those to its sshd, as NAT does. It can make connections itself."""
        self._filter(host, f"{NEW} tcp dport != 22 drop")

    def open_only(self, host: str, *ports: str) -> None:
        """Drop new connections to all ports of a host but these."""
        self._filter(host, f"iifname lo accept; {NEW} tcp dport != {{ {', '.join(ports)} }} drop")

    def _filter(self, host: str, rules: str) -> None:
        chain = f"chain received {{ type filter hook input priority 0; policy accept; {rules}; }}"
        text = f"table inet cut {{\n{chain}\n}}\n"
        tools.call(*self._in(host, "net"), "nft", "-f", "-", text=text)

    def heal(self, host: str) -> None:
        tools.call(*self._in(host, "net"), "nft", "delete", "table", "inet", "cut")

    def pids(self) -> dict[int, str]:
        """Every process that a test has started through these hosts, on all of them."""
        found = {}
        for pid in carriers(self.mark):
            with suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def supervisors_of(self, host: str) -> list[int]:
        """Pids, on this machine, of the supervisors on a host."""
        (inner,) = self._inner_pids(host)
        namespace = os.readlink(f"/proc/{inner}/ns/pid")
        return [
            pid
            for pid, command in self.pids().items()
            if "agent --join" in command and os.readlink(f"/proc/{pid}/ns/pid") == namespace
        ]

    def scratch_folder(self, host: str) -> Path:
        """Folder of the scratch folders of a host, as seen from this machine."""
        (inner,) = self._inner_pids(host)
        return Path(f"/proc/{inner}/root{self.runs}/scratch")

    def scratch_of(self, host: str) -> list[str]:
        """Scratch folders on a host."""
        return os.listdir(self.scratch_folder(host))

    def assert_nothing_left(self, *, timeout_s: float = 25.0) -> None:
        until(lambda: not self.pids(), f"the end of {self.pids()}", timeout_s=timeout_s)
        left = {host: self.scratch_of(host) for host in self._machines}
        assert not any(left.values()), left

    def close(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for command in self._commands:
            with command:
                command.wait(timeout=10)
        for host in list(self._machines):
            self.power_off(host)
        self._stack.close()
