"""Reads evidence from the files of a run folder, once or as they grow. Nothing else is read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kintsugi.diagnosis.evidence import (
    MASTER,
    OVER,
    EvidenceBundle,
    LoggedMessage,
    NewEvidence,
    PhaseSpan,
    ProcessEnd,
    StepSpan,
    known_role,
)
from kintsugi.errors import UserError
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.telemetry.events import (
    Alert,
    Event,
    FaultSeen,
    Note,
    ProcessBegan,
    ProcessEnded,
    ProcessGone,
    Span,
    Stamp,
    Transition,
)
from kintsugi.telemetry.jsonl_log import LineTail, lines_in, paths_of
from kintsugi.telemetry.readings import ClockOffsetReading, Sample

SEARCHED_SIZE = 64 << 10
"""Size below which a file is read whole instead of searched for the first relevant line."""

CLOCKS_S = 60.0
"""Possible error of a host's clock, by which the first relevant line is searched."""

STEPS_SIZE = 1 << 20
"""Further bytes that are read of the master's events, for the usual duration of steps and phases."""
LAST_SIZE = 64 << 10

SPAN = b'"kind":"Span"'
CLOCK = b'"kind":"ClockSample"'

_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_sample_decoder: msgspec.json.Decoder[Sample] = msgspec.json.Decoder(Sample)


class EvidenceReader:
    """Follows the event and readings files of a run; `read` adds what is new."""

    def __init__(self, run_dir: Path, *, since: float = -math.inf) -> None:
        """Records before `since` are left out."""
        if not RunFolder(run_dir).events_folder.is_dir():
            raise UserError(f"{run_dir} has no events: expected the folder of a run")
        self._run_dir = run_dir
        self._since = since
        self._tails: dict[Path, LineTail] = {}
        oldest = next(iter(paths_of(RunFolder(run_dir).events_file(MASTER))), None)
        self.bundle = EvidenceBundle(run=str(run_dir), began=_first_recorded(oldest) if oldest else 0.0)

    def read(self, *, until: float = math.inf) -> EvidenceBundle:
        """Read all records up to a moment. A later call must not be for an earlier moment, since nothing is read
        twice."""
        run = RunFolder(self._run_dir)
        for folder, take in (
            (run.readings_folder, self._take_readings),
            (run.events_folder, self._take_events),
        ):
            for path in self._files(folder):
                tail = self._tails.get(path)
                if tail is None:
                    tail = self._tails[path] = LineTail(path, offset=self._first_offset(path))
                while lines := tail.lines():
                    take(path.stem.partition(".")[0], lines, until)
                    if (_time_of(lines[-1]) or 0.0) > until + CLOCKS_S:
                        break
        self.bundle.sort()
        return self.bundle

    def _first_offset(self, path: Path) -> int:
        offset = _offset_at(path, self._since - CLOCKS_S)
        if path != RunFolder(self._run_dir).events_file(MASTER):
            return offset
        return _next_line(path, max(0, offset - STEPS_SIZE))

    def _files(self, folder: Path) -> list[Path]:
        """Return the files to read, those of agents first: they have the hosts and the offsets of clocks. Rotated
        files are included the first time. Spans of single samples are not needed."""
        files = []
        for path in sorted(folder.glob("*.jsonl")):
            if "." in path.stem or not _is_of_the_run(path.stem):
                continue
            known = path in self._tails
            files += [path] if known else [old for old in paths_of(path) if _reaches(old, self._since)]
        return files

    def _take_readings(self, process: str, lines: list[bytes], until: float) -> None:
        take, corrected = self.bundle.take, self.bundle.corrected
        self._take_clocks(process, [line for line in lines if CLOCK in line])
        for line in lines:
            try:
                stamp = _stamp_decoder.decode(line)
                time = corrected(process, stamp.time)
                if self._since <= time <= until:
                    take(time, stamp.monotonic, process, _sample_decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue

    def _take_clocks(self, process: str, lines: Iterable[bytes]) -> None:
        """Add clock offsets, before the readings that they correct."""
        for line in lines:
            try:
                stamp, sample = _stamp_decoder.decode(line), _sample_decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if isinstance(sample, ClockOffsetReading):
                self.bundle.take_clock(stamp.time, process, sample)

    def _take_events(self, process: str, lines: list[bytes], until: float) -> None:
        is_master = process == MASTER
        for line in lines:
            if not is_master and SPAN in line:
                continue  # Only spans of the master are needed, for the durations of steps.
            try:
                stamp = _stamp_decoder.decode(line)
                time = self.bundle.corrected(process, stamp.time)
                if self._since <= time <= until:
                    take_event(self.bundle, time, process, _event_decoder.decode(line))
                elif is_master and time < self._since:
                    take_earlier(self.bundle, time, _event_decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


def take_earlier(bundle: EvidenceBundle, time: float, event: Event) -> None:
    """Add an event of the master from before the diagnosed time: durations of steps and phases only."""
    match event:
        case Span(name="step", duration_s=duration_s, attributes=attributes):
            bundle.steps.append(StepSpan(time, int(attributes.get("step", 0)), duration_s))
        case Transition(machine="master", key="run", after=after, reason=reason):
            bundle.phases.append(PhaseSpan(time, after, reason))
        case _:
            pass


def take_event(bundle: EvidenceBundle, time: float, process: str, event: Event) -> None:
    """Add an event to the evidence."""
    bundle.at = max(bundle.at, time)
    bundle.began = min(bundle.began, time) if bundle.began else time
    match event:
        case Span(name="step") | Transition(machine="master", key="run"):
            if process == MASTER:
                take_earlier(bundle, time, event)
        case FaultSeen(fault=fault):
            moment = bundle.moment_of(fault, by=process, recorded=time)
            bundle.faults.append(LoggedMessage(moment, process, fault.message, fault))
            bundle.news.append(NewEvidence(moment, process, event))
        case Alert():
            bundle.alerts.append(LoggedMessage(time, process, event.message, event=event))
            bundle.news.append(NewEvidence(time, process, event))
        case Note():
            bundle.notes.append(LoggedMessage(time, process, event.message, event=event))
        case ProcessBegan(pid=pid):
            bundle.births[process].append((time, pid))
            if process == MASTER and bundle.phases and bundle.phases[-1].name in OVER:
                # A master records a phase when it leaves one, so the first phase of a resumed run has no event.
                bundle.phases.append(PhaseSpan(time, "starting", "the run is resumed"))
        case ProcessEnded():
            bundle.goodbyes[process].append(time)
        case ProcessGone():
            source = str(RELATIVE.events_file(process))
            bundle.ends.append(
                ProcessEnd(
                    time, event.of, event.pid, event.status, event.how, event.oom, event.ordered, source
                )
            )
            bundle.news.append(NewEvidence(time, process, event))
        case _:
            pass


def _is_of_the_run(name: str) -> bool:
    """Return whether a file is of a process of the run; records of the diagnosis itself are no evidence."""
    return known_role(name) is not None


def _reaches(path: Path, since: float) -> bool:
    """Return whether a file has records of a moment or later."""
    try:
        return path.stat().st_mtime >= since
    except FileNotFoundError:
        return False


def last_recorded(run_dir: Path) -> float:
    """Return the time of the last record of a run: that of the last lines, since files may have been copied, but not
    later than the files, since the clock of a host may be ahead."""
    folders = (RunFolder(run_dir).events_folder, RunFolder(run_dir).readings_folder)
    return max((_last_time(path) for folder in folders for path in folder.glob("*.jsonl")), default=0.0)


def _last_time(path: Path) -> float:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_SIZE))
            lines = lines_in(file.read())
        written = path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    for line in reversed(lines):
        if (time := _time_of(line)) is not None:
            return min(time, written)
    return 0.0


def _first_recorded(path: Path) -> float:
    """Return the time of the first record; 0 if there is none yet."""
    try:
        with path.open("rb") as file:
            return _time_of(file.readline(LAST_SIZE)) or 0.0
    except FileNotFoundError:
        return 0.0


def _time_of(line: bytes) -> float | None:
    try:
        return _stamp_decoder.decode(line).time
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _next_line(path: Path, offset: int) -> int:
    """Return the offset of the first line at or after an offset."""
    if not offset:
        return 0
    with path.open("rb") as file:
        file.seek(offset)
        file.readline()
        return file.tell()


def _offset_at(path: Path, since: float) -> int:
    """Return about where the lines of a moment begin, by binary search: lines are in the order of time."""
    if since == -math.inf:
        return 0
    with path.open("rb") as file:
        low, high = 0, file.seek(0, os.SEEK_END)
        while high - low > SEARCHED_SIZE:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline()
            time = _time_of(file.readline())
            is_before = time is not None and time < since
            low, high = (middle, high) if is_before else (low, middle)
    return _next_line(path, low)
