"""What protection costs: detection, snapshots and journal on against off, in CPU-seconds and wall time per step.

    python benchmarks/overhead.py [--json FILE] [--pairs 30] [--recipe FILE] [field=value …]

Two runs of the same steps, whose protection is switched off and on while they run. Off, nothing is journaled, no state
is copied or hashed, no heartbeats are sent and none are watched for; everything else is the same code
in the same processes. Blocks of ten steps are on, off, off, on, … in the first run, and off, on, on, off, … in the
second: equal seeds give equal samples, so both have the same work to do in a block. A pair is two neighbouring blocks
of both runs, of which two are on and two off, so that neither the work nor the run nor the moment makes a difference.
The table gives the mean ratio of the pairs and its one-sided 95 % upper bound by Student's t; and, as a machine that is
shared disturbs some pairs far more than others, their median with a bound of the same kind.

Which blocks are off is known in advance: a rank goes by the step it prepares, because all ranks have to agree on what
it hashes to; the others go by a byte in a file, which the benchmark changes when a block ends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import mmap
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.cluster import agent
from kintsugi.cluster.handover import PROGRAMS
from kintsugi.config.recipe import load
from kintsugi.config.schema import Config
from kintsugi.diagnosis import watcher
from kintsugi.lab.soak.soak import with_steps
from kintsugi.lab.testbed.run import MarkedRun, launch_for_a_lab
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.reader import read_faults
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.types import Role

HERE = Path(__file__).parent
RECIPE = HERE.parent / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"
OVERRIDES = ("warmup=null", "eval.every=0", "checkpoint.every=0", "data.num_eval=10")
PAIRS = 30
WARM_BLOCKS = 4
"""Not counted: first answers are slow, and whole rounds of four keep the order of on and off."""
STEP_TIMEOUT_S = 30.0
GOAL = 1.03


STEPS_PER_BLOCK = 10
SWITCH = "KINTSUGI_BENCHMARK_SWITCH"
"""Environment: path of a file of one byte, 1 while the protection is on."""
FLIPPED = "KINTSUGI_BENCHMARK_FLIPPED"
"""Environment: 1 in the run that is on where the other one is off."""


def is_on(step: int) -> bool:
    """On, off, off, on, …: each pair of blocks has one of both, in alternating order, so that a drift cancels out."""
    return (((step - 1) // STEPS_PER_BLOCK) % 4 in (0, 3)) != (os.environ.get(FLIPPED) == "1")


class Switch:
    """The byte, mapped: looking at it costs nothing."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 1)

    @property
    def on(self) -> bool:
        return self._memory[0] == 1

    def set(self, on: bool) -> None:
        self._memory[0] = int(on)


def switched_main(bootstrap: Bootstrap) -> int:
    """Body of every process but the agents: its usual program, with a switch."""
    install(bootstrap.role)
    return usual_main(bootstrap)


def usual_main(bootstrap: Bootstrap) -> int:
    module, _, function = PROGRAMS.entries[bootstrap.role].partition(":")
    program: Callable[[Bootstrap], int] = getattr(importlib.import_module(module), function)
    return program(bootstrap)


def install(role: Role) -> None:
    switch = Switch(Path(os.environ[SWITCH]))
    silence_heartbeats(switch)
    if role is Role.MASTER:
        stop_journal_and_watch(switch)
    elif role is Role.MODEL:
        stop_snapshots()
    elif role is Role.AGENT:
        stop_looking_after_children(switch)


def silence_heartbeats(switch: Switch) -> None:
    from kintsugi.process.membership import Membership

    tick = Membership.tick

    def switched(self: Membership, now: float) -> None:
        if switch.on or not self.registered:
            tick(self, now)

    Membership.tick = switched  # type: ignore[method-assign]


def stop_journal_and_watch(switch: Switch) -> None:
    from kintsugi.journal.inputs import InputRecorder
    from kintsugi.journal.journal import Journal
    from kintsugi.recovery.liveness import LivenessMonitor

    for owner, name, instead in (
        (Journal, "append", None),
        (Journal, "sync", None),
        (InputRecorder, "write", None),
        (LivenessMonitor, "check", []),
    ):
        setattr(owner, name, switched_off(getattr(owner, name), switch, instead=instead))


def stop_looking_after_children(switch: Switch) -> None:
    from kintsugi.cluster.host_monitor import HostMonitor

    look_after = "stopped"
    setattr(HostMonitor, look_after, switched_off(getattr(HostMonitor, look_after), switch, instead=[]))


def switched_off(method: Callable[..., Any], switch: Switch, *, instead: object) -> Callable[..., Any]:
    return lambda *arguments, **named: method(*arguments, **named) if switch.on else instead


def stop_snapshots(on: Callable[[int], bool] = is_on) -> None:
    """Without a copy the live state is the committed one, which is right as long as nothing is rolled back."""
    from torch import Tensor

    from kintsugi.training.snapshots import CopyCounters, StateSnapshots

    prepare, commit, committed = (
        StateSnapshots.prepare,
        StateSnapshots.commit,
        vars(StateSnapshots)["committed"],
    )
    uncopied: set[StateSnapshots] = set()

    def switched_prepare(self: StateSnapshots, counters: CopyCounters) -> str:
        if on(counters.step):
            return prepare(self, counters)
        self.settle()
        return f"step {counters.step}"

    def switched_commit(self: StateSnapshots) -> None:
        if self._prepared is None:
            uncopied.add(self)
        else:
            commit(self)
            uncopied.discard(self)

    def switched_committed(self: StateSnapshots) -> Tensor | None:
        held: Tensor | None = committed.fget(self)
        return self._live if self in uncopied else held

    StateSnapshots.prepare = switched_prepare  # type: ignore[method-assign]
    StateSnapshots.commit = switched_commit  # type: ignore[method-assign]
    setattr(StateSnapshots, "committed", property(switched_committed))  # noqa: B010 - a property has no type to assign to


SWITCHED = {"kintsugi.cluster.agent": "--agent", "kintsugi.diagnosis.watcher": "--watcher"}


class SwitchedProcesses(SystemProcesses):
    """Agents and the watcher are started by the launcher itself, which knows their modules only; they get the switch
    this way."""

    def __init__(self, program: str) -> None:
        self._program = program

    def spawn(self, argv: Sequence[str], **options: Any) -> Child:
        if (option := next((SWITCHED[each] for each in argv if each in SWITCHED), None)) is not None:
            argv = [argv[0], self._program, option, *argv[3:]]
        return super().spawn(argv, **options)


def launch(run_dir: Path, *, program: str = __file__) -> int:
    """The launcher's process: the usual programs, each with a switch that the benchmark `program` installs."""
    module = Path(program).stem
    entries = dict.fromkeys(PROGRAMS.entries, f"{module}:switched_main")
    programs = msgspec.structs.replace(PROGRAMS, entries=entries, preload=(*PROGRAMS.preload, module))
    return launch_for_a_lab(run_dir, resume=False, programs=programs, processes=SwitchedProcesses(program))


class Block(msgspec.Struct, frozen=True):
    """Seconds per step."""

    on: bool
    wall_s: float
    cpu_s: float


def cpu_seconds(pids: Sequence[int]) -> float:
    """What the threads of these processes have run for, in all; to the nanosecond, unlike /proc/PID/stat."""
    total = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # Some threads live for a moment only.
                total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def measure(
    config: Config, folder: Path, *, num_blocks: int, flipped: bool, program: str = __file__
) -> list[Block]:
    """The blocks of one run, in order."""
    folder.mkdir()
    path = folder / "switch"
    path.write_bytes(b"\1")
    os.environ |= {SWITCH: str(path), FLIPPED: str(int(flipped))}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    switch = Switch(path)
    steps = num_blocks * STEPS_PER_BLOCK
    run = MarkedRun(
        with_steps(config, steps=steps + 1),
        run_dir=folder / "run",
        command=(sys.executable, program, "--launch"),
    )
    watch = RunWatch(run.run_dir)
    blocks: list[Block] = []
    try:
        run.start()
        before = None
        for step in range(0, steps + 1, STEPS_PER_BLOCK):
            watch.until(
                lambda step=step: watch.step >= max(step, 1) or not run.running,  # type: ignore[misc]
                what=f"step {step}",
                timeout_s=60.0 + STEP_TIMEOUT_S * STEPS_PER_BLOCK,
            )
            if not run.running:
                why = "; ".join(fault.message for fault in read_faults(run.run_dir, since=0.0))
                raise RuntimeError(f"the run ended: {why or run.output()}")
            switch.set(is_on(step + 1))
            now = (watch.commits[-1].at, cpu_seconds(run.pids()))
            if before is not None:
                wall_s, cpu_s = (after - earlier for after, earlier in zip(now, before, strict=True))
                blocks.append(Block(is_on(step), wall_s / STEPS_PER_BLOCK, cpu_s / STEPS_PER_BLOCK))
            before = now
    finally:
        watch.close()
        run.close()
    return blocks


def upper_bound(ratios: Sequence[float]) -> float:
    """One-sided 95 % bound of the mean; Student's t by its expansion around the normal: 0.1 % from n = 10 on."""
    normal, freedom = statistics.NormalDist().inv_cdf(0.95), len(ratios) - 1
    t = (
        normal
        + (normal**3 + normal) / (4 * freedom)
        + (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * freedom**2)
    )
    return statistics.fmean(ratios) + t * statistics.stdev(ratios) / math.sqrt(len(ratios))


def upper_bound_of_median(ratios: Sequence[float]) -> float:
    """One-sided 95 % bound that supposes nothing of how they are distributed: how many of them would lie below the true
    median is a matter of coins."""
    count = len(ratios)
    below = math.ceil(count / 2 + statistics.NormalDist().inv_cdf(0.95) * math.sqrt(count) / 2)
    return sorted(ratios)[min(below, count - 1)]


def row(what: str, runs: Sequence[Sequence[Block]], *, goal: float = GOAL) -> dict[str, Any]:
    """One figure over all pairs."""
    ratios, values = [], {True: list[float](), False: list[float]()}
    for start in range(0, len(runs[0]), 2):
        pair = {True: list[float](), False: list[float]()}
        for block in (block for run in runs for block in run[start : start + 2]):
            pair[block.on].append(getattr(block, what))
        assert len(pair[True]) == len(pair[False]) == len(runs)
        ratios.append(statistics.geometric_mean(pair[True]) / statistics.geometric_mean(pair[False]))
        for on, seconds in pair.items():
            values[on] += seconds
    return {
        "case": {
            "what": f"{what.removesuffix('_s')} per step",
            "pairs": len(ratios),
            "steps": STEPS_PER_BLOCK,
        },
        "unit": "s",
        "on": round(statistics.median(values[True]), 5),
        "off": round(statistics.median(values[False]), 5),
        "ratio": round(statistics.fmean(ratios), 4),
        "upper_bound_95": round(upper_bound(ratios), 4),
        "median": round(statistics.median(ratios), 4),
        "median_upper_bound_95": round(upper_bound_of_median(ratios), 4),
        "goal": goal,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def main(
    description: str = __doc__.splitlines()[0],
    *,
    program: str = __file__,
    install: Callable[[Role], None] = install,
    install_in_watcher: Callable[[], None] = lambda: None,
    goal: float = GOAL,
) -> None:
    """For every benchmark of something that can be switched off: `install` makes it so in a process of this role."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("overrides", nargs="*", metavar="field=value")
    parser.add_argument("--launch", nargs=3, help=argparse.SUPPRESS)
    for option in SWITCHED.values():
        parser.add_argument(option, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launch is not None:
        sys.exit(launch(Path(arguments.launch[0]), program=program))
    if arguments.agent is not None:
        install(Role.AGENT)
        sys.exit(agent.main(arguments.agent))
    if arguments.watcher is not None:
        install_in_watcher()
        sys.exit(watcher.main(arguments.watcher))
    config = load(arguments.recipe, [*OVERRIDES, *arguments.overrides]).config
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        num_blocks = WARM_BLOCKS + 2 * arguments.pairs
        runs = [
            measure(
                config, Path(folder, str(flipped)), num_blocks=num_blocks, flipped=flipped, program=program
            )[WARM_BLOCKS:]
            for flipped in (False, True)
        ]
    rows = [row("cpu_s", runs, goal=goal), row("wall_s", runs, goal=goal)]
    for entry in rows:
        print(
            f"{entry['case']['what']:14} on {entry['on'] * 1000:8.2f} ms   off {entry['off'] * 1000:8.2f} ms   "
            f"ratio {entry['ratio']:.4f}   95 % upper bound {entry['upper_bound_95']:.4f}   "
            f"median {entry['median']:.4f}, bound {entry['median_upper_bound_95']:.4f}"
        )
    if arguments.json:
        host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        report = {"host": host, "date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
