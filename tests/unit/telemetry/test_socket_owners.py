from __future__ import annotations

from pathlib import Path

from kintsugi.telemetry.collect.socket_owners import SocketEnds, SocketOwners, ends_of


def test_what_one_host_tells_the_others_know(tmp_path: Path) -> None:
    first, second = SocketOwners(tmp_path / "agent-0.jsonl"), SocketOwners(tmp_path / "agent-1.jsonl")
    first.own = SocketEnds({"10.0.0.1:6000": "model-0"})
    second.own = SocketEnds({"10.0.0.2:41000": "model-1"})
    first()
    second()
    first()
    assert second.others == {("10.0.0.1", 6000): "model-0"}
    assert first.others == {("10.0.0.2", 41000): "model-1"}
    first.own = SocketEnds({"10.0.0.1:6001": "model-0"})
    first()
    second()
    assert second.others == {("10.0.0.1", 6001): "model-0"}


def test_what_is_told_is_taken_back_at_the_end(tmp_path: Path) -> None:
    ends = SocketOwners(tmp_path / "agent-0.jsonl")
    ends.own = SocketEnds()
    ends()
    assert (tmp_path / "agent-0.ends").exists()
    ends.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_one_host_tells_nobody(tmp_path: Path) -> None:
    ends = SocketOwners(tmp_path / "agent-0.jsonl")
    ends()
    ends.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_damaged_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "agent-1.ends").write_bytes(b"{")
    ends = SocketOwners(tmp_path / "agent-0.jsonl")
    ends.own = SocketEnds()
    ends()
    assert ends.others == {}


def test_who_listens_everywhere_is_not_told() -> None:
    known = {("0.0.0.0", 80): "model-0", ("::1", 81): "model-0"}
    assert ends_of(known) == SocketEnds({"::1:81": "model-0"})
