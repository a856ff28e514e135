"""Launcher: `python -m kintsugi.lab.fragile.launcher RUN_DIR start warm` starts scheduler, controller and monitors.

It ends with the controller. Processes that the system's own clean-up has left are killed then, so that nothing outlives
the experiment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from uuid import uuid4

from kintsugi.cluster.orphans import kill_children, subreaper
from kintsugi.cluster.spawn import StartOrder, spawn
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.data.dataset import pin_data
from kintsugi.lab.fragile.process import MONITOR, read_hosts
from kintsugi.lab.fragile.scheduler import SCHEDULER
from kintsugi.lab.testbed.watch import MASTER
from kintsugi.process.exit_codes import EXIT_ERROR
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import die_with_parent
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.types import Peer, Placement, Role

LONGEST_S = 24 * 3600.0
END_S = 10.0


def main(arguments: list[str]) -> int:
    """Body of the launcher's process. Such a system can neither be resumed nor use a fork server: it only starts."""
    run_dir = Path(arguments[0])
    die_with_parent()
    config = load_config(RunFolder(run_dir).config_file)
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
    no_master = Peer(MASTER, "", "", "", b"")
    bootstrap = Bootstrap(
        job=uuid4().hex,
        run_dir=str(run_dir),
        process=process,
        role=role,
        host="host-0",
        incarnation="1",
        public_key=b"",
        secret_key=b"",
        master=no_master,
        lifeline=lifeline,
    )
    try:
        return spawn(SystemProcesses(), StartOrder(program, Placement(), bootstrap, report=report_writer))
    finally:
        os.close(report_writer)
        os.close(report_reader)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
