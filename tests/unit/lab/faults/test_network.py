from __future__ import annotations

import math
import os
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kintsugi.lab.faults import network
from kintsugi.lab.faults.mechanism import FaultContext, FaultImpossible
from kintsugi.lab.faults.network import DelayStatistics, FilteredLoss, JitterWalk, check_interface
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.undo_log import ProcessIdentity, UndoJournal


def rules_of(
    tmp_path: Path,
    *,
    peers: tuple[ProcessIdentity, ...] = (),
    peer_ports: tuple[int, ...] | None = None,
    **aim: Any,
) -> str:
    """What nftables is told."""
    scene = FaultContext(
        injection=Injection(ability=Ability.NETWORK_LOSS, target="model-0", **aim),
        mechanism=FilteredLoss.name,
        target=ProcessIdentity.of(os.getpid()),
        peers=peers,
        peer_ports=peer_ports,
        run_dir=str(tmp_path),
        journal=str(tmp_path / "undo.jsonl"),
    )
    fault = FilteredLoss(scene, UndoJournal(tmp_path / "undo.jsonl"))
    fault.table = "t"
    fault.outgoing = True
    return fault.rules()


def test_without_an_aim_every_packet_of_the_target_matches(tmp_path: Path) -> None:
    rules = rules_of(tmp_path)
    assert "tcp sport @own numgen" in rules and "tcp dport @own numgen" in rules
    assert "ifname" not in rules


def test_a_peer_on_another_host_restricts_the_fault_also_while_it_has_no_ports(tmp_path: Path) -> None:
    assert "@peer" not in rules_of(tmp_path)
    rules = rules_of(tmp_path, peer_ports=())
    assert "tcp sport @own tcp dport @peer numgen" in rules


@pytest.mark.parametrize(
    ("lacking", "expected"), [({12}, "CAP_NET_ADMIN"), ({21}, "CAP_SYS_ADMIN"), (set(), None)]
)
def test_a_capability_that_root_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, lacking: set[int], expected: str | None
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "has_capability", lambda number: number not in lacking)
    why = network.missing_right("to set rules")
    assert why == (None if expected is None else f"expected {expected}, to set rules")


def test_a_port_of_a_peer_is_that_port_and_that_peer(tmp_path: Path) -> None:
    peers = (ProcessIdentity.of(os.getpid()),)
    assert "tcp dport @peer numgen" in rules_of(tmp_path, peers=peers)
    assert "tcp dport 8080 numgen" in rules_of(tmp_path, port=8080)
    both = rules_of(tmp_path, peers=peers, port=8080)
    assert "tcp sport @own tcp dport @peer tcp dport 8080 numgen" in both
    assert "tcp dport @own tcp sport @peer tcp sport 8080 numgen" in both


def test_a_network_device_is_matched_where_packets_leave_and_where_they_arrive(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, interface="eth0")
    assert 'oifname "eth0" tcp sport @own' in rules
    assert 'iifname "eth0" tcp dport @own' in rules


def test_a_network_device_that_the_host_has_not_is_refused() -> None:
    check_interface(None)
    check_interface("lo")
    with pytest.raises(FaultImpossible, match=r"interface: expected a network device .*lo.*, got 'eth99'"):
        check_interface("eth99")


@pytest.mark.parametrize(("delay_s", "jitter_s"), [(1.0, 0.5), (0.2, 0.02), (2.0, 2.0)])
def test_a_delay_has_the_mean_and_the_spread_that_were_asked_for_and_nobody_overtakes(
    delay_s: float, jitter_s: float
) -> None:
    wander = JitterWalk(delay_s, jitter_s, choose=random.Random(0))
    moments = [1000.0 + 0.01 * number for number in range(200_000)]
    delays = [wander.at(moment) for moment in moments]
    assert statistics.fmean(delays) == pytest.approx(delay_s, rel=0.02)
    # Of what is spread evenly over ± jitter.
    assert statistics.pstdev(delays) == pytest.approx(jitter_s / math.sqrt(3), rel=0.02)
    assert delay_s - jitter_s <= min(delays) and max(delays) <= delay_s + jitter_s
    arrivals = [moment + delay for moment, delay in zip(moments, delays, strict=True)]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(arrivals))


def test_without_jitter_a_delay_is_always_the_same() -> None:
    wander = JitterWalk(0.3, 0.0, choose=random.Random(0))
    assert {wander.at(moment) for moment in (0.0, 0.1, 7.0)} == {0.3}


def test_what_was_really_applied_is_summed_up() -> None:
    values, applied = [0.9, 1.4, 1.1, 0.6], DelayStatistics()
    assert (applied.mean, applied.deviation) == (0.0, 0.0)
    for value in values:
        applied.add(value)
    assert applied.mean == pytest.approx(statistics.fmean(values))
    assert applied.deviation == pytest.approx(statistics.pstdev(values))


class Queue:
    """Hands packets over as they are given to it, and keeps what became of them."""

    def __init__(self) -> None:
        self.decided: list[int] = []

    def decide(self, packets: list[int], verdict: int) -> None:
        self.decided += packets


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_packets_go_on_in_their_order_when_their_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amount = {"delay_s": 1.0, "jitter_s": 0.5}
    scene = FaultContext(
        injection=Injection(ability=Ability.NETWORK_DELAY, target="model-0", amount=amount),
        mechanism=network.PacketDelay.name,
        target=ProcessIdentity.of(os.getpid()),
        run_dir=str(tmp_path),
        journal=str(tmp_path / "undo.jsonl"),
    )
    queue, clock = Queue(), Clock()
    fake: Any = queue
    monkeypatch.setattr(network, "SYSTEM_CLOCK", clock)
    monkeypatch.setattr(network._QueuedFault, "prepare", lambda self: None)
    fault = network.PacketDelay(scene, UndoJournal(tmp_path / "undo.jsonl"))
    fault._random, fault._queue = random.Random(3), fake
    fault.prepare()
    for number in range(20_000):
        fault.take([number], 1.0)
        clock.now += 0.005
    assert queue.decided == sorted(queue.decided)
    assert fault.measured["delay_mean_s"] == pytest.approx(1.0, rel=0.06)
    assert fault.measured["delay_deviation_s"] == pytest.approx(0.5 / math.sqrt(3), rel=0.06)
