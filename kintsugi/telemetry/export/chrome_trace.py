"""Slices in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each process of the run is a process there. Slices that overlap without nesting are in lanes of
their own, because a lane can only nest. With `flow`, arrows connect consecutive slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.telemetry.store.tracing import TraceSlice

_FLOW = "way of the prompt"


def write_chrome_trace(path: Path, slices: Iterable[TraceSlice], *, flow: bool = False) -> int:
    """Write the file and return the number of slices. Times are relative to the first one."""
    ordered = sorted((each for each in slices if each.start > 0), key=lambda each: (each.start, -each.end))
    origin = ordered[0].start if ordered else 0.0
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":')
        file.write(encoder.encode({"program": "kintsugi", "begins_at_unix_s": f"{origin:.6f}"}))
        file.write(b',"traceEvents":[\n')
        for number, event in enumerate(_events(ordered, origin=origin, flow=flow)):
            file.write((b",\n" if number else b"") + encoder.encode(event))
        file.write(b"\n]}\n")
    return len(ordered)


def _events(slices: list[TraceSlice], *, origin: float, flow: bool) -> Iterator[dict[str, Any]]:
    numbers = {name: number for number, name in enumerate(sorted({each.process for each in slices}), 1)}
    for name, number in numbers.items():
        yield _about(number, "process_name", {"name": name})
        yield _about(number, "process_sort_index", {"sort_index": number})
    lanes: dict[str, list[list[float]]] = {}
    previous: dict[str, Any] | None = None
    count = 0
    for each in slices:
        event = _event(each, numbers[each.process], lanes.setdefault(each.process, []), origin=origin)
        yield event
        if flow and event["ph"] == "X":
            if previous is not None:
                count += 1
                yield _arrow("s", previous, count)
                yield {**_arrow("f", event, count), "bp": "e"}
            previous = event


def _about(process: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": 0, "ts": 0, "args": arguments}


def _event(each: TraceSlice, process: int, lanes: list[list[float]], *, origin: float) -> dict[str, Any]:
    arguments = {**each.attributes, "what": each.text, "source": each.source}
    event = {"name": each.name, "cat": "kintsugi", "pid": process, "ts": _microseconds(each.start - origin)}
    if each.duration_s is None:
        # Of moments Perfetto draws an arrow head, whose lane may hold slices too.
        return {**event, "ph": "i", "s": "t", "tid": 1, "args": arguments}
    lane = _lane(lanes, each.start, each.end)
    return {**event, "ph": "X", "dur": _microseconds(each.duration_s), "tid": lane + 1, "args": arguments}


def _lane(lanes: list[list[float]], start: float, end: float) -> int:
    """Return the first lane in which a slice lies inside all open ones; a lane is the list of their ends."""
    for number, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if not open_ends or end <= open_ends[-1]:
            open_ends.append(end)
            return number
    lanes.append([end])
    return len(lanes) - 1


def _arrow(phase: str, event: dict[str, Any], number: int) -> dict[str, Any]:
    # An arrow begins and ends inside a slice: at its beginning.
    place = {name: event[name] for name in ("pid", "tid", "ts")}
    return {"ph": phase, "name": _FLOW, "cat": _FLOW, "id": number, **place}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
