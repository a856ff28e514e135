"""Hosts of a Slurm allocation: one job step on each node but this one, whose only task is the supervisor of the host.

    srun --jobid=12 --nodelist=n2 --overlap --no-kill … sh -c 'echo …; exec kintsugi agent --join -'

A step of its own per node, so that the end of one leaves the others and the job alone. It may share the resources of
the job with every other step. srun hands the ticket over on the standard input and stays until the step has ended. Its
exit code says nothing: it is 0 after the loss of a node, so the end of a step is the end of a host whatever its code.

A host that is lost gets a step on the node that it had, or on another node of the allocation that is usable and has no
host. Every client command has a time limit, since srun waits without end for nodes that are down.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum

import msgspec

from kintsugi.cluster.backends.command import EngineCommand
from kintsugi.cluster.backends.contract import (
    Backend,
    HostCame,
    HostEvent,
    HostLeaves,
    HostOrder,
    HostWent,
)
from kintsugi.cluster.joining import HostNeeds, versions
from kintsugi.config.schema import Config
from kintsugi.errors import UserError, WorldError
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock

ANSWER_S = 30.0
"""Time for a client command that asks. The daemons' own limit is 10 s by default, and clients repeat some requests."""
START_S = 45.0
"""Time for a step to start on its node."""
REFUSED_S = 20.0
"""Time for a supervisor that is replaced to end by itself."""
LOOK_S = 5.0
"""Interval at which the states of the nodes are read. slurmctld serves the whole site: no more often."""
CLOSE_S = 1.0
"""Time for a killed client command to be gone."""
STARTED = "kintsugi-step"
"""First word of what a step writes when it runs, before its own name and that of its node."""
DEAD = frozenset({"DOWN", "FAIL", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "UNKNOWN"})
"""States and flags of a node on which no step can be started."""
UNUSABLE = DEAD | {
    "DRAIN",
    "DRAINED",
    "DRAINING",
    "FAILING",
    "MAINT",
    "POWER_DOWN",
    "REBOOT",
    "REBOOT_ISSUED",
}
"""Those of a node on which none is started."""
GOES_ON = frozenset({"RUNNING", "SUSPENDED"})
"""States of a job that is not at its end."""
LEAVING = frozenset({"DRAIN", "DRAINED", "DRAINING"})
"""States in which the administrators want a node back."""
_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")


class SlurmNode(msgspec.Struct, frozen=True):
    """One node as `scontrol show nodes` tells of it: `SlurmNode("n2", "10.0.0.12", frozenset({"MIXED"}), 64)`."""

    name: str
    address: str
    """Address or name at which the daemons reach it."""
    states: frozenset[str]
    """State and flags; a node that does not answer has NOT_RESPONDING."""
    cpus: int = 0
    memory_mib: int = 0
    gres: str = ""
    """Generic resources, as `gpu:h200:8(S:0-1)`; empty without any."""

    @property
    def is_usable(self) -> bool:
        return not self.states & UNUSABLE

    @property
    def is_leaving(self) -> bool:
        return bool(self.states & LEAVING)


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Parse the output of `scontrol show nodes --oneliner`."""
    nodes = []
    for line in text.splitlines():
        fields: dict[str, str] = {}
        for field, value in _FIELD.findall(line):
            fields.setdefault(field, value)  # A reason, which comes last, may contain anything.
        if "NodeName" not in fields or "State" not in fields:
            continue
        states = {word.rstrip("*~#!%$@^-+") for word in fields["State"].upper().split("+")}
        if "*" in fields["State"]:
            states.add("NOT_RESPONDING")
        gres = fields.get("Gres", "")
        name = fields["NodeName"]
        nodes.append(
            SlurmNode(
                name,
                fields.get("NodeAddr") or name,
                frozenset(states),
                cpus=int(fields.get("CPUTot") or 0),
                memory_mib=int(fields.get("RealMemory") or 0),
                gres="" if gres == "(null)" else gres,
            )
        )
    return tuple(nodes)


class JobFate(StrEnum):
    """The fate of a job, one of whose steps Slurm has asked to end."""

    GOES_ON = "goes on"
    PREEMPTED = "preempted"
    """A job of a higher priority gets its nodes at the end of the grace time."""
    ENDS = "ends"


def fate_of(text: str) -> JobFate | None:
    """Read what `scontrol show job --oneliner` says about the end of a job; None if it says nothing."""
    fields = dict(reversed(_FIELD.findall(text)))
    state = fields.get("JobState")
    if state is None:
        return None
    if state not in GOES_ON:
        return JobFate.ENDS
    is_preempted = fields.get("PreemptTime", "None") not in ("None", "N/A", "Unknown", "")
    return JobFate.PREEMPTED if is_preempted else JobFate.GOES_ON


def ask_slurm(*command: str, timeout_s: float = ANSWER_S) -> str:
    """Run a client command to its end and return its output. UserError with Slurm's words if it is refused, WorldError
    if Slurm does not answer in time. Blocks."""
    try:
        client = EngineCommand(command)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}; expected the client commands of Slurm") from error
    try:
        client.close(timeout_s=timeout_s, keep_output=True)
        output, status = client.output(whole=True), client.status
    finally:
        client.release()
    if client.was_killed:
        raise WorldError(
            f"Slurm did not answer `{shlex.join(command)}` within {timeout_s:g} s: {output or 'no word'}"
        )
    if status != 0:
        raise UserError(f"Slurm refused `{shlex.join(command)}`: {client_words(output)}")
    return output


def client_words(output: str) -> str:
    """Return what a client command complains about, without its name: `sbatch: error: …`."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [re.sub(r"^\w+: (?:error: )?", "", line) for line in lines]
    return "; ".join(said[:3]) if said else "no word"


class Allocation(msgspec.Struct, frozen=True):
    """The job in whose allocation this process runs."""

    job: str
    nodes: tuple[SlurmNode, ...]
    """All nodes, in Slurm's order."""
    own: str
    """The node of this process; empty if it is outside of the allocation, as after `salloc` on a login node."""

    @property
    def others(self) -> tuple[SlurmNode, ...]:
        """The nodes that are not this machine and were not down when the run began."""
        return tuple(node for node in self.nodes if node.name != self.own and not node.states & DEAD)


def job_of(environment: Mapping[str, str]) -> str:
    """Return the job in whose allocation a process with this environment runs; empty if there is none."""
    return environment.get("SLURM_JOB_ID", "")


def read_allocation(environment: Mapping[str, str], *, ask: Callable[..., str] = ask_slurm) -> Allocation:
    """Read the allocation of this process. UserError if it runs in none."""
    job = job_of(environment)
    if not job:
        raise UserError("expected to run in the allocation of a Slurm job (SLURM_JOB_ID), found none")
    named = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "")
    if not named:
        raise UserError(f"job {job}: expected its nodes in SLURM_JOB_NODELIST, found none")
    nodes = parse_nodes(ask("scontrol", "show", "nodes", named, "--oneliner"))
    if not nodes:
        raise UserError(f"job {job}: Slurm does not know the nodes {named}")
    own = environment.get("SLURMD_NODENAME", "")
    return Allocation(job, nodes, own if own in {node.name for node in nodes} else "")


def choose_node(
    last: str, *, nodes: Sequence[SlurmNode], taken: frozenset[str], avoid: frozenset[str] = frozenset()
) -> tuple[str, str]:
    """Choose the node for a host that is lost: its last one if that is usable, else a free one; return it with the
    reason, or an empty name. `avoid`: nodes on which a step could not be started lately. Pure."""
    states = {node.name: node for node in nodes}
    free = [node.name for node in nodes if node.is_usable and node.name not in taken]
    known = states.get(last)
    if last in free and last not in avoid:
        return last, f"{last} is usable"
    for name in free:
        if name not in avoid:
            seen = "not in the allocation" if known is None else "+".join(sorted(known.states)).lower()
            return name, f"{last} is {seen}; {name} is free"
    if last in free:
        return last, f"no other node is free; {last} is tried again"
    told = ", ".join(f"{node.name} {'+'.join(sorted(node.states)).lower()}" for node in nodes)
    return "", f"no node of the allocation is free and usable: {told}"


def step_command(job: str, node: str, *, host: str, command: Sequence[str]) -> list[str]:
    """Build the call of srun that runs a command as the only task of a step of its own on a node."""
    script = f'echo {STARTED} "$SLURM_JOB_ID.$SLURM_STEP_ID" "$SLURMD_NODENAME"; exec "$@"'
    return [
        "srun",
        f"--jobid={job}",
        f"--job-name={host}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--cpu-bind=none",
        "--mem=0",
        "--quiet",
        "sh",
        "-c",
        script,
        "sh",
        *command,
    ]


def supervisor_command(*, scratch: str = "") -> list[str]:
    """Build the command of a supervisor on a node. It stays the task of its step, so that the step lives with it."""
    folder = ["--scratch", scratch] if scratch else []
    return [sys.executable, "-P", "-m", "kintsugi", "agent", "--join", "-", *folder]


class _Step:
    """The step of one host."""

    def __init__(self, command: EngineCommand, node: str, *, until: float) -> None:
        self.command, self.node, self.until = command, node, until
        self.name = ""
        """`12.3`, once it runs."""

    @property
    def runs(self) -> bool:
        return bool(self.name)

    def look(self) -> bool:
        """Whether it is seen to run for the first time."""
        if not self.name:
            for line in self.command.output().splitlines():
                words = line.split()
                if len(words) == 3 and words[0] == STARTED:
                    self.name = words[1]
                    return True
        return False

    def explain(self) -> str:
        """Describe its end by the last line that is not our own."""
        lines = [line.strip() for line in self.command.output().splitlines()]
        said = [line for line in lines if line and not line.startswith(STARTED)]
        return client_words(said[-1]) if said else f"its job step on {self.node} has ended"


class SlurmBackend:
    """The nodes of an allocation: host-1 is on the first one that is not this machine, host-2 on the second."""

    def __init__(
        self, allocation: Allocation, *, command: Sequence[str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`command` is that of a supervisor."""
        self._job, self._nodes, self._command, self._clock = allocation.job, allocation.others, command, clock
        self._steps: dict[str, _Step] = {}
        self._last = {f"host-{number}": node.name for number, node in enumerate(self._nodes, 1)}
        """Host → the node that it had last."""
        self._failed: dict[str, int] = {}
        """Node → its starts that failed, since the last that did not."""
        self._told: set[str] = {node.name for node in self._nodes if node.is_leaving}
        """Nodes that were told to leave."""
        self._closing: list[tuple[EngineCommand, float, str]] = []
        """Client commands that end by themselves, each with the time at which it is killed, and with its step."""
        self._look: EngineCommand | None = None
        self._look_at = clock.monotonic() + LOOK_S
        self._look_until = 0.0
        self._asked: dict[str, str] = {}
        """Host whose supervisor Slurm has asked to end, and about which is not decided → what the supervisor said."""
        self._job_look: EngineCommand | None = None
        self._job_look_until = 0.0
        self._has_warned = False
        """The script of the job was told that the job is preempted."""
        self._events: list[HostEvent] = []

    def start(self, orders: Sequence[HostOrder]) -> None:
        for order in orders:
            self._start(order, self._last[order.host])

    def replace(self, order: HostOrder) -> None:
        if (before := self._steps.pop(order.host, None)) is not None:
            self._end(before)
        node, why = choose_node(
            self._last[order.host],
            nodes=self._nodes,
            taken=frozenset(step.node for step in self._steps.values()),
            avoid=frozenset(self._failed),
        )
        if node:
            self._start(order, node)
        else:
            self._failed.clear()
            self._events.append(HostWent(order.host, why))

    def _start(self, order: HostOrder, node: str) -> None:
        self._last[order.host] = node
        argv = step_command(self._job, node, host=order.host, command=self._command)
        try:
            command = EngineCommand(argv, secret=order.ticket)
        except OSError as error:
            self._events.append(HostWent(order.host, f"srun: {error.strerror}"))
            return
        self._steps[order.host] = _Step(command, node, until=self._clock.monotonic() + START_S)

    def poll(self) -> list[HostEvent]:
        now = self._clock.monotonic()
        for host, step in list(self._steps.items()):
            self._check(host, step, now)
        for closing in list(self._closing):
            command, until, name = closing
            if command.ended or now >= until:
                if name and not command.ended:
                    self._client("scancel", "--signal=KILL", name)
                command.end(number=signal.SIGKILL)
                command.close(timeout_s=CLOSE_S)
                self._closing.remove(closing)
        self._look_at_nodes(now)
        self._look_at_job(now)
        events, self._events = self._events, []
        return events

    def _check(self, host: str, step: _Step, now: float) -> None:
        if step.look():
            self._failed.pop(step.node, None)
            self._events.append(HostCame(host, step.node))
        if step.command.ended:
            why = step.explain()
            step.command.close(timeout_s=CLOSE_S)
        elif not step.runs and now >= step.until:
            why = f"srun could not start a step on {step.node} within {START_S:g} s"
            self._end(step)
        else:
            return
        if not step.runs:
            self._failed[step.node] = self._failed.get(step.node, 0) + 1
        del self._steps[host]
        self._events.append(HostWent(host, f"{step.node}: {why}"))

    def _end(self, step: _Step) -> None:
        """End a step without waiting for it. A supervisor that is replaced is refused by the run and ends by itself; it
        has some time for that, then its step is killed by name, as srun may not reach a node that is lost."""
        if not step.name:
            step.command.end()
        self._closing.append((step.command, self._clock.monotonic() + REFUSED_S, step.name))

    def _client(self, *argv: str) -> None:
        try:
            self._closing.append((EngineCommand(argv), self._clock.monotonic() + ANSWER_S, ""))
        except OSError as error:
            self._events.extend(HostWent(host, f"{argv[0]}: {error.strerror}") for host in self._steps)

    # The states of the nodes.

    def _look_at_nodes(self, now: float) -> None:
        if self._look is None and now >= self._look_at and self._nodes:
            self._look_at, self._look_until = now + LOOK_S, now + ANSWER_S
            names = ",".join(node.name for node in self._nodes)
            try:
                self._look = EngineCommand(["scontrol", "show", "nodes", names, "--oneliner"])
            except OSError:
                return  # Out of descriptors or processes: the next look may succeed, and nothing depends on one.
        if self._look is None or not (self._look.ended or now >= self._look_until):
            return
        look, self._look = self._look, None
        if not look.ended:
            look.end(number=signal.SIGKILL)
        found = parse_nodes(look.output(whole=True)) if look.ended and look.status == 0 else ()
        look.close(timeout_s=CLOSE_S)
        if found:
            self._nodes = found
            self._tell_leaving()

    def _tell_leaving(self) -> None:
        leaving = {node.name for node in self._nodes if node.is_leaving}
        for host, step in self._steps.items():
            if step.node in leaving - self._told:
                self._events.append(HostLeaves(host, f"{step.node} is being drained"))
        self._told = leaving

    # The end of the job.

    def asked_to_end(self, host: str, why: str) -> None:
        """Slurm signals single steps, and all steps of a job that it preempts or ends: the job itself says which."""
        if not self._has_warned:
            self._asked[host] = why

    def _look_at_job(self, now: float) -> None:
        if self._asked and self._job_look is None and now >= self._job_look_until:
            self._job_look_until = now + ANSWER_S
            try:
                self._job_look = EngineCommand(["scontrol", "show", "job", self._job, "--oneliner"])
            except OSError:
                self._job_look_until = now + LOOK_S
                return
        look = self._job_look
        if look is None or not (look.ended or now >= self._job_look_until):
            return
        self._job_look = None
        fate = fate_of(look.output(whole=True)) if look.ended and look.status == 0 else None
        look.end(number=signal.SIGKILL)
        look.close(timeout_s=CLOSE_S)
        self._job_look_until = now if fate is not None else now + LOOK_S
        if fate is not None:
            self._settle_asked(fate)

    def _settle_asked(self, fate: JobFate) -> None:
        asked, self._asked = self._asked, {}
        match fate:
            case JobFate.PREEMPTED if not self._has_warned:
                # The whole run stops with a checkpoint: its script gets the warning that it knows.
                self._has_warned = True
                self._client("scancel", "--batch", "--signal=USR2", self._job)
            case JobFate.ENDS:
                self._events += [HostWent(host, f"job {self._job} ends") for host in asked]
            case JobFate.GOES_ON:
                self._events += [HostLeaves(host, why) for host, why in asked.items()]

    def give_back(self, *, timeout_s: float) -> None:
        steps, self._steps = list(self._steps.values()), {}
        closing, self._closing = self._closing, []
        share = timeout_s / (len(steps) + 2)
        for step in steps:
            step.look()
            if not step.runs:
                step.command.end()
        # By name, since srun may not reach a node that is lost. srun ends when its step has.
        names = [step.name for step in steps if step.runs] + [name for _, _, name in closing if name]
        if names:
            with suppress(OSError):
                EngineCommand(["scancel", "--signal=KILL", *names]).close(timeout_s=2 * share)
        for step in steps:
            step.command.close(timeout_s=share)
        for command, _, _ in closing:
            command.end(number=signal.SIGKILL)
            command.close(timeout_s=share)
        for look in (self._look, self._job_look):
            if look is not None:
                look.end(number=signal.SIGKILL)
                look.close(timeout_s=share)
        self._look = self._job_look = None


def open_slurm(config: Config) -> tuple[Backend, dict[str, HostNeeds], dict[str, str]]:
    """Open the back end for the allocation of this process; return it with what each host has to have, and its name."""
    allocation = read_allocation(os.environ)
    hosts = {f"host-{number}": node for number, node in enumerate(allocation.others, 1)}
    needs = {host: HostNeeds(versions()) for host in hosts}
    names = {host: f"{node.name}, {node.address}" for host, node in hosts.items()}
    command = supervisor_command(scratch=config.cluster.slurm.scratch)
    return SlurmBackend(allocation, command=command), needs, names
