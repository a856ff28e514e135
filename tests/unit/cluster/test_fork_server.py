from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cluster.child import FORK_SERVER, ChildrenTable
from kintsugi.cluster.fork_server import serve
from kintsugi.cluster.handover import PROGRAMS
from kintsugi.cluster.orphans import children_of
from kintsugi.runtime.proc import process_start_time
from tests.unit.cluster.conftest import until

MakeHost = Callable[..., Any]

STARTS_A_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def fork_server_of(host: Any) -> int:
    table = msgspec.json.decode((host.run_dir / "agents" / "agent-0.json").read_bytes(), type=ChildrenTable)
    (record,) = [record for record in table.children if record.process == FORK_SERVER]
    return record.pid


def test_other_roles_do_not_wait_for_a_template_that_imports_and_are_forked_once_it_is_ready(
    make_host: MakeHost, tmp_path: Path
) -> None:
    folder, gate = tmp_path / "modules", tmp_path / "gate"
    folder.mkdir()
    os.mkfifo(gate)
    (folder / "imports_slowly.py").write_text(f"open({str(gate)!r}).read()")
    os.environ["PYTHONPATH"] += f":{folder}"
    host = make_host(preload=("imports_slowly",), model="idle", rollout="idle")
    assert "kintsugi.cluster.spawn rollout-0" in command_of(host.start("rollout-0").pid)
    gate.open("w").close()
    assert "kintsugi.cluster.fork_server" in command_of(host.start("model-0").pid)
    assert "kintsugi.cluster.fork_server" in command_of(host.start("rollout-1").pid)


def test_a_template_that_is_stopped_is_replaced(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="idle")
    (fork_server,) = children_of(host.agent.pid)
    os.kill(fork_server, signal.SIGSTOP)
    until(lambda: host.turn() and fork_server not in children_of(host.agent.pid), "the end of the template")
    assert "kintsugi.cluster.fork_server" in command_of(host.start("model-0").pid)


def test_a_template_outlives_its_agent_and_forks_for_the_next(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="describe_itself")
    host.start("model-0")
    fork_server = fork_server_of(host)
    host.replace_agent()
    started = host.start("model-1")
    assert "kintsugi.cluster.fork_server" in command_of(started.pid)
    assert process_start_time(fork_server) is not None
    assert not children_of(host.agent.pid), "there is no second template"
    os.kill(started.pid, signal.SIGKILL)
    assert host.exit_of("model-1").incarnation == started.incarnation


def test_a_template_that_dies_after_its_agent_is_replaced(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="idle")
    host.start("model-0")
    fork_server = fork_server_of(host)
    host.replace_agent()
    host.start("model-1")
    os.kill(fork_server, signal.SIGKILL)
    until(lambda: host.turn() and bool(children_of(host.agent.pid)), "another template")
    assert "kintsugi.cluster.fork_server" in command_of(host.start("model-2").pid)


def test_a_template_with_more_than_one_thread_does_not_fork(make_host: MakeHost, tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "starts_a_thread.py").write_text(STARTS_A_THREAD)
    os.environ["PYTHONPATH"] += f":{folder}"
    host = make_host(preload=("starts_a_thread",), model="idle")
    assert "kintsugi.cluster.spawn model-0" in command_of(host.start("model-0").pid)
    log = (tmp_path / "logs" / "agent-0.log").read_text()
    assert "cannot fork: importing starts_a_thread started 1 threads" in log


def test_a_template_outlives_an_agent_that_dies_before_it_has_read_what_it_was_told() -> None:
    agent, fork_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def die_with_unread_data() -> None:
        select.select([agent], [], [], 10)
        agent.close()

    thread = threading.Thread(target=die_with_unread_data)
    thread.start()
    assert serve(fork_server) is None
    thread.join()
    fork_server.close()


@pytest.mark.slow
def test_what_the_template_imports_starts_no_thread() -> None:
    imports = "; ".join(f"import {module}" for module in PROGRAMS.preload)
    program = f"import os; {imports}; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "1\n"
