from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kintsugi.cluster.handover import PROGRAMS

MakeHost = Callable[..., Any]

STARTS_A_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_a_role_of_the_template_is_forked_and_others_are_executed(make_host: MakeHost) -> None:
    host = make_host(preload=("json",), model="idle", rollout="idle")
    assert "kintsugi.cluster.template" in command_of(host.start("model-0").pid)
    assert "kintsugi.cluster.placement rollout-0" in command_of(host.start("rollout-0").pid)


def test_a_template_with_more_than_one_thread_does_not_fork(make_host: MakeHost, tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "starts_a_thread.py").write_text(STARTS_A_THREAD)
    os.environ["PYTHONPATH"] += f":{folder}"
    host = make_host(preload=("starts_a_thread",), model="idle")
    assert "kintsugi.cluster.placement model-0" in command_of(host.start("model-0").pid)
    log = (tmp_path / "logs" / "agent-0.log").read_text()
    assert "cannot fork: importing starts_a_thread started 1 threads" in log


@pytest.mark.slow
def test_what_the_template_imports_starts_no_thread() -> None:
    imports = "; ".join(f"import {module}" for module in PROGRAMS.preload)
    program = f"import os; {imports}; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "1\n"
