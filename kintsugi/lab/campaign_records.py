"""What a campaign came to, as it is written to `campaign.json` and read by the report: its cases, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kintsugi.diagnosis.verdict import Cause
from kintsugi.lab import baselines, scoring
from kintsugi.lab.cases import CaseClass
from kintsugi.lab.records import host_facts, now_as_text
from kintsugi.lab.scoring import Scored

OURS = "ours"
METHODS = {
    OURS: "Kintsugi's diagnosis",
    baselines.LAST_ERROR: "last error in the master's log",
    baselines.FIRST_ERROR: "first error in any log",
}
"""Who is compared, in the words of a report."""


class Answer(msgspec.Struct, frozen=True):
    """What one method said, and when."""

    causes: tuple[Cause, ...]
    t: float | None
    at_the_end: tuple[Cause, ...] = ()
    """What it named when the case was over: of two faults one may take longer to show."""


class Counted(StrEnum):
    """As what a case counts."""

    FAULT = "fault"
    """There was something to find."""
    FAINT = "faint"
    """A fault that changed nothing: nobody has to find it, and whoever names something else is wrong."""
    QUIET = "quiet"
    """Nothing was wrong."""
    NOT = "not"
    """It could not be carried out."""


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"what": "class"}):
    number: int
    faults: tuple[dict[str, Any], ...]
    what: CaseClass
    benign: str
    planned: tuple[str, ...]
    """`network_delay model-1`: what was to be done, also where it could not be."""
    impact: dict[str, Any]
    counted: Counted
    why_not: str
    """Empty where it counts."""
    trouble: str = ""
    """What went wrong when it had been answered, as in undoing it: that changes neither the answer nor the count."""
    diagnoses: dict[str, Answer]
    scores: dict[str, Scored]
    files: int
    lines: int
    seconds: float

    @property
    def ours(self) -> Scored:
        return self.scores[OURS]


class Reason(StrEnum):
    """Why a cluster was not well when the next case was to begin."""

    ENDED = "the run had ended"
    NO_STEPS = "no steps"
    NO_LOOKS = "no diagnosis came"
    ALARM = "false alarm"
    """Steps went on, and the diagnosis kept naming something."""
    NOT_UNDONE = "the last case could not be undone"


class Unwell(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that was not well before a case; another one takes its place, unless it was new."""

    before: int
    """Number of the case."""
    reason: Reason
    said: tuple[str, ...] = ()
    """What the diagnosis last named: `cpu model-1`."""


class CampaignFile(msgspec.Struct, frozen=True, kw_only=True):
    host: dict[str, str]
    date: str
    seed: int
    cases: tuple[CaseRecord, ...]
    table: dict[str, scoring.Row]
    by_kind: dict[str, dict[str, float]]
    """Ability → cases and top-1 of ours."""
    not_counted: dict[str, int]
    """Reason → cases."""
    clusters: int
    unwell: tuple[Unwell, ...]
    seconds: float
    crashes: tuple[str, ...] = ()
    """Of the diagnosis itself."""

    @property
    def false_alarms(self) -> list[Unwell]:
        """Between cases, where nothing was done any more."""
        return [each for each in self.unwell if each.reason is Reason.ALARM]


def counted_as(*, has_faults: bool, was_felt: bool, why_not: str) -> Counted:
    if why_not:
        return Counted.NOT
    if not has_faults:
        return Counted.QUIET
    return Counted.FAULT if was_felt else Counted.FAINT


def summed(
    records: Sequence[CaseRecord],
    *,
    seed: int,
    clusters: int,
    seconds: float,
    unwell: Sequence[Unwell] = (),
    crashes: Sequence[str] = (),
) -> CampaignFile:
    def counted(what: Counted) -> list[CaseRecord]:
        return [record for record in records if record.counted is what]

    def scores(method: str, chosen: Sequence[CaseRecord]) -> list[Scored]:
        return [record.scores[method] for record in chosen]

    faulty, faint, quiet = counted(Counted.FAULT), counted(Counted.FAINT), counted(Counted.QUIET)
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
    for record in counted(Counted.NOT):
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


# For the terminal.


def told(record: CaseRecord) -> str:
    done = ", ".join(record.planned) or record.benign or "nothing"
    if record.counted is Counted.NOT:
        return f"{record.number}: {done}: does not count: {record.why_not}"
    said = ", ".join(map(named, record.diagnoses[OURS].causes[:3])) or "nothing"
    ours = record.ours
    right = ours.top1 or (not ours.said and record.counted is not Counted.FAULT)
    after = f" after {ours.verdict_s:.1f} s" if ours.verdict_s is not None else ""
    faint = " (it changed nothing)" if record.counted is Counted.FAINT else ""
    trouble = f"; then {record.trouble}" if record.trouble else ""
    return f"{record.number}: {done}{faint}: said {said}{after}: {'right' if right else 'WRONG'}{trouble}"


def named(cause: Cause) -> str:
    """`cpu model-1`."""
    return f"{cause.kind} {cause.process}"


def table_lines(result: CampaignFile) -> Iterator[str]:
    """All that was counted, also what stands in no share."""
    heads = {"cases": 6, "top-1": 7, "top-3": 7, "path": 7, "both": 7, "abstained": 11, "misdiagnosed": 14}
    yield " " * 14 + "".join(
        f"{head:>{width}}" for head, width in {**heads, "onset": 9, "verdict": 9}.items()
    )
    for method, row in result.table.items():
        shares = (row.top1, row.top3, row.path, row.every, row.abstained, row.misdiagnosed)
        widths = list(heads.values())[1:]
        cells = "".join(f"{_percent(share):>{width}}" for share, width in zip(shares, widths, strict=True))
        yield f"{method:14}{row.cases:>6}{cells}{_seconds(row.onset_error_s):>9}{_seconds(row.verdict_s):>9}"
    yield from _beside(result)


def _beside(result: CampaignFile) -> Iterator[str]:
    faint = sum(record.counted is Counted.FAINT for record in result.cases)
    if faint:
        yield f"faults that changed nothing: {faint} (a wrong answer to one is a misdiagnosis)"
    for why_not, cases in result.not_counted.items():
        yield f"did not count: {cases}: {why_not}"
    yield f"false alarms between cases: {len(result.false_alarms)}"
    for each in result.false_alarms:
        yield f"  before case {each.before}: {', '.join(each.said)}"
    others: Mapping[Reason, int] = {
        reason: sum(each.reason is reason for each in result.unwell)
        for reason in Reason
        if reason is not Reason.ALARM
    }
    yield from (
        f"clusters that were not well: {count}: {reason}" for reason, count in others.items() if count
    )
    if result.crashes:
        yield f"crashes of the diagnosis: {len(result.crashes)}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
