from __future__ import annotations

from typing import Any

import msgspec

from kintsugi.diagnosis.verdict import Cause, FaultKind, Hop
from kintsugi.lab import campaign
from kintsugi.lab.campaign import Answer, CampaignFile, CaseRecord, summed, told
from kintsugi.lab.cases import CaseClass
from kintsugi.lab.scoring import Scored
from tests.unit.lab.test_outcomes import START

RIGHT = Scored(said=True, top1=True, top3=True, path=True, onset_error_s=0.4, verdict_s=2.0)
WRONG = Scored(said=True, verdict_s=3.0)
SILENT = Scored(said=False)


def case(number: int, what: CaseClass, *, ours: Scored, last: Scored = WRONG, **changes: Any) -> CaseRecord:
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
        "counted": True,
        "why_not": "",
        "diagnoses": {"ours": Answer((cause,) if ours.said else (), START + 2.0 if ours.said else None)},
        "scores": {"ours": ours, "last_error": last, "first_error": SILENT},
        "top1": ours.top1,
        "top3": ours.top3,
        "path": ours.path,
        "onset_error_s": ours.onset_error_s,
        "verdict_s": ours.verdict_s,
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
    table = summed(cases, seed=1, clusters=1, seconds=60.0).table
    assert (table["ours"].top1, table["ours"].abstained, table["ours"].misdiagnosed) == (0.5, 0.5, 0.25)
    assert (table["last_error"].top1, table["last_error"].abstained) == (0.0, 1.0)
    assert list(campaign.table_lines(table))[1].startswith("ours")


def test_a_case_that_does_not_count_changes_no_share_and_is_told_with_its_reason() -> None:
    without = case(2, CaseClass.FAULT, ours=SILENT, counted=False, why_not="the fault changed nothing")
    result = summed([case(1, CaseClass.FAULT, ours=RIGHT), without], seed=1, clusters=1, seconds=9.0)
    assert result.table["ours"].top1 == 1.0
    assert result.not_counted == {"the fault changed nothing": 1}
    assert "does not count" in told(without)


def test_right_and_wrong_are_told_for_faulty_and_for_quiet_cases() -> None:
    assert "right" in told(case(1, CaseClass.FAULT, ours=RIGHT))
    assert "WRONG" in told(case(1, CaseClass.FAULT, ours=WRONG))
    assert "right" in told(case(1, CaseClass.HEALTHY, ours=SILENT))
    assert "WRONG" in told(case(1, CaseClass.HEALTHY, ours=WRONG))


def test_a_campaign_survives_being_written_and_read() -> None:
    result = summed([case(1, CaseClass.FAULT, ours=RIGHT)], seed=1, clusters=1, seconds=9.0)
    encoded = msgspec.json.encode(result)
    assert msgspec.json.decode(encoded, type=CampaignFile) == result
    assert b'"class":"fault"' in encoded
