"""PUBLISHING: ranks copy the new weights into publish buffers, servers load them, then they are current.

The layout copies the committed weights and blocks the ranks. After it the run continues, unless it needs this version,
while the servers load. One version is published at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kintsugi.config.schema import Config
from kintsugi.control import due
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.mesh_choice import mesh_in_force
from kintsugi.control.pending import PendingRequests, Purpose
from kintsugi.control.phases.table import DONE, RUNNING, PhaseReport, PhaseResult
from kintsugi.control.processes import ProcessManager
from kintsugi.control.suspicion import CHIP
from kintsugi.errors import DeadlineExceeded, Fault, IntegrityError, ProcessDied, root_first
from kintsugi.journal.facts import VersionCurrent
from kintsugi.protocol.weights import LoadWeights, Publish, Published, WeightsLoaded
from kintsugi.runtime.backoff import growing_pause
from kintsugi.types import Role
from kintsugi.weights.selection import NO_CHIP, ProcessLocation, join, plan

FIRST_PAUSE_S = 0.1
MAX_FAILURES = 3
"""Loads of one version that may fail before the manager is replaced."""


class PublishPhase:
    """Publishes one version at a time. A new manager gets the current version again."""

    def __init__(
        self,
        config: Config,
        *,
        decision: DecisionBuilder,
        pending: PendingRequests,
        processes: ProcessManager,
        evaluates: bool,
    ) -> None:
        """`evaluates`: the run has held-out problems, so that some versions have to be current to be evaluated."""
        self._config, self._evaluates = config, evaluates
        self._decision, self._pending, self._processes = decision, pending, processes
        self._running, self._transport = config.asynchrony.running, config.weights.transport
        self._way = ""
        """Transport of the last version, and the reason for it."""
        self.is_awaited = False
        """Whether the run waits for the version that is being published."""
        self._has_servers = any(plan.role is Role.SERVER for plan in processes.plans.values())
        self._published: Published | None = None
        self._loading = False
        self._failures = 0
        self._load_at = math.inf
        """Time at which a failed load is repeated."""
        self._ranks: Sequence[str] = ()
        self._late: set[str] = set()
        """Incarnations of servers that did not load the last version in time."""

    def begin(self, ranks: Sequence[str], now: float) -> PhaseReport:
        """Let the lowest rank of each host lay out the committed weights; without servers, they are current
        immediately.

        If the servers are still loading an earlier version that suffices, this one is skipped. If it does not suffice,
        the run waits for it, and then this version follows.
        """
        self._ranks = ranks
        before = self._published.manifest.version if self._loading and self._published is not None else None
        if before is None:
            return self._lay_out(now)
        if self._needs(before):
            self.is_awaited = True
            return RUNNING
        self._decision.explain(f"servers are loading version {before}, so this one is left out")
        return DONE

    def _needs(self, version: int) -> bool:
        """Return whether the run cannot continue while the servers have nothing newer than `version`."""
        state = self._decision.state
        return due.needs_version(self._config, state, version=version, evaluates=self._evaluates)

    def _lay_out(self, now: float) -> PhaseReport:
        state, self._published, self._failures = self._decision.state, None, 0
        if not self._has_servers:
            self._decision.add_fact(VersionCurrent(state.step, "", (), ()))
            return DONE
        members = state.members
        way = plan(
            self._transport,
            ranks=[self._place(rank) for rank in self._ranks],
            servers=[self._place(server) for server in members.live(Role.SERVER)],
            agents={members.members[agent].host: agent for agent in members.live(Role.AGENT)},
            version=state.step,
            step=state.step,
            parts=[self._place(rank) for rank in self._parts()],
        )
        if way.reason != self._way:
            self._way = way.reason
            self._decision.explain(f"weights go to {way.reason}")
        self._pending.ask_all({**self._helpers(state.step), **way.orders}, now)
        return RUNNING

    def _helpers(self, step: int) -> dict[str, Publish]:
        """Orders for the ranks that publish nothing, but gather weights with those that do."""
        if not self._config.actor.layout.gathers_layers:
            return {}
        return {rank: Publish(step, step, transports=()) for rank in self._ranks}

    def _parts(self) -> list[str]:
        """Ranks of the first model, where each has a part of its weights."""
        mesh = mesh_in_force(self._config, self._decision.state)
        return list(self._ranks[: mesh.model_ranks]) if mesh.model_ranks > 1 else []

    def _place(self, process: str) -> ProcessLocation:
        member = self._decision.state.members.members[process]
        return ProcessLocation(process, member.host, member.capabilities.get(CHIP, NO_CHIP))

    def abandon(self) -> None:
        """Ignore a load in progress: the ranks publish again after the recovery."""
        self._loading, self.is_awaited, self._load_at = False, False, math.inf
        self._pending.withdraw_all(Purpose.LOAD)

    def manager_joined(self, now: float) -> None:
        """Request the load again from a new manager, which knows neither the pending load nor the current version."""
        if self._published is None:
            return
        if self._loading:
            self._load(now)
        else:
            managers = self._decision.state.members.live(Role.MANAGER)
            self._pending.ask_each(Purpose.RELOAD, dict.fromkeys(managers, self._body(self._published)), now)

    def laid_out(self, now: float) -> PhaseReport:
        """Let the servers load the weights, once every rank has laid its part out."""
        answers = self._pending.answers
        in_order = [rank for rank in self._ranks if rank in answers]
        published = {
            rank: each
            for rank in in_order
            if isinstance(each := answers[rank], Published) and each.sources  # Helpers have none.
        }
        try:
            self._published = join(published)
        except IntegrityError as error:
            return PhaseReport(PhaseResult.DIVERGED, process=in_order[0], problem=str(error))
        self._failures = 0
        self._load(now)
        self.is_awaited = self._needs(self._decision.state.version)
        return RUNNING if self.is_awaited else DONE

    def _load(self, now: float) -> None:
        """Request the load. Without a live manager, it is requested when one joins."""
        assert self._published is not None
        self._loading = True
        for purpose in (
            Purpose.LOAD,
            Purpose.RELOAD,
        ):  # Earlier requests are superseded, and will be refused.
            self._pending.withdraw_all(purpose)
        bodies = dict.fromkeys(self._decision.state.members.live(Role.MANAGER), self._body(self._published))
        self._pending.ask_each(Purpose.LOAD, bodies, now)

    def _body(self, published: Published) -> LoadWeights:
        return LoadWeights(published.manifest, published.sources, self._running)

    def loaded(self, loaded: WeightsLoaded, now: float) -> PhaseReport:
        """Make a version current: the manager reports that every live server has it, except for late ones."""
        assert self._published is not None and self._loading
        manifest, self._loading, self._failures = self._published.manifest, False, 0
        if (loaded.version, loaded.digest) != (manifest.version, manifest.digest):
            held = f"servers hold version {loaded.version} with digest {loaded.digest}"
            problem = f"{held}, published was {manifest.version} with {manifest.digest}"
            return PhaseReport(PhaseResult.DIVERGED, process=self._ranks[0], problem=problem)
        self._decision.add_fact(
            VersionCurrent(
                loaded.version, manifest.digest, self._published.sources, loaded.servers, loaded.pause_ms
            )
        )
        self._replace_late(loaded, now)
        is_awaited, self.is_awaited = self.is_awaited, False
        if not is_awaited:
            return RUNNING
        return self._lay_out(now) if self._needs(loaded.version) else DONE

    def _replace_late(self, loaded: WeightsLoaded, now: float) -> None:
        """Terminate servers that were late for two versions in a row, as every version waits for them until its
        deadline."""
        members, before, self._late = self._decision.state.members, self._late, set()
        for server in loaded.late:
            if not members.is_live(server):
                continue
            incarnation = members.members[server].incarnation
            self._late.add(incarnation)
            if incarnation in before and not self._processes.is_terminating(server):
                what = f"{server} did not load version {loaded.version} in time, nor the one before"
                name = f"{server}@{incarnation}.late"
                self._processes.terminate(
                    server, Fault(name, DeadlineExceeded.__name__, server, what, 0.0), now
                )

    def failed(self, fault: Fault, now: float) -> PhaseReport:
        """Repeat a failed load after a pause, without the server that could not load, or with another manager if this
        one has failed several times. After twice as many failures the run cannot continue. Those of a load that only
        brings a new manager up to date end a server at most: its version may be overwritten, and another follows."""
        if fault.kind == ProcessDied.__name__:
            return RUNNING  # The request is sent to the next manager when it joins.
        self._failures += 1
        culprit = root_first([fault])[0].process
        if not culprit.startswith(f"{Role.SERVER}-"):
            managers = self._decision.state.members.live(Role.MANAGER)
            culprit = managers[0] if managers and self._loading and self._failures % MAX_FAILURES == 0 else ""
        if self._decision.state.members.is_live(culprit):
            self._processes.terminate(culprit, fault, now)
        self._load_at = now + growing_pause(self._failures, first_s=FIRST_PAUSE_S)
        if not self._loading or self._failures < 2 * MAX_FAILURES:
            return RUNNING
        return PhaseReport(PhaseResult.UNRECOVERABLE, fault=fault)

    def tick(self, now: float) -> None:
        """Repeat a failed load when its pause is over."""
        if now >= self._load_at:
            self._load_at = math.inf
            self.manager_joined(now)
