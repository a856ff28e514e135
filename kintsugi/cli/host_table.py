"""The table of `kintsugi hosts`: every host is asked at the same time, over ssh or by a job step, for at most half a
minute."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from kintsugi.cli import slurm
from kintsugi.cli.hosts import CLOCK
from kintsugi.cluster.backends.command import Conversation
from kintsugi.cluster.backends.slurm import job_of, read_allocation
from kintsugi.cluster.backends.ssh import read_hosts_file, split_hosts, ssh_command
from kintsugi.cluster.host_supervisor import default_scratch
from kintsugi.cluster.joining import (
    NOTED_CLOCK_S,
    HostNeeds,
    facts_of_this_host,
    local_address,
    versions,
    why_refused,
)
from kintsugi.protocol.hosts import HostFacts
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.collect.clock_offset import ClockEstimate, ClockReading, reading

ASK_S = 30.0
NUM_ASKED = 5
"""Round trips by which the clock of a host is measured."""
_HEAD = f"{'host':12} {'address':16} {'cores':>5} {'memory':>9} {'free disk':>10} {'GPUs':>4}  {'clock':>9}  "


class _Asked(msgspec.Struct, frozen=True):
    """One host that is asked."""

    name: str
    address: str
    needs: HostNeeds
    command: Callable[[list[str]], list[str]]
    """From a program to the command that runs it there."""
    python: str = ""


def host_lines(on: str | None) -> tuple[list[str], bool]:
    """Return the table, and whether every host could take part in a run that is started here."""
    if on == slurm.ENGINE and not job_of(os.environ):
        return slurm.cluster_lines()
    here, remote = _asked(on)
    own = _own_facts()
    lines = [
        f"{_HEAD}kintsugi {own.versions.kintsugi}, torch {own.versions.torch}, Python {own.versions.python}"
    ]
    lines.append(_line(here or "this machine", own, offset_s=0.0, problem=""))
    asked = [(host, *_ask(host), SYSTEM_CLOCK.monotonic()) for host in remote]
    all_fit = True
    for host, command, address, since in asked:
        until = since + ASK_S
        answer = command.hear(begin=b"{", timeout_s=max(0.0, until - SYSTEM_CLOCK.monotonic()))
        clock = _clock_of(command, until=until) if answer is not None else None
        command.close(timeout_s=max(0.0, until - SYSTEM_CLOCK.monotonic()), keep_output=True)
        if answer is None or clock is None:
            problem = f"no answer: {command.explain()}"
            lines.append(f"{host.name:12} {host.address:16} {problem}")
        else:
            facts = msgspec.json.decode(answer, type=HostFacts)
            # Its clock when it was asked is compared, whenever that was.
            now = SYSTEM_CLOCK.wall()
            facts = msgspec.structs.replace(facts, wall=now + clock.offset_s)
            problem = why_refused(facts, host.needs, now=now)
            note = f"reaches {address} from {facts.address}{_clock_note(clock)}"
            lines.append(_line(host.name, facts, offset_s=clock.offset_s, problem=problem or note))
        command.release()
        all_fit = all_fit and answer is not None and clock is not None and not problem
    return lines, all_fit


def _clock_of(host: Conversation, *, until: float) -> ClockReading | None:
    """Measure the clock of a host by the fastest of some round trips; None if it does not answer."""
    best = ClockEstimate()
    for _ in range(NUM_ASKED):
        begun, asked_at = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall()
        host.say(b"")
        line = host.hear(begin=CLOCK.encode(), timeout_s=max(0.0, until - begun))
        if line is None:
            return None
        round_trip_s = SYSTEM_CLOCK.monotonic() - begun
        told = float(line.removeprefix(CLOCK.encode()))
        best.add(reading(sent_at=asked_at, round_trip_s=round_trip_s, remote_time=told))
    found = best.best
    assert found is not None
    return ClockReading(-found.offset_s, found.error_s)


def _clock_note(clock: ClockReading) -> str:
    """Return a warning about a clock that is off but taken: records are corrected by what is measured."""
    if abs(clock.offset_s) - clock.error_s <= NOTED_CLOCK_S:
        return ""
    ahead = "ahead" if clock.offset_s > 0 else "behind"
    return f"; warning: its clock is {abs(clock.offset_s):.1f} s {ahead}, times of its records are corrected"


def _asked(on: str | None) -> tuple[str, list[_Asked]]:
    """Return the name of this machine among the hosts, if it has one, and the hosts on other machines."""
    if on is None:
        return "", []
    if on == slurm.ENGINE:
        allocation = read_allocation(os.environ)
        needs = HostNeeds(versions())
        return allocation.own, [
            _Asked(node.name, node.address, needs, partial(slurm.asking_command, node.name))
            for node in allocation.nodes
            if node.name != allocation.own
        ]
    here, remote = split_hosts(read_hosts_file(Path(on)))
    return here.name if here is not None else "", [
        _Asked(
            host.name,
            host.machine,
            HostNeeds(versions(), host.gpus, host.memory_gib << 30),
            partial(ssh_command, host),
            host.python,
        )
        for host in remote
    ]


def _own_facts() -> HostFacts:
    scratch = default_scratch()
    existing = next(folder for folder in (scratch, *scratch.parents) if folder.exists())
    return facts_of_this_host(address="127.0.0.1", scratch=existing)


def _ask(host: _Asked) -> tuple[Conversation, str]:
    """Begin to ask a host; return the command, and the address of this machine on the way to it."""
    address = "127.0.0.1"
    with suppress(OSError):
        address = local_address(host.address)
    program = [host.python or sys.executable, "-P", "-m", "kintsugi", "host-facts", address, "--clock"]
    return Conversation(host.command(program)), address


def _line(name: str, facts: HostFacts, *, offset_s: float, problem: str) -> str:
    return (
        f"{name:12} {facts.address:16} {facts.cores:5} {facts.memory_bytes / 2**30:5.1f} GiB "
        f"{facts.free_bytes / 2**30:6.1f} GiB {len(facts.gpus):4}  {offset_s:+8.3f}s  {problem}"
    ).rstrip()


def ray_lines(address: str) -> tuple[list[str], bool]:
    """Return the table of a Ray cluster, whose nodes are asked by a task on each."""
    from kintsugi.cluster.backends.ray import facts_of_nodes, find_nodes
    from kintsugi.config.schema import RaySection
    from kintsugi.errors import ConfigError

    section = RaySection(address=address)
    nodes = find_nodes(section)
    lines, _ = host_lines(None)
    try:
        reached = local_address(nodes[0].address) if nodes else "127.0.0.1"
    except OSError as error:
        raise ConfigError(f"{nodes[0].address}: no route to this node: {error.strerror or error}") from error
    all_fit = bool(nodes)
    for answer in facts_of_nodes(section, reached=reached):
        node = answer.node
        try:
            facts = msgspec.json.decode(answer.answer, type=HostFacts)
        except msgspec.DecodeError:
            lines.append(f"{node.name:12} {node.address:16} no answer: {answer.answer}")
            all_fit = False
            continue
        problem = why_refused(facts, HostNeeds(versions()), now=SYSTEM_CLOCK.wall())
        all_fit = all_fit and not problem
        offered = f"reaches {reached} from {facts.address}; Ray: {node.cpus:g} CPUs, {node.gpus:g} GPUs"
        offset_s = facts.wall - SYSTEM_CLOCK.wall()
        lines.append(_line(node.name, facts, offset_s=offset_s, problem=problem or offered))
    return lines, all_fit
