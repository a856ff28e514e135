"""What a real run records of itself: of processes, host, links and clock, of one that is stopped or has no memory."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from kintsugi.telemetry.events import ProcessGone, Span, read_events
from kintsugi.telemetry.readings import (
    ClockOffsetReading,
    HeartbeatReading,
    HostReading,
    LinkReading,
    ProcessReading,
    ReadingRecord,
    figures_in,
)
from kintsugi.types import Role
from tests.cluster.real_runs import Run, until
from tests.cluster.tiny_runs import TinyRun, start_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MEMORY = Path("/sys/fs/cgroup/memory")
STOPPED = "model-1"
AT_THE_GATE = {"rollout-0", "rollout-1"}


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group of either version; skips where this user may not make one."""
    second = not MEMORY.exists()
    group = (MEMORY.parent if second else MEMORY) / f"kintsugi-test-{uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


def gone(run_dir: Path, process: str) -> list[ProcessGone]:
    events = [record.event for record in read_events(run_dir, process="agent-0")]
    return [event for event in events if isinstance(event, ProcessGone) and event.of == process]


def looks_at(run: Run, process: str) -> list[ProcessReading]:
    samples = [record.sample for record in figures_in(run.run_dir, process="agent-0")]
    return [sample for sample in samples if isinstance(sample, ProcessReading) and sample.of == process]


def test_a_process_that_the_kernel_ended_for_want_of_memory_is_told_as_such(run: TinyRun) -> None:
    with memory_group(48 << 20) as group:
        programs = {Role.MODEL: "cluster_programs:hungry"}
        run.start_and_wait(start_of("model-0", cgroup=str(group)), programs=programs)
        until(lambda: gone(run.run_dir, "model-0"), "the end of the one that has no memory")
        assert run.launcher is not None
        run.launcher.send_signal(signal.SIGTERM)
        run.launcher.wait(timeout=20)
    (end,) = gone(run.run_dir, "model-0")
    assert (end.status, end.oom) == (-signal.SIGKILL, True)
    assert end.how == "killed by SIGKILL for want of memory"


def waited_for(run: Run) -> set[str]:
    """By the master, by what it said so far."""
    samples = (record.sample for record in figures_in(run.run_dir, process="master-0"))
    return {wait.whom for sample in samples if isinstance(sample, HeartbeatReading) for wait in sample.waits}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A rank of it was stopped; it has gone to its end all the same."""
    run = Run(tmp_path_factory.mktemp("observed") / "run")
    try:
        run.start(gates=(4,))
        run.wait_at(4)
        run.kill(STOPPED, signal.SIGSTOP)
        until(lambda: any(look.state == "T" for look in looks_at(run, STOPPED)), "a look at the stopped one")
        until(
            lambda: waited_for(run) & AT_THE_GATE,
            "the master to say that it waits for who stands at the gate",
        )
        run.let_through(4)
        run.finish()
        yield run
    finally:
        run.close()


def figures(run: Run) -> list[ReadingRecord]:
    return figures_in(run.run_dir)


def test_the_fault_fired_and_how_each_process_ended_is_told(observed: Run) -> None:
    stopped = gone(observed.run_dir, STOPPED)[0]
    assert (stopped.status, stopped.oom) == (-signal.SIGKILL, False), "its master had it ended"
    assert [end.how for end in gone(observed.run_dir, "server-0")] == ["exited with code 0"]


def test_a_stopped_process_is_seen_standing_still(observed: Run) -> None:
    standing = [look for look in looks_at(observed, STOPPED) if look.state == "T"]
    assert len({look.pid for look in standing}) == 1
    assert max(look.values["cpu_s"] for look in standing) == min(look.values["cpu_s"] for look in standing)


def test_every_process_says_about_twice_a_second_how_it_is(observed: Run) -> None:
    beats: dict[str, list[float]] = {}
    for record in figures(observed):
        if isinstance(record.sample, HeartbeatReading):
            beats.setdefault(record.stamp.process, []).append(record.stamp.time)
    assert {"master-0", "agent-0", "manager-0", "model-0", "rollout-0", "server-0"} <= beats.keys()
    calm = beats["agent-0"]
    pauses = sorted(later - earlier for earlier, later in itertools.pairwise(calm))
    assert pauses[len(pauses) // 2] < 1.0


def test_the_master_says_for_whom_it_waits(observed: Run) -> None:
    assert waited_for(observed) & AT_THE_GATE


def test_links_are_named_by_the_processes_at_their_ends(observed: Run) -> None:
    links = {
        (record.sample.of, record.sample.peer)
        for record in figures(observed)
        if isinstance(record.sample, LinkReading)
    }
    assert {("model-0", "master-0"), ("master-0", "model-0"), ("server-0", "manager-0")} <= links
    assert ("model-0", "model-1") in links, "their collectives have sockets that no address book knows"


def test_the_host_and_its_clock_are_measured(observed: Run) -> None:
    hosts = [record.sample for record in figures(observed) if isinstance(record.sample, HostReading)]
    assert all(sample.values["disk_free_bytes"] > 0 for sample in hosts[1:])
    clock = [record.sample for record in figures(observed) if isinstance(record.sample, ClockOffsetReading)][
        -1
    ]
    assert clock.error_s < 0.01
    assert abs(clock.offset_s) <= clock.error_s + 0.001, "all of it is one host"


def test_one_prompt_can_be_followed_through_all_its_stations(observed: Run) -> None:
    stations: dict[str, set[tuple[str, str]]] = {}
    for record in read_events(observed.run_dir):
        if isinstance(record.event, Span):
            attributes = record.event.attributes
            named = attributes.get("tickets", attributes.get("ticket", ""))
            role = record.stamp.process.partition("-")[0]
            for ticket in filter(None, named.split(",")):
                stations.setdefault(ticket, set()).add((role, record.event.name))
    expected = {
        ("rollout", "episode"),
        ("rollout", "actor_generate"),
        ("rollout", "reward"),
        ("manager", "request"),
        ("server", "generate"),
        ("model", "actor_train"),
    }
    trained = [ticket for ticket in stations if ticket.startswith("grpo:")]
    assert trained
    assert any(expected <= stations[ticket] for ticket in trained), stations


def test_what_is_recorded_lies_beside_the_run_and_no_probe_is_left(observed: Run) -> None:
    files = {path.name for path in (observed.run_dir / "figures").iterdir()}
    assert "agent-0.jsonl" in files
    assert not [name for name in files if name.endswith(".probe")]
