"""Result of a campaign, written to `campaign.json` and read by the report: its cases and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kintsugi.diagnosis.verdict import Cause
from kintsugi.lab.campaign import log_readers, scoring
from kintsugi.lab.campaign.cases import CaseClass
from kintsugi.lab.campaign.scoring import ScoredAnswer
from kintsugi.lab.scenarios.records import host_facts, now_as_text

OURS = "ours"
METHODS = {
    OURS: "Kintsugi's diagnosis",
    log_readers.LAST_ERROR: "last error in the master's log",
    log_readers.FIRST_ERROR: "first error in any log",
}
"""Methods that are compared, as a report names them."""


class MethodAnswer(msgspec.Struct, frozen=True):
    """Answer of one method, with its time."""

    causes: tuple[Cause, ...]
    t: float | None
    at_the_end: tuple[Cause, ...] = ()
    """Causes named at the end of the case: the second of two faults may take longer to show."""


class CountedAs(StrEnum):
    """Category in which a case is counted."""

    FAULT = "fault"
    """The fault had an effect."""
    FAINT = "faint"
    """The fault had no effect: it does not have to be found, but naming something else is wrong."""
    QUIET = "quiet"
    """Nothing was wrong."""
    NOT = "not"
    """The case could not be carried out."""


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"what": "class"}):
    number: int
    faults: tuple[dict[str, Any], ...]
    what: CaseClass
    benign: str
    planned: tuple[str, ...]
    """Planned faults (`network_delay model-1`), also where they could not be injected."""
    impact: dict[str, Any]
    counted: CountedAs
    why_not: str
    """Reason why the case is not counted; empty when it is."""
    trouble: str = ""
    """Error after the answer, for example in undoing the fault: it changes neither the answer nor the count."""
    diagnoses: dict[str, MethodAnswer]
    scores: dict[str, ScoredAnswer]
    files: int
    lines: int
    seconds: float

    @property
    def ours(self) -> ScoredAnswer:
        return self.scores[OURS]


class ExclusionReason(StrEnum):
    """Reason why a cluster was not healthy before the next case."""

    ENDED = "the run had ended"
    NO_STEPS = "no steps"
    NO_LOOKS = "no diagnosis came"
    ALARM = "false alarm"
    """Steps were committed, but the diagnosis kept naming a cause."""
    NOT_UNDONE = "the last case could not be undone"


class UnhealthyCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster that was not healthy before a case; it is replaced, unless it was new."""

    before: int
    """Number of the case."""
    reason: ExclusionReason
    said: tuple[str, ...] = ()
    """Causes that the diagnosis last named: `cpu model-1`."""


class CampaignFile(msgspec.Struct, frozen=True, kw_only=True):
    host: dict[str, str]
    date: str
    seed: int
    cases: tuple[CaseRecord, ...]
    table: dict[str, scoring.ScoreRow]
    by_kind: dict[str, dict[str, float]]
    """Fault type → number of cases and top-1 accuracy of our diagnosis."""
    not_counted: dict[str, int]
    """Reason → number of cases."""
    clusters: int
    unwell: tuple[UnhealthyCluster, ...]
    seconds: float
    crashes: tuple[str, ...] = ()
    """Crashes of the diagnosis itself."""

    @property
    def false_alarms(self) -> list[UnhealthyCluster]:
        """False alarms between cases, when no fault was active."""
        return [each for each in self.unwell if each.reason is ExclusionReason.ALARM]


def counted_as(*, has_faults: bool, was_felt: bool, why_not: str) -> CountedAs:
    if why_not:
        return CountedAs.NOT
    if not has_faults:
        return CountedAs.QUIET
    return CountedAs.FAULT if was_felt else CountedAs.FAINT


def summarize(
    records: Sequence[CaseRecord],
    *,
    seed: int,
    clusters: int,
    seconds: float,
    unwell: Sequence[UnhealthyCluster] = (),
    crashes: Sequence[str] = (),
) -> CampaignFile:
    def counted(what: CountedAs) -> list[CaseRecord]:
        return [record for record in records if record.counted is what]

    def scores(method: str, chosen: Sequence[CaseRecord]) -> list[ScoredAnswer]:
        return [record.scores[method] for record in chosen]

    faulty, faint, quiet = counted(CountedAs.FAULT), counted(CountedAs.FAINT), counted(CountedAs.QUIET)
    two = [record for record in faulty if record.what is CaseClass.TWO]
    table = {
        method: scoring.row(
            scores(method, faulty),
            scores(method, quiet),
            faint=scores(method, faint),
            two=scores(method, two),
        )
        for method in METHODS
    }
    reasons: dict[str, int] = {}
    for record in counted(CountedAs.NOT):
        reasons[record.why_not] = reasons.get(record.why_not, 0) + 1
    return CampaignFile(
        host=host_facts(),
        date=now_as_text(),
        seed=seed,
        cases=tuple(records),
        table=table,
        by_kind=_by_kind(faulty),
        not_counted=reasons,
        clusters=clusters,
        unwell=tuple(unwell),
        seconds=seconds,
        crashes=tuple(crashes),
    )


def _by_kind(faulty: Sequence[CaseRecord]) -> dict[str, dict[str, float]]:
    found: dict[str, list[bool]] = {}
    for record in faulty:
        if record.what is CaseClass.FAULT:
            found.setdefault(record.faults[0]["kind"], []).append(record.ours.top1)
    return {
        kind: {"cases": len(right), "top1": sum(right) / len(right)} for kind, right in sorted(found.items())
    }


def num_right(result: CampaignFile) -> tuple[int, int]:
    """Return the number of faults that the first answer named, and of all that were injected, with an effect or
    without."""
    tried = [record for record in result.cases if record.faults and record.counted is not CountedAs.NOT]
    return sum(record.ours.top1 for record in tried), len(tried)


# Terminal output.


def format_case(record: CaseRecord) -> str:
    done = ", ".join(record.planned) or record.benign or "nothing"
    if record.counted is CountedAs.NOT:
        return f"{record.number}: {done}: does not count: {record.why_not}"
    said = ", ".join(map(named, record.diagnoses[OURS].causes[:3])) or "nothing"
    ours = record.ours
    right = ours.top1 or (not ours.said and record.counted is not CountedAs.FAULT)
    after = f" after {ours.verdict_s:.1f} s" if ours.verdict_s is not None else ""
    faint = " (it changed nothing)" if record.counted is CountedAs.FAINT else ""
    trouble = f"; then {record.trouble}" if record.trouble else ""
    return f"{record.number}: {done}{faint}: said {said}{after}: {'right' if right else 'WRONG'}{trouble}"


def named(cause: Cause) -> str:
    """Format a cause as `cpu model-1`."""
    return f"{cause.kind} {cause.process}"


def table_lines(result: CampaignFile) -> Iterator[str]:
    """Yield the result table, followed by the counts that are not part of a share."""
    heads = {"cases": 6, "top-1": 7, "top-3": 7, "path": 7, "both": 7, "abstained": 11, "misdiagnosed": 14}
    yield " " * 14 + "".join(
        f"{head:>{width}}" for head, width in {**heads, "onset": 9, "verdict": 9}.items()
    )
    for method, row in result.table.items():
        shares = (row.top1, row.top3, row.path, row.every, row.abstained, row.misdiagnosed)
        widths = list(heads.values())[1:]
        cells = "".join(f"{_percent(share):>{width}}" for share, width in zip(shares, widths, strict=True))
        yield f"{method:14}{row.cases:>6}{cells}{_seconds(row.onset_error_s):>9}{_seconds(row.verdict_s):>9}"
    yield from _remarks(result)


def _remarks(result: CampaignFile) -> Iterator[str]:
    faint = sum(record.counted is CountedAs.FAINT for record in result.cases)
    if faint:
        yield f"faults that changed nothing: {faint} (a wrong answer to one is a misdiagnosis)"
    for why_not, cases in result.not_counted.items():
        yield f"did not count: {cases}: {why_not}"
    yield f"false alarms between cases: {len(result.false_alarms)}"
    for each in result.false_alarms:
        yield f"  before case {each.before}: {', '.join(each.said)}"
    others: Mapping[ExclusionReason, int] = {
        reason: sum(each.reason is reason for each in result.unwell)
        for reason in ExclusionReason
        if reason is not ExclusionReason.ALARM
    }
    yield from (
        f"clusters that were not healthy: {count}: {reason}" for reason, count in others.items() if count
    )
    if result.crashes:
        yield f"crashes of the diagnosis: {len(result.crashes)}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
