"""`python -m kintsugi.lab.fragile.launcher RUN_DIR start warm`: starts scheduler and controller, ends with the latter.
Beside them it starts who looks at each host.

Whatever is left then is ended, however well the clean-up of the system itself went: nothing outlives its experiment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.orphans import kill_children, subreaper
from kintsugi.cluster.placement import Start, spawn
from kintsugi.config import Config
from kintsugi.data.source import pin_data
from kintsugi.lab.fragile.process import MONITOR, read_hosts
from kintsugi.lab.fragile.scheduler import SCHEDULER
from kintsugi.lab.running import PR_SET_PDEATHSIG
from kintsugi.lab.watching import MASTER
from kintsugi.recipe import load_config
from kintsugi.runs import CONFIG_FILE
from kintsugi.runtime import Child, SystemProcesses
from kintsugi.types import Peer, Placement, Role
from kintsugi.worker import EXIT_ERROR

LONGEST_S = 24 * 3600.0
END_S = 10.0


def main(arguments: list[str]) -> int:
    """Body of the launcher's process. A system of this kind can not be resumed, nor forked: it only starts."""
    run_dir = Path(arguments[0])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    config = load_config(run_dir / CONFIG_FILE)
    pin_data(config, run_dir=run_dir)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    processes = SystemProcesses()
    with subreaper():
        try:
            _start(SCHEDULER, Role.AGENT, "kintsugi.lab.fragile.scheduler:main", run_dir, lifeline=reader)
            controller = _start(MASTER, Role.MASTER, _controller(config), run_dir, lifeline=reader)
            for index in range(len(read_hosts(run_dir))):
                monitor = "kintsugi.lab.fragile.monitor:main"
                _start(f"{MONITOR}-{index}", Role.AGENT, monitor, run_dir, lifeline=reader)
            status = controller.wait_ended(whom=MASTER, timeout_s=LONGEST_S)
        finally:
            os.close(writer)
            kill_children(processes, but=(), timeout_s=END_S)
    return EXIT_ERROR if status is None or status < 0 else status


def _controller(config: Config) -> str:
    kind = "elastic" if config.algorithm.name == "sft" else "controller"
    return f"kintsugi.lab.fragile.{kind}:main"


def _start(process: str, role: Role, program: str, run_dir: Path, *, lifeline: int) -> Child:
    report_reader, report_writer = os.pipe2(os.O_CLOEXEC)
    nobody = Peer(MASTER, "", "", "", b"")
    bootstrap = Bootstrap(
        job=uuid4().hex,
        run_dir=str(run_dir),
        process=process,
        role=role,
        host="host-0",
        incarnation="1",
        public_key=b"",
        secret_key=b"",
        master=nobody,
        lifeline=lifeline,
    )
    try:
        return spawn(SystemProcesses(), Start(program, Placement(), bootstrap, report=report_writer))
    finally:
        os.close(report_writer)
        os.close(report_reader)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
