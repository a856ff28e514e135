"""File of the spans that a process adds to `runtime.SPANS`: one file of bounded size per process.

Spans are many and come from hot code, which only queues them. A thread encodes and writes them in batches; a process
that is killed loses the spans of its last moment.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.spans import SPANS
from kintsugi.telemetry.disk_budget import DISK_BUDGET, SPANS_SIZE
from kintsugi.telemetry.events import Span, Stamp
from kintsugi.telemetry.jsonl_log import NUM_OLD, LineFile, LineWriter

LARGEST_SIZE = 64 << 20
"""Size of a file of a small run; with the three older files that are kept, it holds about a million spans."""
GATHER_S = 0.5


Told = tuple[float, str, Mapping[str, object], float, float]
"""Wall clock, name, attributes, since, until."""


class _Line(msgspec.Struct, gc=False):
    """A `Span` and its `Stamp` in one struct: spans are so many that two objects and two encodings would be too
    slow."""

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
    """Return the attributes as text, without those that are None."""
    return {key: str(value) for key, value in attributes.items() if value is not None}


class SpanLog:
    """Records the spans of this process from construction until `close`."""

    def __init__(self, run_dir: str, process: str) -> None:
        size = DISK_BUDGET.file_size(SPANS_SIZE, num_files=NUM_OLD + 1, largest=LARGEST_SIZE)
        file = LineFile(RunFolder(run_dir).spans_file(process), largest_size=size, reserved_size=0)
        self._writer = LineWriter[Told](file, lost="spans.dropped", encode=self._encode, gather_s=GATHER_S)
        self._encoder = msgspec.json.Encoder()
        self._process = process
        SPANS.record_to(self._record)

    def _record(self, name: str, attributes: Mapping[str, object], since: float, until: float) -> None:
        self._writer.put((SYSTEM_CLOCK.wall(), name, attributes, since, until))

    def _encode(self, batch: list[Told]) -> bytes:
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
                for wall, name, attributes, since, until in batch
            ]
        )

    def close(self) -> None:
        SPANS.record_to(None)
        self._writer.close()
