from __future__ import annotations

import json
from pathlib import Path

import pytest

from kintsugi.errors import UserError
from kintsugi.lab.fragile.timeouts import HOUR_S, NOTIFY_S, STOP_JOB_S, Scale, read_scale, write_scale


def test_an_hour_takes_six_seconds() -> None:
    assert Scale().of(HOUR_S) == 6.0
    assert Scale().of(NOTIFY_S) == 1.0


def test_waits_of_less_than_a_minute_are_not_shortened_to_nothing() -> None:
    assert Scale().of(STOP_JOB_S) == 3.0
    assert Scale.by(6000.0).of(STOP_JOB_S) == 3.0


def test_a_scale_that_means_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="positive scale, got 0"):
        Scale.by(0.0)


def test_every_wait_is_recorded_with_its_length_there_and_here(tmp_path: Path) -> None:
    write_scale(tmp_path, Scale.by(1200.0))
    assert read_scale(tmp_path) == Scale(hour_s=3.0)
    record = json.loads((tmp_path / "scale.json").read_text())
    assert record["factor"] == 1200.0
    assert record["waits"]["transfer"] == {"real_s": 3600.0, "here_s": 3.0}
