"""The host manager when its own process is slow, fails, or is started again."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster import host_manager
from kintsugi.cluster.backends.contract import HostEvent, HostOrder
from kintsugi.cluster.handover import PROGRAMS
from kintsugi.cluster.host_manager import (
    SILENT_S,
    STEADY_S,
    HostManager,
    HostPhase,
    HostRecord,
    KeptHosts,
    encode_report,
    kept_hosts,
)
from kintsugi.cluster.host_manager_process import HOST_MANAGER, HostFailed, ManagerHandover
from kintsugi.cluster.joining import HostNeeds, versions
from kintsugi.config.schema import ClusterSection, Config
from kintsugi.errors import ConfigError
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, read_events
from kintsugi.transport import new_key_pair
from kintsugi.types import Peer, Role

HOSTS = ("host-1", "host-2")


class Engine:
    """A back end whose hosts never do anything."""

    def __init__(self) -> None:
        self.ordered: list[str] = []
        self.given_back = 0
        self.failure: Exception | None = None

    def start(self, orders: Sequence[HostOrder]) -> None:
        self.ordered += [order.host for order in orders]

    def replace(self, order: HostOrder) -> None:
        self.ordered.append(order.host)

    def poll(self) -> list[HostEvent]:
        if self.failure is not None:
            raise self.failure
        return []

    def asked_to_end(self, host: str, why: str) -> None:
        """None of them does."""

    def give_back(self, *, timeout_s: float) -> None:
        self.given_back += 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Managers:
    """Host managers of one run, one after the other."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.engine, self.clock = run_dir, Engine(), Clock()
        needs = {host: HostNeeds(versions()) for host in HOSTS}
        monkeypatch.setattr(host_manager, "open_backend", lambda *given, **named: (self.engine, needs, {}))
        self.lifeline, self.launcher = os.pipe2(os.O_CLOEXEC)
        self.reports, report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._listener = socket.create_server(("127.0.0.1", 0))
        public_key, secret_key = new_key_pair()
        agents = tuple(
            Bootstrap(
                "job",
                str(run_dir),
                f"agent-{number}",
                Role.AGENT,
                host,
                "0",
                b"",
                b"",
                Peer("", "", "", "", b""),
                -1,
            )
            for number, host in enumerate(HOSTS, 1)
        )
        self.handover = ManagerHandover(
            Config(name="a", cluster=ClusterSection(start_timeout_s=60.0)),
            str(run_dir),
            agents,
            PROGRAMS,
            public_key,
            secret_key,
            self._listener.fileno(),
            self.lifeline,
            report,
        )

    def keep(self, *records: HostRecord) -> None:
        """Leave what an earlier host manager knew."""
        kept = KeptHosts("job", records)
        RunFolder(self.run_dir).hosts_file.write_bytes(msgspec.json.encode(kept))

    def end(self) -> None:
        """End the launcher, as a host manager sees it."""
        os.close(self.launcher)

    def close(self) -> None:
        self._listener.close()
        for descriptor in (self.lifeline, self.reports, self.handover.report):
            os.close(descriptor)


@pytest.fixture
def managers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Managers]:
    made = Managers(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.close()


def ready(host: str) -> HostRecord:
    return HostRecord(host, HostPhase.READY, 1, new_key_pair()[0], was_ready=True)


def phases(managers: Managers) -> set[HostPhase]:
    kept = kept_hosts(managers.run_dir, job="job")
    return {each.phase for each in kept or ()}


def test_hosts_are_not_lost_because_the_host_manager_itself_did_not_run(managers: Managers) -> None:
    managers.keep(*map(ready, HOSTS))
    manager, clock = HostManager(managers.handover, clock=managers.clock), managers.clock
    assert manager._adopt(clock.now)
    for silence_s in (3 * SILENT_S, 0.1, SILENT_S - 1.0):
        clock.now += silence_s
        manager._check(clock.now)
    assert phases(managers) == {HostPhase.READY} and managers.engine.ordered == []
    for _ in range(int(SILENT_S / 0.5) + 1):
        clock.now += 0.5
        manager._check(clock.now)
    assert phases(managers) == {HostPhase.LOST}, "they are lost by a silence in which it runs"
    managers.end()
    manager.run()


def test_a_host_that_never_stays_is_ordered_with_growing_pauses_and_named(managers: Managers) -> None:
    managers.keep(ready("host-1"), HostRecord("host-2", HostPhase.ENDED, 1))
    manager, clock = HostManager(managers.handover, clock=managers.clock), managers.clock
    assert manager._adopt(clock.now)
    record = manager._records["host-1"]

    def lose_after(ready_s: float) -> float:
        """Lose the host when it was ready for so long; return the pause before it is ordered again."""
        record.phase, manager._since["host-1"] = HostPhase.READY, clock.now
        clock.now += ready_s
        manager._checked_at = clock.now
        manager._lose(record, "its supervisor has ended")
        before, lost_at = len(managers.engine.ordered), clock.now
        while len(managers.engine.ordered) == before:
            clock.now += 0.5
            manager._check(clock.now)
        return clock.now - lost_at

    assert [lose_after(1.0) for _ in range(7)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert lose_after(STEADY_S) == 2.0, "one that was ready for a while is none in a row"
    events = [each.event for each in read_events(managers.run_dir, process=HOST_MANAGER)]
    told = [event.message for event in events if isinstance(event, Alert) and "in a row" in event.message]
    assert len(told) == 5 and "lost 3 times in a row" in told[0] and "again after 60 s" in told[-1]
    managers.end()
    manager.run()


def test_hosts_are_kept_after_an_error_and_given_back_at_the_end(managers: Managers) -> None:
    managers.keep(*map(ready, HOSTS))
    managers.engine.failure = ConfigError("the engine refuses")
    with pytest.raises(ConfigError):
        HostManager(managers.handover).run()
    assert managers.engine.given_back == 0 and phases(managers) == {HostPhase.READY}
    kept_files = RunFolder(managers.run_dir).host_files_folder
    assert kept_files.exists(), "a successor goes on with the same files"
    managers.engine.failure = None
    managers.keep(*(HostRecord(host, HostPhase.LOST, 1, was_ready=True) for host in HOSTS))
    managers.end()
    HostManager(managers.handover).run()
    assert managers.engine.given_back == 1
    assert kept_hosts(managers.run_dir, job="job") is None and not kept_files.exists()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_host_manager_that_can_not_be_started_again_does_not_end_a_run_that_has_begun(
    has_begun: bool, managers: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(*given: object, **named: object) -> object:
        raise ConfigError("Slurm does not answer")

    if has_begun:
        managers.keep(*map(ready, HOSTS))
    monkeypatch.setattr(host_manager, "open_backend", no_answer)
    monkeypatch.setattr(host_manager, "own_session_and_log", lambda process, log: None)
    handed_over = os.memfd_create("handover")
    os.write(handed_over, msgspec.msgpack.encode(managers.handover))
    os.lseek(handed_over, 0, os.SEEK_SET)
    assert host_manager.main([str(handed_over)]) == 2
    try:
        told = os.read(managers.reports, 65536)
    except BlockingIOError:
        told = b""
    assert (b"does not answer" in told) == (not has_begun)


def test_a_long_reason_is_one_write_to_the_pipe() -> None:
    line = encode_report(HostFailed("host-1", "x" * 10_000 + "the end"))
    assert len(line) < 4096 and b"the end" in line
