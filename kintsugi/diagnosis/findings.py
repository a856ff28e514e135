"""Something that is wrong with one process by itself, whatever followed from it; findings of one thing merge."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kintsugi.diagnosis.verdict import Evidence, FaultKind

SAME_S = 6.0
"""Two findings of the same thing so close to each other are one."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    process: str
    kind: FaultKind
    onset: float
    until: float
    """When it last showed."""
    strength: float
    """0 to 1: how sure this piece of evidence is by itself."""
    what: str
    """After the name of the process: `was killed by SIGKILL`."""
    evidence: tuple[Evidence, ...] = ()
    is_fact: bool = False
    """Something that happened (an end, a stop, an error), not a comparison."""
    rules_out: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Processes at the other end of what is wrong: a link's peer."""
    of_host: bool = False
    """Of all of its host, for which the process only stands."""


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of the same process and kind that follow each other closely are one; the strongest words stay."""
    groups: dict[tuple[str, FaultKind], list[Finding]] = {}
    for finding in sorted(findings, key=lambda each: each.onset):
        row = groups.setdefault((finding.process, finding.kind), [])
        if row and finding.onset <= row[-1].until + SAME_S:
            row[-1] = _both(row[-1], finding)
        else:
            row.append(finding)
    return [finding for row in groups.values() for finding in row]


def _both(first: Finding, second: Finding) -> Finding:
    best = max((first, second), key=lambda each: (each.is_fact, each.strength))
    evidence = {(each.source, each.quote): each for each in (*first.evidence, *second.evidence)}
    return msgspec.structs.replace(
        best,
        onset=min(first.onset, second.onset),
        until=max(first.until, second.until),
        # Two independent signs are more than one.
        strength=1 - (1 - first.strength) * (1 - 0.5 * second.strength),
        evidence=tuple(sorted(evidence.values(), key=lambda each: each.time)),
        is_fact=first.is_fact or second.is_fact,
        rules_out=tuple(dict.fromkeys((*first.rules_out, *second.rules_out))),
        others=tuple(dict.fromkeys((*first.others, *second.others))),
    )


def intervals(moments: Iterable[tuple[float, float]], *, gap_s: float) -> list[list[tuple[float, float]]]:
    """(time, value) pairs in order, grouped where they follow each other closely."""
    groups: list[list[tuple[float, float]]] = []
    for moment in moments:
        if groups and moment[0] - groups[-1][-1][0] <= gap_s:
            groups[-1].append(moment)
        else:
            groups.append([moment])
    return groups
