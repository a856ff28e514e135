from __future__ import annotations

import sys

import msgspec
import pytest

from kintsugi.errors import UserError
from kintsugi.lab.campaign_records import CampaignFile
from kintsugi.lab.records import RunsFile
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report import figures, measures


def test_the_same_data_give_the_same_bytes(campaign: CampaignFile) -> None:
    curves = campaigns.curves(campaign)
    first, second = (figures.diagnosis_times([], curves, scale=600.0, name="times") for _ in range(2))

    assert first == second


def test_a_run_that_nobody_diagnosed_and_that_showed_nothing_can_be_drawn(runs: RunsFile) -> None:
    silent = msgspec.structs.replace(runs.runs[0], diagnosed=None, surfaced=None, timeline=(), correct=False)

    drawn = figures.propagation([silent], name="silent")

    assert "no cause was named" in drawn.svg
    assert "no error was seen" in drawn.svg


def test_a_long_timeline_keeps_its_beginning_and_its_end(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.profile == "fragile")
    moments = [
        msgspec.structs.replace(
            run.timeline[-1], process=f"model-{number % 2}", what=f"error {number}", t=1.9e9 + number
        )
        for number in range(50)
    ]

    stations = measures.stations_of(msgspec.structs.replace(run, timeline=tuple(moments)))

    assert len(stations) == measures.MOST_STATIONS
    assert (stations[0].what, stations[-1].what) == ("error 0", "error 49")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(UserError, match=r"kintsugi\[plots\]"):
        figures.require_matplotlib()
