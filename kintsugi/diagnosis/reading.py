"""Fills the evidence from the files of a run folder, at once or as they grow. Nothing else is ever read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kintsugi.diagnosis.evidence import MASTER, Bundle, End, Phase, Said, Step, known_role
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
)
from kintsugi.observe.figures import Sample
from kintsugi.observe.lines import LineTail, paths_of

SEARCHED_SIZE = 64 << 10
"""So much of a file is read rather than searched for where to begin."""

SPAN = b'"kind":"Span"'

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
        self.bundle = Bundle(run=str(run_dir))

    def read(self, *, until: float = math.inf) -> Bundle:
        """Everything up to a moment. What is read is not read again, so a later call must not ask for less."""
        for folder, take in (("figures", self._take_figures), ("events", self._take_events)):
            for path in self._files(self._run_dir / folder):
                tail = self._tails.get(path)
                if tail is None:
                    tail = self._tails[path] = LineTail(path, offset=_offset_at(path, self._since))
                while lines := tail.lines():
                    take(path.stem.partition(".")[0], lines, until)
        self.bundle.sort()
        return self.bundle

    def _files(self, folder: Path) -> list[Path]:
        """Those of agents first: they say which host is which. Of bounded logs the old ones, if they are new to us."""
        current = sorted(
            path for path in folder.glob("*.jsonl") if path.stem.removesuffix(".spans").count(".") == 0
        )
        files = []
        for path in current:
            if not _is_of_the_run(path.stem.removesuffix(".spans")):
                continue
            known = path in self._tails
            files += [path] if known else [old for old in paths_of(path) if _reaches(old, self._since)]
        return files

    def _take_figures(self, process: str, lines: Iterable[bytes], until: float) -> None:
        take = self.bundle.take
        for line in lines:
            try:
                stamp = _stamp_decoder.decode(line)
                if self._since <= stamp.time <= until:
                    take(stamp.time, stamp.monotonic, process, _sample_decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue

    def _take_events(self, process: str, lines: Iterable[bytes], until: float) -> None:
        offset = self.bundle.offsets.get(self.bundle.host(process), 0.0)
        is_master = process == MASTER
        for line in lines:
            if not is_master and SPAN in line:
                continue  # Stations of single samples: many, and the master's spans say how long each stage took.
            try:
                stamp = _stamp_decoder.decode(line)
                if self._since <= stamp.time <= until:
                    take_event(self.bundle, stamp.time - offset, process, _event_decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


def take_event(bundle: Bundle, time: float, process: str, event: Event) -> None:
    """One line of an event file, sorted into what it says."""
    bundle.at = max(bundle.at, time)
    bundle.began = min(bundle.began, time) if bundle.began else time
    match event:
        case Span(name=name, duration_s=duration_s, attributes=attributes):
            if process == MASTER and name == "step":
                bundle.steps.append(Step(time, int(attributes.get("step", 0)), duration_s))
            bundle.spans[process][name].add(time, duration_s)
        case Transition(machine="master", key="run", after=after, reason=reason):
            bundle.phases.append(Phase(time, after, reason))
        case FaultSeen(fault=fault):
            bundle.faults.append(Said(fault.time or time, process, fault.message, fault))
        case Alert(message=message):
            bundle.alerts.append(Said(time, process, message))
        case Note(message=message):
            bundle.notes.append(Said(time, process, message))
        case ProcessBegan(pid=pid):
            bundle.births[process].append((time, pid))
        case ProcessEnded():
            bundle.goodbyes[process].append(time)
        case ProcessGone():
            source = f"events/{process}.jsonl"
            bundle.ends.append(
                End(time, event.of, event.pid, event.status, event.how, event.oom, event.ordered, source)
            )
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
            try:
                is_before = _stamp_decoder.decode(file.readline()).time < since
            except (msgspec.MsgspecError, UnicodeDecodeError):
                is_before = False
            low, high = (middle, high) if is_before else (low, middle)
        if low:
            file.seek(low)
            file.readline()
            low = file.tell()
        return low
