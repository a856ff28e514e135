"""What the launcher hands to a node agent, and what the agent tells it back. Both through inherited descriptors."""

from __future__ import annotations

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.types import Role
from kintsugi.worker import MAINS


class Programs(msgspec.Struct, frozen=True):
    """What a process of each role runs. A value, so that a test can start a run of tiny programs."""

    entries: dict[Role, str]
    """Role → `module:function`, called with the process's `Bootstrap`; its result is the exit code."""
    preload: tuple[str, ...] = ()
    """Modules that the template imports before it forks; empty means no template: every process is executed."""
    forked: tuple[Role, ...] = ()
    """Roles whose processes are forked from the template."""


PROGRAMS = Programs(
    entries=MAINS,
    preload=("torch", "kintsugi.training.worker", "kintsugi.generation.server"),
    forked=(Role.MODEL, Role.SERVER),
)


class AgentHandover(msgspec.Struct, frozen=True):
    """Everything an agent starts with; holds secret keys.

    The agent's own `bootstrap.lifeline` ends when the launcher is gone. Its children get another pipe, which ends only
    when launcher *and* agent are gone: the launcher and this agent hold its write end, nobody else.
    """

    bootstrap: Bootstrap
    children_lifeline_read: int
    children_lifeline_write: int
    report: int
    """Write end of the pipe to the launcher, for `AgentReport`s."""
    programs: Programs
    master: Bootstrap | None = None
    """The master's own bootstrap, where this agent is the one that starts it. Its `lifeline` is filled in here."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The agent runs, and so does the master where it is this agent's."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """The agent, or its master, did not come up; the agent ends."""

    process: str
    phase: str
    why: str


class MasterDied(msgspec.Struct, frozen=True, tag=True):
    """The master ended by a signal instead of an exit code."""

    how: str
    last_output: str


AgentReport = Ready | NotStarted | MasterDied
