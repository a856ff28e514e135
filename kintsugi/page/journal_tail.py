"""Facts of a run's journal, read as they are written, without those of single prompts, which are nearly all of it.

journal     the folded state of a compacted run, then what followed; read first, so that its incidents are known at once
journal.N   earlier facts, read afterwards, the newest file first: restarts, dropped samples, times of old incidents
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
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
    StateFolded,
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
from kintsugi.journal.journal import JournalPayload, kept_files, read_payloads
from kintsugi.page.line_files import file_id
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
LAST_MOMENTS = 4096
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


class _EarlierFile(msgspec.Struct):
    """A file that the journal replaced when it was compacted."""

    path: Path
    until: int
    """Last record that the newer file does not have."""
    size: int
    offset: int = 0


class JournalTail:
    """State of a run that only its journal has. Not safe for several threads."""

    def __init__(self, run_dir: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run, self._clock = RunFolder(run_dir), clock
        self._reset()

    def _reset(self) -> None:
        self._inode, self._offset, self._size = 0, 0, 0
        self._first = self._last = 0
        """Sequences of the first record of the journal, and of the last one that was read."""
        self._earlier: list[_EarlierFile] = []
        """Files that the journal replaced, still to be read, the newest first."""
        self._index = IncidentIndex()
        self.problems: tuple[str, ...] = ()
        self.is_current = False
        """Whether the journal itself is read: incidents and processes are those of now."""
        self.is_complete = False
        """Whether earlier files are read, too."""
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
        self._has_all_moments = False
        self._last_moments: deque[tuple[int, float]] = deque(maxlen=LAST_MOMENTS)
        """Record that may follow from each of the last inputs, and the time of the input."""

    @property
    def share(self) -> float:
        """Part of the journal and its earlier files that has been read."""
        if self.is_complete:
            return 1.0
        total = self._size + sum(each.size for each in self._earlier)
        return min(0.99, self._offset / total) if total else 0.0

    def all_problems(self) -> tuple[str, ...]:
        """Return the problems, and whether reading goes on."""
        if self.is_complete:
            return self.problems
        return *self.problems, f"the journal is still being read: {self.share:.0%}"

    def refresh(self, *, budget_s: float = READ_S) -> None:
        """Read what was added, then what is left of earlier files, for as long as the budget allows."""
        path = self._run.journal_file
        deadline = self._clock.monotonic() + budget_s
        self.is_current = self.is_complete = False
        try:
            status = path.stat()
            if status.st_ino != self._inode:
                self._change_file(path, status.st_ino)
            self._size = status.st_size
            self.is_current = self._read_new(path, deadline=deadline)
            self.is_complete = self.is_current and self._read_earlier(deadline=deadline)
        except FileNotFoundError:
            self._reset()
            self.is_current = self.is_complete = True
        except (KintsugiError, OSError) as error:
            self._give_up(str(error))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._give_up(f"{path.name}: written by another version of kintsugi: {error}")

    def _give_up(self, problem: str) -> None:
        """Keep what was read so far; the rest can not be read."""
        self.problems = (problem,)
        self.is_current = self.is_complete = True

    def _change_file(self, path: Path, inode: int) -> None:
        """Continue in another file: a compacted one begins with the state that is known already; one that another
        master continued is a copy, and is read from its start."""
        first = next(iter(read_payloads(path, most=1)), None)
        sequence = first.sequence if first is not None else 0
        if self._last and sequence > self._first and self._catch_up(path, sequence):
            assert first is not None
            self._inode, self._first, self._offset = inode, sequence, first.end
            return
        self._reset()
        self._inode, self._first = inode, sequence
        until = sequence
        for number, earlier in reversed(kept_files(path).items()):
            known = file_id(earlier)
            if number < until and known is not None:
                self._earlier.append(_EarlierFile(earlier, until=until, size=known[1]))
                until = number

    def _catch_up(self, path: Path, sequence: int) -> bool:
        """Read the end of the file that was followed, under its second name; return whether nothing is missing."""
        earlier = {number: kept for number, kept in kept_files(path).items() if number >= self._first}
        for number, kept in earlier.items():
            offset = self._offset if number == self._first else 0
            try:
                while payloads := read_payloads(kept, offset=offset, most=PIECE):
                    self._take_payloads([each for each in payloads if self._last < each.sequence <= sequence])
                    offset = payloads[-1].end
            except KintsugiError:  # It was removed meanwhile.
                return False
        return self._last == sequence

    def _read_new(self, path: Path, *, deadline: float) -> bool:
        """Read the journal; return whether all of it is read."""
        while True:
            payloads = read_payloads(path, offset=self._offset, most=PIECE)
            self._take_payloads(payloads)
            if payloads:
                self._offset = payloads[-1].end
            if len(payloads) < PIECE:
                return True
            if self._clock.monotonic() >= deadline:
                return False

    def _take_payloads(self, payloads: list[JournalPayload]) -> None:
        for payload in payloads:
            for fact in _facts(payload.content):
                self._take(payload.sequence, fact)
            self._last = payload.sequence

    def _read_earlier(self, *, deadline: float) -> bool:
        """Read earlier files; return whether all of them are read. One that was removed meanwhile is left out."""
        while self._earlier:
            if self._clock.monotonic() >= deadline:
                return False
            file = self._earlier[0]
            try:
                payloads = read_payloads(file.path, offset=file.offset, most=PIECE)
            except (KintsugiError, FileNotFoundError):
                payloads = []
            for payload in payloads:
                if payload.sequence <= file.until:
                    for fact in _facts(payload.content):
                        self._take_earlier(payload.sequence, fact)
            if len(payloads) < PIECE:
                self._earlier.pop(0)
            else:
                file.offset = payloads[-1].end
        return True

    def _take_earlier(self, sequence: int, fact: Fact) -> None:
        """Take a fact that the folded state stands for, but for what the state does not tell."""
        if isinstance(fact, _TIMED) and len(self.timed) < MOST_TIMED:
            self.timed.append((sequence, fact))
        match fact:
            case ProcessRequested(process=process, host=host):
                self.hosts.setdefault(process, host)
            case ProcessJoined(peer=peer):
                self.hosts.setdefault(peer.process, peer.host)
            case ProcessLost(process=process):
                self.restarts[process] += 1
            case TermStarted(adopting=True):
                self.restarts[MASTER] += 1
            case VersionCurrent(version=version):
                self.current_version = max(version, self.current_version or version)
            case TicketFiltered() | TicketExpired() | SampleQuarantined():
                self._take_count(fact)
            case _:
                pass

    def _take(self, sequence: int, fact: Fact) -> None:
        self._index.take(fact)
        if isinstance(fact, _TIMED):
            self.timed.append((sequence, fact))
            del self.timed[:-MOST_TIMED]
        match fact:
            case StateFolded():
                self._restore(fact)
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

    def _restore(self, folded: StateFolded) -> None:
        """Take the state that all earlier records led to."""
        self.pids, self.answers = dict(folded.processes), dict(folded.answers)
        self.saved_steps, self.scaled_to = list(folded.saved_steps), folded.servers
        self.committed_step = folded.step

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
        in_order = sorted(self.timed, key=lambda each: each[0])
        found = (TimedFact(self._moments.get(sequence), fact) for sequence, fact in in_order)
        return [each for each in found if each.time is not None and since <= each.time <= until]

    def _read_moments(self) -> None:
        """Read the times of inputs; those that led to facts of incidents are kept. The last ones are looked at again,
        since an input is written before its facts, and all of them once earlier facts are known."""
        path = self._run.inputs_file
        wanted = {sequence for sequence, _ in self.timed}
        if self.is_complete and not self._has_all_moments:
            self._moments_offset, self._has_all_moments = 0, True
        self._take_moments(self._last_moments, wanted)
        try:
            while True:
                moments, end = read_moments(path, offset=self._moments_offset)
                found = [(moment.after + 1, moment.wall) for moment in moments if moment.wall]
                self._take_moments(found, wanted)
                self._last_moments.extend(found)
                self._moments_offset = end
                if not moments:
                    return
        except (OSError, msgspec.MsgspecError):
            return

    def _take_moments(self, found: Iterable[tuple[int, float]], wanted: set[int]) -> None:
        self._moments.update((sequence, wall) for sequence, wall in found if sequence in wanted)


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
