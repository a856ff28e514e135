"""What would be told to a kernel that can shape packets; here it is told to nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.lab.faults import mechanism, netem, network
from kintsugi.lab.faults.mechanism import FaultContext, FaultImpossible
from kintsugi.lab.faults.netem import ShapedDelay, ShapedLoss
from kintsugi.lab.injector import undo_log
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.undo_log import ProcessIdentity, RemoveShaping, UndoJournal
from kintsugi.lab.testbed import tools
from kintsugi.lab.testbed.tools import ToolFailed

OURS = "qdisc prio 6b01: root refcnt 2 bands 4\n"
NOBODYS = "qdisc noqueue 0: root refcnt 2\n"


class Tools:
    """Keeps what programs are called with; queues are as it is said."""

    def __init__(self) -> None:
        self.queues = NOBODYS
        self.lines: list[str] = []
        self.on_call: list[int] = []
        self.journal: UndoJournal | None = None

    def call(self, *command: str, text: str = "", timeout_s: float = 0.0) -> str:
        if "show" in command:
            return self.queues
        if self.journal is not None:
            self.on_call.append(len(self.journal.outstanding()))
        self.lines += text.splitlines() or [" ".join(command)]
        return ""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Tools:
    fake = Tools()
    monkeypatch.setattr(tools, "call", fake.call)
    monkeypatch.setattr(netem, "enter", lambda namespaces: None)
    monkeypatch.setattr(netem, "network_of", lambda pid: 77)
    ports = {0: frozenset[int](), 1: frozenset({5000, 5001}), 2: frozenset({9, 8080})}
    for module in (netem, mechanism):
        monkeypatch.setattr(module, "ports_of", lambda pids: ports[sum(pids)])
    return fake


def fault_of(
    kind: type[ShapedDelay | ShapedLoss], injection: Injection, tmp_path: Path, *, peer: bool
) -> ShapedDelay:
    scene = FaultContext(
        injection=injection,
        mechanism=kind.name,
        target=ProcessIdentity(1, 1),
        peers=(ProcessIdentity(2, 1),) if peer else (),
        run_dir=str(tmp_path),
        journal=str(tmp_path / "undo.jsonl"),
    )
    return kind(scene, UndoJournal(tmp_path / "undo.jsonl"))  # type: ignore[return-value]


def delay(
    tmp_path: Path, fake: Tools, *, peer: bool = False, port: int | None = None, ramp_s: float = 0.0
) -> ShapedDelay:
    injection = Injection(
        ability=Ability.NETWORK_DELAY,
        target="model-0",
        port=port,
        interface="lo",
        ramp_s=ramp_s,
        amount={"delay_s": 1.0, "jitter_s": 0.5},
    )
    fault = fault_of(ShapedDelay, injection, tmp_path, peer=peer)
    fake.journal = fault._journal
    fault.prepare()
    return fault


def filters(fake: Tools) -> list[str]:
    return [line.partition("u32 ")[2] for line in fake.lines if line.startswith("filter add")]


def test_packets_of_the_target_go_through_a_band_of_their_own(tmp_path: Path, fake: Tools) -> None:
    delay(tmp_path, fake).begin()
    assert fake.lines[:2] == [
        "qdisc add dev lo root handle 6b01: prio bands 4",
        "qdisc add dev lo parent 6b01:4 netem delay 1000ms 500ms limit 65536",
    ]
    assert filters(fake) == [
        "match ip protocol 6 0xff match ip sport 5000 0xffff flowid 6b01:4",
        "match ip protocol 6 0xff match ip sport 5001 0xffff flowid 6b01:4",
    ]


def test_a_filter_is_made_for_each_pair_of_ports_and_of_a_peer_and_a_port_for_both(
    tmp_path: Path, fake: Tools
) -> None:
    to_port = "match ip protocol 6 0xff match ip sport 5000 0xffff match ip dport {} 0xffff flowid 6b01:4"
    delay(tmp_path, fake, peer=True).begin()
    assert len(filters(fake)) == 4 and filters(fake)[0] == to_port.format(9)
    fake.lines.clear()
    delay(tmp_path, fake, port=80).begin()
    assert len(filters(fake)) == 2 and filters(fake)[0] == to_port.format(80)
    fake.lines.clear()
    delay(tmp_path, fake, peer=True, port=8080).begin()
    assert len(filters(fake)) == 2 and filters(fake)[0] == to_port.format(8080)
    fake.lines.clear()
    delay(tmp_path, fake, peer=True, port=80).begin()
    assert filters(fake) == []


def test_a_ramp_changes_the_delay_and_leaves_the_rest(tmp_path: Path, fake: Tools) -> None:
    fault = delay(tmp_path, fake, ramp_s=2.0)
    fault.begin()
    assert fake.lines[1].endswith("netem delay 0ms 0ms limit 65536")
    fake.lines.clear()
    fault.tick(0.5)
    fault.tick(0.5)
    assert fake.lines == ["qdisc change dev lo parent 6b01:4 netem delay 500ms 250ms limit 65536"]


def test_the_share_of_a_loss_is_told_in_percent(tmp_path: Path, fake: Tools) -> None:
    injection = Injection(
        ability=Ability.NETWORK_LOSS, target="model-0", interface="lo", amount={"share": 0.1}
    )
    fault_of(ShapedLoss, injection, tmp_path, peer=False).prepare()
    fault = fault_of(ShapedLoss, injection, tmp_path, peer=False)
    fault.prepare()
    fault.begin()
    assert fake.lines[1] == "qdisc add dev lo parent 6b01:4 netem loss 10.00% limit 65536"


def test_how_it_is_undone_is_written_down_first_and_undoes_only_what_is_ours(
    tmp_path: Path, fake: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo_log, "process_in", lambda network: 4242 if network == 77 else None)
    fault = delay(tmp_path, fake)
    fault.begin()
    assert fake.on_call[0] == 1
    assert [entry.undo for entry in fault._journal.outstanding()] == [RemoveShaping(77, "lo")]
    fake.queues = OURS
    fake.lines.clear()
    fault.end()
    assert fake.lines == ["nsenter --target 4242 --net tc qdisc del dev lo root"]
    assert fault._journal.outstanding() == []
    fake.queues = NOBODYS
    fake.lines.clear()
    RemoveShaping(77, "lo").carry_out()
    RemoveShaping(78, "lo").carry_out()
    assert fake.lines == []


def test_queues_that_somebody_has_set_are_left_alone(tmp_path: Path, fake: Tools) -> None:
    fake.queues = "qdisc tbf 8001: root refcnt 2 rate 1Mbit\n"
    with pytest.raises(FaultImpossible, match="lo has traffic shaping already: qdisc tbf"):
        delay(tmp_path, fake)


def test_a_kernel_that_can_not_do_it_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*command: str, text: str = "", timeout_s: float = 0.0) -> str:
        raise ToolFailed("unshare --net sh -c …: Error: Specified qdisc kind is unknown.")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "has_capability", lambda number: True)
    monkeypatch.setattr(tools, "has", lambda program: True)
    monkeypatch.setattr(tools, "call", refuse)
    netem.netem_refusal.cache_clear()
    try:
        assert "can not shape packets (sch_netem" in str(ShapedDelay.missing())
        assert str(ShapedDelay.missing()).endswith("Specified qdisc kind is unknown.")
    finally:
        netem.netem_refusal.cache_clear()


def test_only_hosts_of_their_own_are_shaped() -> None:
    assert "only on hosts of their own" in str(ShapedDelay.unsupported_for(os.getpid()))
