"""Simulation campaign: many seeds over all CPU cores, with violations, coverage and speed.

A part of a campaign runs in a process of its own (`python -m kintsugi.simulation.campaign`) and writes its results to a
file. Parts share nothing, so the result of a seed does not depend on the process that runs it.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kintsugi.config.schema import (
    LEARN_ROWS,
    ActorSection,
    AlgorithmSection,
    AsynchronySection,
    CheckpointSection,
    ClusterSection,
    Config,
    DataSection,
    EvaluationSection,
    GenerationSection,
    LayoutSection,
    RolloutSection,
    WarmupSection,
)
from kintsugi.control.master import Master
from kintsugi.control.placement import ProcessPlan
from kintsugi.errors import WorldError
from kintsugi.recovery.rank import Flow
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.simulation.cluster import SimulatedCluster, SimulationOutcome, undisturbed
from kintsugi.simulation.coverage import Coverage, Pair
from kintsugi.simulation.faults import SimulatedFaultPlan, draw_absences, draw_faults, draw_scalings
from kintsugi.simulation.invariants import Reference
from kintsugi.simulation.master import NewMaster
from kintsugi.simulation.targeted_faults import aim

PART_TIMEOUT_S = 24 * 3600.0
VIOLATIONS_KEPT = 100


class Violation(msgspec.Struct, frozen=True):
    """A seed that violated an invariant, and the command that reproduces it."""

    seed: int
    what: str
    trace_hash: str
    command: str


class CampaignFigures(msgspec.Struct):
    """Results of a part of a campaign."""

    seeds: int = 0
    counted: int = 0
    """Seeds with at least 9 processes, 10 committed steps and 3 faults, one of them during a recovery."""
    events: int = 0
    faults: int = 0
    scalings: int = 0
    """Number of requests for another number of servers."""
    rollbacks: int = 0
    seconds: float = 0.0
    """CPU time."""
    virtual_s: float = 0.0
    num_violations: int = 0
    violations: list[Violation] = []
    covered_events: list[tuple[Pair, int]] = []
    covered_crashes: list[tuple[Pair, int]] = []

    def add(self, other: CampaignFigures) -> None:
        for name in (
            "seeds",
            "counted",
            "events",
            "faults",
            "scalings",
            "rollbacks",
            "seconds",
            "virtual_s",
            "num_violations",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.violations = [*self.violations, *other.violations][:VIOLATIONS_KEPT]

    def coverage(self) -> Coverage:
        found = Coverage()
        for pairs, counter in (
            (self.covered_events, found.events),
            (self.covered_crashes, found.crashes),
        ):
            counter.update(dict(pairs))
        return found


VARIANTS: tuple[AlgorithmSection, ...] = (
    AlgorithmSection(name="grpo"),
    AlgorithmSection(name="ppo"),
    AlgorithmSection(name="grpo"),
    AlgorithmSection(name="dapo", resampling_rounds=1),
    AlgorithmSection(name="grpo"),
    AlgorithmSection(name="rloo", beta=0.1),
    AlgorithmSection(name="grpo"),
    AlgorithmSection(name="reward_model"),
)
"""Algorithms of the runs, in turn: half of them have a single training call; ppo sends two at once; dapo replaces
groups; rloo computes advantages after a model call; reward_model has neither servers nor manager and is evaluated by
the ranks."""


SYNCHRONOUS = AsynchronySection()
ASYNCHRONOUS = (
    AsynchronySection(max_staleness=1),
    AsynchronySection(max_staleness=2, overtake=1),
    AsynchronySection(max_staleness=4, overtake=2),
)


def simulated_config(
    num_workers: int = 6,
    variant: AlgorithmSection = VARIANTS[0],
    *,
    is_busy: bool = False,
    asynchrony: AsynchronySection = SYNCHRONOUS,
    shards: int = 1,
    layout: SimulatedLayout | None = None,
) -> Config:
    """Return the configuration of a run of ten steps of eight samples on two hosts; more workers are spread over more
    hosts. `shards`: the parts into which the state is cut; or `layout`, which tells the number of ranks as well.

    A busy run evaluates in the middle of its main stage too, and saves more often.
    """
    ranks, hosts = max(2, min(num_workers // 3, 64)), max(2, num_workers // 100)
    ranks += -ranks % shards
    if layout is not None:
        ranks, hosts = layout.ranks, layout.hosts
    servers = max(2, min(num_workers // 3, 64 + num_workers // 100))
    rollouts = max(2, num_workers - ranks - servers)
    groups = max(4, rollouts // 16)
    return Config(
        name="simulated",
        algorithm=msgspec.structs.replace(variant, steps=8, batch_size=groups, group_size=2),
        warmup=WarmupSection(steps=2, batch_size=2 * groups),
        data=DataSection(num_eval=2),
        eval=EvaluationSection(num_samples=2, every=3 if is_busy else 0),
        checkpoint=CheckpointSection(every=2 if is_busy else 4),
        actor=ActorSection(
            workers=ranks,
            logical_shards=max(4, ranks),
            layout=LayoutSection(shards=shards) if layout is None else layout.section,
        ),
        rollout=RolloutSection(workers=rollouts),
        asynchrony=asynchrony,
        generation=GenerationSection(servers=servers),
        cluster=ClusterSection(hosts=hosts, start_timeout_s=20.0),
    )


class SimulatedLayout(msgspec.Struct, frozen=True):
    """Ranks of a simulated run, the parts of their state, and the hosts that all processes are spread over."""

    ranks: int
    shards: int
    hosts: int
    stages: int = 1
    tensors: int = 1

    @property
    def section(self) -> LayoutSection:
        return LayoutSection(shards=self.shards, stages=self.stages, tensors=self.tensors)


SHARDED = ((2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 2), (4, 4), (6, 2), (6, 3))
"""Ranks and shards."""
LAYOUTS = (
    *((ranks, shards, 1, 1) for ranks, shards in SHARDED),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (4, 1, 2, 2),
    (4, 2, 2, 1),
    (4, 1, 1, 2),
    (8, 2, 2, 2),
)
"""Ranks, shards, stages and tensors."""


def layout_of(seed: int) -> SimulatedLayout:
    """Draw the layout of a run."""
    draw = random.Random(f"layout {seed}")
    ranks, shards, stages, tensors = draw.choice(LAYOUTS)
    return SimulatedLayout(ranks, shards, draw.choice((2, 2, 3)), stages, tensors)


class RunShape(msgspec.Struct, frozen=True):
    """Differences between the runs of a campaign, besides their faults."""

    flow: Flow
    is_busy: bool
    variant: AlgorithmSection
    asynchrony: AsynchronySection
    layout: SimulatedLayout | None = None
    """None: that of all runs of the campaign."""


def shape_of(seed: int) -> RunShape:
    """Draw the shape of a run: every fourth uses a framework without a rollback step, every second is busy, every third
    asynchronous."""
    draw = random.Random(f"shape {seed}")
    flow = Flow.RESTORE if draw.random() < 0.25 else Flow.ROLLBACK
    is_busy, variant = draw.random() < 0.5, draw.choice(VARIANTS)
    is_ahead = variant.name not in LEARN_ROWS and draw.random() < 0.35
    return RunShape(flow, is_busy, variant, draw.choice(ASYNCHRONOUS) if is_ahead else SYNCHRONOUS)


def draw_plan(
    seed: int, layout: Sequence[ProcessPlan], *, num_steps: int, with_absences: bool = False
) -> SimulatedFaultPlan:
    """Return all faults of the run of a seed. `with_absences`: in every fourth run ranks can not be started for a
    while."""
    draw = random.Random(f"plan {seed}")
    plan = draw_faults(draw, layout, num_steps=num_steps)
    aim(draw, plan, seed, layout)
    draw_scalings(random.Random(f"scalings {seed}"), plan, layout, num_steps=num_steps)
    if with_absences:
        draw_absences(random.Random(f"absences {seed}"), plan, layout, num_steps=num_steps)
    return plan


class Runner:
    """Runs seeds; the fault-free run of each shape is made once."""

    def __init__(self, *, num_workers: int = 6, shards: int = 1, draws_layouts: bool = False) -> None:
        """`draws_layouts`: every seed has a layout of its own, instead of these shards."""
        self._num_workers, self._shards, self._draws_layouts = num_workers, shards, draws_layouts
        self._references: dict[RunShape, tuple[Config, Reference]] = {}

    def run(
        self,
        seed: int,
        *,
        coverage: Coverage | None = None,
        keep_trace: bool = False,
        new_master: NewMaster = Master,
    ) -> SimulationOutcome:
        """Run one seed, optionally with a modified master that should fail."""
        shape = shape_of(seed)
        if self._draws_layouts:
            shape = msgspec.structs.replace(shape, layout=layout_of(seed))
        if shape not in self._references:
            config = simulated_config(
                self._num_workers,
                shape.variant,
                is_busy=shape.is_busy,
                asynchrony=shape.asynchrony,
                shards=self._shards,
                layout=shape.layout,
            )
            self._references[shape] = config, undisturbed(config, flow=shape.flow)
        config, reference = self._references[shape]
        cluster = SimulatedCluster(
            config,
            seed=seed,
            reference=reference,
            coverage=coverage,
            flow=shape.flow,
            keep_trace=keep_trace,
            new_master=new_master,
        )
        cluster.injector.take(
            draw_plan(seed, cluster.layout, num_steps=10, with_absences=self._draws_layouts)
        )
        return cluster.run()

    def run_all(self, first: int, count: int) -> CampaignFigures:
        """Run seeds `first` to `first + count - 1` in this process."""
        figures, coverage = CampaignFigures(), Coverage()
        since = time.process_time()
        for seed in range(first, first + count):
            outcome = self.run(seed, coverage=coverage)
            figures.seeds += 1
            figures.counted += outcome.counts
            figures.events += outcome.num_events
            figures.faults += len(outcome.faults)
            figures.scalings += len(outcome.scalings)
            figures.rollbacks += outcome.num_rollbacks
            figures.virtual_s += outcome.virtual_s
            if outcome.violations:
                figures.num_violations += 1
                figures.violations.append(
                    Violation(seed, outcome.violations[0], outcome.trace_hash, self.replay_command(seed))
                )
        figures.seconds = time.process_time() - since
        figures.covered_events = list(coverage.events.items())
        figures.covered_crashes = list(coverage.crashes.items())
        return figures

    def replay_command(self, seed: int) -> str:
        workers = f" --workers {self._num_workers}" if self._num_workers != 6 else ""
        shards = f" --shards {self._shards}" if self._shards != 1 else ""
        layouts = " --layouts" if self._draws_layouts else ""
        return f"kintsugi simulate --replay {seed}{workers}{shards}{layouts} --trace"


def summary_of(seed: int, outcome: SimulationOutcome) -> str:
    """Return a summary of one run in a few lines."""
    faults = [f"{fault.kind} {fault.target} {fault.other} in {fault.fired_in}" for fault in outcome.faults]
    scalings = [f"to {scaling.servers} servers in {scaling.fired_in}" for scaling in outcome.scalings]
    return "\n".join(
        [
            f"seed {seed}: {outcome.outcome}, {outcome.num_steps} steps, {outcome.num_events} events",
            f"  {outcome.virtual_s:.1f} virtual s, trace {outcome.trace_hash}",
            *(f"  fault: {fault}" for fault in faults),
            *(f"  scaling: {scaling}" for scaling in scalings),
            *(f"  violation: {violation}" for violation in outcome.violations),
        ]
    )


def run_campaign(
    *,
    first: int,
    count: int,
    num_workers: int = 6,
    num_processes: int = 0,
    shards: int = 1,
    draws_layouts: bool = False,
) -> dict[str, object]:
    """Run seeds over several processes and return the report."""
    num_processes = min(num_processes or os.cpu_count() or 1, max(1, count))
    since = time.monotonic()
    if num_processes == 1:
        runner = Runner(num_workers=num_workers, shards=shards, draws_layouts=draws_layouts)
        parts = [runner.run_all(first, count)]
    else:
        sizes = [str(num_workers), str(shards), str(int(draws_layouts))]
        parts = _run_parts(first, count, sizes=sizes, num_processes=num_processes)
    wall_s = time.monotonic() - since
    total, coverage = CampaignFigures(), Coverage()
    for part in parts:
        total.add(part)
        coverage.add(part.coverage())
    return {
        "first_seed": first,
        "seeds": total.seeds,
        "counted_seeds": total.counted,
        "violations": total.num_violations,
        "violating": msgspec.to_builtins(total.violations),
        "faults": total.faults,
        "scalings": total.scalings,
        "rollbacks": total.rollbacks,
        "events": total.events,
        "events_per_run": total.events / max(1, total.seeds),
        "events_per_s_per_core": total.events / max(1e-9, total.seconds),
        "runs_per_s": total.seeds / max(1e-9, wall_s),
        "virtual_s": total.virtual_s,
        "wall_s": wall_s,
        "processes": num_processes,
        "simulated_processes": len(
            SimulatedCluster(simulated_config(num_workers, shards=shards), seed=0).layout
        )
        + 1,
        "coverage": coverage.report(),
    }


def _run_parts(first: int, count: int, *, sizes: list[str], num_processes: int) -> list[CampaignFigures]:
    """Run one process per part. Seeds take turns, so that no part has only the slow ones."""
    with tempfile.TemporaryDirectory() as folder:
        share, rest = divmod(count, num_processes)
        children, begin = [], first
        for number in range(num_processes):
            size = share + (number < rest)
            path = Path(folder) / f"{number}.json"
            arguments = [str(begin), str(size), *sizes, str(path)]
            child = SystemProcesses().spawn(
                [sys.executable, "-P", "-m", "kintsugi.simulation.campaign", *arguments]
            )
            children.append((child, path))
            begin += size
        parts = []
        for child, path in children:
            status = child.wait_ended(whom=f"simulating process {child.pid}", timeout_s=PART_TIMEOUT_S)
            child.close()
            if status != 0:
                raise WorldError(f"a simulating process ended with {status}")
            parts.append(msgspec.json.decode(path.read_bytes(), type=CampaignFigures))
        return parts


def main(arguments: list[str]) -> int:
    """Run a part. Arguments: first seed, number of seeds, workers, shards, whether layouts are drawn (0 or 1), file for
    the results."""
    first, count, num_workers, shards, draws_layouts, path = arguments
    runner = Runner(num_workers=int(num_workers), shards=int(shards), draws_layouts=bool(int(draws_layouts)))
    figures = runner.run_all(int(first), int(count))
    Path(path).write_bytes(msgspec.json.encode(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
