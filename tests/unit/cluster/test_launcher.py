from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster.handover import PROGRAMS, AgentHandover
from kintsugi.cluster.launcher import AgentHandle
from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.errors import StartFailed
from kintsugi.runtime.processes import SystemProcesses
from tests.unit.cluster.conftest import bootstrap_of_an_agent, open_descriptors
from tests.unit.transport.harness import free_descriptors


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
