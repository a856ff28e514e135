"""Text of a diagnosis for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.diagnosis.verdict import Cause, Diagnosis
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Stamp
from kintsugi.telemetry.jsonl_log import lines_in, paths_of
from kintsugi.types import Role, process_id

MOST_EARLIER = 5
LONGEST_LINE = 64 << 10
Clock = Callable[[float], str]


def format_diagnosis(diagnosis: Diagnosis, *, end: str = "") -> str:
    """Format the causes, the most likely first, each with its path, evidence and advice. `end`: what ended the run.

    Times include the day if the run lasts over several days.
    """
    clock = partial(_clock, with_day=_has_several_days(diagnosis))
    lines = [f"{diagnosis.run} at {clock(diagnosis.at)}, diagnosed since {clock(diagnosis.since)}"]
    if end:
        lines.append(end)
    elif not diagnosis.causes:
        lines.append(f"nothing to blame: {diagnosis.abstained}")
    for number, cause in enumerate(diagnosis.causes, start=1):
        lines += ["", *_cause_lines(number, cause, clock)]
    if before := _earlier_than(diagnosis):
        lines += ["", "earlier in this run:"]
        lines += [
            f"  {clock(cause.onset)}  {cause.kind.value:<14} {cause.summary} (reported {clock(at)})"
            for at, cause in before[-MOST_EARLIER:]
        ]
    return "\n".join(lines)


def as_values(diagnosis: Diagnosis, *, end: str = "") -> dict[str, Any]:
    """Return the diagnosis as plain values, with earlier causes of the run and their times (`told`) under `earlier`,
    and what ended the run under `end`."""
    before = [{"told": at, **msgspec.to_builtins(cause)} for at, cause in _earlier_than(diagnosis)]
    return {**msgspec.to_builtins(diagnosis), "earlier": before, "end": end}


def _earlier_than(diagnosis: Diagnosis) -> list[tuple[float, Cause]]:
    """Return earlier causes that the watcher found and this diagnosis does not name."""
    named = {(cause.process, cause.kind) for cause in diagnosis.causes}
    return [
        (at, cause)
        for at, cause in earlier(Path(diagnosis.run), before=diagnosis.at)
        if (cause.process, cause.kind) not in named or cause.onset < diagnosis.since
    ]


def _has_several_days(diagnosis: Diagnosis) -> bool:
    """Return whether the run began on another day, by the first event of its master."""
    for path in paths_of(RunFolder(diagnosis.run).events_file(process_id(Role.MASTER, 0)))[:1]:
        with suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            began = msgspec.json.decode(file.readline(LONGEST_LINE), type=Stamp).time
            return datetime.fromtimestamp(began).date() != datetime.fromtimestamp(diagnosis.at).date()
    return False


def _cause_lines(number: int, cause: Cause, clock: Clock) -> Iterator[str]:
    where = f" on {cause.host}" if cause.host else ""
    yield f"{number}. {cause.process}{where}: {cause.kind.value}, {cause.confidence:.0%} sure"
    yield f"   {cause.summary}"
    yield f"   since    {clock(cause.onset)}"
    for index, hop in enumerate(cause.path):
        head = "way     " if index == 0 else "        "
        arrow = "" if index == 0 else "→ "
        yield f"   {head} {clock(hop.time)}  {arrow}{hop.process}: {hop.what}"
    for index, evidence in enumerate(cause.evidence):
        head = "evidence" if index == 0 else "        "
        yield f"   {head} {clock(evidence.time)}  {evidence.source}: {evidence.quote}"
    for index, other in enumerate(cause.rules_out):
        yield f"   {'not     ' if index == 0 else '        '} {other}"
    if cause.advice:
        yield f"   do       {cause.advice}"


def earlier(run_dir: Path, *, before: float) -> list[tuple[float, Cause]]:
    """Return the causes that the watcher found, each once, with the time of its diagnosis."""
    found: dict[tuple[str, str, int], tuple[float, Cause]] = {}
    for line in chain.from_iterable(
        lines_in(path.read_bytes()) for path in paths_of(RunFolder(run_dir).diagnoses_file)
    ):
        try:
            diagnosis = msgspec.json.decode(line, type=Diagnosis)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # A killed watcher may leave part of a line.
            continue
        if diagnosis.at <= before:
            for cause in diagnosis.causes:
                # A lasting cause is in every line that another cause has changed; the last version counts.
                found[cause.process, cause.kind.value, round(cause.onset / 10)] = (diagnosis.at, cause)
    return sorted(found.values(), key=lambda each: each[1].onset)


def _clock(time: float, *, with_day: bool) -> str:
    form = "%Y-%m-%d %H:%M:%S" if with_day else "%H:%M:%S"
    return f"{datetime.fromtimestamp(time).astimezone().strftime(form)}.{int(time * 10) % 10}"
