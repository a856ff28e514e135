from __future__ import annotations

import sys

import msgspec
import pytest

from kintsugi.errors import UserError
from kintsugi.lab.campaign.records import CampaignFile
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report import figures, measures, plotting, propagation
from kintsugi.lab.scenarios.records import RunsFile


def test_the_same_data_give_the_same_bytes(campaign: CampaignFile) -> None:
    curves = campaigns.curves(campaign)
    first, second = (figures.diagnosis_times([], curves, scale=600.0, name="times") for _ in range(2))

    assert first == second


def test_a_run_without_verdict_and_without_error_can_be_drawn(runs: RunsFile) -> None:
    silent = msgspec.structs.replace(runs.runs[0], diagnosed=None, surfaced=None, timeline=(), correct=False)

    drawn = propagation.propagation([silent], name="silent")

    assert "no cause was named" in drawn.svg
    assert "no visible error" in drawn.svg


def test_a_long_timeline_keeps_its_beginning_and_its_end(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.profile == "fragile")
    moments = [
        msgspec.structs.replace(
            run.timeline[-1], process=f"model-{number % 2}", what=f"error {number}", t=1.9e9 + number
        )
        for number in range(50)
    ]

    stations = measures.stations_of(msgspec.structs.replace(run, timeline=tuple(moments), surfaced=None))

    assert len(stations) == measures.MOST_STATIONS
    assert (stations[0].what, stations[-1].what) == ("error 0", "error 49")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(UserError, match=r"kintsugi\[plots\]"):
        plotting.require_matplotlib()


def test_a_mark_stands_at_its_time_and_shares_it_with_those_beside_it() -> None:
    stations = [(0.0, -1), (1.0, -1), (1.1, -1), (1.1, 0)]

    marks = propagation.marks_of(stations, apart=0.5)

    assert [(mark.label, mark.x, mark.y) for mark in marks] == [
        ("1", 0.0, -1),
        ("2,3", 1.0, -1),
        ("4", 1.1, 0),
    ]


def test_of_a_long_message_less_is_told_and_always_its_time() -> None:
    lines = propagation.entry("1 " + "word " * 200, " (+6.0 s)")

    assert len(lines) == propagation.MOST_LINES
    assert lines[-1].endswith("… (+6.0 s)")


def test_a_step_that_never_ended_is_drawn_as_long_as_it_was(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.profile == "fragile")

    drawn = figures.anomalies([run], name="unfinished")

    assert "step that never ended" in drawn.svg


def test_what_logs_tell_after_the_error_that_a_person_sees_is_no_station_of_its_way(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S1" and run.profile == "fragile")
    assert run.surfaced is not None
    seen = measures.stations_of(run)[-1]
    at_once = msgspec.structs.replace(seen, process="rollout-1", what="the same")
    later = msgspec.structs.replace(seen, process="model-0", t=seen.t + 1.0)

    stations = measures.stations_of(msgspec.structs.replace(run, timeline=(*run.timeline, at_once, later)))

    assert (stations[-2], stations[-1]) == (at_once, seen)
