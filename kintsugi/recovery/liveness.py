"""Liveness of the processes that report to the master: silence, standstill, loss of a host.

Exits are not handled here: the kernel reports them to the agents, and these to the master. What remains is a process
that runs and does nothing. `LivenessMonitor` suspects from heartbeats and their absence; `confirm` decides after the
agent has inspected the process. A suspicion costs an inspection and a confirmation costs the process, so suspicion is
quick and confirmation is slow.

Heartbeats need the interpreter, and one call of a library can hold it for a minute: a tokenizer, a reward, a save. So
silence alone replaces nothing. The agent sees from outside which of these a silent process is:

    stopped, frozen, ended        state in /proc, control group                    replaced at once
    unreachable                   its recorded heartbeats go on                    replaced after `UNREACHABLE_S`
    blocked in the kernel         state D, no CPU time, no context switch          replaced after `UNINTERRUPTIBLE_S`
    kept by a call that computes  no recorded heartbeat, CPU time advances         replaced after `COMPUTING_CALL_S`
    kept by a call that sleeps    no recorded heartbeat, no CPU time               replaced after `SLEEPING_CALL_S`

Everything here is pure: `now` is passed in (monotonic seconds of the master), nothing is read or sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kintsugi.protocol.agents import Inspected
from kintsugi.protocol.membership import Heartbeat
from kintsugi.types import Role, Wait, role_of

SILENT_S = 1.5
"""Three missed heartbeats. A shorter limit would raise alarms for heartbeats that are late on a busy machine; a stopped
process is seen by its agent earlier anyway."""
REPEAT_S = 1.0
"""Interval at which a suspicion is repeated while it lasts; each time the process is inspected again."""
ATTENTIVE_S = 0.25
"""Longest time between two calls of a running master (its tick is 0.2 s). Beyond it the master did not run (a pause of
the interpreter, an overloaded host, SIGSTOP) and could not receive heartbeats: that time does not count."""
QUIET_S = 0.9
"""Longest gap between heartbeats of any process while at least one sends them. In a longer gap the clock of the monitor
stops: otherwise the processes with the oldest heartbeats would be suspected just before it is clear that all are
silent. Long enough that a process is detected in 2.5 s if a single other one is left and sends only every 1.2 s."""
ALL_SILENT_S = 1.3
"""A gap longer than any late heartbeat: the fault was in the master or the network, and all timers restart after it."""
ALL_SILENT_GRACE_S = 5.0
"""Time for which the silence of all processes is attributed to the master or the network. After it every host is
suspected."""
FRESH_START_EVERY_S = 10.0
"""Shortest time between two restarts of all timers: a cluster so slow that all of it falls silent repeatedly must not
hide a process that never returns."""
STUCK_S = 3.0
"""Least time that a request is given: a busy machine may need seconds without any fault."""
STUCK_FACTOR = 3.0
"""Multiple of the longest answer so far that a request is given."""
FIRST_ANSWER_S = 60.0
"""Time for the first answer: nothing is known yet, libraries warm up, kernels are compiled, files are read."""
SAVE_S = 60.0
"""Time for a save, which moves no counter while it writes and flushes, on a disk that may stall."""
ANYONE = "anyone"
"""Name that an idle process declares as the subject of its wait."""


class SuspicionKind(StrEnum):
    """Kind of a suspicion."""

    SILENT = "silent"
    """No heartbeats."""
    STUCK = "stuck"
    """Heartbeats arrive, but the main thread makes no progress with a pending request."""
    HOST = "host"
    """Neither the agent nor any process of a host sends heartbeats; named after the agent."""
    SLOW = "slow"
    """Far slower than its peers and than its own past."""
    CHIP = "chip"
    """An accelerator is broken or reports warnings; named after the agent that reported it."""
    DIAGNOSED = "diagnosed"
    """The diagnosis names it as the cause of a problem."""


class Suspicion(msgspec.Struct, frozen=True):
    """One suspected process: `Suspicion("model-1", "1.0", STUCK, "has not moved for 4.1 s …", 20.4)`."""

    process: str
    incarnation: str
    kind: SuspicionKind
    evidence: str
    """Evidence, one sentence with measured values."""
    first_seen: float
    """Time at which this suspicion arose (monotonic seconds of the master); repetitions keep it."""
    lasting_s: float = 0.0
    """Time for which the process was silent or made no progress, while the master was running."""


class OpenRequest(msgspec.Struct, frozen=True):
    """A request of the master without an answer: `OpenRequest("call-7", "RunCall", since=12.0, usual_s=0.8)`."""

    token: str
    kind: str
    """Class name of the message."""
    since: float
    usual_s: float | None = None
    """Longest answer of this kind so far; None before the first."""

    @property
    def allowance_s(self) -> float:
        """Time that the request may stay open without progress before the process is suspected."""
        least_s = SAVE_S if self.kind == "Save" else STUCK_S
        known_s = FIRST_ANSWER_S if self.usual_s is None else STUCK_FACTOR * self.usual_s
        return max(least_s, known_s)


CONTROL_THREAD = frozenset({Role.MODEL, Role.SERVER})
"""Roles with a control thread, which sends heartbeats while the main thread hangs. All others send them from their main
loop: when it hangs, they are silent."""


@dataclass(slots=True, eq=False)
class _Host:
    members: set[str] = field(default_factory=set)
    agent: str | None = None
    last_heartbeat: float = 0.0
    """Time of the last heartbeat of any of its processes."""


@dataclass(slots=True, eq=False)
class _Watched:
    """One process by its heartbeats. Times are of the clock of the monitor."""

    process: str
    incarnation: str
    host: _Host
    can_hang: bool
    last_heartbeat: float
    moved: float
    """Time of the last progress: a counter grew, a wait began or ended, or it was idle."""
    counters: dict[str, int] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()
    awaited: tuple[str, ...] = ()
    """Processes that it declares to wait for."""
    idle: bool = False


@dataclass(slots=True)
class _Finding:
    """A suspicious process at this moment, whether or not it was reported before."""

    watched: _Watched
    kind: SuspicionKind
    evidence: str
    lasting_s: float


@dataclass(slots=True)
class _Open:
    """A suspicion that lasts."""

    first_seen: float
    told: float


class LivenessMonitor:
    """Takes every heartbeat; `check` returns the suspected processes.

    Its clock is that of the master, less the time in which the master did not run and less the time in which no
    heartbeat at all arrived. Processes are kept in the order of their last heartbeats, so that a check looks only at
    silent ones and at overdue requests.
    """

    def __init__(self) -> None:
        self._watched: OrderedDict[str, _Watched] = OrderedDict()
        self._hosts: dict[str, _Host] = {}
        self._open: dict[tuple[str, str, SuspicionKind], _Open] = {}
        self._called: float | None = None
        self._not_counted_s = 0.0
        self._last_heartbeat = 0.0
        """Time of the last heartbeat of any process."""
        self._fresh_start = float("-inf")

    def joined(self, process: str, incarnation: str, now: float, *, host: str) -> None:
        """Take a registration, the first or a repeated one, as a heartbeat."""
        clock = self._end_gap(self._advance_clock(now))
        self.forget(process)
        role = role_of(process)
        home = self._hosts.setdefault(host, _Host())
        home.members.add(process)
        home.last_heartbeat = clock
        if role is Role.AGENT:
            home.agent = process
        self._watched[process] = _Watched(process, incarnation, home, role in CONTROL_THREAD, clock, clock)

    def forget(self, process: str) -> None:
        """Expect no more heartbeats of a process that is known to be lost."""
        watched = self._watched.pop(process, None)
        if watched is None:
            return
        home = watched.host
        home.members.discard(process)
        if home.agent == process:
            home.agent = None

    def on_heartbeat(self, process: str, incarnation: str, heartbeat: Heartbeat, now: float) -> None:
        """Take a heartbeat. Those of unknown processes and earlier incarnations are ignored."""
        clock = self._advance_clock(now)
        watched = self._watched.get(process)
        if watched is None or watched.incarnation != incarnation:
            return
        clock = self._end_gap(clock)
        silent_s = clock - watched.last_heartbeat
        if silent_s >= SILENT_S:
            # Nothing is known of its main thread in that time: one call may have kept all threads.
            watched.moved += silent_s
        watched.last_heartbeat = watched.host.last_heartbeat = clock
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
        """Return new suspicions, and those that were not reported for a second. `asked`: pending requests by
        process."""
        clock = self._advance_clock(now)
        quiet_s = clock - self._last_heartbeat
        if len(self._watched) > 1 and QUIET_S < quiet_s <= ALL_SILENT_GRACE_S:
            clock = self._last_heartbeat + QUIET_S
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

    # Clock.

    def _advance_clock(self, now: float) -> float:
        """Return the time on the clock of the monitor, which excludes pauses of the master."""
        if self._called is not None:
            self._not_counted_s += max(0.0, now - self._called - ATTENTIVE_S)
        self._called = now
        return now - self._not_counted_s

    def _end_gap(self, clock: float) -> float:
        """End a gap without heartbeats: it does not count either, and after a long one all timers restart."""
        quiet_s = clock - self._last_heartbeat
        if len(self._watched) > 1:
            is_fresh_start = quiet_s >= ALL_SILENT_S and clock - self._fresh_start >= FRESH_START_EVERY_S
            not_counted_s = quiet_s if is_fresh_start else max(0.0, quiet_s - QUIET_S)
            self._not_counted_s += not_counted_s
            clock -= not_counted_s
            if is_fresh_start:
                self._fresh_start = clock
        self._last_heartbeat = clock
        return clock

    # Silence.

    def _silent(self, clock: float) -> Iterator[_Finding]:
        """Find silent processes. The oldest heartbeats come first, so the first one in time ends the search."""
        hosts: set[str] = set()
        for process, watched in self._watched.items():
            silent_s = clock - watched.last_heartbeat
            if silent_s < SILENT_S:
                return
            home = watched.host
            home_silent_s = clock - home.last_heartbeat
            is_alone = len(home.members) == 1
            if home.agent is not None and home_silent_s >= SILENT_S and not is_alone:
                if home.agent not in hosts:
                    hosts.add(home.agent)
                    yield self._host_silent(home, self._watched[home.agent], home_silent_s)
            elif QUIET_S <= home_silent_s < SILENT_S and not is_alone and not self._is_open(watched):
                # The rest of its host seems to follow: soon the host is suspected, or this process alone.
                continue
            else:
                evidence = (
                    f"no heartbeat of {process} for {silent_s:.1f} s, three or more are missing; "
                    f"the last one of any process came {clock - self._last_heartbeat:.1f} s ago"
                )
                yield _Finding(watched, SuspicionKind.SILENT, evidence, silent_s)

    def _is_open(self, watched: _Watched) -> bool:
        return (watched.process, watched.incarnation, SuspicionKind.SILENT) in self._open

    @staticmethod
    def _host_silent(home: _Host, agent: _Watched, silent_s: float) -> _Finding:
        evidence = (
            f"neither {agent.process} nor any of the {len(home.members) - 1} other processes of its host "
            f"sent a heartbeat for {silent_s:.1f} s"
        )
        return _Finding(agent, SuspicionKind.HOST, evidence, silent_s)

    # Standstill.

    def _stuck(
        self, clock: float, now: float, asked: Mapping[str, Sequence[OpenRequest]]
    ) -> Iterator[_Finding]:
        """Follow the declared waits from overdue requests to processes that wait for none and make no progress.

        A process that waits for another one is not the cause. A cycle of waits has no end and blames none of them: each
        wait has its own deadline.
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
    """Return the names in declared waits; one wait may name several."""
    names = {name: None for wait in waits for name in wait.whom.split(", ")}
    return tuple(name for name in names if name != ANYONE)


def _work(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the counters that the main thread moves. Counters with a dot in their name belong to the control thread,
    which counts even while the main thread hangs."""
    return {name: count for name, count in counters.items() if "." not in name}


def _stands_still(watched: _Watched, clock: float, allowance_s: float) -> bool:
    """Return whether a process made no progress up to its last heartbeat; a silent one cannot be judged."""
    speaks = clock - watched.last_heartbeat < SILENT_S
    return watched.can_hang and speaks and watched.last_heartbeat - watched.moved > allowance_s


def _standstill(watched: _Watched, asked: str, request: OpenRequest, *, open_s: float) -> _Finding:
    still_s = watched.last_heartbeat - watched.moved
    usual = (
        "none was answered yet" if request.usual_s is None else f"at most {request.usual_s:.1f} s until now"
    )
    path = "" if asked == watched.process else f", which {asked} waits for,"
    evidence = (
        f"{watched.process}{path} sends heartbeats but has not moved for {still_s:.1f} s "
        "and waits for no other process; "
        f"{request.kind} of {asked} has been open for {open_s:.1f} s ({usual})"
    )
    return _Finding(watched, SuspicionKind.STUCK, evidence, still_s)


# Inspection by the agent.

UNREACHABLE_S = 10.0
"""Time that a process whose loop turns has to be heard again: a link may recover, a machine may catch up."""
HUNG_S = 5.0
"""Time for a process that speaks, sleeps, uses no CPU and makes no progress with a request beyond its allowance."""
UNINTERRUPTIBLE_S = 15.0
"""Time for one uninterruptible sleep in the kernel for a disk or a device, which cannot be ended earlier."""
SLEEPING_CALL_S = 60.0
"""Time for a call that keeps a process silent and uses no CPU. It may wait for a server or a disk; the package itself
never blocks without a deadline, so a call of a library is the only other explanation than a deadlock in one."""
COMPUTING_CALL_S = 180.0
"""Time for a call that keeps a process silent and computes."""
HEARTBEAT_CPU_S = 0.05
"""CPU time between two inspections that heartbeats, or threads that wait for the interpreter, do not explain."""


class SuspicionResolution(StrEnum):
    """Decision about a suspicion."""

    WAIT = "wait"
    REPLACE = "replace"
    CLEAR = "clear"


class Activity(StrEnum):
    """State of a silent process between two inspections."""

    UNKNOWN = "unknown"
    """It was inspected once."""
    TURNING = "turning"
    """Its loop turns and records heartbeats; they do not arrive."""
    BLOCKED = "blocked"
    """Its main thread stays in one uninterruptible sleep in the kernel."""
    COMPUTING = "computing"
    """One call keeps it and computes."""
    SLEEPING = "sleeping"
    """One call keeps it and sleeps."""


CALLS = frozenset({Activity.COMPUTING, Activity.SLEEPING})
"""One call keeps the process: its loop does not turn, although it is neither stopped nor frozen."""


class Inspection(msgspec.Struct, frozen=True):
    """One inspection of a silent or stuck process, and what the master concluded from it."""

    inspected: Inspected
    activity: Activity = Activity.UNKNOWN
    lasting_s: float = 0.0
    """Age of the suspicion at this inspection."""
    since_s: float = 0.0
    """Age of the suspicion since which the activity lasts."""


class LivenessDecision(msgspec.Struct, frozen=True):
    """Decision after an inspection: `LivenessDecision(SuspicionResolution.REPLACE, "stopped", "state T: …", …)`."""

    decision: SuspicionResolution
    fault: str
    """"stopped", "dead", "link" or "hung"; empty unless the process is to be replaced."""
    reason: str
    inspection: Inspection
    """To be passed with the next inspection of the same suspicion."""


def confirm(
    inspected: Inspected, earlier: Inspection | None, silent_s: float, *, speaks: bool = False
) -> LivenessDecision:
    """Decide whether to replace a suspected process, from its state in the kernel now and at the inspection before.

    `silent_s` is the time without heartbeats. For a process that `speaks` but is stuck it is the time without progress;
    while such a process computes, the deadline of its request decides. `earlier` must belong to the same suspicion: the
    CPU time since an older one does not show whether the process runs now.
    """
    state = inspected.state
    found = _inspection(inspected, earlier, silent_s)
    if state in {"T", "t"}:
        return _replace("stopped", f"state {state}: it was stopped by a signal or a debugger", found)
    if inspected.frozen:
        return _replace("stopped", f"state {state}: its control group is frozen", found)
    if state in {"", "Z", "X", "x"}:
        shown = f"state {state}" if state else "no such process"
        return _replace("dead", f"{shown}: it has ended, the report of it is on its way or was lost", found)
    if silent_s < (STUCK_S if speaks else SILENT_S):
        reason = f"its last heartbeat is {silent_s:.1f} s old and is in state {state}"
        return LivenessDecision(SuspicionResolution.CLEAR, "", reason, found)
    used_s = 0.0 if earlier is None else inspected.cpu_s - earlier.inspected.cpu_s
    seen = f"state {state}, {used_s:.2f} s of CPU time since the inspection before"
    return _of_stuck(found, seen, silent_s, used_s) if speaks else _of_silent(found, seen, silent_s)


def _inspection(inspected: Inspected, earlier: Inspection | None, lasting_s: float) -> Inspection:
    """Compare an inspection with the one before."""
    if earlier is None:
        return Inspection(inspected, lasting_s=lasting_s)
    before = earlier.inspected
    used_s = inspected.cpu_s - before.cpu_s
    if inspected.recorded != before.recorded:
        activity = Activity.TURNING
    elif inspected.state == "D" and used_s == 0.0 and inspected.switches == before.switches:
        activity = Activity.BLOCKED
    else:
        activity = Activity.COMPUTING if used_s > HEARTBEAT_CPU_S else Activity.SLEEPING
    # The first comparison holds for the time before it as well.
    is_same = earlier.activity in (activity, Activity.UNKNOWN)
    return Inspection(inspected, activity, lasting_s, earlier.since_s if is_same else earlier.lasting_s)


def _of_silent(found: Inspection, seen: str, silent_s: float) -> LivenessDecision:
    """Decide about a process that sends no heartbeats and is neither stopped nor frozen nor dead."""
    lasting_s = silent_s - found.since_s
    if found.activity in CALLS and silent_s >= COMPUTING_CALL_S:
        return _limited("hung", f"{seen}: one call keeps it silent", silent_s, COMPUTING_CALL_S, found)
    match found.activity:
        case Activity.UNKNOWN:
            return _wait(f"{seen}: only a second inspection shows what it does", found)
        case Activity.TURNING:
            what = f"{seen}: it runs and records heartbeats, but none arrives"
            return _limited("link", what, lasting_s, UNREACHABLE_S, found)
        case Activity.BLOCKED:
            what = f"{seen}, no context switch: it waits in the kernel"
            return _limited("hung", what, lasting_s, UNINTERRUPTIBLE_S, found)
        case Activity.COMPUTING:
            what = f"{seen}: it computes in one call, without a heartbeat"
            return _limited("hung", what, silent_s, COMPUTING_CALL_S, found)
        case Activity.SLEEPING:
            what = f"{seen}: it sleeps in one call, without a heartbeat"
            return _limited("hung", what, lasting_s, SLEEPING_CALL_S, found)


def _of_stuck(found: Inspection, seen: str, still_s: float, used_s: float) -> LivenessDecision:
    """Decide about a process that sends heartbeats and makes no progress with a request."""
    if found.inspected.state == "R" or used_s > HEARTBEAT_CPU_S:
        return _wait(f"{seen}: it computes", found)
    if found.inspected.state == "D":
        return _limited("hung", f"{seen}, it waits in the kernel", still_s, UNINTERRUPTIBLE_S, found)
    if found.activity is Activity.UNKNOWN:
        return _wait(f"{seen}: only a second inspection shows whether it uses the CPU", found)
    return _limited("hung", f"{seen}: it sleeps", still_s, HUNG_S, found)


def _limited(fault: str, seen: str, lasting_s: float, limit_s: float, found: Inspection) -> LivenessDecision:
    """Wait up to a limit, then replace."""
    reason = f"{seen}; nothing from it for {lasting_s:.1f} s, at most {limit_s:.0f} s are allowed"
    return _replace(fault, reason, found) if lasting_s >= limit_s else _wait(reason, found)


def _wait(reason: str, found: Inspection) -> LivenessDecision:
    return LivenessDecision(SuspicionResolution.WAIT, "", reason, found)


def _replace(fault: str, reason: str, found: Inspection) -> LivenessDecision:
    return LivenessDecision(SuspicionResolution.REPLACE, fault, reason, found)
