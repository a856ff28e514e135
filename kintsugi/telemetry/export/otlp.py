"""Slices as OpenTelemetry traces, in the JSON encoding of OTLP: accepted by a collector's file receiver and /v1/traces.

A line of a file is a `TracesData`, as OpenTelemetry's file exporter writes them: one for a prompt, many for a run. Each
process of the run is a resource. Ids are lower-case hexadecimal digests of what they identify, so repeated exports
are equal.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.telemetry.store.tracing import Trace, TraceSlice

MOST_SPANS = 500
"""Spans in a line: bounds the memory of export and collector, which reads line by line."""
INTERNAL = 1
"""SPAN_KIND_INTERNAL."""


def write_otlp(path: Path, slices: Iterable[TraceSlice], *, run: str) -> int:
    """Export a whole run: one trace for each ticket and each step; other slices belong to the trace of their process.

    Nothing is the parent of anything: what a span lies in may be written down only after it.
    """
    known = enumerate(each for each in slices if each.start > 0)
    count = 0
    with path.open("wb") as file:
        while some := list(itertools.islice(known, MOST_SPANS)):
            spans: dict[str, list[dict[str, Any]]] = {}
            for number, each in some:
                spans.setdefault(each.process, []).append(_numbered_span(each, number, run=run))
            file.write(_line(spans, run=run))
            count += len(some)
    return count


def _numbered_span(each: TraceSlice, number: int, *, run: str) -> dict[str, Any]:
    attributes = each.attributes
    subject = attributes.get("ticket") or (f"step:{attributes['step']}" if "step" in attributes else "")
    trace_id = _identifier(32, run, subject or each.process)
    return _span(each, trace_id=trace_id, span_id=_identifier(16, run, each.process, str(number)))


def write_otlp_trace(path: Path, trace: Trace) -> int:
    """Export one prompt: a root span with the moments as events and the durations as child spans."""
    known = [each for each in trace.stations if each.start > 0]
    trace_id, root_id = _identifier(32, trace.run, trace.ticket), _identifier(16, trace.run, trace.ticket)
    moments = [each for each in known if each.duration_s is None]
    root = {
        "traceId": trace_id,
        "spanId": root_id,
        "name": f"prompt {trace.ticket}",
        "kind": INTERNAL,
        "startTimeUnixNano": _nanoseconds(min((each.start for each in known), default=0.0)),
        "endTimeUnixNano": _nanoseconds(max((each.end for each in known), default=0.0)),
        "attributes": _attributes(
            {"kintsugi.ticket": trace.ticket, "kintsugi.row": trace.row, "kintsugi.prompt": trace.prompt}
        ),
        "events": [
            {
                "timeUnixNano": _nanoseconds(each.start),
                "name": each.name,
                "attributes": _attributes({"process": each.process, "what": each.text, **each.attributes}),
            }
            for each in moments
        ],
        "status": {},
    }
    spans: dict[str, list[dict[str, Any]]] = {"master-0": [root]}
    for number, each in enumerate(each for each in known if each.duration_s is not None):
        span_id = _identifier(16, trace.run, trace.ticket, each.process, str(number))
        span = _span(each, trace_id=trace_id, span_id=span_id)
        spans.setdefault(each.process, []).append({**span, "parentSpanId": root_id})
    path.write_bytes(_line(spans, run=trace.run))
    return len(known)


def _span(each: TraceSlice, *, trace_id: str, span_id: str) -> dict[str, Any]:
    return {
        "traceId": trace_id,
        "spanId": span_id,
        "name": each.name,
        "kind": INTERNAL,
        "startTimeUnixNano": _nanoseconds(each.start),
        "endTimeUnixNano": _nanoseconds(each.end),
        "attributes": _attributes({**each.attributes, "what": each.text, "source": each.source}),
        "status": {},
    }


def _line(spans: dict[str, list[dict[str, Any]]], *, run: str) -> bytes:
    """Process → its spans."""
    scope = {"name": "kintsugi"}
    document = {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": _attributes(
                        {"service.name": "kintsugi", "service.namespace": run, "service.instance.id": process}
                    )
                },
                "scopeSpans": [{"scope": scope, "spans": inner}],
            }
            for process, inner in sorted(spans.items())
        ]
    }
    return msgspec.json.encode(document) + b"\n"


def _attributes(values: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items() if value]


def _identifier(digits: int, *names: str) -> str:
    """Return an id that is never all zeros, which would mean none."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:digits]


def _nanoseconds(seconds: float) -> str:
    """Return nanoseconds as text, because 64-bit integers are text in this encoding."""
    return str(round(seconds * 1e9))
