"""A run folder as a small run leaves it, at times that a test can name."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kintsugi.control.protocol import Tick
from kintsugi.journal.facts import (
    BatchFormed,
    Fact,
    ProcessRequested,
    RunStarted,
    SamplesScored,
    StateFolded,
    StepCommitted,
    TermStarted,
    TicketAssigned,
    TicketsIssued,
    VersionCurrent,
)
from kintsugi.journal.inputs import InputRecorder
from kintsugi.journal.journal import Journal
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Event, EventLog
from kintsugi.telemetry.jsonl_log import LineFile
from kintsugi.telemetry.readings import Sample
from kintsugi.types import FinishReason, Role, SampleMeta, Ticket, ticket_id

NOON = 1_700_000_000.0
MONOTONIC = 5_000.0
FIRST, SECOND = (ticket_id("grpo", epoch=0, position=position) for position in (0, 1))


class RecordedRun:
    """Writes what processes of a run would write; all times are seconds after `NOON`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        self._journal = Journal.create(folder / "journal", owner="test")
        self._inputs = InputRecorder(folder / "inputs")
        for opened in (self._journal, self._inputs):
            weakref.finalize(self, opened.close)

    def say(self, process: str, event: Event, *, at: float) -> None:
        log = EventLog(
            RunFolder(self.folder).events_file(process),
            process=process,
            clock=VirtualClock(start=MONOTONIC + at, wall=NOON + at),
        )
        log.emit(event)
        log.close()

    def decide(self, *facts: Fact, at: float) -> None:
        """An input, and the facts that follow from it."""
        self._inputs.write(Tick(), MONOTONIC + at, wall=NOON + at, after=self._journal.sequence)
        self._journal.append(facts)

    def compact(self) -> None:
        """Compact the journal, as a master does."""
        self._journal.compact(
            StateFolded(
                term=self._journal.term,
                job="job",
                step=0,
                processes={},
                saved_steps=(),
                servers=None,
                answers={},
                parts={},
            )
        )

    def print(self, process: str, text: str) -> None:
        with (self.folder / "logs" / f"{process}.log").open("a") as file:
            file.write(text)

    def measure(self, process: str, *samples: Sample, at: float) -> None:
        file = LineFile(RunFolder(self.folder).readings_file(process))
        for sample in samples:
            stamp = {"time": NOON + at, "monotonic": MONOTONIC + at, "process": process}
            file.append(msgspec.json.encode(stamp | msgspec.to_builtins(sample)) + b"\n")
        file.close()


def meta(
    ticket: str, index: int, *, version: int, holder: str = "rollout-1", reward: float = 1.0
) -> SampleMeta:
    return SampleMeta(f"{ticket}/{index}", ticket, 9, 3, reward, {}, FinishReason.EOS, version, holder, "d")


def tickets(*ids: str, num_samples: int = 2) -> tuple[Ticket, ...]:
    return tuple(
        Ticket(each, "grpo", 0, int(each.split(":")[2]), int(each.split(":")[3]), num_samples) for each in ids
    )


def a_step(run: RecordedRun, ids: Sequence[str] = (FIRST, SECOND), *, step: int = 1, at: float = 1.0) -> None:
    """The facts of one whole step: issued at `at`, one second from each station to the next."""
    version = step - 1
    run.decide(TicketsIssued(tickets(*ids)), at=at)
    run.decide(*(TicketAssigned(each, "rollout-1", "1.5", version) for each in ids), at=at + 1)
    for each in ids:
        samples = tuple(meta(each, index, version=version) for index in range(2))
        run.decide(SamplesScored(each, samples), at=at + 2)
    run.decide(BatchFormed(step, tuple(ids)), at=at + 3)
    run.decide(StepCommitted(step, "c0ffee" * 4), at=at + 4)
    run.decide(VersionCurrent(step, "d", (), ("server-0", "server-1")), at=at + 5)


def begun_run(folder: Path) -> RecordedRun:
    """Two hosts with a model worker each."""
    run = RecordedRun(folder)
    run.decide(
        RunStarted("job", "digest"),
        TermStarted(1, "a"),
        ProcessRequested("model-0", Role.MODEL, "host-0", "1.1"),
        ProcessRequested("model-1", Role.MODEL, "host-1", "1.2"),
        at=0.0,
    )
    return run
