from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster.child import ChildRecord, ChildrenTable
from kintsugi.cluster.handover import PROGRAMS, AgentHandover
from kintsugi.cluster.launcher import AgentHandle, Launcher
from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.errors import DeadlineExceeded, StartFailed
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import boot_id, process_start_time
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.signals import Signals
from kintsugi.telemetry.events import FaultSeen, read_events
from tests.unit.cluster.conftest import bootstrap_of_an_agent, open_descriptors
from tests.unit.transport.harness import free_descriptors


class EndedAgent(AgentHandle):
    """An agent whose process has ended; its table is what it left."""

    def __init__(self, process: str, folder: Path) -> None:
        lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
        handover = AgentHandover(
            bootstrap=msgspec.structs.replace(
                bootstrap_of_an_agent(folder), process=process, incarnation="1"
            ),
            children_lifeline_read=lifeline_read,
            children_lifeline_write=lifeline_write,
            report=-1,
            programs=PROGRAMS,
        )
        super().__init__(handover, place=HostNamespaces("host-0"))

    def has_ended(self) -> bool:
        return True


class ProcessesWithOneThatStays(SystemProcesses):
    """One process waits for a disk: the kernel does not end it."""

    def __init__(self, stays: int) -> None:
        super().__init__()
        self._stays = stays

    def adopt(self, pid: int) -> Child:
        child = super().adopt(pid)
        return Stays(child) if pid == self._stays else child  # type: ignore[return-value]


class Stays:
    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid

    def send_signal(self, number: int) -> None:
        pass

    def ended(self) -> bool:
        return True  # So that its group is left alone.

    def wait_ended(self, *, whom: str, timeout_s: float) -> None:
        raise DeadlineExceeded(whom=whom, what="its end", waited_s=timeout_s)

    def close(self) -> None:
        self._child.close()


def test_a_process_that_the_kernel_does_not_end_keeps_no_other_from_being_cleaned_up(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as stuck, subprocess.Popen(["sleep", "600"]) as other:
        signals = Signals(signal.SIGUSR2)
        launcher = Launcher(
            run_dir=tmp_path,
            signals=signals,
            processes=ProcessesWithOneThatStays(stuck.pid),
            start_timeout_s=1.0,
            standby=None,
        )
        for process, child in (("agent-0", stuck), ("agent-1", other)):
            start_time = process_start_time(child.pid)
            assert start_time is not None
            table = ChildrenTable(boot_id(), (ChildRecord("model-0", "a", child.pid, start_time),))
            path = RunFolder(tmp_path).agent_file(process)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(msgspec.json.encode(table))
            launcher._agents.append(EndedAgent(process, tmp_path))
        try:
            launcher.clean_up()
            assert process_start_time(other.pid) is None
            assert process_start_time(stuck.pid) is not None
        finally:
            stuck.kill()
            signals.close()
    seen = [record.event for record in read_events(tmp_path, process="launcher-0")]
    assert [event.fault.kind for event in seen if isinstance(event, FaultSeen)] == ["DeadlineExceeded"]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_agent_for_which_no_descriptor_is_left_fails_to_start_and_stays_due(
    tmp_path: Path, number: int
) -> None:
    lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
    handover = AgentHandover(
        bootstrap=msgspec.structs.replace(bootstrap_of_an_agent(tmp_path), incarnation="1"),
        children_lifeline_read=lifeline_read,
        children_lifeline_write=lifeline_write,
        report=-1,
        programs=PROGRAMS,
    )
    agent = AgentHandle(handover, place=HostNamespaces("host-0"))
    agent.restart_at = 12.0
    before = open_descriptors()
    with free_descriptors(number), pytest.raises(StartFailed, match="Too many open files") as caught:
        agent.start(SystemProcesses(), stop_requested=False, deadline=1.0, record=lambda: None)
    assert isinstance(caught.value.__cause__, OSError)
    assert open_descriptors() == before
    assert agent.restart_at == 12.0 and not agent.was_started
    agent.close_pipes()
