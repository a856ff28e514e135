"""`python slurm_job_script.py RUN_DIR SUMMARY`: the body of a job whose run stops with this summary when asked to.

It notes in `RUN_DIR/noted.txt` when it starts, and whether its children live when it is asked to stop.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from kintsugi.cli.slurm import requeued_when_warned

if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    with (run_dir / "noted.txt").open("a") as noted:
        noted.write(f"started {restarts}\n")
        noted.flush()
        if restarts != "0":
            sys.exit(0)
        children = [subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True)]

        def stop(number: int, frame: FrameType | None) -> None:
            noted.write(f"asked to stop, {sum(child.poll() is None for child in children)} children live\n")
            noted.flush()
            shutil.copy(sys.argv[2], run_dir / "summary.json")
            sys.exit(0)

        with requeued_when_warned(run_dir):
            signal.signal(signal.SIGTERM, stop)
            signal.pause()
