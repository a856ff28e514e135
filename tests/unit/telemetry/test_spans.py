from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.spans import SPANS, Spans
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import EventLog, Note, Record, Span, read_events
from kintsugi.telemetry.spans import SpanLog


def test_a_span_is_recorded_with_what_is_known_of_it() -> None:
    recorded: list[tuple[str, Mapping[str, object], float, float]] = []
    spans = Spans(VirtualClock(start=7.5))
    spans.add("before", {}, since=1.0)
    spans.record_to(lambda *span: recorded.append(span))
    spans.add("generate", {"ticket": "grpo:0:17:0"}, since=5.0)
    spans.add("swap", {}, since=5.0, until=5.5)
    assert recorded == [("generate", {"ticket": "grpo:0:17:0"}, 5.0, 7.5), ("swap", {}, 5.0, 5.5)]


def test_a_block_is_a_span_also_when_it_fails() -> None:
    recorded: list[tuple[str, Mapping[str, object], float, float]] = []
    clock = VirtualClock(start=7.5)
    spans = Spans(clock)
    spans.record_to(lambda *span: recorded.append(span))
    with suppress(RuntimeError), spans.around("load_model"):
        clock.advance(1.5)
        raise RuntimeError
    assert recorded == [("load_model", {}, 7.5, 9.0)]


def test_spans_lie_beside_the_events_of_their_process_and_are_read_with_them(tmp_path: Path) -> None:
    log = EventLog(RunFolder(tmp_path).events_file("server-0"), process="server-0")
    log.emit(Note("begun"))
    spans = SpanLog(str(tmp_path), "server-0")
    SPANS.add("generate", {"ticket": "a", "samples": 4, "error": None}, since=1.0, until=2.0)
    spans.close()
    SPANS.add("generate", {"ticket": "b"}, since=1.0, until=2.0)
    log.close()

    def events(records: list[Record]) -> list[object]:
        return [record.event for record in records]

    assert events(read_events(tmp_path)) == [
        Note("begun"),
        Span("generate", 1.0, 1.0, {"ticket": "a", "samples": "4"}),
    ]
    assert events(read_events(tmp_path, process="server-0")) == events(read_events(tmp_path))
