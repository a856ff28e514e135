"""A run that is weeks old: what a new master, `kintsugi status` and `kintsugi samples` cost; memory of the master.

    python benchmarks/long_run.py journal [--samples 10000000] [--folder FOLDER]
    python benchmarks/long_run.py memory [--steps 200000] [--checkpoint-every 10]
    python benchmarks/long_run.py simulation [--steps 200000] [--checkpoint-every 10]
    python benchmarks/long_run.py book [--processes 900 10000]

`journal` writes the run folder of a run in progress, with the writers and the compaction that the master uses, and then
measures processes from their start: a master that takes the run over, up to its first decision in the journal, and
commands. `memory` folds the facts of as many steps of 8 samples into the state of a master that journals and
compacts them, with checkpoints or without (0), and prints its memory on the way. `simulation` runs a whole simulated
cluster for as many steps, and prints the size of everything that its master refers to, and the memory of the process.
The simulator keeps all facts, to check them against a later takeover; here there is none, so facts of old steps are
dropped once they are checked. `book` prints the bytes of the address book in encoded messages to all processes
together: of a loss, of a join, and of all joins at the start.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import msgspec

from kintsugi.config.recipe import dump, load
from kintsugi.config.schema import Config
from kintsugi.control.book_sharing import SHARE_S, BookSharing
from kintsugi.control.master import Master
from kintsugi.control.membership import WorkerRegistry
from kintsugi.control.process import (
    COMPACTED_AFTER,
    COMPACTION_SIZE,
    MasterShell,
    config_digest,
    new_state,
)
from kintsugi.control.protocol import Decision, Event
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    BatchFormed,
    CheckpointSaved,
    Fact,
    ProcessJoined,
    ProcessLost,
    ProcessRequested,
    RunStarted,
    SamplesScored,
    StageStarted,
    StepCommitted,
    TermStarted,
    TicketAssigned,
    TicketsIssued,
)
from kintsugi.journal.journal import Journal
from kintsugi.protocol import wire
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.campaign import simulated_config
from kintsugi.simulation.cluster import SimulatedCluster
from kintsugi.simulation.master import JOURNAL
from kintsugi.telemetry.step_metrics import MetricsWriter, SamplesWriter, step_metrics
from kintsugi.transport import new_key_pair
from kintsugi.types import FinishReason, Peer, Role, SampleMeta, SampleText, Ticket, ticket_id

GROUP_SIZE = 8
RECIPE = "grpo_arithmetic"
AGENT = Peer("agent-0", "1", "host-0", "tcp://127.0.0.1:9", b"a" * 40)
FACTS_KEPT, STEPS_KEPT = 20_000, 20
"""Facts and steps of a simulated run that are kept to check others."""
CALL_METRICS = {"kl": 0.01, "entropy": 1.2, "grad_norm": 0.4, "clip_ratio": 0.02, "loss": 0.1}


class LongRun:
    """The journal and the state of a master, fed with the facts of steps as a run leads to them."""

    def __init__(self, folder: Path, config: Config, *, groups: int, checkpoint_every: int) -> None:
        self.config, self._groups, self._every = config, groups, checkpoint_every
        self.state = new_state(config)
        self.journal = Journal.create(RunFolder(folder).journal_file, owner="benchmark")
        self.num_compactions = 0
        self._rounds = 0
        self.append(
            RunStarted("benchmark", config_digest(config)),
            TermStarted(1, "a"),
            StageStarted("grpo", 0),
            ProcessJoined(AGENT, Role.AGENT, 1),
        )

    def append(self, *facts: Fact) -> None:
        for fact in facts:
            self.state.apply(fact)
        self.journal.append(facts)
        is_boundary = any(isinstance(fact, COMPACTED_AFTER) for fact in facts)
        if is_boundary and self.journal.is_compaction_due(min_size=COMPACTION_SIZE):
            self.journal.compact(self.state.fold())
            self.num_compactions += 1

    def step(self, step: int) -> list[SampleMeta]:
        """Issue, score and train the groups of a step; return its samples."""
        first = (step - 1) * self._groups
        tickets = [
            Ticket(
                ticket_id("grpo", epoch=0, position=first + n, round=0), "grpo", 0, first + n, 0, GROUP_SIZE
            )
            for n in range(self._groups)
        ]
        self.append(TicketsIssued(tuple(tickets)))
        metas: list[SampleMeta] = []
        for ticket in tickets:
            self.append(TicketAssigned(ticket.id, "rollout-0", "1.1", step - 1))
            samples = tuple(self._sample(ticket, index, step) for index in range(GROUP_SIZE))
            self.append(SamplesScored(ticket.id, samples))
            metas += samples
        self.append(BatchFormed(step, tuple(ticket.id for ticket in tickets)))
        metrics = step_metrics(
            metas, advantages={}, call_metrics=CALL_METRICS, timing={"step": 1.0, "train": 0.4}
        )
        self.append(StepCommitted(step, f"{step:016x}", {**metrics, "samples": float(len(metas))}))
        if self._every and step % self._every == 0:
            self.append(CheckpointSaved(step, f"checkpoints/step-{step}", f"{step:016x}"))
        self.metrics = metrics
        return metas

    def _sample(self, ticket: Ticket, index: int, step: int) -> SampleMeta:
        reward = ((ticket.position * 7919 + index * 104729) % 1000) / 1000
        key = f"{ticket.id}/{index}"
        return SampleMeta(
            key, ticket.id, 40, 12, reward, {"right": reward}, FinishReason.EOS, step - 1, "rollout-0", ""
        )


def config_of(run_dir: Path) -> Config:
    return load(RECIPE, [f"run_dir={run_dir}"]).config


def write_run(run_dir: Path, *, samples: int) -> None:
    """Write the folder of a run in progress: journal, samples, metrics."""
    run_dir.mkdir(parents=True)
    config = config_of(run_dir)
    dump(config, RunFolder(run_dir).config_file)
    groups = config.algorithm.batch_size
    run = LongRun(run_dir, config, groups=groups, checkpoint_every=50)
    metrics, lines = MetricsWriter(run_dir), SamplesWriter(run_dir)
    num_steps, begun = -(-samples // (groups * GROUP_SIZE)), time.monotonic()
    for step in range(1, num_steps + 1):
        metas = run.step(step)
        texts = {
            meta.key: SampleText(f"What is {step} + {number}?", f"The sum is {step + number}.")
            for number, meta in enumerate(metas)
        }
        lines.write(step, metas, texts=texts, advantages={})
        metrics.write(step, run.metrics)
        if step % max(1, num_steps // 20) == 0:
            say(
                f"step {step} of {num_steps}, {time.monotonic() - begun:.0f} s, {run.num_compactions} compactions"
            )
    run.journal.sync()
    run.journal.close()


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def take_over(run_dir: Path) -> None:
    """Start a master on the folder, as its agent would after the death of another, up to its first decision."""
    public_key, secret_key = new_key_pair()
    lifeline, _ = os.pipe()
    bootstrap = Bootstrap(
        job="benchmark",
        run_dir=str(run_dir),
        process="master-0",
        role=Role.MASTER,
        host="host-0",
        incarnation="b",
        public_key=public_key,
        secret_key=secret_key,
        master=Peer("master-0", "b", "host-0", "", public_key),
        lifeline=lifeline,
        peers=(msgspec.structs.replace(AGENT, address=""),),
        adopting=True,
    )
    shell = MasterShell(bootstrap, config_of(run_dir))
    shell.begin()
    state: MasterState = shell._master.state
    assert state.term >= 2 and state.step > 0
    os._exit(0)


def measured(*arguments: str) -> dict[str, float]:
    """Run a process; return its duration and its largest resident memory."""
    begun, peak_kb = time.monotonic(), 0
    pid = os.posix_spawn(sys.executable, [sys.executable, *arguments], os.environ, file_actions=_quiet())
    while not (found := os.wait4(pid, os.WNOHANG))[0]:
        # `ru_maxrss` would include the memory of this process, from which it was spawned.
        peak_kb = max(peak_kb, _peak_kb(pid))
        time.sleep(0.005)
    _, status, usage = found
    assert status == 0, f"{arguments}: status {status}"
    return {
        "seconds": round(time.monotonic() - begun, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "megabytes": round(peak_kb / 1024, 1),
    }


def _peak_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _quiet() -> list[tuple[int, int, str, int, int]]:
    return [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]


def measure_journal(run_dir: Path, *, repeats: int) -> dict[str, object]:
    """Measure the three processes, several times each; the fastest of each is the least disturbed."""
    cases = {
        "interpreter with kintsugi.cli": ("-c", "import kintsugi.cli.main"),
        "new master, first decision": (__file__, "take-over", str(run_dir)),
        "kintsugi status": ("-m", "kintsugi", "status", str(run_dir)),
        "kintsugi samples --worst 10": ("-m", "kintsugi", "samples", str(run_dir), "--worst", "10"),
        "kintsugi samples": ("-m", "kintsugi", "samples", str(run_dir)),
        "kintsugi incidents": ("-m", "kintsugi", "incidents", str(run_dir)),
        "kintsugi logs": ("-m", "kintsugi", "logs", str(run_dir)),
    }
    found: dict[str, object] = {}
    for name, arguments in cases.items():
        runs = [measured(*arguments) for _ in range(repeats)]
        found[name] = min(runs, key=lambda run: run["seconds"])
        say(f"{name}: {found[name]}")
    sizes = {path.name: path.stat().st_size for path in sorted(run_dir.iterdir()) if path.is_file()}
    kept = sum(size for name, size in sizes.items() if name.startswith("journal.") and name[8:].isdecimal())
    plain = {name: size for name, size in sizes.items() if not name.startswith("journal.")}
    return {**found, "bytes": {**plain, "kept journals": kept}}


def measure_memory(*, steps: int, checkpoint_every: int, reports: int = 10) -> Iterator[dict[str, float]]:
    """Yield the resident memory of this process and the size of the folded state on the way."""
    with tempfile.TemporaryDirectory() as folder:
        run = LongRun(Path(folder), config_of(Path(folder)), groups=1, checkpoint_every=checkpoint_every)
        for step in range(1, steps + 1):
            run.step(step)
            if step % (steps // reports) == 0:
                yield {
                    "step": step,
                    "resident_mb": round(_resident() / 1e6, 1),
                    "folded_kb": round(sum(map(len, run.state.fold().parts.values())) / 1e3, 1),
                    "journal_mb": round(RunFolder(folder).journal_file.stat().st_size / 1e6, 1),
                }
        run.journal.close()


class MeasuredMaster(Master):
    """The decisions of a master, which prints the size of its objects on the way."""

    every = 1000

    def decide(self, event: Event, now: float) -> Decision:
        before = self.state.step
        decision = super().decide(event, now)
        if self.state.step > before and self.state.step % self.every == 0:
            sizes = {
                "step": self.state.step,
                "master_kb": round(_deep_size(self) / 1e3, 1),
                "resident_mb": round(_resident() / 1e6, 1),
                "cpu_s": round(time.process_time(), 1),
            }
            sys.stdout.write(json.dumps(sizes) + "\n")
            sys.stdout.flush()
        return decision


def _deep_size(root: object) -> int:
    """Return the size of all objects that this one refers to, classes, functions and modules left out."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType | Config):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        waiting.extend(gc.get_referents(each))
    return total


def simulate(*, steps: int, checkpoint_every: int) -> None:
    """Run a simulated cluster without faults for as many steps."""
    config = simulated_config()
    config = msgspec.structs.replace(
        config,
        # Simulated rewards are sometimes no numbers; with few groups a step, so often that a long run rightly fails.
        algorithm=msgspec.structs.replace(config.algorithm, steps=steps, batch_size=8),
        checkpoint=msgspec.structs.replace(config.checkpoint, every=checkpoint_every),
        eval=msgspec.structs.replace(config.eval, every=100),
    )
    MeasuredMaster.every = max(1, steps // 10)
    cluster = SimulatedCluster(config, seed=0, new_master=MeasuredMaster)
    cluster.injector.last_at = float("inf")  # The run takes longer than one of a campaign.
    cluster.invariants.follow(lambda _: _forget(cluster))
    outcome = cluster.run()
    assert outcome.outcome == "finished" and not outcome.violations, outcome.violations


def _forget(cluster: SimulatedCluster) -> None:
    """Drop what the simulator has checked of old steps."""
    seen, disk = cluster.invariants, cluster.disk
    if len(seen.facts) < FACTS_KEPT:
        return
    last = seen.step - STEPS_KEPT
    seen.facts.clear()
    seen.found.batches = {step: batch for step, batch in seen.found.batches.items() if step > last}
    seen.found.digests = {step: digest for step, digest in seen.found.digests.items() if step > last}
    seen._versions = {
        ticket: version
        for ticket, version in seen._versions.items()
        if seen._trained.get(ticket, seen.step) > last
    }
    seen._trained = {ticket: step for ticket, step in seen._trained.items() if step > last}
    disk.operations.clear()
    for name in [name for name in disk.list(JOURNAL.parent) if name != JOURNAL.name]:
        disk.remove(JOURNAL.parent / name)


def measure_book(num_processes: int) -> dict[str, float]:
    """Join so many processes, 100 in each turn of the master, then lose one and take its replacement in."""
    members, master = WorkerRegistry(), Peer("master-0", "a", "host-0", "tcp://10.0.0.1:40000", b"m" * 40)
    members.begin_term(1)
    sharing, now = BookSharing(members, master=master), 0.0

    def join(number: int, incarnation: str) -> None:
        process = f"model-{number}"
        members.apply(ProcessRequested(process, Role.MODEL, "host-0", incarnation))
        address = f"tcp://10.{number // 65536}.{number // 256 % 256}.2:{30_000 + number % 9_000}"
        peer = Peer(process, incarnation, "host-0", address, f"{number:040}".encode())
        members.apply(ProcessJoined(peer, Role.MODEL, number))
        sharing.changed()

    def shared_bytes() -> int:
        """Bytes of what is sent in a turn; the next heartbeat of each process shows that it has it."""
        nonlocal now
        now += 2 * SHARE_S
        envelope = Envelope("job", 1, "master-0", "a1b2c3d4", 1, MessageKind.ONE_WAY)
        sent = 0
        for book, processes in sharing.due(now):
            sent += len(wire.encode(envelope, wire.encode_body(book))) * len(processes)
            for process in processes:
                sharing.after_heartbeat(process, book.number, now)
        return sent

    started = 0
    for first in range(0, num_processes, 100):
        for number in range(first, min(first + 100, num_processes)):
            join(number, "1.1")
        started += shared_bytes()
    fault = Fault("f", "ProcessDied", "model-7", "killed", 0.0)
    members.apply(ProcessLost("model-7", "1.1", fault))
    sharing.changed()
    loss = shared_bytes()
    join(7, "1.2")
    return {
        "processes": num_processes,
        "loss_mb": round(loss / 1e6, 3),
        "join_mb": round(shared_bytes() / 1e6, 3),
        "start_mb": round(started / 1e6, 1),
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    journal = commands.add_parser("journal")
    journal.add_argument("--samples", type=int, default=10_000_000)
    journal.add_argument("--folder", type=Path, help="kept, and used again if it holds the run")
    journal.add_argument("--repeats", type=int, default=5)
    for name in ("memory", "simulation"):
        steps = commands.add_parser(name)
        steps.add_argument("--steps", type=int, default=200_000)
        steps.add_argument("--checkpoint-every", type=int, default=10)
    book = commands.add_parser("book")
    book.add_argument("--processes", type=int, nargs="+", default=[900, 10_000])
    commands.add_parser("take-over").add_argument("run", type=Path)
    options = parser.parse_args()
    if options.command == "take-over":
        take_over(options.run)
    elif options.command == "memory":
        for line in measure_memory(steps=options.steps, checkpoint_every=options.checkpoint_every):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    elif options.command == "book":
        for num_processes in options.processes:
            sys.stdout.write(json.dumps(measure_book(num_processes)) + "\n")
    elif options.command == "simulation":
        simulate(steps=options.steps, checkpoint_every=options.checkpoint_every)
    else:
        folder = options.folder or Path(tempfile.mkdtemp())
        run_dir = folder / "run"
        try:
            if not run_dir.exists():
                write_run(run_dir, samples=options.samples)
            sys.stdout.write(json.dumps(measure_journal(run_dir, repeats=options.repeats), indent=2) + "\n")
        finally:
            if options.folder is None:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
