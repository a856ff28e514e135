"""Where a process writes what its `runtime.SPANS` are told: one file of bounded size per process.

There are many, from the middle of the work. So they are written by a thread, and a process that is killed takes the
last moment of them with it.
"""

from __future__ import annotations

from kintsugi.observe.events import Span, Stamp, spans_path, stamped
from kintsugi.observe.lines import LineFile, LineWriter
from kintsugi.runtime import SPANS, SYSTEM_CLOCK

LARGEST_SIZE = 64 << 20
"""Of a file; with the three older ones that are kept, about a million spans."""


GATHER_S = 0.5


class SpanLog:
    """From its making until `close`, what takes time in this process is written down."""

    def __init__(self, run_dir: str, process: str) -> None:
        file = LineFile(spans_path(run_dir, process), largest_size=LARGEST_SIZE, reserved_size=0)
        self._writer = LineWriter(file, lost="spans.dropped", gather_s=GATHER_S)
        self._process = process
        SPANS.record_to(self._record)

    def _record(self, name: str, start: float, duration_s: float, attributes: dict[str, str]) -> None:
        stamp = Stamp(SYSTEM_CLOCK.wall(), SYSTEM_CLOCK.monotonic(), self._process)
        self._writer.put(stamped(stamp, Span(name, start, duration_s, attributes)))

    def close(self) -> None:
        SPANS.record_to(None)
        self._writer.close()
