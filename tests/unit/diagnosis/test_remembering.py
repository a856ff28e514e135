"""Repeated diagnoses of one run remember what is usual, however long a fault lasts. Hours of readings: slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kintsugi.diagnosis.baseline import PastReadings, UsualRange, lower, usual
from kintsugi.diagnosis.diagnose import DiagnosisMemory
from kintsugi.diagnosis.timeseries import TimeSeries
from kintsugi.diagnosis.verdict import Diagnosis
from kintsugi.telemetry.events import Transition
from tests.unit.diagnosis.healthy import HOSTS, START, Change, HealthyRun

pytestmark = pytest.mark.slow


def looks(run: HealthyRun, memory: DiagnosisMemory, *, seconds: int, every_s: int = 5) -> Iterator[Diagnosis]:
    for _ in range(0, seconds, every_s):
        run.play(every_s)
        yield memory.look(run.bundle, now=run.time + 0.1)


def said(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(cause.process, cause.kind.value) for cause in diagnosis.causes]


@pytest.mark.parametrize(
    ("where", "change", "kind"),
    [
        ("host-1", lambda now, rates: rates.update(fsync_s=0.5), "disk_slow"),
        ("master-0", lambda now, rates: rates.update(throttled_s=0.8), "cpu"),
    ],
)
def test_what_lasts_does_not_become_usual_and_keeps_its_beginning(
    where: str, change: Change, kind: str
) -> None:
    run, memory = HealthyRun(), DiagnosisMemory()
    assert not any(said(each) for each in looks(run, memory, seconds=120))
    run.changes[where] = change
    found = list(looks(run, memory, seconds=400, every_s=10))[1:]
    assert {name for each in found for _, name in said(each)} == {kind}
    assert all(each.causes for each in found)
    assert found[-1].causes[0].onset == pytest.approx(START + 120, abs=2.0)


def test_when_it_is_over_nothing_is_said_any_more() -> None:
    run, memory = HealthyRun(), DiagnosisMemory()
    list(looks(run, memory, seconds=120))
    run.changes["host-1"] = lambda now, rates: rates.update(fsync_s=0.5)
    list(looks(run, memory, seconds=200, every_s=10))
    run.changes.clear()
    assert not any(said(each) for each in list(looks(run, memory, seconds=60))[3:])


def test_a_way_that_is_full_whenever_weights_go_out_is_as_usual() -> None:
    run, memory = HealthyRun(), DiagnosisMemory()

    def full(now: float, rates: dict[str, float]) -> None:
        if now % 20 >= 17:
            rates.update(rtt_s=0.2, out_bytes=5e7)

    run.changes |= {("model-1", "model-0"): full, ("model-1", "agent-0"): full}
    list(looks(run, memory, seconds=180))
    assert not any(said(each) for each in looks(run, memory, seconds=60, every_s=1))


def test_but_three_times_later_than_then_is_not() -> None:
    run, memory = HealthyRun(), DiagnosisMemory()

    def full(now: float, rates: dict[str, float]) -> None:
        if now % 20 >= 17:
            rates.update(rtt_s=0.2, out_bytes=5e7)

    run.changes |= {("model-1", "model-0"): full, ("model-1", "agent-0"): full}
    list(looks(run, memory, seconds=200))
    late: Change = lambda now, rates: rates.update(rtt_s=0.7)  # noqa: E731
    run.changes |= {("model-1", "model-0"): late, ("model-1", "agent-0"): late, ("model-1", "master-0"): late}
    assert ("model-1", "network_delay") in said(list(looks(run, memory, seconds=8, every_s=1))[-1])


def test_memory_that_is_taken_for_every_save_and_given_back_is_no_leak() -> None:
    run, memory = HealthyRun(), DiagnosisMemory()

    def saves(now: float, rates: dict[str, float]) -> None:
        part = now % 100
        rates["rss_bytes"] = 4e9 if part < 90 else min(16e9, 4e9 + 4e9 * (part - 89))

    run.changes["model-0"] = saves
    list(looks(run, memory, seconds=180))  # Of the first one nobody can know.
    assert not any(said(each) for each in looks(run, memory, seconds=230, every_s=2))


def test_hosts_that_are_far_apart_are_as_usual() -> None:
    class Far(HealthyRun):
        def _link(self, of: str, peer: str) -> dict[str, float]:
            values = super()._link(of, peer)
            if (of in HOSTS["host-0"]) != (peer in HOSTS["host-0"]):
                values["rtt_s"] = self._noise(0.16, share=0.1)
            return values

    run, memory = Far(), DiagnosisMemory()
    list(looks(run, memory, seconds=40))
    assert not any(said(each) for each in looks(run, memory, seconds=60))


def test_figures_that_come_rarely_say_the_same() -> None:
    class Rare(HealthyRun):
        def _one_second(self) -> None:
            self.silent = {"agent-0", "agent-1"} if int(self.now) % 4 else set()
            super()._one_second()

    run = Rare().play(120)
    run.changes["model-1"] = lambda now, rates: rates.update(throttled_s=0.9)
    found = list(looks(run, DiagnosisMemory(), seconds=20))
    assert ("model-1", "cpu") in said(found[-1])


def test_how_long_slow_steps_usually_take_is_not_forgotten() -> None:
    run, memory = HealthyRun(), DiagnosisMemory()
    list(looks(run, memory, seconds=60))
    run.stalled = True
    found = list(looks(run, memory, seconds=600))
    assert "no step was committed for" in found[-1].abstained


def test_the_lowest_of_what_was_usual_counts_for_an_hour() -> None:
    past, track = PastReadings(), TimeSeries()
    track.add(0.0, 1.0)
    past.add(track, UsualRange(1.0, 0.1, count=50), at=0.0)
    past.add(track, UsualRange(9.0, 0.1, count=50), at=3000.0)
    past.forget(at=3000.0)
    assert past.lowest(track) == UsualRange(1.0, 0.1, count=50)
    past.forget(at=5000.0)
    assert past.lowest(track) == UsualRange(9.0, 0.1, count=50)
    track.forget_before(1.0)
    past.forget(at=5000.0)
    assert past.lowest(track) is None


def test_what_is_known_of_one_part_only_is_taken_from_there() -> None:
    assert lower(None, UsualRange(1.0, 0.1)) == UsualRange(1.0, 0.1)
    assert lower(UsualRange(2.0, 0.1, often=3.0), UsualRange(1.0, 0.2)) == UsualRange(1.0, 0.2, often=3.0)
    assert usual([1.0, 2.0]) is None


def test_when_nobody_records_anything_any_more_the_disk_is_named() -> None:
    run, memory = HealthyRun(), DiagnosisMemory()
    list(looks(run, memory, seconds=60))
    later = [memory.look(run.bundle, now=run.time + seconds) for seconds in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert [said(each) for each in later[:3]] == [[], [], []]
    assert said(later[-1]) == [("master-0", "disk_slow")]
    run.play(6)
    assert said(memory.look(run.bundle, now=run.time + 0.1)) == []


def test_a_run_that_has_ended_records_nothing_and_has_no_bad_disk() -> None:
    run, memory = HealthyRun(), DiagnosisMemory()
    list(looks(run, memory, seconds=60))
    run.say("master-0", Transition("master", "run", "", "ended", "finished"))
    assert not any(said(memory.look(run.bundle, now=run.time + seconds)) for seconds in (4.0, 5.0, 6.0))
