"""Where a process writes what its `runtime.SPANS` are told: one file of bounded size per process.

There are many, from the middle of the work, which only leaves word of each. A thread makes lines of them, many at once,
and a process that is killed takes the last moment of them with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kintsugi.observe.events import Span, Stamp, spans_path
from kintsugi.observe.lines import LineFile, LineWriter
from kintsugi.runtime import SPANS, SYSTEM_CLOCK

LARGEST_SIZE = 64 << 20
"""Of a file; with the three older ones that are kept, about a million spans."""
GATHER_S = 0.5


Told = tuple[float, str, Mapping[str, object], float, float]
"""Wall clock, name, attributes, since, until."""


class _Line(msgspec.Struct, gc=False):
    """A `Span` and its `Stamp` in one: there are so many that two objects and two encodings would be felt."""

    time: float
    monotonic: float
    process: str
    kind: str
    name: str
    start: float
    duration_s: float
    attributes: dict[str, str]


KIND = str(Span.__struct_config__.tag)
assert _Line.__struct_fields__ == (*Stamp.__struct_fields__, "kind", *Span.__struct_fields__)


def known(attributes: Mapping[str, object]) -> dict[str, str]:
    """As they are written: those that are None are not known."""
    return {key: str(value) for key, value in attributes.items() if value is not None}


class SpanLog:
    """From its making until `close`, what takes time in this process is written down."""

    def __init__(self, run_dir: str, process: str) -> None:
        file = LineFile(spans_path(run_dir, process), largest_size=LARGEST_SIZE, reserved_size=0)
        self._writer = LineWriter[Told](file, lost="spans.dropped", encode=self._encode, gather_s=GATHER_S)
        self._encoder = msgspec.json.Encoder()
        self._process = process
        SPANS.record_to(self._record)

    def _record(self, name: str, attributes: Mapping[str, object], since: float, until: float) -> None:
        self._writer.put((SYSTEM_CLOCK.wall(), name, attributes, since, until))

    def _encode(self, told: list[Told]) -> bytes:
        return self._encoder.encode_lines(
            [
                _Line(
                    wall,
                    until,
                    self._process,
                    KIND,
                    name,
                    since,
                    max(0.0, until - since),
                    known(attributes),
                )
                for wall, name, attributes, since, until in told
            ]
        )

    def close(self) -> None:
        SPANS.record_to(None)
        self._writer.close()
