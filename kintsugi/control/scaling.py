"""How many generation servers a run has: people may ask for another number while it goes on.

More are ordered as at the start, spread over the hosts; they load the current weights and are admitted by the manager.
Surplus ones, the last first, end as soon as the manager lets their requests go on elsewhere. Which server draws a
sample never shows in the sample, so the run ends in the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.config import Config
from kintsugi.control.draft import Draft
from kintsugi.control.layout import most_servers, plan_servers
from kintsugi.control.phases import Phase
from kintsugi.control.protocol import ScaleRequested
from kintsugi.control.staff import Staff
from kintsugi.facts import ScaleRefused, ServersScaled
from kintsugi.stages import has_servers
from kintsugi.types import Role


class Scaling:
    """Answers each request once. The number is a fact, so a master that takes over goes on with it."""

    def __init__(
        self, config: Config, *, draft: Draft, staff: Staff, staffed: Callable[[float], None]
    ) -> None:
        """`staffed`: perhaps nobody is missing any more, though nobody came."""
        self._config, self._draft, self._staff, self._staffed = config, draft, staff, staffed
        self._plan()

    def requested(self, event: ScaleRequested, now: float, *, phase: Phase, failed: bool) -> None:
        """While the processes of the run start, the request waits: who does not come then ends the run."""
        if event.request in self._draft.state.answered:
            self._draft.because(f"request {event.request} was answered")
            return
        if phase is Phase.STARTING and not failed:
            self._draft.because(f"scaled to {event.servers} servers once everybody is there")
            return
        ending = failed or phase is Phase.ENDING
        problem = "the run is about to end" if ending else self._problem(event.servers)
        if problem:
            self._draft.fact(ScaleRefused(event.request, problem))
            self._draft.because(f"not scaled to {event.servers} servers: {problem}")
            return
        self._draft.fact(ServersScaled(event.request, event.servers))
        self._draft.because(f"scaled to {event.servers} servers")
        was_missing = bool(self._staff.missing())
        self._plan()
        self._staff.adjust(now, first=False)
        if was_missing:
            self._staffed(now)

    def _problem(self, servers: int) -> str:
        """Why the run can not have so many servers; empty if it can."""
        if not has_servers(self._config):
            return "this run samples nothing and has no servers"
        if servers < 1:
            return f"expected at least 1 server, got {servers}"
        urls, most = self._config.generation.urls, most_servers(self._config)
        if urls and servers > len(urls):
            return f"expected at most one server for each of the {len(urls)} `generation.urls`, got {servers}"
        if most is not None and servers > most:
            return f"expected at most as many servers as the {most} samples of a step, got {servers}"
        return ""

    def _plan(self) -> None:
        number = self._draft.state.num_servers
        if number is not None:
            self._staff.plan(Role.SERVER, plan_servers(self._config, number))
