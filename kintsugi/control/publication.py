"""New weights on their way to the servers: laid out by ranks, loaded through the manager, then current.

Laying out copies the committed weights and takes the ranks' time. From then on the ranks may go on, and the servers
load beside everything else. One version is on its way at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kintsugi.config import Config
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.staff import Staff
from kintsugi.control.suspicion import CHIP
from kintsugi.errors import DeadlineExceeded, Fault, IntegrityError, ProcessDied, root_first
from kintsugi.facts import VersionCurrent
from kintsugi.messages import LoadWeights, Published, WeightsLoaded
from kintsugi.types import Role
from kintsugi.weights.choice import NO_CHIP, Place, join, plan

AGAIN = "weights"
LOAD = "load"
FIRST_PAUSE_S = 0.1
MAX_FAILURES = 3
"""Loads of one version that may fail before the manager is replaced."""


class Publication:
    """One version at a time; a manager that was replaced is given the current one again."""

    def __init__(
        self,
        config: Config,
        *,
        draft: Draft,
        talk: Conversation,
        staff: Staff,
        needs: Callable[[int], bool],
        go_on: Callable[[float], None],
        roll: Callable[[float], None],
        wrong: Callable[[str, str, float], None],
    ) -> None:
        """`needs`: whether the run can not go on while servers have nothing newer than this version. `go_on`: it can.
        `roll`: more may be sampled. `wrong`: a rank's weights are not the others'."""
        self._draft, self._talk, self._staff = draft, talk, staff
        self._running, self._transport = config.asynchrony.running, config.weights.transport
        self._way = ""
        """How the servers got their weights last, and why."""
        self._needs, self._go_on, self._roll, self._wrong = needs, go_on, roll, wrong
        self._is_awaited = False
        """Whether the run waits for what is on its way."""
        self._has_servers = any(plan.role is Role.SERVER for plan in staff.plans.values())
        self._published: Published | None = None
        self._loading = False
        self._failures = 0
        self._load_at = math.inf
        """When a load that failed is repeated."""
        self._ranks: Sequence[str] = ()
        self._late: set[str] = set()
        """Incarnations of servers that did not load the last version in time."""

    def begin(self, ranks: Sequence[str], now: float) -> None:
        """Have the lowest rank of each host lay the committed weights out; without servers, they are current.

        Where servers are still loading an earlier version that will do, this one is left out. Where it will not do, the
        run waits for it, and then this one follows.
        """
        self._ranks = ranks
        before = self._published.manifest.version if self._loading and self._published is not None else None
        if before is None:
            self._lay_out(now)
        elif self._needs(before):
            self._is_awaited = True
        else:
            self._draft.because(f"servers are loading version {before}, so this one is left out")
            self._go_on(now)

    def _lay_out(self, now: float) -> None:
        state, self._published, self._failures = self._draft.state, None, 0
        if not self._has_servers:
            self._draft.fact(VersionCurrent(state.step, "", (), ()))
            self._go_on(now)
            return
        members = state.members
        way = plan(
            self._transport,
            ranks=[self._place(rank) for rank in self._ranks],
            servers=[self._place(server) for server in members.live(Role.SERVER)],
            agents={members.members[agent].host: agent for agent in members.live(Role.AGENT)},
            version=state.step,
            step=state.step,
        )
        if way.reason != self._way:
            self._way = way.reason
            self._draft.because(f"weights go to {way.reason}")
        self._talk.ask_all(way.orders, now, then=self._laid_out)

    def _place(self, process: str) -> Place:
        member = self._draft.state.members.members[process]
        return Place(process, member.host, member.capabilities.get(CHIP, NO_CHIP))

    def abandon(self) -> None:
        """The ranks come together again, and publish again when they have; until then nothing follows from a load."""
        self._loading, self._is_awaited, self._load_at = False, False, math.inf
        self._talk.withdraw_all(f"{LOAD}:")

    def manager_joined(self, now: float) -> None:
        """It knows nothing yet: neither what it was asked to load, nor what the servers have."""
        if self._published is None:
            return
        if self._loading:
            self._load(now)
        else:
            managers = self._draft.state.members.live(Role.MANAGER)
            self._talk.ask_each(AGAIN, dict.fromkeys(managers, self._body(self._published)), now)

    def _laid_out(self, now: float) -> None:
        answers = self._talk.answers
        in_order = [rank for rank in self._ranks if rank in answers]
        published = {rank: each for rank in in_order if isinstance(each := answers[rank], Published)}
        try:
            self._published = join(published)
        except IntegrityError as error:
            self._wrong(in_order[0], str(error), now)
            return
        self._load(now)
        self._is_awaited = self._needs(self._draft.state.version)
        if not self._is_awaited:
            self._go_on(now)

    def _load(self, now: float) -> None:
        """While there is no manager, nothing is asked: it will be when one joins."""
        assert self._published is not None
        self._loading = True
        for purpose in (LOAD, AGAIN):  # What was asked before is superseded, and will be refused.
            self._talk.withdraw_all(f"{purpose}:")
        bodies = dict.fromkeys(self._draft.state.members.live(Role.MANAGER), self._body(self._published))
        self._talk.ask_each(LOAD, bodies, now)

    def _body(self, published: Published) -> LoadWeights:
        return LoadWeights(published.manifest, published.sources, self._running)

    def loaded(self, loaded: WeightsLoaded, now: float) -> None:
        """The manager says that every live server has them, but for those that it left behind."""
        assert self._published is not None and self._loading
        manifest, self._loading, self._failures = self._published.manifest, False, 0
        if (loaded.version, loaded.digest) != (manifest.version, manifest.digest):
            held = f"servers hold version {loaded.version} with digest {loaded.digest}"
            problem = f"{held}, published was {manifest.version} with {manifest.digest}"
            self._wrong(self._ranks[0], problem, now)
            return
        self._draft.fact(
            VersionCurrent(
                loaded.version, manifest.digest, self._published.sources, loaded.servers, loaded.pause_ms
            )
        )
        self._replace_late(loaded, now)
        is_awaited, self._is_awaited = self._is_awaited, False
        if not is_awaited:
            self._roll(now)
        elif self._needs(loaded.version):
            self._lay_out(now)
        else:
            self._go_on(now)

    def _replace_late(self, loaded: WeightsLoaded, now: float) -> None:
        """Every version waits for who will not load it, for as long as it may: who was late twice in a row is ended."""
        members, before, self._late = self._draft.state.members, self._late, set()
        for server in loaded.late:
            if not members.is_live(server):
                continue
            incarnation = members.members[server].incarnation
            self._late.add(incarnation)
            if incarnation in before and not self._staff.is_condemned(server):
                what = f"{server} did not load version {loaded.version} in time, nor the one before"
                name = f"{server}@{incarnation}.late"
                self._staff.condemn(server, Fault(name, DeadlineExceeded.__name__, server, what, 0.0), now)

    def failed(self, fault: Fault, now: float) -> bool:
        """A load failed: it is repeated after a pause, without the server that could not load, or with another manager
        if this one fails again and again. False when that did not help either."""
        if fault.kind == ProcessDied.__name__:
            return True  # The next manager is asked when it joins.
        self._failures += 1
        culprit = root_first([fault])[0].process
        if not culprit.startswith(f"{Role.SERVER}-"):
            managers = self._draft.state.members.live(Role.MANAGER)
            culprit = managers[0] if managers and self._failures % MAX_FAILURES == 0 else ""
        if self._draft.state.members.is_live(culprit):
            self._staff.condemn(culprit, fault, now)
        self._load_at = now + FIRST_PAUSE_S * 2.0 ** (self._failures - 1)
        return self._failures < 2 * MAX_FAILURES

    def tick(self, now: float) -> None:
        """Repeat what failed, when its pause is over."""
        if now >= self._load_at:
            self._load_at = math.inf
            self.manager_joined(now)
