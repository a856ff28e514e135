"""`python slurm_launcher.py RUN_DIR`: a launcher around the fake master, on the nodes of its allocation."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from kintsugi.cli.slurm import placed_cluster
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.launcher import launch
from kintsugi.config.schema import ClusterSection, Config

if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    config = Config(name="test", cluster=placed_cluster(ClusterSection(on="slurm", start_timeout_s=120.0)))
    programs = msgspec.json.decode((run_dir / "programs.json").read_bytes(), type=Programs)
    sys.exit(launch(config, run_dir=run_dir, on_tick=lambda: None, programs=programs))
