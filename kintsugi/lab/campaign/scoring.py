"""Scoring of a diagnosis against the faults that were injected. Pure.

Scoring is strict: the answer must name the target process and the fault kind of what was injected. For a fault of the
run folder's disk, every process that uses the disk is right; for a fault of name resolution, every process on that
host; for a neighbour on an accelerator and for bytes of shared memory, every rank and server on the host.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import msgspec

from kintsugi.diagnosis.verdict import Cause, FaultKind, Hop
from kintsugi.lab.injector.injection import Ability
from kintsugi.types import Role, role_of

KINDS: dict[Ability, frozenset[FaultKind]] = {
    Ability.CPU: frozenset({FaultKind.CPU}),
    Ability.MEMORY: frozenset({FaultKind.MEMORY}),
    Ability.DISK_FILL: frozenset({FaultKind.DISK_FULL}),
    Ability.DISK_LOAD: frozenset({FaultKind.DISK_SLOW}),
    Ability.NETWORK_DELAY: frozenset({FaultKind.NETWORK_DELAY}),
    Ability.NETWORK_LOSS: frozenset({FaultKind.NETWORK_LOSS}),
    Ability.DNS: frozenset({FaultKind.DNS}),
    Ability.NETWORK_CUT: frozenset({FaultKind.NETWORK_CUT}),
    Ability.DEVICE_MEMORY: frozenset({FaultKind.DEVICE_MEMORY}),
    Ability.DEVICE_SLOW: frozenset({FaultKind.DEVICE}),
    Ability.KILL: frozenset({FaultKind.KILLED}),
    Ability.STOP: frozenset({FaultKind.STOPPED}),
    Ability.CORRUPT: frozenset({FaultKind.CORRUPTION}),
    Ability.NUMERIC: frozenset({FaultKind.NUMERIC}),
    Ability.DISK_ERROR: frozenset({FaultKind.DISK_ERROR}),
    Ability.GROW: frozenset({FaultKind.MEMORY, FaultKind.DEVICE_MEMORY}),
    Ability.USER_CODE: frozenset({FaultKind.USER_CODE}),
    # On this machine a host is its agent.
    Ability.HOST_LOSS: frozenset({FaultKind.HOST_LOST, FaultKind.KILLED}),
}
"""Fault kinds that are right for each injected fault type."""
OF_THE_DISK = frozenset({Ability.DISK_FILL, Ability.DISK_LOAD})
"""Fault types that affect the disk of the run folder, which all hosts share."""
OF_THE_HOST = frozenset({Ability.DNS})
"""Fault types that are injected into one process and affect its whole host."""

_ROLES_THAT_WAIT: frozenset[tuple[Role, Role]] = frozenset(
    {
        (Role.MODEL, Role.MODEL),
        (Role.MODEL, Role.ROLLOUT),
        (Role.MODEL, Role.AGENT),
        (Role.SERVER, Role.AGENT),
        (Role.SERVER, Role.MODEL),
        (Role.SERVER, Role.MANAGER),
        (Role.MANAGER, Role.SERVER),
        (Role.ROLLOUT, Role.MANAGER),
        (Role.ROLLOUT, Role.SERVER),
        (Role.AGENT, Role.MODEL),
        (Role.AGENT, Role.SERVER),
        (Role.MANAGER, Role.AGENT),
        (Role.ROLLOUT, Role.AGENT),
        (Role.AGENT, Role.AGENT),
    }
    | {(Role.MASTER, role) for role in Role}
    | {(role, Role.MASTER) for role in Role}
)
"""Pairs (waiting role, awaited role): the directions in which a fault can propagate. A hop in another direction is
wrong."""


class ExpectedCause(msgspec.Struct, frozen=True):
    """Right answer for an injected fault."""

    processes: frozenset[str]
    kinds: frozenset[FaultKind]
    start: float


def expected_cause(
    ability: Ability,
    *,
    target: str,
    start: float,
    host_of: dict[str, str],
    kinds: Collection[FaultKind] = (),
    shares_device: bool = False,
    shares_memory: bool = False,
) -> ExpectedCause:
    """Return the right answer; `host_of` maps processes to hosts, `kinds` overrides the kinds of the fault type.

    `shares_device`: the fault is of an accelerator, which all ranks and servers of that host use. `shares_memory`:
    bytes were changed in memory that they have mapped, which does not show the process that changed it.
    """
    processes = {target}
    if shares_device or shares_memory:
        processes |= {
            process
            for process, host in host_of.items()
            if host == host_of.get(target) and _role(process) in (Role.MODEL, Role.SERVER)
        }
    if ability in OF_THE_DISK:
        processes |= set(host_of)
    if ability in OF_THE_HOST and target in host_of:
        processes |= {process for process, host in host_of.items() if host == host_of[target]}
    return ExpectedCause(frozenset(processes), frozenset(kinds) or KINDS[ability], start)


def is_right(process: str, kind: str, expected: Iterable[ExpectedCause]) -> bool:
    """Whether an answer matches one of the right answers."""
    return any(process in each.processes and kind in each.kinds for each in expected)


def is_right_path(path: Sequence[Hop], *, cause: str) -> bool:
    """Whether a path leads from the named cause to a visible symptom, in directions in which a fault can propagate.

    A hop is right when its process can wait for the one before it. Symptoms are visible at the master, or at something
    that is no process (a step, a user): a path that ends elsewhere, or never leaves the cause, does not explain the
    symptom.
    """
    if not path or path[0].process != cause or _role(path[-1].process) not in (Role.MASTER, None):
        return False
    processes = [hop.process for hop in path]
    stations = [
        process for process, before in zip(processes, ["", *processes], strict=False) if process != before
    ]
    if len(set(stations)) < len(stations):
        return False
    return all(_may_wait(waiter, waited) for waited, waiter in pairwise(stations))


def _may_wait(waiter: str, waited: str) -> bool:
    roles = (_role(waiter), _role(waited))
    return None in roles or roles in _ROLES_THAT_WAIT


def _role(process: str) -> Role | None:
    """Return the role; None for something that is no process: a step, a user."""
    try:
        return role_of(process)
    except (ValueError, AssertionError):
        return None


def num_hops(path: Sequence[Hop] | Sequence[str]) -> int:
    """Count how often a fault propagates from one process to another.

    >>> num_hops(["model-1", "model-1", "agent-0", "server-0"])
    2
    """
    processes = [hop if isinstance(hop, str) else hop.process for hop in path]
    return sum(before != after for before, after in pairwise(processes))


# Table of a campaign.


class ScoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one method's answer to one case."""

    said: bool
    """Whether a cause was named."""
    top1: bool = False
    top3: bool = False
    """A right cause is among the first three."""
    every: bool = False
    """All right causes are among the first three at the end of the case."""
    path: bool = False
    onset_error_s: float | None = None
    verdict_s: float | None = None


def score(
    causes: Sequence[Cause],
    expected: Sequence[ExpectedCause],
    *,
    t: float | None,
    start: float,
    at_the_end: Sequence[Cause] = (),
) -> ScoredAnswer:
    """Score an answer. With two faults, the first answer has to name one of them, and the last one both."""
    if not causes:
        return ScoredAnswer(said=False)
    right = [is_right(cause.process, cause.kind, expected) for cause in causes[:3]]
    last = (at_the_end or causes)[:3]
    named = [any(is_right(cause.process, cause.kind, [each]) for cause in last) for each in expected]
    first = next((cause for cause, is_it in zip(causes, right, strict=False) if is_it), None)
    did_it = [each for each in expected if first is not None and is_right(first.process, first.kind, [each])]
    return ScoredAnswer(
        said=True,
        top1=right[0],
        top3=any(right),
        every=bool(expected) and all(named),
        path=right[0] and is_right_path(causes[0].path, cause=causes[0].process),
        onset_error_s=None if first is None else min(abs(first.onset - each.start) for each in did_it),
        verdict_s=None if t is None else t - start,
    )


class ScoreRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a method in a campaign's table; shares from 0 to 1, None where there was no such case."""

    cases: int
    """Cases with a fault that had an effect."""
    faint: int
    """Cases with a fault that had no effect."""
    top1: float | None
    top3: float | None
    path: float | None
    every: float | None
    """Share of the cases with two faults in which both were named."""
    abstained: float | None
    """Share of the cases without a fault in which no cause was named."""
    misdiagnosed: float | None
    """Share of all cases in which a wrong cause was named."""
    onset_error_s: float | None
    """Median over the right answers."""
    verdict_s: float | None
    """Median over all answers that named a cause."""


def row(
    faulty: Sequence[ScoredAnswer],
    quiet: Sequence[ScoredAnswer],
    *,
    faint: Sequence[ScoredAnswer] = (),
    two: Sequence[ScoredAnswer] = (),
) -> ScoreRow:
    """Compute the row of a method; `two` are the cases of `faulty` with two faults. Where a fault had no effect, naming
    nothing or the fault is right; everything else is a misdiagnosis."""
    wrong = [each.said and not each.top1 for each in (*faulty, *faint)] + [each.said for each in quiet]
    onsets = [each.onset_error_s for each in faulty if each.top1 and each.onset_error_s is not None]
    verdicts = [each.verdict_s for each in faulty if each.verdict_s is not None]
    return ScoreRow(
        cases=len(faulty),
        faint=len(faint),
        top1=_share(each.top1 for each in faulty),
        top3=_share(each.top3 for each in faulty),
        path=_share(each.path for each in faulty),
        every=_share(each.every for each in two),
        abstained=_share(not each.said for each in quiet),
        misdiagnosed=_share(wrong),
        onset_error_s=statistics.median(onsets) if onsets else None,
        verdict_s=statistics.median(verdicts) if verdicts else None,
    )


def _share(values: Iterable[bool]) -> float | None:
    each = list(values)
    return sum(each) / len(each) if each else None


_NAME = re.compile(rf"\b(?:{'|'.join(role.value for role in Role)})-\d+\b")


def processes_in(text: str) -> list[str]:
    """Return the process names in a text, in order."""
    return _NAME.findall(text)
