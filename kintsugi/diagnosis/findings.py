"""Findings: single faults of one process, before it is known what follows from what. Close findings are merged."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kintsugi.diagnosis.verdict import Evidence, FaultKind

SAME_S = 6.0
"""Findings of one process and kind this close to each other are merged."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    process: str
    kind: FaultKind
    onset: float
    until: float
    """Time of the last evidence."""
    strength: float
    """0 to 1: confidence from this evidence alone."""
    what: str
    """Predicate of the process: `was killed by SIGKILL`."""
    evidence: tuple[Evidence, ...] = ()
    is_fact: bool = False
    """An event (an end, a stop, an error), not a comparison of readings."""
    rules_out: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Other processes involved, as the peer of a link."""
    of_host: bool = False
    """The whole host is affected, and the process represents it."""
    advice: str = ""
    """Remedy, where it is another than that of the kind."""


def shortened(message: str, *, max_length: int = 240) -> str:
    """Return a message on one line, cut to a length that is quick to read."""
    line = " ".join(message.split())
    return line if len(line) <= max_length else f"{line[: max_length - 1]}…"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings of the same process and kind that follow each other closely; the strongest description is kept."""
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
        # Two independent pieces of evidence are stronger than one.
        strength=1 - (1 - first.strength) * (1 - 0.5 * second.strength),
        evidence=tuple(sorted(evidence.values(), key=lambda each: each.time)),
        is_fact=first.is_fact or second.is_fact,
        rules_out=tuple(dict.fromkeys((*first.rules_out, *second.rules_out))),
        others=tuple(dict.fromkeys((*first.others, *second.others))),
    )


def intervals(moments: Iterable[tuple[float, float]], *, gap_s: float) -> list[list[tuple[float, float]]]:
    """Group sorted (time, value) pairs that follow each other closely."""
    groups: list[list[tuple[float, float]]] = []
    for moment in moments:
        if groups and moment[0] - groups[-1][-1][0] <= gap_s:
            groups[-1].append(moment)
        else:
            groups.append([moment])
    return groups
