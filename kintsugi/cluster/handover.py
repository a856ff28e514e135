"""What the launcher hands to a node agent, what the agent tells it back, and what the agent hands to its children.

All of it through inherited descriptors.
"""

from __future__ import annotations

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.supervision import StartProcess
from kintsugi.transport import new_key_pair
from kintsugi.types import Peer, Role
from kintsugi.worker import MAINS


class Programs(msgspec.Struct, frozen=True):
    """What a process of each role runs. A value, so that a test can start a run of tiny programs."""

    entries: dict[Role, str]
    """Role → `module:function`, called with the process's `Bootstrap`; its result is the exit code."""
    preload: tuple[str, ...] = ()
    """Modules that the template imports before it forks; empty means no template: every process is executed."""
    forked: tuple[Role, ...] = ()
    """Roles that wait for a template that is still importing, as they would have to import the same, and that spares
    can take on. Once the template is ready, processes of every role are forked from it."""
    prepare: str = "kintsugi.cluster.placement:unprepared"
    """What a spare does before it waits: it gets ready what the template must not have, its device."""
    probe: str = ""
    """`module:function` that gives a `chips.Probe` of the host's accelerators, or None; empty: nobody looks at them."""


PROGRAMS = Programs(
    entries=MAINS,
    preload=(
        "torch",
        "kintsugi.training.worker",
        "kintsugi.generation.server",
        "kintsugi.generation.manager",
        "kintsugi.rollout.worker",
        "kintsugi.control.shell",
    ),
    forked=(Role.MODEL, Role.SERVER),
    prepare="kintsugi.model.device:prepare",
    probe="kintsugi.cluster.chips:nvml_probe",
)


class AgentHandover(msgspec.Struct, frozen=True):
    """Everything an agent starts with, and every successor of it; holds secret keys.

    The agent's own `bootstrap.lifeline` ends when the launcher is gone. Its children get another pipe, which ends only
    when launcher *and* agent are gone: the launcher and this agent hold its write end, nobody else.
    """

    bootstrap: Bootstrap
    children_lifeline_read: int
    children_lifeline_write: int
    report: int
    """Write end of the pipe to the launcher, for `AgentReport`s."""
    programs: Programs
    spares: int = 0
    """How many processes wait for a part."""
    master: Bootstrap | None = None
    """The master's own bootstrap, where this agent is the one that starts it. Its `lifeline` is filled in here."""
    stop_requested: bool = False
    """Somebody asked for a stop after this step while the agent's predecessor was there, or nobody was."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What an agent inherits."""
        given = (
            self.bootstrap.lifeline,
            self.children_lifeline_read,
            self.children_lifeline_write,
            self.report,
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
    epoch: int,
) -> Bootstrap:
    """What a new process of an agent's host begins with: a key pair of its own, and the master of this epoch."""
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
        epoch=epoch,
    )


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The agent runs, and so does the master where it is this agent's."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """The agent, or its master, did not come up; the agent ends."""

    process: str
    phase: str
    why: str


class MasterDied(msgspec.Struct, frozen=True, tag=True):
    """The master ended by a signal instead of an exit code, once too often."""

    how: str
    last_output: str


class Ending(msgspec.Struct, frozen=True, tag=True):
    """The agent begins to end because it is to: with its master, or told by it or the launcher. One that ends without
    having said so has failed, whatever its exit code."""


AgentReport = Ready | NotStarted | MasterDied | Ending
