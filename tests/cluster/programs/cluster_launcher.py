"""`python cluster_launcher.py RUN_DIR [supervised]`: a launcher around the fake master, which can be killed.

`supervised`: the command of a launcher in a session of its own.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec

from kintsugi.cli.supervisor import supervise
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.launcher import launch
from kintsugi.config.schema import Config
from kintsugi.errors import KintsugiError

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Ignored if the tests run under `nohup`.
    run_dir = Path(sys.argv[1])
    config = msgspec.json.decode((run_dir / "config.json").read_bytes(), type=Config)
    programs = msgspec.json.decode((run_dir / "programs.json").read_bytes(), type=Programs)
    try:
        run = supervise if sys.argv[2:] else launch
        sys.exit(run(config, run_dir=run_dir, on_tick=lambda: None, programs=programs))
    except KintsugiError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(99)
