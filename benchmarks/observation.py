"""What observation costs: everything that is recorded against nothing, in CPU-seconds and wall time per step.

    python benchmarks/observation.py [--json FILE] [--pairs 30] [--recipe FILE] [field=value …]

All that is only recorded for people and for the diagnosis is switched off and on while a run goes on: the samples of
processes, host and links, what heartbeats say, spans, the probe of the disk, the questions for the time, and the
process that diagnoses. Runs, blocks and pairs are those of `overhead.py`, whose protection stays on here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks import overhead
from benchmarks.overhead import SWITCH, Switch, switched_off
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.types import Role

GOAL = 1.02


def switched_main(bootstrap: Bootstrap) -> int:
    """Body of every process but the agents: its usual program, with a switch."""
    install(bootstrap.role)
    return overhead.usual_main(bootstrap)


def install(role: Role) -> None:
    from kintsugi.cluster.exit_recorder import OomAttribution
    from kintsugi.cluster.host_monitor import ClockSync, HostSampler
    from kintsugi.runtime.spans import Spans
    from kintsugi.telemetry.collect.probes import Probe
    from kintsugi.telemetry.readings import ReadingsLog

    switch = Switch(Path(os.environ[SWITCH]))
    recorders: tuple[tuple[Any, str, object], ...] = (
        (ReadingsLog, "write", None),
        (HostSampler, "samples", []),
        (Probe, "_try", None),
        (ClockSync, "tick", None),
        (OomAttribution, "look_at", None),
        (Spans, "add", None),
    )
    for owner, name, instead in recorders:
        setattr(owner, name, switched_off(getattr(owner, name), switch, instead=instead))


def install_in_watcher() -> None:
    from kintsugi.diagnosis.watcher import DiagnosisWatcher

    look = "look"
    switch = Switch(Path(os.environ[SWITCH]))
    setattr(DiagnosisWatcher, look, switched_off(getattr(DiagnosisWatcher, look), switch, instead=None))


if __name__ == "__main__":
    overhead.main(
        __doc__.splitlines()[0],
        program=__file__,
        install=install,
        install_in_watcher=install_in_watcher,
        goal=GOAL,
    )
