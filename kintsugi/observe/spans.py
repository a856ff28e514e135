"""Where a process writes what its `runtime.SPANS` are told: one file of bounded size per process.

There are many, from the middle of the work. So they are written by a thread, and a process that is killed takes the
last moment of them with it.
"""

from __future__ import annotations

import msgspec

from kintsugi.observe.events import Span, Stamp, spans_path
from kintsugi.observe.lines import LineFile, LineWriter
from kintsugi.runtime import SPANS, SYSTEM_CLOCK

LARGEST_SIZE = 64 << 20
"""Of a file; with the three older ones that are kept, about a million spans."""
GATHER_S = 0.5


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


class SpanLog:
    """From its making until `close`, what takes time in this process is written down."""

    def __init__(self, run_dir: str, process: str) -> None:
        file = LineFile(spans_path(run_dir, process), largest_size=LARGEST_SIZE, reserved_size=0)
        encode = msgspec.json.Encoder().encode_lines
        self._writer = LineWriter[_Line](file, lost="spans.dropped", encode=encode, gather_s=GATHER_S)
        self._process = process
        SPANS.record_to(self._record)

    def _record(self, name: str, start: float, duration_s: float, attributes: dict[str, str]) -> None:
        wall, monotonic = SYSTEM_CLOCK.wall(), SYSTEM_CLOCK.monotonic()
        self._writer.put(_Line(wall, monotonic, self._process, KIND, name, start, duration_s, attributes))

    def close(self) -> None:
        SPANS.record_to(None)
        self._writer.close()
