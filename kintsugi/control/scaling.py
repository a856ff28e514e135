"""Scaling of the generation servers while the run continues. Results are unaffected.

Additional servers start as at the beginning, spread over the hosts; they load the current weights, and the manager
admits them. Surplus ones end, the last first, once the manager has moved their requests to other servers. A sample does
not depend on the server that draws it.
"""

from __future__ import annotations

from kintsugi.config.schema import Config
from kintsugi.config.stages import has_servers
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import most_servers, plan_servers
from kintsugi.control.processes import ProcessManager
from kintsugi.control.protocol import ScaleRequested
from kintsugi.journal.facts import ScaleRefused, ServersScaled
from kintsugi.types import Role


class Scaling:
    """Answers each request once. The number of servers is a fact, so a new master keeps it."""

    def __init__(self, config: Config, *, decision: DecisionBuilder, processes: ProcessManager) -> None:
        self._config, self._decision, self._processes = config, decision, processes
        self._plan()

    def requested(self, event: ScaleRequested, now: float, *, phase: Phase, failed: bool) -> bool:
        """Carry a request out, refuse it, or leave it for later; return whether processes were missing before.

        The request waits while the run starts: a process that is missing then would end the run.
        """
        if event.request in self._decision.state.answered:
            self._decision.explain(f"request {event.request} was answered")
            return False
        if phase is Phase.STARTING and not failed:
            self._decision.explain(f"scaled to {event.servers} servers once every process is there")
            return False
        ending = failed or phase is Phase.ENDING
        problem = "the run is about to end" if ending else self._problem(event.servers)
        if problem:
            self._decision.add_fact(ScaleRefused(event.request, problem))
            self._decision.explain(f"not scaled to {event.servers} servers: {problem}")
            return False
        self._decision.add_fact(ServersScaled(event.request, event.servers))
        self._decision.explain(f"scaled to {event.servers} servers")
        was_missing = bool(self._processes.missing())
        self._plan()
        self._processes.adjust(now, first=False)
        return was_missing

    def _problem(self, servers: int) -> str:
        """Return why the run cannot have so many servers; empty if it can."""
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
        number = self._decision.state.num_servers
        if number is not None:
            self._processes.plan(Role.SERVER, plan_servers(self._config, number))
