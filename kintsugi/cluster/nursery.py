"""Births of an agent's children: a spare where there is one, else forked from the template, else executed.

A role that needs what the template imports waits for it; the others are executed until it has said that it is ready.
From then on every child is forked, so a replacement runs a tenth of a second after it was ordered.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Collection
from typing import Protocol

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import TEMPLATE, ChildRecord, Kept, record_of
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.orphans import kill_children
from kintsugi.cluster.placement import Start, spawn
from kintsugi.cluster.restarts import RestartLimit
from kintsugi.cluster.segments import Loop
from kintsugi.cluster.spares import Spares
from kintsugi.cluster.template import Imported, Template
from kintsugi.errors import DeadlineExceeded, StartFailed
from kintsugi.runtime import Child, Clock, Processes
from kintsugi.types import Role, role_of

END_TIMEOUT_S = 2.0
"""For something that was killed to be gone."""
IMPORT_S = 60.0
"""For a template to import all that its children need."""
FORK_S = 5.0
"""For a template that is ready to fork one child."""
EXIT_S = 0.5
"""For a template whose connection has ended to end itself, so that its status tells why."""


class Answerable(Protocol):
    """Who answers for a child, once it is born."""

    def born(self, kept: Kept) -> None:
        """`kept.child` is a process now."""

    def started(self, kept: Kept) -> None:
        """It is born, and its program has begun."""

    def start_failed(self, kept: Kept, error: StartFailed) -> None:
        """It was not born, and will not be."""


class Parent(Answerable, Protocol):
    """Who answers for all children but the spares."""

    def known_pids(self) -> set[int]:
        """Of every child that was born; whatever else descends from this process is a stranger."""

    def template_changed(self) -> None:
        """There is another template, or none."""


class Nursery:
    """Brings children to life, one after the other; keeps the template that they are forked from."""

    def __init__(
        self,
        loop: Loop,
        *,
        parent: Parent,
        programs: Programs,
        processes: Processes,
        own: Bootstrap,
        num_spares: int,
        template_name: str,
        lifeline: int,
        clock: Clock,
    ) -> None:
        """`own` is the agent's bootstrap."""
        self._loop = loop
        self._parent = parent
        self._programs = programs
        self._processes = processes
        self._template_name, self._lifeline = template_name, lifeline
        self._clock = clock
        self._template: Template | None = None
        self._template_ready = False
        self._template_limit = RestartLimit()
        self._forking: deque[Kept] = deque()
        """Asked of the template and not yet born, in order."""
        self._heard_at = 0.0
        """When the template last gave a sign of life, or the first of those was asked of it."""
        self._closed = False
        self._spares = Spares(
            loop, number=num_spares, own=own, program=programs.prepare, births=self, clock=clock
        )

    @property
    def is_forking(self) -> bool:
        """Whether a process may have been born that the template has not told us of."""
        return bool(self._forking)

    @property
    def pids(self) -> set[int]:
        """Of those that no order was given for: template and spares."""
        return self._spares.pids | ({self._template.child.pid} if self._template is not None else set())

    def template_record(self) -> ChildRecord | None:
        """The template's line of the table."""
        return record_of(self._template.child if self._template is not None else None, process=TEMPLATE)

    def start_template(self) -> None:
        """Unless there is one, or the programs need none."""
        if self._template is not None or self._closed or not self._programs.preload:
            return
        template = Template.start(
            self._processes,
            preload=self._programs.preload,
            name=self._template_name,
            lifeline=self._lifeline,
        )
        self._use(template)
        self._parent.template_changed()

    def adopt_template(self, child: Child) -> None:
        """Go on with that of an earlier agent; one that does not listen is killed."""
        try:
            self._use(Template.adopt(child, name=self._template_name))
        except OSError:
            child.send_signal(signal.SIGKILL)
            child.wait_ended(whom=TEMPLATE, timeout_s=END_TIMEOUT_S)
            child.close()

    def _use(self, template: Template) -> None:
        self._template, self._template_ready = template, False
        self._loop.watch(template.fileno(), self._template_spoke)

    def bring_up(self, kept: Kept) -> None:
        """Begin a birth. The child tells how its start went on a pipe of its own."""
        start = self._with_report(kept)
        if start is None:
            return
        if self._take_spare(kept):
            self._answers_for(kept).born(kept)
        elif self._is_forked(kept) and self._template is not None and self._template.request(start):
            if not self._forking:
                self._heard_at = self._clock.monotonic()
            self._forking.append(kept)
        else:
            self._execute(kept)
        os.close(start.report)

    def _answers_for(self, kept: Kept) -> Answerable:
        return self._spares if role_of(kept.process) is Role.SPARE else self._parent

    def _take_spare(self, kept: Kept) -> bool:
        """Where there is one, unless it could not become what is ordered: libraries have read its environment."""
        assert kept.start is not None
        role = role_of(kept.process)
        if role is not Role.SPARE:
            self._spares.postpone()
        if role in self._programs.forked and not kept.start.placement.environment:
            kept.child = self._spares.give(kept.start)
        return kept.child is not None

    def avoid(self, broken_chips: tuple[str, ...]) -> None:
        """No spare may hold any of these accelerators."""
        self._spares.avoid(broken_chips)

    def _with_report(self, kept: Kept) -> Start | None:
        """How to start it, with a new pipe for what it reports; None if there is none, which ends the birth."""
        assert kept.start is not None
        try:
            kept.report, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            failed = StartFailed(process=kept.process, phase="opening a pipe for its report", why=str(error))
            self._answers_for(kept).start_failed(kept, failed)
            return None
        kept.start = msgspec.structs.replace(kept.start, report=writer)
        self._loop.watch(kept.report, lambda: self.take_report(kept))
        return kept.start

    def _is_forked(self, kept: Kept) -> bool:
        assert kept.start is not None
        role = role_of(kept.process)
        if role is Role.MASTER and self._template is not None and self._template.is_adopted:
            # Its status is the run's exit code, so it has to be a child of ours.
            return False
        awaits_template = role in self._programs.forked or role is Role.SPARE
        return (awaits_template or self._template_ready) and not kept.start.placement.environment

    def _execute(self, kept: Kept) -> None:
        assert kept.start is not None
        try:
            kept.child = spawn(self._processes, kept.start)
        except StartFailed as error:
            self._answers_for(kept).start_failed(kept, error)
            return
        self._answers_for(kept).born(kept)

    def take_report(self, kept: Kept) -> None:
        """Read how the start went, if that has been told."""
        reader = kept.report
        if reader < 0 or not kept.read_report():
            return
        self._loop.unwatch(reader)
        os.close(reader)
        if kept.started and kept.child is not None:
            self._answers_for(kept).started(kept)

    def let_go(self, kept: Kept) -> None:
        """Expect no report any more."""
        if kept.report >= 0:
            self._loop.unwatch(kept.report)
            os.close(kept.report)
            kept.report = -1

    # The template.

    def _template_spoke(self) -> None:
        assert self._template is not None
        self._heard_at = self._clock.monotonic()
        answer = self._template.receive()
        if answer is None:
            self._template_gone()
        elif isinstance(answer, Imported):
            self._template_ready = True
        elif answer.pid < 0:
            self._execute_instead(self._forking.popleft())
        else:
            self._forked(self._forking.popleft(), answer.pid)

    def _forked(self, kept: Kept, pid: int) -> None:
        try:
            kept.child = self._processes.adopt(pid)
        except ProcessLookupError:
            # It has ended already, and its remains were the launcher's to take away.
            self.take_report(kept)
            self._answers_for(kept).start_failed(kept, kept.start_error(None))
            return
        self._answers_for(kept).born(kept)
        if kept.started:
            self._answers_for(kept).started(kept)

    def _template_gone(self) -> None:
        """Replaced if it was killed; one that could not import, or not fork, is done without: its log says why.

        What it had not forked is executed; what it forked unnoticed is a stranger, and killed.
        """
        was_ready = self._template_ready
        status = self._close_template(grace_s=EXIT_S)
        kill_children(
            self._processes, but=self._parent.known_pids(), timeout_s=END_TIMEOUT_S, clock=self._clock
        )
        waiting = tuple(self._forking)
        self._forking.clear()
        was_killed = status is not None and status < 0
        if (was_ready or was_killed) and self._template_limit.allows(self._clock.monotonic()):
            self.start_template()
        for kept in waiting:
            self._execute_instead(kept)

    def _execute_instead(self, kept: Kept) -> None:
        """Start what the template did not, through a pipe of its own: the first one may have another holder."""
        self.let_go(kept)
        is_spare = role_of(kept.process) is Role.SPARE
        if self._closed or kept.stopping or is_spare:
            why = "it was stopped" if not is_spare else "its template is gone, and nobody waits for it"
            error = StartFailed(process=kept.process, phase="starting", why=why)
            self._answers_for(kept).start_failed(kept, error)
            return
        start = self._with_report(kept)
        if start is not None:
            self._execute(kept)
            os.close(start.report)

    def look_after(self, stopped: Collection[int], now: float) -> None:
        """Replace a template or spare that stands still, and a spare that is missing. Several times a second."""
        template = self._template
        if template is not None and (template.child.pid in stopped or self.template_is_late(now)):
            template.child.send_signal(signal.SIGKILL)  # Its end is seen, and another one is started.
        can_make = not self._closed and (self._template is None or self._template_ready)
        self._spares.look_after(stopped, now, can_make=can_make)

    def template_is_late(self, now: float) -> bool:
        """Whether it hangs: it is asked for a child, and has said nothing for longer than that can take."""
        most_s = FORK_S if self._template_ready else IMPORT_S
        return self.is_forking and now - self._heard_at > most_s

    def _close_template(self, *, grace_s: float) -> int | None:
        """Gives its status, if it ended by itself or was killed by somebody else."""
        if self._template is None:
            return None
        template, self._template = self._template, None
        self._template_ready = False
        self._loop.unwatch(template.fileno())
        template.close()
        if grace_s > 0:
            with contextlib.suppress(DeadlineExceeded):
                template.child.wait_ended(whom=TEMPLATE, timeout_s=grace_s)
        status = template.child.status()
        template.child.send_signal(signal.SIGKILL)
        template.child.wait_ended(whom=TEMPLATE, timeout_s=END_TIMEOUT_S)
        template.child.close()
        return status

    def close(self) -> None:
        """Nobody is born any more."""
        self._closed = True
        self._spares.close()
        self._close_template(grace_s=0.0)
        while self._forking:
            self._execute_instead(self._forking.popleft())
