"""Hosts over ssh: one line of a hosts file each, started by the system's `ssh` without a terminal or a question.

    # name  address      options
    a       10.0.0.11
    b       user@10.0.0.12  slots=2 gpus=8 memory_gib=500 python=/venv/bin/python port=2222
    c       10.0.0.13       spare

ssh only starts a supervisor, hands it the ticket on its standard input, and ends: the host then lives by its own
connection to the run. So `HostCame` follows the end of ssh, and the loss of a host is known by its silence.
"""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kintsugi.cluster.backends.command import EngineCommand
from kintsugi.cluster.backends.contract import HostCame, HostEvent, HostLeaves, HostOrder, HostWent
from kintsugi.errors import ConfigError
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock

CONNECT_S = 5
"""Time for the connection to a host."""
START_S = 60.0
"""Time for a supervisor to join, over a connection that stands."""
_NUMBERS = ("slots", "gpus", "memory_gib", "port")


class RemoteHost(msgspec.Struct, frozen=True):
    """One line of a hosts file: `RemoteHost("b", "me@10.0.0.12", slots=2, gpus=8)`."""

    name: str
    address: str
    """Address or name, with the user where it is another one."""
    slots: int = 1
    gpus: int = 0
    memory_gib: int = 0
    port: int = 0
    """Port of its sshd; 0: the one of ssh's own configuration."""
    python: str = ""
    """Interpreter on that host; empty: the path of this machine's."""
    scratch: str = ""
    """Folder for files of the run on that host; empty: the default one."""
    spare: bool = False

    @property
    def machine(self) -> str:
        """Address without the user."""
        return self.address.rpartition("@")[2]


def read_hosts_file(path: Path) -> tuple[RemoteHost, ...]:
    """Read a hosts file; ConfigError names the line that is wrong. Spares are put last."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"`cluster.on`: expected a hosts file, got {path}: {why}") from error
    hosts = [
        _parse(words, where=f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if (words := line.partition("#")[0].split())
    ]
    if not [host for host in hosts if not host.spare]:
        raise ConfigError(
            f"{path}: expected a line `name address …` for each host, found none that is no spare"
        )
    for what in ("name", "address"):
        values = [getattr(host, what) for host in hosts]
        if repeated := {value for value in values if values.count(value) > 1}:
            raise ConfigError(f"{path}: expected each {what} once, found {repeated.pop()!r} on several lines")
    return tuple(sorted(hosts, key=lambda host: host.spare))


def _parse(words: Sequence[str], *, where: str) -> RemoteHost:
    if len(words) < 2:
        raise ConfigError(f"{where}: expected `name address [options]`, got {' '.join(words)!r}")
    values: dict[str, object] = {}
    for word in words[2:]:
        key, _, value = word.partition("=")
        if word == "spare":
            values["spare"] = True
        elif key in _NUMBERS and value.isdecimal():
            values[key] = int(value)
        elif key in ("python", "scratch") and value.startswith("/"):
            values[key] = value
        else:
            options = ", ".join(
                [*(f"{name}=NUMBER" for name in _NUMBERS), "python=/PATH", "scratch=/PATH", "spare"]
            )
            raise ConfigError(f"{where}: expected options {options}, got {word!r}")
    if values.get("slots") == 0:
        raise ConfigError(f"{where}: expected at least one slot, got 0; leave the host out instead")
    if words[1].startswith("-") or words[0].startswith("-"):
        raise ConfigError(f"{where}: expected a name and an address, got {' '.join(words[:2])!r}")
    return RemoteHost(words[0], words[1], **values)  # type: ignore[arg-type]


def split_hosts(hosts: Sequence[RemoteHost]) -> tuple[RemoteHost | None, tuple[RemoteHost, ...]]:
    """Return the line of this machine, if there is one, and the hosts on other machines. ConfigError for an address
    that does not resolve."""
    here = [host for host in hosts if _is_here(host)]
    if len(here) > 1:
        raise ConfigError(
            f"expected this machine on one line of the hosts file, found {here[0].name}, {here[1].name}"
        )
    return (here[0] if here else None), tuple(host for host in hosts if host not in here)


def other_machines(path: Path) -> tuple[RemoteHost, ...]:
    """Return the machines of a hosts file but this one. ConfigError as of `read_hosts_file` and `split_hosts`."""
    return split_hosts(read_hosts_file(path))[1]


def _is_here(host: RemoteHost) -> bool:
    """Whether the address of a host is one of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.machine, 0, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(f"host {host.name}: address {host.machine!r} does not resolve: {error}") from error
    if family != socket.AF_INET:
        raise ConfigError(f"host {host.name}: expected an IPv4 address, got {address[0]}")
    with socket.socket(family, kind) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def ssh_command(host: RemoteHost, remote: Sequence[str]) -> list[str]:
    """Build the call of ssh that runs a command on a host; it asks nothing and gives up soon."""
    options = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_S}",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=2",
    ]
    port = ["-p", str(host.port)] if host.port else []
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", *flags, *port, host.address, "--", shlex.join(remote)]


def supervisor_command(host: RemoteHost) -> list[str]:
    """Build the command of a supervisor on a host."""
    scratch = ["--scratch", host.scratch] if host.scratch else []
    return [
        host.python or sys.executable,
        "-P",
        "-m",
        "kintsugi",
        "agent",
        "--join",
        "-",
        "--detach",
        *scratch,
    ]


class SshBackend:
    """The hosts of a file: host-1 is the first line, host-2 the second. A lost host is started again on its machine."""

    def __init__(self, hosts: Sequence[RemoteHost], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._machines = {f"host-{number}": host for number, host in enumerate(hosts, 1)}
        self._clock = clock
        self._starting: dict[str, tuple[EngineCommand, float]] = {}
        """Host → its ssh, and when that is given up."""
        self._events: list[HostEvent] = []

    def start(self, orders: Sequence[HostOrder]) -> None:
        for order in orders:
            self.replace(order)

    def replace(self, order: HostOrder) -> None:
        if (before := self._starting.pop(order.host, None)) is not None:
            before[0].end(number=signal.SIGKILL)
            before[0].close(timeout_s=1.0)
        machine = self._machines[order.host]
        try:
            command = EngineCommand(ssh_command(machine, supervisor_command(machine)), secret=order.ticket)
        except OSError as error:
            self._events.append(HostWent(order.host, f"ssh: {error.strerror}"))
            return
        self._starting[order.host] = command, self._clock.monotonic() + START_S

    def poll(self) -> list[HostEvent]:
        now = self._clock.monotonic()
        for host, (command, until) in list(self._starting.items()):
            if not command.ended and now < until:
                continue
            machine = self._machines[host]
            late = not command.ended
            if late:
                command.end(number=signal.SIGKILL)
            why = f"ssh to {machine.address} did not end for {START_S:g} s" if late else command.explain()
            came = not late and command.status == 0
            command.close(timeout_s=1.0)
            del self._starting[host]
            self._events.append(HostCame(host, machine.address) if came else HostWent(host, why))
        events, self._events = self._events, []
        return events

    def asked_to_end(self, host: str, why: str) -> None:
        self._events.append(HostLeaves(host, why))

    def give_back(self, *, timeout_s: float) -> None:
        starting, self._starting = self._starting, {}
        for command, _ in starting.values():
            command.end()
        for command, _ in starting.values():
            command.close(timeout_s=timeout_s / len(starting))
