"""What an agent does for children whose parent it is not: those of the agent before it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kintsugi.cluster.child import ChildrenTable
from kintsugi.cluster.shared_memory import SegmentClient
from kintsugi.errors import RefusedError
from kintsugi.protocol.agents import Inspect, Inspected, StopProcess
from kintsugi.protocol.membership import Ok
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import process_start_time
from tests.unit.cluster.conftest import until

MakeHost = Callable[..., Any]


@pytest.mark.parametrize("preload", [(), ("json",)], ids=["executed", "forked"])
def test_children_outlive_their_agent_and_its_successor_lists_them(
    make_host: MakeHost, preload: tuple[str, ...]
) -> None:
    host = make_host(preload=preload, model="idle", rollout="idle")
    started = [host.start("model-0"), host.start("rollout-0")]
    register = host.replace_agent()
    assert [msgspec.structs.astuple(child) for child in register.children] == [
        msgspec.structs.astuple(one) for one in started
    ]
    assert all(process_start_time(one.pid) for one in started)


def test_the_end_of_an_adopted_child_is_reported_with_its_last_words(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    log = host.run_dir / "logs" / "model-0.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("of an earlier incarnation\n")
    started = host.start("model-0")
    host.replace_agent()
    with log.open("a") as file:
        file.write("these are its last words\n")
    os.kill(started.pid, signal.SIGKILL)
    exited = host.exit_of("model-0")
    assert exited.incarnation == started.incarnation
    # Its parent takes the status; the agent knows it only when it looks while the process is still ending.
    assert exited.status in {None, -signal.SIGKILL}
    assert exited.last_output == "these are its last words\n"


def test_an_adopted_child_is_answered_for_stopped_and_replaced_like_any_other(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    first, second = host.start("model-0", incarnation="1.0"), host.start("model-1", incarnation="1.0")
    host.replace_agent()
    assert host.start("model-0", incarnation="1.0") == first
    replaced = host.start("model-0", incarnation="1.1")
    assert process_start_time(first.pid) is None
    assert process_start_time(replaced.pid) is not None
    assert host.ask(StopProcess("model-1", "1.0", grace_s=2.0)) == Ok()
    assert process_start_time(second.pid) is None


def test_who_died_together_with_the_agent_is_not_listed(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    dead, living = host.start("model-0"), host.start("model-1")
    host.agent.send_signal(signal.SIGSTOP)
    os.kill(dead.pid, signal.SIGKILL)
    assert [child.pid for child in host.replace_agent().children] == [living.pid]


def test_the_table_of_another_session_names_nobody_to_adopt(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    started = host.start("model-0")
    host.agent.send_signal(signal.SIGSTOP)
    path = RunFolder(host.run_dir).agent_file("agent-0")
    table = msgspec.json.decode(path.read_bytes(), type=ChildrenTable)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(table, job="another")))
    assert host.replace_agent().children == ()
    os.kill(started.pid, signal.SIGKILL)


def test_segments_survive_the_agent(make_host: MakeHost) -> None:
    host = make_host(model="segment_keeper")
    host.start("model-0")
    host.wrote("model-0", "written")
    host.replace_agent()
    client = SegmentClient(f"kintsugi-{host.master.job}-host-0")

    def opened() -> int | None:
        try:
            return client.open("snapshot")
        except RefusedError:
            return None

    descriptor = until(opened, "the segment to be offered again")
    assert os.pread(descriptor, 15, 0) == b"state of step 7"
    os.close(descriptor)
    client.close()


def test_a_stopped_child_is_suspected_once_and_looks_stopped_from_outside(make_host: MakeHost) -> None:
    host = make_host(model="idle")
    started = host.start("model-0")
    look = Inspect("model-0", started.incarnation)
    running = host.ask(look)
    assert isinstance(running, Inspected)
    assert running.state in {"R", "S"}
    assert running.cpu_s > 0
    os.kill(started.pid, signal.SIGSTOP)
    until(lambda: host.turn() and bool(host.suspicions), "the suspicion")
    (suspected,) = host.suspicions
    assert (suspected.process, suspected.incarnation) == ("model-0", started.incarnation)
    stopped = host.ask(look)
    assert isinstance(stopped, Inspected)
    assert stopped.state == "T"
    assert host.ask(Inspect("model-0", "another")) == Inspected("")
    assert host.ask(Inspect("model-9", "1")) == Inspected("")
