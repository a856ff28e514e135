"""False alarms: thousands of healthy steps with everything that may look like a fault and is none.

    python benchmarks/false_alarms.py [--json FILE] [--steps 2000]

Every process stands still now and then with all its threads, as in a collection of garbage; a reward takes seconds once
in a while, as the longest of many rollouts does; checkpoints are written all the time. Counted are processes that were
taken for lost, incidents that were opened, and suspicions that had to be looked into and were not confirmed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.cluster.handover import PROGRAMS
from kintsugi.config.recipe import load
from kintsugi.control.protocol import Suspected
from kintsugi.journal.facts import CheckpointSaved, IncidentOpened, ProcessLost, StepCommitted
from kintsugi.journal.inputs import read_inputs
from kintsugi.journal.journal import read_facts
from kintsugi.lab.soak.soak import with_steps
from kintsugi.lab.testbed.run import MarkedRun, launch_for_a_lab
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.protocol.bootstrap import Bootstrap

HERE = Path(__file__).parent
RECIPE = HERE.parent / "kintsugi" / "recipes" / "soak.yaml"
STEPS = 2000
STEP_TIMEOUT_S = 10.0
PAUSE_EVERY_S = (5.0, 20.0)
PAUSE_S = (0.1, 1.0)
LONG_TAIL_SHARE = 1 / 400
LONG_TAIL_S = (0.5, 4.0)


def pausing_main(bootstrap: Bootstrap) -> int:
    """Body of every process but the agents: its usual program, beside a thread that sometimes stops all others."""
    seed = int(hashlib.sha256(f"{bootstrap.process} {bootstrap.incarnation}".encode()).hexdigest(), 16)
    threading.Thread(target=pause_now_and_then, args=(random.Random(seed),), daemon=True).start()
    module, _, function = PROGRAMS.entries[bootstrap.role].partition(":")
    program: Callable[[Bootstrap], int] = getattr(importlib.import_module(module), function)
    return program(bootstrap)


def pause_now_and_then(source: random.Random) -> None:
    """`PyDLL` keeps the interpreter's lock during the call: no other thread runs, as in a collection of garbage."""
    library = ctypes.PyDLL(None)
    while True:
        time.sleep(source.uniform(*PAUSE_EVERY_S))
        library.usleep(int(source.uniform(*PAUSE_S) * 1e6))


def long_tail(completions: list[str], **columns: Any) -> list[float]:
    """A reward that varies, and takes seconds for a few prompts; the same ones in every run."""
    digest = hashlib.sha256(repr((completions, sorted(columns))).encode()).digest()
    if int.from_bytes(digest[:4], "little") < LONG_TAIL_SHARE * 2**32:
        time.sleep(LONG_TAIL_S[0] + (LONG_TAIL_S[1] - LONG_TAIL_S[0]) * digest[4] / 255)
    return [sum(character in "13579" for character in text) / (len(text) or 1) for text in completions]


def launch(run_dir: Path) -> int:
    """The launcher's process: the usual programs, each with pauses."""
    programs = msgspec.structs.replace(
        PROGRAMS,
        entries=dict.fromkeys(PROGRAMS.entries, "false_alarms:pausing_main"),
        preload=(*PROGRAMS.preload, "false_alarms"),
    )
    return launch_for_a_lab(run_dir, resume=False, programs=programs)


def count(run_dir: Path) -> dict[str, int]:
    facts = read_facts(run_dir / "journal")
    suspected = [record.event for record in read_inputs(run_dir / "inputs")]
    return {
        "steps": sum(isinstance(fact, StepCommitted) for fact in facts),
        "saves": sum(isinstance(fact, CheckpointSaved) for fact in facts),
        "incidents": sum(isinstance(fact, IncidentOpened) for fact in facts),
        "processes_lost": sum(isinstance(fact, ProcessLost) for fact in facts),
        "suspicions": sum(isinstance(event, Suspected) for event in suspected),
    }


def measure(folder: Path, *, steps: int) -> dict[str, int]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(HERE))
    overrides = [
        "algorithm.batch_size=4", "algorithm.group_size=2", "algorithm.reward=[false_alarms.long_tail]",
        "data.num_eval=4", "eval.every=100", "checkpoint.every=10",
    ]  # fmt: skip
    config = with_steps(load(RECIPE, overrides).config, steps=steps)
    run = MarkedRun(config, run_dir=folder / "run", command=(sys.executable, __file__, "--launch"))
    watch = RunWatch(run.run_dir)
    try:
        run.start()
        watch.until(
            lambda: not run.running,
            what="the end of the run",
            timeout_s=60.0 + STEP_TIMEOUT_S * steps,
            pause_s=0.5,
        )
        if run.exit_code() != 0:
            raise RuntimeError(f"the run failed: {run.output()}")
    finally:
        watch.close()
        run.close()
    return count(run.run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--launch", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launch is not None:
        sys.exit(launch(Path(arguments.launch[0])))
    with tempfile.TemporaryDirectory(prefix="false-alarms-") as folder:
        found = measure(Path(folder), steps=arguments.steps)
    for name, number in found.items():
        print(f"{name:16} {number:>8,}")
    if arguments.json:
        host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        report = {"host": host, "date": datetime.now(UTC).isoformat(timespec="seconds"), **found}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if found["incidents"] or found["processes_lost"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
