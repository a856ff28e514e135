"""Handover from the launcher to a node agent, reports of the agent to it, and the bootstrap of an agent's children.

All of it is passed through inherited descriptors.
"""

from __future__ import annotations

import msgspec

from kintsugi.protocol.agents import StartProcess
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.transport import new_key_pair
from kintsugi.types import Peer, Role


class Programs(msgspec.Struct, frozen=True):
    """Programs of the processes of a run. A value, so that a test can start a run of tiny programs."""

    entries: dict[Role, str]
    """Role → `module:function`, called with the process's `Bootstrap`; its result is the exit code."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports; empty means no fork server: every process is executed."""
    forked: tuple[Role, ...] = ()
    """Roles that wait for a fork server that is still importing, because they need the same imports; spares can become
    one of these. Once the fork server is ready, processes of every role are forked from it."""
    prepare: str = "kintsugi.cluster.spawn:unprepared"
    """Program that prepares a spare: it initialises the device, which the fork server must not do."""
    interpreters: dict[Role, str] = {}
    """Role → Python interpreter of its processes, where it is another one. They are always executed: a fork server and
    its spares are of this interpreter."""
    probe: str = ""
    """`module:function` that returns an `AcceleratorProbe`, or None; empty: accelerators are not monitored."""


_ENTRIES: dict[Role, str] = {
    Role.MASTER: "kintsugi.control.process:main",
    Role.MODEL: "kintsugi.training.worker:main",
    Role.ROLLOUT: "kintsugi.rollout.worker:main",
    Role.MANAGER: "kintsugi.generation.manager:main",
    Role.SERVER: "kintsugi.generation.server:main",
}

PROGRAMS = Programs(
    entries=_ENTRIES,
    preload=(
        "torch",
        *(entry.partition(":")[0] for entry in _ENTRIES.values()),
        "kintsugi.training.torch_framework",
    ),
    forked=(Role.MODEL, Role.SERVER),
    prepare="kintsugi.model.device:prepare",
    probe="kintsugi.cluster.accelerators:nvml_probe",
)


class AgentHandover(msgspec.Struct, frozen=True):
    """Everything that an agent and its successors start with; holds secret keys.

    The agent's own `bootstrap.lifeline` ends with the launcher and its standby. Its children get another pipe, which
    ends only when launcher, standby *and* agent have ended: only these hold its write end.
    """

    bootstrap: Bootstrap
    children_lifeline_read: int
    children_lifeline_write: int
    report: int
    """Write end of the pipe to the launcher, for `AgentReport`s."""
    programs: Programs
    spares: int = 0
    """Number of spare processes."""
    master: Bootstrap | None = None
    """Bootstrap of the master, for the agent that starts it, which fills in `lifeline`."""
    stop_requested: bool = False
    """A stop after this step was requested before this agent started."""
    gate: int = -1
    """Read end of a pipe: the agent begins when the launcher has recorded its pid, and ends if the launcher dies
    before. Without it (-1) the agent begins at once."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that an agent inherits."""
        given = (
            self.bootstrap.lifeline,
            self.children_lifeline_read,
            self.children_lifeline_write,
            self.report,
            self.gate,
            self.master.listener if self.master else -1,
        )
        return tuple(descriptor for descriptor in given if descriptor >= 0)


def child_bootstrap(
    order: StartProcess,
    *,
    agent: Bootstrap,
    master: Peer,
    lifeline: int,
    segments: str,
    broken_chips: tuple[str, ...],
    term: int,
) -> Bootstrap:
    """Build the bootstrap of a new process of an agent's host, with a key pair of its own."""
    public_key, secret_key = new_key_pair()
    return Bootstrap(
        job=agent.job,
        run_dir=agent.run_dir,
        process=order.process,
        role=order.role,
        host=agent.host,
        incarnation=order.incarnation,
        public_key=public_key,
        secret_key=secret_key,
        master=master,
        lifeline=lifeline,
        bind=agent.bind,
        known_as=agent.known_as,
        agent=agent.process,
        segments=segments,
        broken_chips=broken_chips,
        term=term,
        bulk=agent.bulk,
        run_folder_agent=agent.run_folder_agent,
        num_processes=agent.num_processes,
    )


class AgentReady(msgspec.Struct, frozen=True, tag="Ready"):
    """The agent runs, and so does the master where this agent starts it."""


class AgentNotStarted(msgspec.Struct, frozen=True, tag="NotStarted"):
    """The agent or its master could not be started; the agent ends."""

    process: str
    phase: str
    why: str


class MasterDied(msgspec.Struct, frozen=True, tag=True):
    """The master was killed by a signal more often than it may be restarted."""

    how: str
    last_output: str


class AgentEnding(msgspec.Struct, frozen=True, tag="Ending"):
    """The agent begins an orderly end: after its master, or requested by the master or the launcher. An agent that ends
    without this report has failed, whatever its exit code."""


class AgentEnded(msgspec.Struct, frozen=True, tag="Ended"):
    """Last report of an orderly end, for a launcher that is not the agent's parent and does not get its status."""

    exit_code: int


AgentReport = AgentReady | AgentNotStarted | MasterDied | AgentEnding | AgentEnded
