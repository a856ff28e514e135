"""Facts of a run's journal, read as they are written, without those of single prompts, which are nearly all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kintsugi.errors import KintsugiError
from kintsugi.journal.facts import (
    BatchFormed,
    CheckpointSaved,
    Fact,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    ProcessLost,
    ProcessRequested,
    RolledBack,
    RunEnded,
    SampleQuarantined,
    SamplesScored,
    ScaleRefused,
    ServersScaled,
    StepCommitted,
    StrategyChosen,
    TermStarted,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketsIssued,
    VersionCurrent,
)
from kintsugi.journal.inputs import read_moments
from kintsugi.journal.journal import read_payloads
from kintsugi.run_folder.incidents import MASTER, IncidentIndex, IncidentReport
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.types import Role, kind_of, process_id

READ_S = 0.4
"""Longest time that one request spends on reading; the rest is read by the next one."""
PIECE = 200
"""Records between two looks at the clock."""
MOST_TIMED = 20_000
"""Facts of incidents that are kept with their times."""
MOST_REASONS = 500
LINE_END = "\n"
_UNREAD = frozenset(
    kind_of(kind).encode() for kind in (TicketsIssued, TicketAssigned, SamplesScored, BatchFormed)
)
"""Facts of single prompts, which are not decoded."""
_TIMED = (IncidentOpened, IncidentClosed, StrategyChosen, ProcessLost, ProcessJoined, RolledBack, TermStarted)
_TAG = b"\xa4type"

_raw_decoder = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])
_fact_decoder: msgspec.msgpack.Decoder[Fact] = msgspec.msgpack.Decoder(Fact)


class TimedFact(msgspec.Struct, frozen=True):
    """A fact and the time of the input that led to it; None where that was not recorded."""

    time: float | None
    fact: Fact


class JournalTail:
    """State of a run that only its journal has. Not safe for several threads."""

    def __init__(self, run_dir: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run, self._clock = RunFolder(run_dir), clock
        self._reset()

    def _reset(self) -> None:
        self._inode, self._offset = 0, 0
        self._index = IncidentIndex()
        self.problems: tuple[str, ...] = ()
        self.is_complete = False
        self.hosts: dict[str, str] = {}
        """Process → host, of every process that ever was requested."""
        self.pids: dict[str, int] = {}
        """Registered processes."""
        self.restarts: Counter[str] = Counter()
        self.saved_steps: list[int] = []
        self.committed_step = 0
        self.current_version: int | None = None
        self.scaled_to: int | None = None
        self.answers: dict[str, str] = {}
        self.dropped: Counter[str] = Counter()
        """Groups and samples that were not trained, by reason."""
        self.ended: RunEnded | None = None
        self.timed: list[tuple[int, Fact]] = []
        """Facts of incidents, with the number of their record."""
        self._moments: dict[int, float] = {}
        self._moments_offset = 0

    def refresh(self, *, budget_s: float = READ_S) -> None:
        """Read what was added. A journal that another master continued is another file, and is read from its start."""
        path = self._run.journal_file
        try:
            inode = path.stat().st_ino
        except OSError:
            self._reset()
            self.is_complete = True
            return
        if inode != self._inode:
            self._reset()
            self._inode = inode
        deadline = self._clock.monotonic() + budget_s
        self.is_complete = False
        try:
            while not self.is_complete and self._clock.monotonic() < deadline:
                payloads = read_payloads(path, offset=self._offset, most=PIECE)
                for payload in payloads:
                    for fact in _facts(payload.content):
                        self._take(payload.sequence, fact)
                    self._offset = payload.end
                self.is_complete = len(payloads) < PIECE
        except KintsugiError as error:
            self.problems = (str(error),)
            self.is_complete = True
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.problems = (f"{path.name}: written by another version of kintsugi: {error}",)
            self.is_complete = True

    def _take(self, sequence: int, fact: Fact) -> None:
        self._index.take(fact)
        if isinstance(fact, _TIMED):
            self.timed.append((sequence, fact))
            del self.timed[:-MOST_TIMED]
        match fact:
            case ProcessRequested(process=process, host=host):
                self.hosts[process] = host
            case ProcessJoined(peer=peer, pid=pid):
                self.hosts[peer.process] = peer.host
                self.pids[peer.process] = pid
            case ProcessLost(process=process):
                self.pids.pop(process, None)
                self.restarts[process] += 1
            case TermStarted(adopting=True):
                self.restarts[MASTER] += 1
                self.ended = None
            case TermStarted():
                self.pids.clear()
                self.ended = None
            case CheckpointSaved(step=step):
                self.saved_steps.append(step)
            case StepCommitted(step=step) | RolledBack(step=step):
                self.committed_step = step
            case RunEnded():
                self.ended = fact
            case _:
                self._take_count(fact)

    def _take_count(self, fact: Fact) -> None:
        """Take a fact about weights, servers, or samples that were dropped."""
        match fact:
            case VersionCurrent(version=version):
                self.current_version = version
            case ServersScaled():
                self.scaled_to, self.answers[fact.request] = fact.servers, ""
            case ScaleRefused():
                self.answers[fact.request] = fact.reason
            case TicketFiltered(reason=reason):
                self._drop(f"group filtered: {reason}")
            case TicketExpired(reason=reason):
                self._drop(f"group expired: {reason}")
            case SampleQuarantined(reason=reason):
                self._drop(f"sample quarantined: {reason.partition(LINE_END)[0][:200]}")
            case _:
                pass

    def _drop(self, reason: str) -> None:
        is_kept = reason in self.dropped or len(self.dropped) < MOST_REASONS
        self.dropped[reason if is_kept else "other reasons"] += 1

    def all_hosts(self) -> dict[str, str]:
        """Return process → host; the master is on the host of the first agent."""
        first = self.hosts.get(process_id(Role.AGENT, 0))
        return self.hosts if first is None else {MASTER: first, **self.hosts}

    def report(self) -> IncidentReport:
        return self._index.report()

    def facts_between(self, since: float, until: float) -> list[TimedFact]:
        """Return the facts of incidents in a window of time, in order."""
        self._read_moments()
        found = (TimedFact(self._moments.get(sequence), fact) for sequence, fact in self.timed)
        return [each for each in found if each.time is not None and since <= each.time <= until]

    def _read_moments(self) -> None:
        """Read the times of inputs; those that led to facts of incidents are kept."""
        path = self._run.inputs_file
        wanted = {sequence for sequence, _ in self.timed}
        try:
            while True:
                moments, end = read_moments(path, offset=self._moments_offset)
                for moment in moments:
                    if moment.wall and moment.after + 1 in wanted:
                        self._moments[moment.after + 1] = moment.wall
                self._moments_offset = end
                if not moments:
                    return
        except (OSError, msgspec.MsgspecError):
            return


def _facts(content: bytes) -> Iterator[Fact]:
    """Decode the facts of a record, without those of single prompts."""
    if not any(kind in content for kind in _UNREAD):
        yield from (_fact_decoder.decode(raw) for raw in _raw_decoder.decode(content))
        return
    for raw in _raw_decoder.decode(content):
        if _kind(bytes(memoryview(raw)[:64])) not in _UNREAD:
            yield _fact_decoder.decode(raw)


def _kind(head: bytes) -> bytes:
    """Return the tag of an encoded fact, which is its first entry: a map, `type`, and a short string."""
    place = head.find(_TAG, 1, 12)
    if place < 0 or place + len(_TAG) >= len(head):
        return b""
    size = head[place + len(_TAG)] & 0x1F
    begin = place + len(_TAG) + 1
    return head[begin : begin + size]
