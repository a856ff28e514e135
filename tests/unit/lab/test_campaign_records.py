from __future__ import annotations

from typing import Any

import msgspec

from kintsugi.diagnosis.verdict import Cause, FaultKind, Hop
from kintsugi.lab.campaign.cases import CaseClass
from kintsugi.lab.campaign.records import (
    OURS,
    CampaignFile,
    CaseRecord,
    CountedAs,
    ExclusionReason,
    MethodAnswer,
    UnhealthyCluster,
    counted_as,
    format_case,
    summarize,
    table_lines,
)
from kintsugi.lab.campaign.scoring import ScoredAnswer
from tests.unit.lab.test_outcome import START

RIGHT = ScoredAnswer(said=True, top1=True, top3=True, path=True, onset_error_s=0.4, verdict_s=2.0)
WRONG = ScoredAnswer(said=True, verdict_s=3.0)
SILENT = ScoredAnswer(said=False)


def case(
    number: int, what: CaseClass, *, ours: ScoredAnswer, last: ScoredAnswer = WRONG, **changes: Any
) -> CaseRecord:
    has_fault = what in (CaseClass.FAULT, CaseClass.TWO)
    cause = Cause(
        process="model-1",
        host="",
        kind=FaultKind.CPU,
        onset=START,
        confidence=1.0,
        summary="",
        path=(Hop("model-1", "", START),),
        evidence=(),
    )
    fields: dict[str, Any] = {
        "number": number,
        "faults": ({"kind": "cpu", "target": "model-1"},) if has_fault else (),
        "what": what,
        "benign": "",
        "planned": ("cpu model-1",) if has_fault else (),
        "impact": {"real": has_fault},
        "counted": CountedAs.FAULT if has_fault else CountedAs.QUIET,
        "why_not": "",
        "diagnoses": {OURS: MethodAnswer((cause,) if ours.said else (), START + 2.0 if ours.said else None)},
        "scores": {OURS: ours, "last_error": last, "first_error": SILENT},
        "files": 3,
        "lines": 40,
        "seconds": 5.0,
    }
    return CaseRecord(**{**fields, **changes})


def test_the_table_has_every_method_over_the_same_cases() -> None:
    cases = [
        case(1, CaseClass.FAULT, ours=RIGHT),
        case(2, CaseClass.FAULT, ours=SILENT),
        case(3, CaseClass.HEALTHY, ours=SILENT, last=SILENT),
        case(4, CaseClass.BENIGN, ours=WRONG, last=SILENT),
    ]
    result = summarize(cases, seed=1, clusters=1, seconds=60.0)
    ours, last = result.table[OURS], result.table["last_error"]
    assert (ours.top1, ours.abstained, ours.misdiagnosed) == (0.5, 0.5, 0.25)
    assert (last.top1, last.abstained) == (0.0, 1.0)
    assert list(table_lines(result))[1].startswith(OURS)


def test_a_case_that_could_not_be_done_changes_no_share_and_is_told_with_its_reason() -> None:
    without = case(2, CaseClass.FAULT, ours=SILENT, counted=CountedAs.NOT, why_not="model-1 has ended")
    result = summarize([case(1, CaseClass.FAULT, ours=RIGHT), without], seed=1, clusters=1, seconds=9.0)
    assert result.table[OURS].top1 == 1.0
    assert result.not_counted == {"model-1 has ended": 1}
    assert "does not count" in format_case(without)


def test_naming_something_else_where_a_fault_changed_nothing_is_a_misdiagnosis() -> None:
    faint = [
        case(number, CaseClass.FAULT, ours=ours, counted=CountedAs.FAINT)
        for number, ours in enumerate((WRONG, RIGHT, SILENT), 2)
    ]
    result = summarize([case(1, CaseClass.FAULT, ours=RIGHT), *faint], seed=1, clusters=1, seconds=9.0)
    ours = result.table[OURS]
    assert (ours.cases, ours.faint, ours.top1, ours.misdiagnosed) == (1, 3, 1.0, 0.25)
    assert ["WRONG" in format_case(each) for each in faint] == [True, False, False]


def test_a_case_counts_by_what_was_done_and_felt() -> None:
    assert counted_as(has_faults=True, was_felt=True, why_not="") is CountedAs.FAULT
    assert counted_as(has_faults=True, was_felt=False, why_not="") is CountedAs.FAINT
    assert counted_as(has_faults=False, was_felt=True, why_not="") is CountedAs.QUIET
    assert counted_as(has_faults=True, was_felt=True, why_not="its target is gone") is CountedAs.NOT


def test_of_two_faults_at_once_it_is_counted_how_often_both_were_named() -> None:
    both = msgspec.structs.replace(RIGHT, every=True)
    cases = [
        case(1, CaseClass.TWO, ours=both),
        case(2, CaseClass.TWO, ours=RIGHT),
        case(3, CaseClass.FAULT, ours=both),
    ]
    assert summarize(cases, seed=1, clusters=1, seconds=9.0).table[OURS].every == 0.5


def test_a_diagnosis_that_would_not_fall_silent_is_told_as_a_false_alarm() -> None:
    unwell = [
        UnhealthyCluster(before=4, reason=ExclusionReason.ALARM, said=("disk_slow agent-1",)),
        UnhealthyCluster(before=9, reason=ExclusionReason.NO_STEPS, said=("killed model-0",)),
    ]
    result = summarize([case(1, CaseClass.FAULT, ours=RIGHT)], seed=1, clusters=3, seconds=9.0, unwell=unwell)
    lines = list(table_lines(result))
    assert "false alarms between cases: 1" in lines
    assert "  before case 4: disk_slow agent-1" in lines
    assert "clusters that were not healthy: 1: no steps" in lines


def test_where_no_case_was_quiet_nothing_is_said_of_abstaining() -> None:
    result = summarize([case(1, CaseClass.FAULT, ours=RIGHT)], seed=1, clusters=1, seconds=9.0)
    assert result.table[OURS].abstained is None
    assert "–" in list(table_lines(result))[1]


def test_right_and_wrong_are_told_for_faulty_and_for_quiet_cases() -> None:
    assert "right" in format_case(case(1, CaseClass.FAULT, ours=RIGHT))
    assert "WRONG" in format_case(case(1, CaseClass.FAULT, ours=WRONG))
    assert "right" in format_case(case(1, CaseClass.HEALTHY, ours=SILENT))
    assert "WRONG" in format_case(case(1, CaseClass.HEALTHY, ours=WRONG))


def test_a_campaign_survives_being_written_and_read() -> None:
    result = summarize([case(1, CaseClass.FAULT, ours=RIGHT)], seed=1, clusters=1, seconds=9.0)
    encoded = msgspec.json.encode(result)
    assert msgspec.json.decode(encoded, type=CampaignFile) == result
    assert b'"class":"fault"' in encoded
