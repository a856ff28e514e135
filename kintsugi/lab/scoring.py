"""Whether a diagnosis is right: what was done against what was said. Pure.

Right is strict: the process that was hit, and the kind that belongs to what was done to it. What hits the disk of the
run folder is right with whoever uses it, what hits the name service of a host with any process of that host.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import msgspec

from kintsugi.diagnosis.verdict import Cause, FaultKind, Hop
from kintsugi.lab.injection import Ability
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
}
"""What each ability is called by who finds it."""
OF_THE_DISK = frozenset({Ability.DISK_FILL, Ability.DISK_LOAD})
"""What is done to the disk of the run folder, which all hosts share."""
OF_THE_HOST = frozenset({Ability.DNS})
"""What is done to a process and hits its whole host."""

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
"""(who waits, for whom): the ways on which trouble can travel. A hop against them is a mistake."""


class Culprit(msgspec.Struct, frozen=True):
    """What was really done, in the words of a diagnosis."""

    processes: frozenset[str]
    kinds: frozenset[FaultKind]
    start: float


def culprit(
    ability: Ability,
    *,
    target: str,
    start: float,
    host_of: dict[str, str],
    kinds: Collection[FaultKind] = (),
) -> Culprit:
    """`host_of` says which process is where; `kinds` are those of an experiment that knows better."""
    processes = {target}
    if ability in OF_THE_DISK:
        processes |= set(host_of)
    if ability in OF_THE_HOST and target in host_of:
        processes |= {process for process, host in host_of.items() if host == host_of[target]}
    return Culprit(frozenset(processes), frozenset(kinds) or KINDS[ability], start)


def is_right(process: str, kind: str, culprits: Iterable[Culprit]) -> bool:
    """Whether this is one of those who did it."""
    return any(process in each.processes and kind in each.kinds for each in culprits)


def is_right_path(path: Sequence[Hop], *, cause: str) -> bool:
    """From the cause that was named to what people saw, along ways on which trouble can travel.

    A hop is right when its process may wait for the one before it. People see the master, or what is no process (a
    step, a user): a path that ends elsewhere, or never leaves the cause, does not say how it showed.
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
    """None of what is no process: a run's step, a user."""
    try:
        return role_of(process)
    except (ValueError, AssertionError):
        return None


def num_hops(path: Sequence[Hop] | Sequence[str]) -> int:
    """How often the trouble went from one process to another.

    >>> num_hops(["model-1", "model-1", "agent-0", "server-0"])
    2
    """
    processes = [hop if isinstance(hop, str) else hop.process for hop in path]
    return sum(before != after for before, after in pairwise(processes))


# A campaign's table.


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One method's answer to one case."""

    said: bool
    """A cause was named."""
    top1: bool = False
    top3: bool = False
    """One of those who did it is among the first three."""
    every: bool = False
    """All of those who did it are among the first three when the case is over."""
    path: bool = False
    onset_error_s: float | None = None
    verdict_s: float | None = None


def score(
    causes: Sequence[Cause],
    culprits: Sequence[Culprit],
    *,
    t: float | None,
    start: float,
    at_the_end: Sequence[Cause] = (),
) -> Scored:
    """With two culprits, the first answer has to be one of them, and the last one, where it is another, both."""
    if not causes:
        return Scored(said=False)
    right = [is_right(cause.process, cause.kind, culprits) for cause in causes[:3]]
    last = (at_the_end or causes)[:3]
    named = [any(is_right(cause.process, cause.kind, [each]) for cause in last) for each in culprits]
    first = next((cause for cause, is_it in zip(causes, right, strict=False) if is_it), None)
    did_it = [each for each in culprits if first is not None and is_right(first.process, first.kind, [each])]
    return Scored(
        said=True,
        top1=right[0],
        top3=any(right),
        every=bool(culprits) and all(named),
        path=right[0] and is_right_path(causes[0].path, cause=causes[0].process),
        onset_error_s=None if first is None else min(abs(first.onset - each.start) for each in did_it),
        verdict_s=None if t is None else t - start,
    )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A method in a campaign's table; shares are of 0 to 1, None where there was no case of the kind."""

    cases: int
    """With a fault that the run felt."""
    faint: int
    """With a fault that changed nothing."""
    top1: float | None
    top3: float | None
    path: float | None
    every: float | None
    """Named both, of the cases with two faults."""
    abstained: float | None
    """Of the cases in which nothing was wrong."""
    misdiagnosed: float | None
    """Named something that it was not, of all cases."""
    onset_error_s: float | None
    """Median, of those that were right."""
    verdict_s: float | None
    """Median, of those that said something."""


def row(
    faulty: Sequence[Scored],
    quiet: Sequence[Scored],
    *,
    faint: Sequence[Scored] = (),
    two: Sequence[Scored] = (),
) -> Row:
    """`two` are those of `faulty` with two faults. Where a fault changed nothing, silence is right and so is its name;
    anything else is a misdiagnosis."""
    wrong = [each.said and not each.top1 for each in (*faulty, *faint)] + [each.said for each in quiet]
    onsets = [each.onset_error_s for each in faulty if each.top1 and each.onset_error_s is not None]
    verdicts = [each.verdict_s for each in faulty if each.verdict_s is not None]
    return Row(
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
    """Names of processes in a sentence, in order."""
    return _NAME.findall(text)
