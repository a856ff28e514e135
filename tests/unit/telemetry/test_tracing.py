from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.errors import UserError
from kintsugi.journal.facts import (
    BatchFormed,
    RolledBack,
    StepCommitted,
    TicketReturned,
    TicketsIssued,
    VersionCurrent,
)
from kintsugi.telemetry.events import Alert, Span, Transition
from kintsugi.telemetry.export.chrome_trace import write_chrome_trace
from kintsugi.telemetry.export.otlp import MOST_SPANS, write_otlp, write_otlp_trace
from kintsugi.telemetry.readings import ClockOffsetReading
from kintsugi.telemetry.store.index import RunStore
from kintsugi.telemetry.store.tracing import (
    Trace,
    TraceSlice,
    issued_tickets,
    timeline,
    trace_ticket,
    whole_run,
)
from tests.unit.telemetry.recorded_run import (
    FIRST,
    MONOTONIC,
    NOON,
    SECOND,
    RecordedRun,
    a_step,
    begun_run,
    tickets,
)


def span(run: RecordedRun, process: str, name: str, *, start: float, end: float, **attributes: str) -> None:
    run.say(process, Span(name, MONOTONIC + start, end - start, attributes), at=end)


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """One step of two tickets, with what processes said of it."""
    run = begun_run(tmp_path / "run")
    a_step(run)
    span(run, "rollout-1", "episode", start=2.1, end=2.9, ticket=FIRST)
    span(run, "server-0", "generate", start=2.2, end=2.5, ticket=FIRST, version="0")
    span(run, "server-0", "generate", start=2.3, end=2.7, ticket=SECOND, version="0")
    for rank in ("model-0", "model-1"):
        span(run, rank, "actor_train", start=4.1, end=4.8, step="1", tickets=f"{FIRST},{SECOND}")
    span(run, "server-1", "weights_fetch", start=5.2, end=5.6, version="1")
    return run


def traced(run: RecordedRun, ticket: str = FIRST) -> Trace:
    with RunStore(run.folder) as store:
        store.refresh()
        return trace_ticket(store, ticket, row="row 3 of sums", prompt="1+1=")


def stations(trace: Trace) -> list[tuple[str, str, float]]:
    return [(each.name, each.process, round(each.start - NOON, 3)) for each in trace.stations]


def test_a_prompt_is_followed_from_its_ticket_to_the_weights_that_learned_from_it(run: RecordedRun) -> None:
    trace = traced(run)
    assert stations(trace) == [
        ("issued", "master-0", 1.0),
        ("assigned", "master-0", 2.0),
        ("episode", "rollout-1", 2.1),
        ("generate", "server-0", 2.2),
        ("scored", "master-0", 3.0),
        ("batched", "master-0", 4.0),
        ("actor_train", "model-0", 4.1),
        ("actor_train", "model-1", 4.1),
        ("committed", "master-0", 5.0),
        ("weights_fetch", "server-1", 5.2),
        ("current", "master-0", 6.0),
    ]
    assert (trace.steps, trace.version) == ((1,), 1)


def test_a_trace_is_the_same_after_the_journal_was_compacted(run: RecordedRun) -> None:
    before = [(each.name, each.process, each.text) for each in traced(run).stations]
    run.compact()
    assert [(each.name, each.process, each.text) for each in traced(run).stations] == before


def test_times_of_another_host_are_aligned_and_the_clocks_error_is_told(run: RecordedRun) -> None:
    run.measure("agent-1", ClockOffsetReading("host-1", -2.0, 0.004), at=0.5)
    trace = traced(run)
    assert ("actor_train", "model-1", 6.1) in stations(trace)
    assert trace.clocks == {"host-1": (-2.0, 0.004)}
    assert "clock of host-1: -2000.000 ms ± 4.000 ms against the master's, taken off" in timeline(trace)


def test_what_was_undone_is_told_with_what_came_of_it_in_the_end(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    a_step(run, at=1.0)
    a_step(run, ["grpo:0:2:0"], step=2, at=7.0)
    run.decide(TicketReturned("grpo:0:2:0", "rollout-1 is lost"), RolledBack(1, "the state is gone"), at=20.0)
    run.decide(BatchFormed(2, ("grpo:0:2:0",)), at=21.0)
    run.decide(StepCommitted(2, "again"), at=22.0)
    run.decide(VersionCurrent(2, "d", (), ("server-0",)), at=23.0)
    trace = traced(run, "grpo:0:2:0")
    names = [name for name, _, _ in stations(trace)]
    assert names[-5:] == ["returned", "rolled_back", "batched", "committed", "current"]
    assert names.count("committed") == 2 and trace.steps == (2, 2)
    assert "rolled_back" not in [name for name, _, _ in stations(traced(run))]


def test_a_version_that_was_left_out_is_not_waited_for(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.decide(BatchFormed(1, (FIRST,)), at=0.5)
    a_step(run, [FIRST], step=3)
    assert traced(run).version == 3


def test_a_ticket_that_is_on_its_way_is_told_as_far_as_it_has_come(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.decide(TicketsIssued(tickets(FIRST)), at=1.0)
    trace = traced(run)
    assert stations(trace) == [("issued", "master-0", 1.0)]
    assert "in no batch yet" in timeline(trace)


def test_a_ticket_that_was_never_issued_is_the_users_mistake(run: RecordedRun) -> None:
    with pytest.raises(UserError, match="no ticket grpo:9:9:9 was given out"):
        traced(run, "grpo:9:9:9")


def test_every_ticket_can_be_listed(run: RecordedRun) -> None:
    with RunStore(run.folder) as store:
        store.refresh()
        assert [ticket.id for ticket in issued_tickets(store)] == [FIRST, SECOND]


def test_the_timeline_says_when_how_long_who_what_and_where_it_is_written(run: RecordedRun) -> None:
    lines = timeline(traced(run)).splitlines()
    assert lines[0] == f"{FIRST} · row 3 of sums · '1+1='"
    assert lines[1] == "in the batch of step 1; first current as version 1"
    train = next(line for line in lines if "model-1" in line)
    assert "+3.100 s" in train and "0.700 s" in train and "(events/model-1.jsonl)" in train
    assert "tickets 2" in train
    assert any(line.endswith("version 1 is current at server-0, server-1  (journal)") for line in lines)


def chrome_events(path: Path) -> list[dict[str, object]]:
    document = json.loads(path.read_text())
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    return list(document["traceEvents"])


def test_the_chrome_trace_of_a_prompt_has_its_slices_in_microseconds_and_arrows(
    run: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(path, traced(run).stations, flow=True)
    events = chrome_events(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}  # type: ignore[index]
    episode = next(event for event in events if event["name"] == "episode")
    assert (names[episode["pid"]], episode["ph"]) == ("rollout-1", "X")
    assert episode["ts"] == pytest.approx(1.1e6, abs=1) and episode["dur"] == pytest.approx(0.8e6, abs=1)
    starts = [event for event in events if event["ph"] == "s"]
    ends = [event for event in events if event["ph"] == "f"]
    assert len(starts) == len(ends) == 4 and {e["id"] for e in starts} == {e["id"] for e in ends}
    assert all(event["bp"] == "e" for event in ends)
    assert {event["ph"] for event in events} == {"M", "X", "i", "s", "f"}


def test_slices_that_overlap_stand_in_lanes_of_their_own(tmp_path: Path) -> None:
    slices = [
        TraceSlice(name=name, process="server-0", start=start, duration_s=duration_s)
        for name, start, duration_s in (
            ("outer", 1.0, 4.0),
            ("inner", 2.0, 1.0),
            ("across", 4.0, 3.0),
            ("later", 8.0, 1.0),
        )
    ]
    write_chrome_trace(tmp_path / "t.json", slices)
    lanes = {
        event["name"]: event["tid"] for event in chrome_events(tmp_path / "t.json") if event["ph"] == "X"
    }
    assert lanes == {"outer": 1, "inner": 1, "across": 2, "later": 1}


def otlp_spans(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    for line in path.read_text().splitlines():
        yield from otlp_spans_in(line)


def otlp_spans_in(line: str) -> Iterator[tuple[str, dict[str, object]]]:
    document = json.loads(line)
    assert set(document) == {"resourceSpans"}
    for resource in document["resourceSpans"]:
        named = {each["key"]: each["value"]["stringValue"] for each in resource["resource"]["attributes"]}
        for scope in resource["scopeSpans"]:
            for each in scope["spans"]:
                yield named["service.instance.id"], each


def test_the_otlp_export_of_a_prompt_is_one_trace_below_one_span(run: RecordedRun, tmp_path: Path) -> None:
    path = tmp_path / "otlp.json"
    trace = traced(run)
    write_otlp_trace(path, trace)
    spans = list(otlp_spans(path))
    (root,) = [each for _, each in spans if "parentSpanId" not in each]
    assert {each["traceId"] for _, each in spans} == {root["traceId"]}
    assert {each["parentSpanId"] for _, each in spans if each is not root} == {root["spanId"]}
    assert len({each["spanId"] for _, each in spans}) == len(spans) == 6
    assert len(str(root["traceId"])) == 32 and len(str(root["spanId"])) == 16
    assert root["startTimeUnixNano"] == str(round((NOON + 1.0) * 1e9))
    assert root["endTimeUnixNano"] == str(round((NOON + 6.0) * 1e9))
    moments = [event["name"] for event in root["events"]]  # type: ignore[attr-defined]
    assert moments == ["issued", "assigned", "scored", "batched", "committed", "current"]
    allowed = {"traceId", "spanId", "parentSpanId", "name", "kind", "attributes", "events", "status"}
    allowed |= {"startTimeUnixNano", "endTimeUnixNano"}
    assert all(set(each) <= allowed for _, each in spans)
    first = path.read_bytes()
    assert first.count(b"\n") == 1
    write_otlp_trace(path, trace)
    assert path.read_bytes() == first


def test_a_long_run_is_exported_in_lines_of_bounded_length_and_never_held_as_a_whole(tmp_path: Path) -> None:
    path, written = tmp_path / "o.json", list[int]()

    def slices() -> Iterator[TraceSlice]:
        for number in range(2 * MOST_SPANS + 1):
            written.append(path.stat().st_size)
            yield TraceSlice(
                name="generate", process=f"server-{number % 2}", start=1.0 + number, duration_s=0.5
            )

    assert write_otlp(path, slices(), run="r") == 2 * MOST_SPANS + 1
    lines = path.read_text().splitlines()
    assert [sum(1 for _ in otlp_spans_in(line)) for line in lines] == [MOST_SPANS, MOST_SPANS, 1]
    assert written[-1] > 0, "the first was written before the last was asked for"
    ids = [each["spanId"] for _, each in otlp_spans(path)]
    assert len(set(ids)) == len(ids)


def test_the_timeline_has_days_where_it_is_told_to(run: RecordedRun) -> None:
    lines = timeline(traced(run), with_day=True).splitlines()
    assert all(line.startswith("2023-11-1") for line in lines[4:])
    assert lines[3].index("after") + len("after") == lines[4].index(" s ") + len(" s")


def test_a_whole_run_is_exported_with_its_phases_and_what_went_wrong(
    run: RecordedRun, tmp_path: Path
) -> None:
    for at, before, after in ((1.0, "starting", "collecting"), (4.0, "collecting", "training")):
        run.say("master-0", Transition("master", "run", before, after, "because"), at=at)
    run.say("model-1", Alert("slow"), at=4.5)
    with RunStore(run.folder) as store:
        store.refresh()
        slices = list(whole_run(store))
        assert [each.name for each in whole_run(store, since=NOON + 4.4, until=NOON + 4.6)] == ["Alert"]
    assert next(each for each in slices if each.name == "collecting").duration_s == 3.0
    assert {"generate", "Alert", "committed", "current"} <= {each.name for each in slices}
    assert write_chrome_trace(tmp_path / "c.json", slices) == len(slices)
    assert write_otlp(tmp_path / "o.json", slices, run="r") == len(slices)
    traces = {str(each["name"]): each["traceId"] for _, each in otlp_spans(tmp_path / "o.json")}
    assert traces["episode"] != traces["actor_train"]
