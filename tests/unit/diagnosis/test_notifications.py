"""What people who are elsewhere are told of a verdict."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.diagnosis.notifications import notification_of, notification_of_end
from kintsugi.diagnosis.verdict import Cause, FaultKind

CAUSE = Cause(
    process="model-1",
    host="host-1",
    kind=FaultKind.CPU,
    onset=1000.0,
    confidence=0.96,
    summary="model-1: was kept from running for 2 of 3 s",
    path=(),
    evidence=(),
)


def test_one_sentence_says_which_run_who_what_how_sure_and_why() -> None:
    said = notification_of(CAUSE, run="runs/x", time=1004.0)
    assert said.text == ("runs/x: model-1 on host-1: cpu, 96 % sure: was kept from running for 2 of 3 s")
    assert (said.run, said.process, said.kind, said.time) == ("runs/x", "model-1", "diagnosis", 1004.0)
    assert said.values == {"confidence": 0.96, "onset": 1000.0}
    assert said.details["summary"] == CAUSE.summary


def test_of_whom_no_host_is_known_none_is_named() -> None:
    said = notification_of(msgspec.structs.replace(CAUSE, host=""), run="runs/x", time=1004.0)
    assert said.text.startswith("runs/x: model-1: cpu, 96 % sure: ")


def test_the_end_of_a_trouble_is_told_with_how_long_it_lasted() -> None:
    said = notification_of_end(CAUSE, run="runs/x", time=1012.4)
    assert said is not None
    assert said.text == "runs/x: model-1 on host-1: cpu is over after 12 s"
    assert (said.kind, said.process, said.time) == ("diagnosis", "model-1", 1012.4)
    assert said.values["lasted_s"] == 12.4


@pytest.mark.parametrize("kind", [FaultKind.KILLED, FaultKind.CRASHED])
def test_that_something_is_over_which_is_over_at_once_is_no_news(kind: FaultKind) -> None:
    assert notification_of_end(msgspec.structs.replace(CAUSE, kind=kind), run="runs/x", time=1012.0) is None
