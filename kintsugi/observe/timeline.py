"""One prompt's way as text: a line per station, with when, how long, where, what, and where that is written."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kintsugi.observe.tracing import ISSUED, Slice, Trace

MOST_PROMPT = 60


def timeline(trace: Trace, *, with_day: bool = False) -> str:
    return "\n".join([*_head(trace), "", *_table(trace, with_day=with_day)])


def clock_text(time: float, *, with_day: bool = False) -> str:
    """Of the day, to the millisecond; question marks where no time is known."""
    form = "%Y-%m-%d %H:%M:%S.%f" if with_day else "%H:%M:%S.%f"
    if time > 0:
        return datetime.fromtimestamp(time).strftime(form)[:-3]
    return "????-??-?? ??:??:??.???" if with_day else "??:??:??.???"


def _head(trace: Trace) -> Iterator[str]:
    prompt = trace.prompt if len(trace.prompt) <= MOST_PROMPT else f"{trace.prompt[: MOST_PROMPT - 1]}…"
    yield " · ".join(filter(None, [trace.ticket, trace.row, repr(prompt) if prompt else ""]))
    if not trace.steps:
        yield "in no batch yet"
    else:
        steps = ", ".join(map(str, trace.steps))
        current = (
            f"first current as version {trace.version}"
            if trace.version is not None
            else "not current at any server yet"
        )
        yield f"in the batch of step {steps}; {current}"
    for host, (offset_s, error_s) in trace.clocks.items():
        taken_off = ", taken off" if abs(offset_s) > error_s else ""
        ahead = f"{offset_s * 1e3:+.3f} ms ± {error_s * 1e3:.3f} ms"
        yield f"clock of {host}: {ahead} against the master's{taken_off}"


def _table(trace: Trace, *, with_day: bool) -> Iterator[str]:
    origin = next((each.start for each in trace.stations if each.name == ISSUED and each.start > 0), 0.0)
    width = max((len(each.process) for each in trace.stations), default=0)
    time = f"{'time':<{24 if with_day else 13}}"
    yield f"{time} {'after':>9} {'took':>9}  {'process':<{width}}  what  (where it is written)"
    for each in trace.stations:
        about = " " if each.exact else "~"
        after = f"{each.start - origin:+.3f} s" if origin and each.start > 0 else ""
        took = _seconds(each)
        where = f"({each.source})" if each.source else ""
        clock = clock_text(each.start, with_day=with_day)
        yield f"{clock}{about} {after:>9} {took:>9}  {each.process:<{width}}  {each.text}  {where}"


def _seconds(each: Slice) -> str:
    return "" if each.duration_s is None else f"{each.duration_s:.3f} s"
