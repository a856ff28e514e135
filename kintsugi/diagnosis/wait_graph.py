"""Graph of waits between processes, and the path of a fault from its process to the visible symptom. Pure.

Processes declare their waits; those of the master are its open requests. Where no wait is declared, the path follows
the usual flow of work through the system.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle, awaited_processes, known_role
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import FaultKind, Hop
from kintsugi.types import Role

LEAST_WAIT_S = 0.4
"""Least wait that counts; shorter ones are normal."""
AFTER_S = 6.0
"""Time after a fault in which waits are attributed to it."""
NO_PROCESS = frozenset({"anyone", "itself", "this process"})


class WaitEdge(msgspec.Struct, frozen=True):
    """`waiter` waited for `seconds` for a reply of `awaited`."""

    waiter: str
    awaited: str
    what: str
    time: float
    seconds: float


def waits_in(bundle: EvidenceBundle, *, since: float, until: float) -> list[WaitEdge]:
    """Return the declared waits for other processes, the longest of each pair."""
    longest: dict[tuple[str, str], WaitEdge] = {}
    for process, beats in bundle.beats.items():
        for beat in beats:
            if not since <= beat.time <= until:
                continue
            for wait in beat.waits:
                seconds = beat.time - wait.since
                if wait.whom in NO_PROCESS or seconds < LEAST_WAIT_S:
                    continue
                for awaited in awaited_processes(wait):
                    key = (process, awaited)
                    if awaited != process and (key not in longest or seconds > longest[key].seconds):
                        longest[key] = WaitEdge(process, awaited, wait.what, beat.time, seconds)
    return list(longest.values())


def sinks(edges: list[WaitEdge]) -> dict[str, float]:
    """Return the processes that others wait for and that do not wait themselves, with the longest wait."""
    waiters = {edge.waiter for edge in edges}
    found: dict[str, float] = {}
    for edge in edges:
        if edge.awaited not in waiters:
            found[edge.awaited] = max(found.get(edge.awaited, 0.0), edge.seconds)
    return found


def path_from(bundle: EvidenceBundle, finding: Finding, *, symptom: Hop, at: float) -> tuple[Hop, ...]:
    """Return the path from the cause to the symptom: along declared waits, otherwise along the usual flow of work."""
    first = Hop(finding.process, finding.what, finding.onset)
    # Readings come once a second: an effect must not appear before its cause.
    symptom = Hop(symptom.process, symptom.what, max(symptom.time, finding.onset))
    if finding.process == MASTER:
        return (first, symptom) if symptom.what != first.what else (first,)
    until = min(at, finding.until + AFTER_S)
    edges = waits_in(bundle, since=finding.onset, until=until)
    declared = _declared(edges, finding.process)
    edges = declared or [
        WaitEdge(waiter, awaited, "", finding.onset, 0.0) for waiter, awaited in _usual_flow(bundle, finding)
    ]
    between = (
        Hop(edge.waiter, _text(edge), max(edge.time - edge.seconds, finding.onset))
        for edge in edges
        if edge.waiter != MASTER
    )
    return (first, *between, symptom)


def _text(edge: WaitEdge) -> str:
    if not edge.what:
        return f"waits for {edge.awaited}"
    return f"waits {edge.seconds:.1f} s for {edge.awaited}: {edge.what}"


def _declared(edges: list[WaitEdge], cause: str) -> list[WaitEdge]:
    """Return the shortest path from the cause to the master along declared waits; empty if there is none.

    A direct wait of the master comes last: its open request says less than waits between other processes.
    """
    waiting_for: dict[str, list[WaitEdge]] = {}
    for edge in edges:
        waiting_for.setdefault(edge.awaited, []).append(edge)
    ways: deque[tuple[str, list[WaitEdge]]] = deque([(cause, [])])
    seen, direct = {cause}, []
    while ways:
        awaited, way = ways.popleft()
        for edge in sorted(waiting_for.get(awaited, ()), key=lambda edge: edge.waiter == MASTER):
            if edge.waiter == MASTER:
                if way:
                    return [*way, edge]
                direct = [edge]
            elif edge.waiter not in seen:
                seen.add(edge.waiter)
                ways.append((edge.waiter, [*way, edge]))
    return direct


def _usual_flow(bundle: EvidenceBundle, finding: Finding) -> list[tuple[str, str]]:
    """Return (waiter, awaited) pairs along the flow of work: servers reply to the manager, it to the rollout workers,
    they to the master; ranks wait for each other; weights go from ranks through the agent of their host to servers."""
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


def _one(bundle: EvidenceBundle, role: Role, *, near: str) -> str:
    """Return one process of a role, on another host if there is one: a near one is often affected as well."""
    every = sorted(process for process in bundle.processes if process.startswith(f"{role.value}-"))
    return next((each for each in every if bundle.host(each) != bundle.host(near)), next(iter(every), ""))
