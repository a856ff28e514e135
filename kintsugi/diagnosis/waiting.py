"""Who waits for whom, and how trouble travels: from the one who does not move to what people see. Pure.

Processes declare their waits; the master's are the requests that it has no answer to. Where nobody has declared one,
the way that work goes through the system says who has to wait.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kintsugi.diagnosis.evidence import MASTER, Bundle, known_role
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import FaultKind, Hop
from kintsugi.diagnosis.words import processes_in
from kintsugi.types import Role

LEAST_WAIT_S = 0.4
"""Shorter waits are how processes work."""
AFTER_S = 6.0
"""How long after a fault those are looked at who wait because of it."""
NOBODY = frozenset({"anyone", "itself", "this process"})


class Edge(msgspec.Struct, frozen=True):
    """`waiter` stood still for `seconds`, because `whom` did not answer."""

    waiter: str
    whom: str
    what: str
    time: float
    seconds: float


def waits_in(bundle: Bundle, *, since: float, until: float) -> list[Edge]:
    """Declared waits for other processes, each with the longest that was seen."""
    longest: dict[tuple[str, str], Edge] = {}
    for process, beats in bundle.beats.items():
        for beat in beats:
            if not since <= beat.time <= until:
                continue
            for wait in beat.waits:
                seconds = beat.time - wait.since
                if wait.whom in NOBODY or seconds < LEAST_WAIT_S:
                    continue
                for whom in processes_in(wait.whom):
                    key = (process, whom)
                    if whom != process and (key not in longest or seconds > longest[key].seconds):
                        longest[key] = Edge(process, whom, wait.what, beat.time, seconds)
    return list(longest.values())


def sinks(edges: list[Edge]) -> dict[str, float]:
    """Those for whom others wait and who wait for nobody, with how long they are waited for."""
    waiters = {edge.waiter for edge in edges}
    found: dict[str, float] = {}
    for edge in edges:
        if edge.whom not in waiters:
            found[edge.whom] = max(found.get(edge.whom, 0.0), edge.seconds)
    return found


def path_from(bundle: Bundle, finding: Finding, *, symptom: Hop, at: float) -> tuple[Hop, ...]:
    """From the cause to what people see: along declared waits as far as there are any, else along the work's way."""
    first = Hop(finding.process, finding.what, finding.onset)
    # Figures come once a second: what follows is never told as earlier.
    symptom = Hop(symptom.process, symptom.what, max(symptom.time, finding.onset))
    if finding.process == MASTER:
        return (first, symptom) if symptom.what != first.what else (first,)
    until = min(at, finding.until + AFTER_S)
    edges = waits_in(bundle, since=finding.onset, until=until)
    declared = _declared(edges, finding.process)
    stations = declared or [
        Edge(waiter, whom, "", finding.onset, 0.0) for waiter, whom in _usual_way(bundle, finding)
    ]
    between = (
        Hop(edge.waiter, _told(edge), max(edge.time - edge.seconds, finding.onset))
        for edge in stations
        if edge.waiter != MASTER
    )
    return (first, *between, symptom)


def _told(edge: Edge) -> str:
    if not edge.what:
        return f"waits for {edge.whom}"
    return f"waits {edge.seconds:.1f} s for {edge.whom}: {edge.what}"


def _declared(edges: list[Edge], cause: str) -> list[Edge]:
    """The shortest way back from the cause to the master along declared waits; empty where there is none.

    A direct wait of the master is the last to be taken: that it asked somebody says less than who stood still for whom.
    """
    waiting_for: dict[str, list[Edge]] = {}
    for edge in edges:
        waiting_for.setdefault(edge.whom, []).append(edge)
    ways: deque[tuple[str, list[Edge]]] = deque([(cause, [])])
    seen, direct = {cause}, []
    while ways:
        whom, way = ways.popleft()
        for edge in sorted(waiting_for.get(whom, ()), key=lambda edge: edge.waiter == MASTER):
            if edge.waiter == MASTER:
                if way:
                    return [*way, edge]
                direct = [edge]
            elif edge.waiter not in seen:
                seen.add(edge.waiter)
                ways.append((edge.waiter, [*way, edge]))
    return direct


def _usual_way(bundle: Bundle, finding: Finding) -> list[tuple[str, str]]:
    """(who waits, for whom) by the way that work goes: servers answer the manager, it the rollout workers, they the
    master; ranks wait for each other; weights go from ranks through their host's agent to servers."""
    process, role = finding.process, known_role(finding.process)
    phase = bundle.phase_at(finding.until)
    name = phase.name if phase else ""
    rollout = _one(bundle, Role.ROLLOUT, near=process)
    manager = _one(bundle, Role.MANAGER, near=process)
    way: list[str] = []
    if role is Role.SERVER:
        way = [] if name in ("publishing", "starting") else [manager, rollout]
    elif role is Role.MANAGER:
        way = [rollout]
    elif role is Role.ROLLOUT:
        way = [_one(bundle, Role.MODEL, near=process)] if name == "training" else []
    elif role is Role.MODEL:
        is_link = finding.kind in (FaultKind.NETWORK_DELAY, FaultKind.NETWORK_LOSS, FaultKind.NETWORK_CUT)
        agents = [other for other in finding.others if other.startswith(Role.AGENT.value)]
        if name == "publishing" and is_link and agents:
            way = [agents[0], _one(bundle, Role.SERVER, near=process)]
        else:
            way = [next((peer for peer in bundle.role_peers(process)), "")]
    names = [process, *(each for each in way if each)]
    return [*zip(names[1:], names, strict=False), (MASTER, names[-1])]


def _one(bundle: Bundle, role: Role, *, near: str) -> str:
    """One process of a role, of another host if there is one: who is near is often hit too."""
    every = sorted(process for process in bundle.processes if process.startswith(f"{role.value}-"))
    return next((each for each in every if bundle.host(each) != bundle.host(near)), next(iter(every), ""))
