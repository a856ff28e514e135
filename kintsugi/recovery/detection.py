"""The master's own watch over the processes that report to it: who is silent, who stands still, which host is gone.

Exits are no business of this module: the kernel tells the agents, and they tell the master. What is left is a process
that lives and does nothing. `Watch` suspects from what the heartbeats say, and from their absence; `confirm` judges
what the agent then sees from outside. A suspicion costs a look, a confirmed one costs the process, so the watch is
quick and the judgement is slow.

Everything here is pure: `now` is passed in (monotonic seconds of the master), nothing is read or sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kintsugi.messages import Heartbeat
from kintsugi.supervision import Inspected
from kintsugi.types import Role, Wait, role_of

SILENT_S = 1.5
"""Three heartbeats missed. Shorter, and one that was late on a busy machine would be an alarm; a process that was
stopped is seen by its agent earlier anyway."""
REPEAT_S = 1.0
"""A suspicion is told again this often while it lasts: each time the process is looked at anew."""
ATTENTIVE_S = 0.25
"""Longest time between two calls of a master that runs (its tick is 0.2 s). What goes beyond it, the master did not run
(a pause of the interpreter, an overloaded host, SIGSTOP) and can not have heard anyone: that time does not count."""
QUIET_S = 0.9
"""While anybody speaks at all, somebody is heard more often than this. When nobody is, the watch's clock stands still:
the processes that were heard longest ago would else be suspected just before it is plain that all are silent. Long
enough that a process stays detectable in 2.5 s if a single other one is left and speaks only every 1.2 s."""
ALL_SILENT_S = 1.3
"""Nobody was heard for longer than a late heartbeat takes: the fault was here or in the network, and after it everybody
starts afresh."""
ALL_SILENT_GRACE_S = 5.0
"""How long everybody's silence is taken for our own or the network's fault. Longer, and every host is suspected."""
FRESH_START_EVERY_S = 10.0
"""Everybody starts afresh at most this often: a cluster so slow that all of it falls silent again and again must not
hide a process that never comes back."""
STUCK_S = 3.0
"""A request is given at least this long: seconds happen on a busy machine without anything being wrong."""
STUCK_FACTOR = 3.0
"""… and this many times the longest answer so far."""
FIRST_ANSWER_S = 60.0
"""Before the first answer nothing is known, and libraries warm up, kernels are compiled, files are read."""
SAVE_S = 60.0
"""A save moves no counter while it writes and flushes, and a disk may hesitate for long."""
ANYONE = "anyone"
"""What an idle process declares that it waits for."""


class SuspicionKind(StrEnum):
    """What seems wrong."""

    SILENT = "silent"
    """No heartbeats."""
    STUCK = "stuck"
    """Heartbeats, but its main thread does not move though something is asked of it."""
    HOST = "host"
    """Neither an agent nor any process of its host is heard; named after the agent."""
    SLOW = "slow"
    """Far slower than its peers and than its own past."""
    CHIP = "chip"
    """An accelerator is broken, or shows a worrying sign; named after the agent that saw it."""
    DIAGNOSED = "diagnosed"
    """The watcher has named it as the cause of a trouble."""


class Suspicion(msgspec.Struct, frozen=True):
    """One process that seems wrong: `Suspicion("model-1", "1.0", STUCK, "has not moved for 4.1 s …", 20.4)`."""

    process: str
    incarnation: str
    kind: SuspicionKind
    evidence: str
    """One sentence with figures."""
    first_seen: float
    """When this suspicion arose (monotonic seconds of the master); repetitions keep it."""
    lasting_s: float = 0.0
    """How long the process has been silent, or has not moved, as far as the master was there to see it."""


class OpenRequest(msgspec.Struct, frozen=True):
    """A request to which the master has no answer yet: `OpenRequest("call-7", "RunCall", since=12.0, usual_s=0.8)`."""

    token: str
    kind: str
    """Class name of its body."""
    since: float
    usual_s: float | None = None
    """The longest answer of this kind so far; None before the first."""

    @property
    def allowance_s(self) -> float:
        """How long it may stay open without progress before something is wrong."""
        least_s = SAVE_S if self.kind == "Save" else STUCK_S
        known_s = FIRST_ANSWER_S if self.usual_s is None else STUCK_FACTOR * self.usual_s
        return max(least_s, known_s)


CONTROL_THREAD = frozenset({Role.MODEL, Role.SERVER})
"""Whose main thread can hang while a thread beside it speaks. The others speak from the very loop that works: when it
hangs, they are silent."""


@dataclass(slots=True, eq=False)
class _Host:
    members: set[str] = field(default_factory=set)
    agent: str | None = None
    heard: float = 0.0
    """When any of its processes was last heard."""


@dataclass(slots=True, eq=False)
class _Watched:
    """One process as its heartbeats show it. Times are of the watch's own clock."""

    process: str
    incarnation: str
    host: _Host
    can_hang: bool
    heard: float
    moved: float
    """When it last moved: a counter grew, a wait began or ended, or it was idle."""
    counters: dict[str, int] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()
    awaited: tuple[str, ...] = ()
    """Whom it waits for, by its own word."""
    idle: bool = False


@dataclass(slots=True)
class _Finding:
    """What looks wrong at this moment, whether or not it was told before."""

    watched: _Watched
    kind: SuspicionKind
    evidence: str
    lasting_s: float


@dataclass(slots=True)
class _Open:
    """A suspicion that lasts."""

    first_seen: float
    told: float


class Watch:
    """Hears every heartbeat, and says on `check` who is suspected.

    Its clock is the master's, less the time in which the master did not run and less that in which nobody at all was
    heard. Processes are kept in the order in which they were last heard, so that a check looks only at those that are
    silent and at what is asked for too long.
    """

    def __init__(self) -> None:
        self._watched: OrderedDict[str, _Watched] = OrderedDict()
        self._hosts: dict[str, _Host] = {}
        self._open: dict[tuple[str, str, SuspicionKind], _Open] = {}
        self._called: float | None = None
        self._not_counted_s = 0.0
        self._heard = 0.0
        """When anybody was last heard."""
        self._fresh_start = float("-inf")

    def joined(self, process: str, incarnation: str, now: float, *, host: str) -> None:
        """A process has registered, for the first time or again; that is a sign of life like a heartbeat."""
        clock = self._someone_speaks(self._attend(now))
        self.forget(process)
        role = role_of(process)
        home = self._hosts.setdefault(host, _Host())
        home.members.add(process)
        home.heard = clock
        if role is Role.AGENT:
            home.agent = process
        self._watched[process] = _Watched(process, incarnation, home, role in CONTROL_THREAD, clock, clock)

    def forget(self, process: str) -> None:
        """A process is gone, and known to be: nobody waits for its heartbeats any more."""
        watched = self._watched.pop(process, None)
        if watched is None:
            return
        home = watched.host
        home.members.discard(process)
        if home.agent == process:
            home.agent = None

    def heard(self, process: str, incarnation: str, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat came. Those of strangers and of earlier incarnations say nothing."""
        clock = self._attend(now)
        watched = self._watched.get(process)
        if watched is None or watched.incarnation != incarnation:
            return
        clock = self._someone_speaks(clock)
        watched.heard = watched.host.heard = clock
        self._watched.move_to_end(process)
        moved = heartbeat.waits != watched.waits
        if moved:
            watched.waits = heartbeat.waits
            watched.awaited = _awaited(heartbeat.waits)
            watched.idle = any(wait.whom == ANYONE for wait in heartbeat.waits)
        if watched.can_hang:
            counters = heartbeat.progress.counters
            if counters != watched.counters:
                moved = moved or _work(counters) != _work(watched.counters)
                watched.counters = counters
            if moved or watched.idle:
                watched.moved = clock

    def check(self, now: float, *, asked: Mapping[str, Sequence[OpenRequest]]) -> list[Suspicion]:
        """Who is suspected: newly, or still and not told for a second. `asked` is what the master waits for."""
        clock = self._attend(now)
        quiet_s = clock - self._heard
        if len(self._watched) > 1 and QUIET_S < quiet_s <= ALL_SILENT_GRACE_S:
            clock = self._heard + QUIET_S
        findings = [*self._silent(clock), *self._stuck(clock, now, asked)]
        lasting: dict[tuple[str, str, SuspicionKind], _Open] = {}
        suspicions = []
        for finding in findings:
            watched = finding.watched
            key = (watched.process, watched.incarnation, finding.kind)
            lasting[key] = known = self._open.get(key) or _Open(now, float("-inf"))
            if now - known.told >= REPEAT_S:
                known.told = now
                suspicions.append(Suspicion(*key, finding.evidence, known.first_seen, finding.lasting_s))
        self._open = lasting
        return suspicions

    # The clock.

    def _attend(self, now: float) -> float:
        """The time on the watch's own clock; one that the master slept through has not passed on it."""
        if self._called is not None:
            self._not_counted_s += max(0.0, now - self._called - ATTENTIVE_S)
        self._called = now
        return now - self._not_counted_s

    def _someone_speaks(self, clock: float) -> float:
        """End a time in which nobody was heard: it has not passed either, and after a long one all start afresh."""
        quiet_s = clock - self._heard
        if len(self._watched) > 1:
            is_fresh_start = quiet_s >= ALL_SILENT_S and clock - self._fresh_start >= FRESH_START_EVERY_S
            not_counted_s = quiet_s if is_fresh_start else max(0.0, quiet_s - QUIET_S)
            self._not_counted_s += not_counted_s
            clock -= not_counted_s
            if is_fresh_start:
                self._fresh_start = clock
        self._heard = clock
        return clock

    # Silence.

    def _silent(self, clock: float) -> Iterator[_Finding]:
        """Those heard longest ago come first; the first that was heard in time ends the search."""
        hosts: set[str] = set()
        for process, watched in self._watched.items():
            silent_s = clock - watched.heard
            if silent_s < SILENT_S:
                return
            home = watched.host
            home_silent_s = clock - home.heard
            is_alone = len(home.members) == 1
            if home.agent is not None and home_silent_s >= SILENT_S and not is_alone:
                if home.agent not in hosts:
                    hosts.add(home.agent)
                    yield self._host_silent(home, self._watched[home.agent], home_silent_s)
            elif QUIET_S <= home_silent_s < SILENT_S and not is_alone and not self._is_open(watched):
                # The rest of its host seems to follow: in a moment the host is suspected, or this process alone.
                continue
            else:
                evidence = (
                    f"no heartbeat of {process} for {silent_s:.1f} s, three or more are missing; "
                    f"the last one of anybody came {clock - self._heard:.1f} s ago"
                )
                yield _Finding(watched, SuspicionKind.SILENT, evidence, silent_s)

    def _is_open(self, watched: _Watched) -> bool:
        return (watched.process, watched.incarnation, SuspicionKind.SILENT) in self._open

    @staticmethod
    def _host_silent(home: _Host, agent: _Watched, silent_s: float) -> _Finding:
        evidence = (
            f"neither {agent.process} nor any of the {len(home.members) - 1} other processes of its host "
            f"was heard for {silent_s:.1f} s"
        )
        return _Finding(agent, SuspicionKind.HOST, evidence, silent_s)

    # Standstill.

    def _stuck(
        self, clock: float, now: float, asked: Mapping[str, Sequence[OpenRequest]]
    ) -> Iterator[_Finding]:
        """From what is open for too long, along the declared waits, to those who wait for nobody and do not move.

        Who says that it waits for another is not the culprit. Waits in a circle have no end and blame nobody: each of
        them has its own deadline.
        """
        overdue = [
            (request.allowance_s, process, request)
            for process, requests in asked.items()
            for request in requests
            if now - request.since > request.allowance_s
        ]
        overdue.sort(key=lambda late: late[0])
        reached: set[str] = set()
        for allowance_s, process, request in overdue:
            ahead = [process]
            while ahead:
                name = ahead.pop()
                watched = self._watched.get(name)
                if name in reached or watched is None:
                    continue
                reached.add(name)
                if watched.awaited:
                    ahead.extend(watched.awaited)
                elif _stands_still(watched, clock, allowance_s):
                    yield _standstill(watched, process, request, open_s=now - request.since)


def _awaited(waits: Sequence[Wait]) -> tuple[str, ...]:
    """The names in declared waits; one wait may name several."""
    names = {name: None for wait in waits for name in wait.whom.split(", ")}
    return tuple(name for name in names if name != ANYONE)


def _work(counters: Mapping[str, int]) -> dict[str, int]:
    """The counters that the main thread moves. Those with a dot in their name are counted by the control
    thread, and grow too when the master asks a process again that hangs."""
    return {name: count for name, count in counters.items() if "." not in name}


def _stands_still(watched: _Watched, clock: float, allowance_s: float) -> bool:
    """As of its last heartbeat; of a silent process nobody knows whether it moves."""
    speaks = clock - watched.heard < SILENT_S
    return watched.can_hang and speaks and watched.heard - watched.moved > allowance_s


def _standstill(watched: _Watched, asked: str, request: OpenRequest, *, open_s: float) -> _Finding:
    still_s = watched.heard - watched.moved
    usual = (
        "none was answered yet" if request.usual_s is None else f"at most {request.usual_s:.1f} s until now"
    )
    path = "" if asked == watched.process else f", which {asked} waits for,"
    evidence = (
        f"{watched.process}{path} speaks but has not moved for {still_s:.1f} s and waits for nobody; "
        f"{request.kind} of {asked} has been open for {open_s:.1f} s ({usual})"
    )
    return _Finding(watched, SuspicionKind.STUCK, evidence, still_s)


# What the agent sees from outside.

UNREACHABLE_S = 10.0
"""A process that runs is left this long to be heard again: a link may come back, a machine may catch up."""
HUNG_S = 5.0
"""A process that sleeps, uses no processor and says nothing is given this long: control threads wake twice a second."""
UNINTERRUPTIBLE_S = 15.0
"""In the kernel for a disk or a device, which may take long and can not be ended any earlier."""
HEARTBEAT_CPU_S = 0.05
"""More than heartbeats alone cost between two looks: less does not show that the main thread computes."""


class Resolution(StrEnum):
    """What to do about a suspicion."""

    WAIT = "wait"
    REPLACE = "replace"
    CLEAR = "clear"


class Verdict(msgspec.Struct, frozen=True):
    """What a look from outside says: `Verdict(Resolution.REPLACE, "stopped", "state T: …")`."""

    decision: Resolution
    fault: str
    """"stopped", "dead", "link" or "hung"; empty unless it is to be replaced."""
    reason: str


def confirm(
    inspected: Inspected, earlier: Inspected | None, silent_s: float, *, speaks: bool = False
) -> Verdict:
    """Whether a suspected process is to be replaced, from how the kernel shows it now and at the look before.

    `silent_s` is how long it was not heard. Of a process that `speaks` but stands still it is how long it has not
    moved; while such a one computes, the deadline of the request decides, not this. `earlier` must be of the same
    suspicion: what a process used since an older one says nothing about whether it runs now.
    """
    state = inspected.state
    if state in {"T", "t"}:
        return _replace("stopped", f"state {state}: it was stopped by a signal or a debugger")
    if state in {"", "Z", "X", "x"}:
        shown = f"state {state}" if state else "no such process"
        return _replace("dead", f"{shown}: it has ended, the report of it is on its way or was lost")
    if silent_s < (STUCK_S if speaks else SILENT_S):
        return Verdict(Resolution.CLEAR, "", f"it was heard {silent_s:.1f} s ago and is in state {state}")
    used_s = 0.0 if earlier is None else inspected.cpu_s - earlier.cpu_s
    used = f"state {state}, {used_s:.2f} s of processor time since the look before"
    runs = state == "R" or used_s > (HEARTBEAT_CPU_S if speaks else 0.0)
    if speaks and runs:
        return _wait(f"{used}: it computes")
    if state == "D":
        return _limited("hung", f"{used}, it waits in the kernel", silent_s, UNINTERRUPTIBLE_S)
    if runs:
        return _limited("link", f"{used}: it runs, but can not be heard", silent_s, UNREACHABLE_S)
    if earlier is None:
        return _wait(f"state {state}: only a second look shows whether it uses the processor")
    return _limited("hung", f"{used}: it sleeps", silent_s, HUNG_S)


def _limited(fault: str, seen: str, silent_s: float, limit_s: float) -> Verdict:
    """Wait up to a limit, then replace."""
    reason = f"{seen}; nothing from it for {silent_s:.1f} s, at most {limit_s:.0f} s are allowed"
    return _replace(fault, reason) if silent_s >= limit_s else _wait(reason)


def _wait(reason: str) -> Verdict:
    return Verdict(Resolution.WAIT, "", reason)


def _replace(fault: str, reason: str) -> Verdict:
    return Verdict(Resolution.REPLACE, fault, reason)
