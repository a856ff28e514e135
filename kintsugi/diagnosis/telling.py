"""A diagnosis in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path

import msgspec

from kintsugi.diagnosis.verdict import Cause, Diagnosis
from kintsugi.observe.lines import lines_in, paths_of
from kintsugi.observe.verdicts import DIAGNOSES_FILE

MOST_EARLIER = 5


def tell(diagnosis: Diagnosis) -> str:
    """The most likely cause first, each with its way to what was seen, its evidence, and what to do."""
    lines = [f"{diagnosis.run} at {_clock(diagnosis.at)}, looked at since {_clock(diagnosis.since)}"]
    if not diagnosis.causes:
        lines.append(f"nothing to blame: {diagnosis.abstained}")
    for number, cause in enumerate(diagnosis.causes, start=1):
        lines += ["", *_cause_lines(number, cause)]
    named = {(cause.process, cause.kind) for cause in diagnosis.causes}
    before = [
        (at, cause)
        for at, cause in earlier(Path(diagnosis.run), before=diagnosis.at)
        if (cause.process, cause.kind) not in named or cause.onset < diagnosis.since
    ]
    if before:
        lines += ["", "earlier in this run:"]
        lines += [
            f"  {_clock(cause.onset)}  {cause.kind.value:<14} {cause.summary} (told {_clock(at)})"
            for at, cause in before[-MOST_EARLIER:]
        ]
    return "\n".join(lines)


def _cause_lines(number: int, cause: Cause) -> Iterator[str]:
    where = f" on {cause.host}" if cause.host else ""
    yield f"{number}. {cause.process}{where}: {cause.kind.value}, {cause.confidence:.0%} sure"
    yield f"   {cause.summary}"
    yield f"   since    {_clock(cause.onset)}"
    for index, hop in enumerate(cause.path):
        head = "way     " if index == 0 else "        "
        arrow = "" if index == 0 else "→ "
        yield f"   {head} {_clock(hop.time)}  {arrow}{hop.process}: {hop.what}"
    for index, evidence in enumerate(cause.evidence):
        head = "evidence" if index == 0 else "        "
        yield f"   {head} {_clock(evidence.time)}  {evidence.source}: {evidence.quote}"
    for index, other in enumerate(cause.rules_out):
        yield f"   {'not     ' if index == 0 else '        '} {other}"
    if cause.advice:
        yield f"   do       {cause.advice}"


def earlier(run_dir: Path, *, before: float) -> list[tuple[float, Cause]]:
    """What the watcher has said of a run, each cause once, with when it was said."""
    told: dict[tuple[str, str, int], tuple[float, Cause]] = {}
    for line in chain.from_iterable(
        lines_in(path.read_bytes()) for path in paths_of(run_dir / DIAGNOSES_FILE)
    ):
        try:
            diagnosis = msgspec.json.decode(line, type=Diagnosis)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # What a killed watcher left of a line.
            continue
        if diagnosis.at <= before:
            for cause in diagnosis.causes:
                # The same trouble stands in every line that another has changed; its last words stay.
                told[cause.process, cause.kind.value, round(cause.onset / 10)] = (diagnosis.at, cause)
    return sorted(told.values(), key=lambda each: each[1].onset)


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time).astimezone():%H:%M:%S}.{int(time * 10) % 10}"
