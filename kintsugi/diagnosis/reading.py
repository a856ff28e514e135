"""Fills the evidence from the files of a run folder, at once or as they grow. Nothing else is ever read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kintsugi.diagnosis.evidence import MASTER, OVER, Bundle, End, News, Phase, Said, Step, known_role
from kintsugi.errors import UserError
from kintsugi.observe.events import (
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
    events_path,
)
from kintsugi.observe.figures import ClockSample, Sample
from kintsugi.observe.lines import LineTail, lines_in, paths_of

SEARCHED_SIZE = 64 << 10
"""So much of a file is read rather than searched for where to begin."""

CLOCKS_S = 60.0
"""Where a file is read from is found by its host's own clock, which may be wrong by as much."""

STEPS_SIZE = 1 << 20
"""So much more is read of the master's events: how long its steps and phases usually take is known from the last ones,
however long ago they were."""
LAST_SIZE = 64 << 10

SPAN = b'"kind":"Span"'
CLOCK = b'"kind":"ClockSample"'

_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_sample_decoder: msgspec.json.Decoder[Sample] = msgspec.json.Decoder(Sample)


class Reader:
    """Follows the event and figure files of a run; `read` takes in what they hold by now."""

    def __init__(self, run_dir: Path, *, since: float = -math.inf) -> None:
        """What was recorded before `since` is left out."""
        if not (run_dir / "events").is_dir():
            raise UserError(f"{run_dir} has no events: expected the folder of a run")
        self._run_dir = run_dir
        self._since = since
        self._tails: dict[Path, LineTail] = {}
        self.bundle = Bundle(run=str(run_dir), began=_first_recorded(events_path(run_dir, MASTER)))

    def read(self, *, until: float = math.inf) -> Bundle:
        """Everything up to a moment. What is read is not read again, so a later call must not ask for less."""
        for folder, take in (("figures", self._take_figures), ("events", self._take_events)):
            for path in self._files(self._run_dir / folder):
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
        if path.name != events_path(self._run_dir, MASTER).name or path.parent.name != "events":
            return offset
        return _next_line(path, max(0, offset - STEPS_SIZE))

    def _files(self, folder: Path) -> list[Path]:
        """Those of agents first: they say which host is which, and how its clock is. Of bounded logs the old ones, if
        they are new to us. Spans of single samples are many, and say nothing that is looked for."""
        files = []
        for path in sorted(folder.glob("*.jsonl")):
            if "." in path.stem or not _is_of_the_run(path.stem):
                continue
            known = path in self._tails
            files += [path] if known else [old for old in paths_of(path) if _reaches(old, self._since)]
        return files

    def _take_figures(self, process: str, lines: list[bytes], until: float) -> None:
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
        """Before what they correct."""
        for line in lines:
            try:
                stamp, sample = _stamp_decoder.decode(line), _sample_decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if isinstance(sample, ClockSample):
                self.bundle.take_clock(stamp.time, process, sample)

    def _take_events(self, process: str, lines: list[bytes], until: float) -> None:
        is_master = process == MASTER
        for line in lines:
            if not is_master and SPAN in line:
                continue  # The master's say how long a step took; nothing else is looked for.
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


def take_earlier(bundle: Bundle, time: float, event: Event) -> None:
    """What the master said before all that is looked at: how long things take, and nothing else."""
    match event:
        case Span(name="step", duration_s=duration_s, attributes=attributes):
            bundle.steps.append(Step(time, int(attributes.get("step", 0)), duration_s))
        case Transition(machine="master", key="run", after=after, reason=reason):
            bundle.phases.append(Phase(time, after, reason))
        case _:
            pass


def take_event(bundle: Bundle, time: float, process: str, event: Event) -> None:
    """One line of an event file, sorted into what it says."""
    bundle.at = max(bundle.at, time)
    bundle.began = min(bundle.began, time) if bundle.began else time
    match event:
        case Span(name="step") | Transition(machine="master", key="run"):
            if process == MASTER:
                take_earlier(bundle, time, event)
        case FaultSeen(fault=fault):
            moment = bundle.moment_of(fault, by=process, told=time)
            bundle.faults.append(Said(moment, process, fault.message, fault))
            bundle.news.append(News(moment, process, event))
        case Alert(message=message):
            bundle.alerts.append(Said(time, process, message))
            bundle.news.append(News(time, process, event))
        case Note(message=message):
            bundle.notes.append(Said(time, process, message))
        case ProcessBegan(pid=pid):
            bundle.births[process].append((time, pid))
            if process == MASTER and bundle.phases and bundle.phases[-1].name in OVER:
                # A master tells of its phases when it leaves one: the first of a run that is resumed has no word.
                bundle.phases.append(Phase(time, "starting", "the run is resumed"))
        case ProcessEnded():
            bundle.goodbyes[process].append(time)
        case ProcessGone():
            source = f"events/{process}.jsonl"
            bundle.ends.append(
                End(time, event.of, event.pid, event.status, event.how, event.oom, event.ordered, source)
            )
            bundle.news.append(News(time, process, event))
        case _:
            pass


def _is_of_the_run(name: str) -> bool:
    """What the diagnosis itself has said is no evidence."""
    return known_role(name) is not None


def _reaches(path: Path, since: float) -> bool:
    """Whether a file holds something of a moment or later."""
    try:
        return path.stat().st_mtime >= since
    except FileNotFoundError:
        return False


def last_recorded(run_dir: Path) -> float:
    """When a run last wrote something down: what its last lines say, whenever the files were copied here; but not later
    than the files are, should the clock of a host be ahead."""
    folders = (run_dir / "events", run_dir / "figures")
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
    """0 where there is nothing yet."""
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
    """Where the first line begins at or after a place."""
    if not offset:
        return 0
    with path.open("rb") as file:
        file.seek(offset)
        file.readline()
        return file.tell()


def _offset_at(path: Path, since: float) -> int:
    """Where the lines of a moment begin, about: its lines are in the order of their times."""
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
