"""What observation costs: everything that is recorded against nothing, in CPU-seconds and wall time per step.

    python benchmarks/observation.py [--json FILE] [--pairs 30]

All that is only recorded for people and for the diagnosis is switched off and on while a run goes on: the samples of
processes, host and links, what heartbeats say, spans, the probe of the disk, the questions for the time, and the
process that diagnoses. Runs, blocks and pairs are those of `overhead.py`, whose protection stays on here.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks import overhead
from benchmarks.overhead import SWITCH, Switch, switched_off
from kintsugi.bootstrap import Bootstrap
from kintsugi.types import Role

GOAL = 1.02


def switched_main(bootstrap: Bootstrap) -> int:
    """Body of every process but the agents: its usual program, with a switch."""
    install(bootstrap.role)
    return overhead.usual_main(bootstrap)


def install(role: Role) -> None:
    from kintsugi.cluster.obituaries import OomLedger
    from kintsugi.cluster.oversight import TimeKeeping
    from kintsugi.cluster.sampling import Sampling
    from kintsugi.observe.figures import FiguresLog
    from kintsugi.observe.probes import Probe
    from kintsugi.runtime import Spans

    switch = Switch(Path(os.environ[SWITCH]))
    recorders: tuple[tuple[Any, str, object], ...] = (
        (FiguresLog, "write", None),
        (Sampling, "samples", []),
        (Probe, "_try", None),
        (TimeKeeping, "tick", None),
        (OomLedger, "look_at", None),
        (Spans, "add", None),
    )
    for owner, name, instead in recorders:
        setattr(owner, name, switched_off(getattr(owner, name), switch, instead=instead))


class PausedWatcher(Switch):
    """Stops the process that diagnoses while the others do not record."""

    def set(self, on: bool) -> None:
        super().set(on)
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = os.environ[SWITCH].encode() in (folder / "environ").read_bytes()
                if is_ours and b"kintsugi.diagnosis.watcher" in (folder / "cmdline").read_bytes():
                    os.kill(int(folder.name), signal.SIGCONT if on else signal.SIGSTOP)


if __name__ == "__main__":
    setattr(overhead, "Switch", PausedWatcher)  # noqa: B010 - the one that the measuring process turns
    overhead.main(__doc__.splitlines()[0], program=__file__, install=install, goal=GOAL)
