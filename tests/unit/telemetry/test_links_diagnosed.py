"""That links which are not used are told of rarely changes nothing about what is found wrong with them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import pytest

from kintsugi.telemetry.collect.links import LinkTable
from kintsugi.telemetry.collect.tcp import TcpSocket
from kintsugi.telemetry.readings import LinkReading
from tests.unit.diagnosis.healthy import LINKS, Change, HealthyRun
from tests.unit.diagnosis.looking import named
from tests.unit.telemetry.test_links import INFO

HERE, THERE = ("10.0.0.1", 40000), ("10.0.0.2", 4000)
IDLE_S = 23
"""Not a multiple of how often such a link is told of."""


@dataclass
class RecordedByAnAgent(HealthyRun):
    """The same run, its connections looked at as an agent does."""

    agents: dict[tuple[str, str], LinkTable] = field(default_factory=lambda: defaultdict(LinkTable))
    num_told: int = 0

    def _take(self, recorder: str, sample: object) -> None:
        if not isinstance(sample, LinkReading):
            super()._take(recorder, sample)
            return
        known = {name: value for name, value in sample.values.items() if name in INFO.__struct_fields__}
        info = msgspec.structs.replace(INFO, **known)
        connection = TcpSocket("ESTABLISHED", HERE, THERE, 1, 1, 0, 0, info)
        links = self.agents[sample.of, sample.peer]
        found = links.look([connection], owners={1: sample.of}, book={THERE: sample.peer})
        for ago_s, samples in ((1.0, found.before), (0.0, found.now)):
            for each in samples:
                self.num_told += 1
                self.bundle.take(self.time - ago_s, self.time - ago_s, recorder, each)


def idle(_: float, rates: dict[str, float]) -> None:
    rates.update(out_bytes=0.0, in_bytes=0.0, rtt_s=0.002)


def late(now: float, rates: dict[str, float]) -> None:
    rates["rtt_s"] = 0.002 + 0.5 * (1 - (7 / 8) ** (4 * (now - 20 - IDLE_S)))


def lossy(_: float, rates: dict[str, float]) -> None:
    rates["retransmits"] = 3.0


def cut(now: float, rates: dict[str, float]) -> None:
    rates.update(backoff=min(6.0, now - 20 - IDLE_S), out_bytes=0.0, retransmits=1.0)


@pytest.mark.parametrize(
    ("trouble", "kind"), [(late, "network_delay"), (lossy, "network_loss"), (cut, "network_cut")]
)
def test_what_goes_wrong_in_the_first_second_after_a_pause_is_seen_as_if_there_had_been_none(
    trouble: Change, kind: str
) -> None:
    told: list[list[list[tuple[str, str]]]] = []
    of_one = [link for link in LINKS if "model-1" in link]
    for run in (HealthyRun(), RecordedByAnAgent()):
        run.play(20)
        run.changes.update(dict.fromkeys(of_one, idle))
        run.play(IDLE_S)
        run.changes.update(dict.fromkeys(of_one, trouble))
        told.append([named(run.play(1)) for _ in range(6)])
    assert told[0] == told[1]
    assert told[0][-1] == [("model-1", kind)]


def test_pauses_make_the_record_shorter() -> None:
    run = RecordedByAnAgent()
    run.changes.update(dict.fromkeys(LINKS, idle))
    run.play(50)
    assert run.num_told == 10 * len(LINKS)


def test_one_that_becomes_used_again_is_nothing_wrong() -> None:
    run = RecordedByAnAgent().play(20)
    for _ in range(3):
        run.changes.update(dict.fromkeys(LINKS, idle))
        run.play(7).changes.clear()
        for _ in range(4):
            assert named(run.play(1)) == []
