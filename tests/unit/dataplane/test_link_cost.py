from __future__ import annotations

import random

import pytest

from kintsugi.dataplane.link_cost import (
    BETWEEN_HOSTS,
    LinkCosts,
    LinkLoad,
    MeasuredTransfer,
    TransferCost,
    TransferTiming,
)

SLOW_TO_ASK = TransferCost(1e-3, 30e-3, 3e-9)
FAR_AWAY = TransferCost(20e-3, 1e-4, 1e-8)
FAST = TransferCost(1e-4, 1e-4, 1e-10)
SHAPES = (LinkLoad(1, 1 << 20), LinkLoad(4, 8 << 20), LinkLoad(2, 1000))


def timing(true: TransferCost, load: LinkLoad, *, noise: float = 1.0) -> TransferTiming:
    """What would be measured: the first answer comes after one request."""
    first = load.size // load.requests
    return TransferTiming(load, noise * true.estimate(load), first, noise * true.estimate(LinkLoad(1, first)))


@pytest.mark.parametrize("true", [SLOW_TO_ASK, FAR_AWAY, FAST], ids=["slow to ask", "far away", "fast"])
def test_the_estimate_comes_to_what_is_measured(true: TransferCost) -> None:
    measured, chance = MeasuredTransfer(BETWEEN_HOSTS), random.Random(7)
    for _ in range(120):
        measured.take(timing(true, chance.choice(SHAPES), noise=chance.lognormvariate(0.0, 0.05)))
    for load in SHAPES:
        assert measured.cost.estimate(load) == pytest.approx(true.estimate(load), rel=0.3)


def test_requests_and_latency_are_told_apart_by_the_first_answer_and_the_last() -> None:
    measured = MeasuredTransfer(BETWEEN_HOSTS)
    for _ in range(20):
        measured.take(timing(SLOW_TO_ASK, LinkLoad(2, 12_000)))
    assert measured.cost.request_s == pytest.approx(SLOW_TO_ASK.request_s, rel=0.05)
    assert measured.cost.latency_s < 0.1 * SLOW_TO_ASK.request_s


def test_one_transfer_that_stood_still_changes_nothing() -> None:
    undisturbed, disturbed = MeasuredTransfer(BETWEEN_HOSTS), MeasuredTransfer(BETWEEN_HOSTS)
    load = LinkLoad(2, 12_000)
    for number in range(30):
        undisturbed.take(timing(FAR_AWAY, load))
        disturbed.take(timing(FAR_AWAY, load, noise=1000.0 if number == 20 else 1.0))
    assert disturbed.cost.estimate(load) == pytest.approx(undisturbed.cost.estimate(load), rel=0.02)


def test_a_link_that_became_slow_is_believed_within_a_dozen_steps() -> None:
    measured, load = MeasuredTransfer(BETWEEN_HOSTS), LinkLoad(2, 12_000)
    for _ in range(12):
        measured.take(timing(SLOW_TO_ASK, load))
    assert measured.cost.estimate(load) == pytest.approx(SLOW_TO_ASK.estimate(load), rel=0.1)


def test_no_part_is_ever_negative() -> None:
    measured, chance = MeasuredTransfer(BETWEEN_HOSTS), random.Random(3)
    for _ in range(300):
        load = LinkLoad(chance.randint(1, 9), chance.randint(0, 1 << 22))
        first_s = chance.expovariate(100.0)
        measured.take(
            TransferTiming(load, first_s + chance.expovariate(10.0), load.size // load.requests, first_s)
        )
        assert min(measured.cost.latency_s, measured.cost.request_s, measured.cost.byte_s) >= 0.0


def test_a_measurement_is_about_its_own_link() -> None:
    links = LinkCosts()
    before = links.stream("host-0", "host-1"), links.memory("host-0")
    links.streamed("host-1", "host-0", timing=timing(SLOW_TO_ASK, LinkLoad(2, 12_000)))
    links.passed_on("host-1", timing=timing(SLOW_TO_ASK, LinkLoad(2, 12_000)))
    assert (links.stream("host-0", "host-1"), links.memory("host-0")) == before
    assert links.stream("host-1", "host-0") != BETWEEN_HOSTS
    assert links.memory("host-1") != before[1]


def test_nothing_takes_no_time() -> None:
    assert FAR_AWAY.estimate(LinkLoad(0, 0)) == 0.0
