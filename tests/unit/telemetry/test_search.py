from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from kintsugi.errors import Fault, UserError
from kintsugi.journal.facts import ProcessRequested
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, EventLog, FaultSeen, Note, Span
from kintsugi.telemetry.readings import ClockOffsetReading, HostReading, LinkReading, ProcessReading
from kintsugi.telemetry.store.index import RunStore
from kintsugi.telemetry.store.search import SearchQuery, TimeExtent, extent_of, follow, moment, search
from kintsugi.types import Role
from tests.unit.telemetry.recorded_run import FIRST, NOON, RecordedRun, a_step, begun_run


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = begun_run(tmp_path / "run")
    a_step(run)
    run.say("rollout-1", Span("episode", 0.0, 0.5, {"ticket": FIRST}), at=2.5)
    run.say(
        "model-0", FaultSeen(Fault("f00d", "StorageError", "model-0", "batch size mismatch", 0.0)), at=4.0
    )
    run.say("model-1", Alert(f"{FIRST} looks odd", {"ratio": 2.0}), at=5.0)
    run.print("model-1", f"warning: {FIRST}/1 was cut off\n")
    return run


@pytest.fixture
def store(run: RecordedRun) -> Iterator[RunStore]:
    with RunStore(run.folder) as store:
        store.refresh()
        yield store


def kinds(store: RunStore, query: SearchQuery) -> list[str]:
    return [line.kind for line in search(store, query)]


def test_a_request_is_found_wherever_it_is_named(store: RunStore) -> None:
    expected = ["TicketsIssued", "TicketAssigned", "Span", "SamplesScored", "BatchFormed", "Alert", "log"]
    assert kinds(store, SearchQuery(request=FIRST)) == expected
    assert kinds(store, SearchQuery(request=f"{FIRST}/0")) == expected


def test_faults_steps_and_versions_are_requests_too(store: RunStore) -> None:
    assert kinds(store, SearchQuery(request="f00d")) == ["FaultSeen"]
    assert kinds(store, SearchQuery(request="step:1")) == ["BatchFormed", "StepCommitted"]
    assert kinds(store, SearchQuery(request="version:1")) == ["VersionCurrent"]


def test_words_are_found_in_their_order_and_the_last_may_be_cut(store: RunStore) -> None:
    assert kinds(store, SearchQuery(keyword="batch size mis")) == ["FaultSeen"]
    assert kinds(store, SearchQuery(keyword="Size Batch")) == []
    assert kinds(store, SearchQuery(keyword='"odd')) == ["Alert"]


def test_a_kind_is_found_by_each_of_its_words(store: RunStore) -> None:
    for words in ("committed", "Step Committed", "stepcommitted", "step commit"):
        assert kinds(store, SearchQuery(keyword=words)) == ["StepCommitted"], words


def test_a_window_a_process_and_a_kind_all_have_to_fit(store: RunStore) -> None:
    window = SearchQuery(since=NOON + 4.0, until=NOON + 5.0)
    assert kinds(store, window) == ["BatchFormed", "FaultSeen", "StepCommitted", "Alert"]
    assert [line.process for line in search(store, SearchQuery(process="model", until=NOON + 9))] == [
        "model-0",
        "model-1",
    ]
    assert kinds(store, SearchQuery(process="model-0", kind="fault")) == ["FaultSeen"]
    assert kinds(store, SearchQuery(process="model-0", kind="alert")) == []


def test_what_concerns_single_prompts_is_told_only_where_it_is_asked_for(
    run: RecordedRun, store: RunStore
) -> None:
    log = EventLog(RunFolder(run.folder).spans_file("server-0"), process="server-0")
    log.emit(Span("generate", 0.0, 0.1, {"ticket": FIRST}))
    log.close()
    store.refresh()
    assert not {"TicketAssigned", "SamplesScored"} & set(kinds(store, SearchQuery()))
    assert kinds(store, SearchQuery(process="server")) == []
    assert kinds(store, SearchQuery(process="server", kind="span")) == ["Span"]
    assert kinds(store, SearchQuery(keyword="generate")) == ["Span"]
    assert "SamplesScored" in kinds(store, SearchQuery(request=FIRST))


def test_figures_are_found_by_time_and_by_whom_they_are_of(run: RecordedRun, store: RunStore) -> None:
    for second in range(5):
        run.measure("agent-0", ProcessReading("model-0", 7, "S", {"cpu_s": 1.0}), at=second)
        run.measure("agent-0", LinkReading("model-0", "agent-1", 80, "ESTABLISHED"), at=second)
        run.measure("agent-1", ProcessReading("model-1", 8, "R"), HostReading("host-1"), at=second)
    found = list(
        search(store, SearchQuery(kind="ProcessSample", process="model-0", since=NOON + 2, until=NOON + 3))
    )
    assert [(line.time - NOON, line.process) for line in found] == [(2.0, "model-0"), (3.0, "model-0")]
    assert found[0].text == "pid 7 state S cpu_s=1" and found[0].source == "figures/agent-0.jsonl"
    assert len(list(search(store, SearchQuery(kind="HostSample")))) == 5
    times = [line.time for line in search(store, SearchQuery(kind="ProcessSample"))]
    assert len(times) == 10 and times == sorted(times)


def test_figures_have_the_masters_time_too(run: RecordedRun) -> None:
    run.decide(ProcessRequested("agent-1", Role.AGENT, "host-1", "1.3"), at=0.0)
    run.measure("agent-1", ClockOffsetReading("host-1", 100.0, 0.001), HostReading("host-1"), at=103.0)
    run.measure("agent-0", HostReading("host-0"), at=4.0)
    with RunStore(run.folder) as store:
        store.refresh()
        query = SearchQuery(kind="HostSample", since=NOON + 2.0, until=NOON + 4.0)
        told = [(line.time - NOON, line.process) for line in search(store, query)]
    assert told == [(3.0, "agent-1"), (4.0, "agent-0")]


def test_a_clock_that_was_set_back_hides_no_figures(run: RecordedRun, store: RunStore) -> None:
    for at in (8.0, 3.0):
        run.measure("agent-0", HostReading("host-0"), at=at)
    query = SearchQuery(kind="HostSample", until=NOON + 5.0)
    assert [line.time - NOON for line in search(store, query)] == [3.0]


def test_how_a_kind_begins_means_figures_only_where_nothing_else_begins_so(
    run: RecordedRun, store: RunStore
) -> None:
    run.measure(
        "agent-0", ProcessReading("model-0", 7, "S"), ClockOffsetReading("host-0", 0.0, 0.001), at=1.0
    )
    assert set(kinds(store, SearchQuery(kind="process"))) == {"ProcessRequested"}
    assert kinds(store, SearchQuery(kind="clock")) == ["ClockSample"]


def test_figures_are_not_followed(store: RunStore) -> None:
    with pytest.raises(UserError, match="--follow: expected events, facts or logs, got --kind HostSample"):
        next(follow(store, SearchQuery(kind="HostSample"), pause=lambda: False))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (SearchQuery(process="model-7"), "expected a process of the run or a role (master-0, model-0"),
        (SearchQuery(kind="nonsense"), "--kind: expected one of"),
        (SearchQuery(kind=""), "--kind"),
        (SearchQuery(keyword="→"), "expected words to look for"),
        (SearchQuery(kind="HostSample", keyword="x"), "readings have no words"),
    ],
)
def test_what_can_not_be_looked_for_is_the_users_mistake(
    store: RunStore, query: SearchQuery, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        list(search(store, query))
    assert words in str(caught.value)


def test_following_tells_what_is_there_then_what_comes_each_once(run: RecordedRun) -> None:
    texts = iter(["first", "second"])

    def pause() -> bool:
        text = next(texts, None)
        if text is not None:
            run.say("server-0", Note(text), at=9.0)
        return text is not None

    with RunStore(run.folder) as store:
        told = [line.text for line in follow(store, SearchQuery(process="server"), pause=pause)]
    assert told == ["first", "second"]


EXTENT = TimeExtent(NOON, NOON + 100.0)
DAY = datetime.fromtimestamp(NOON)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+90s", NOON + 90),
        ("1.5m", NOON + 10),
        ("-30s", NOON + 70),
        (str(NOON + 7.25), NOON + 7.25),
        (DAY.isoformat(), NOON),
        (DAY.strftime("%H:%M:%S") + ".5", NOON + 0.5),
        (DAY.strftime("%H:%M"), NOON - DAY.second),
    ],
)
def test_times_are_understood_as_people_write_them(text: str, expected: float) -> None:
    assert moment(text, extent=EXTENT, option="--since") == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        *("yesterday", "", "25:00:00", "2026-13-01", "1e300", "9" * 40, "+5 parsecs"),
        *("+99999999999d", "99999999999d", "9" * 400 + "s"),
    ],
)
def test_nonsense_is_no_time(text: str) -> None:
    with pytest.raises(UserError) as caught:
        moment(text, extent=EXTENT, option="--since")
    assert "--since" in str(caught.value) and "expected a time" in str(caught.value)


EVENING = datetime(2026, 11, 16, 22, 0).timestamp()
NIGHT = TimeExtent(EVENING, EVENING + 5 * 3600)


@pytest.mark.parametrize(
    ("text", "after_s"),
    [
        ("22:30", 1800),
        ("00:10", 7800),
        ("03:00:00", 18000),
        ("21:59:30", -30),
        ("03:30", 19800),
        ("21:00", -3600),
    ],
)
def test_a_time_of_the_day_is_that_of_the_day_on_which_the_run_was_there(text: str, after_s: float) -> None:
    assert moment(text, extent=NIGHT, option="--since") == EVENING + after_s


@pytest.mark.parametrize("text", ["99", "21:00", "2026-11-15T23:00", "+6h"])
def test_a_moment_that_is_not_of_the_run_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError) as caught:
        moment(text, extent=NIGHT, option="--at", is_inside=True)
    expected = "expected a moment of the run, which goes from 2026-11-16 22:00:00 to 2026-11-17 03:00:00"
    assert f"--at {text}: {expected}" in str(caught.value)


@pytest.mark.parametrize("text", ["21:59:10", "22:00", "00:00", "03:00:40", "0s"])
def test_who_writes_minutes_means_any_second_of_them(text: str) -> None:
    moment(text, extent=NIGHT, option="--at", is_inside=True)


def test_a_run_goes_on_as_long_as_somebody_is_measured(run: RecordedRun, store: RunStore) -> None:
    """What was printed without a time says nothing about when."""
    assert extent_of(store) == TimeExtent(NOON, NOON + 6.0)
    run.measure("agent-0", HostReading("host-0"), at=300.0)
    assert extent_of(store) == TimeExtent(NOON, NOON + 300.0)


def test_nothing_can_be_counted_from_a_run_that_recorded_nothing(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store, pytest.raises(UserError, match="nothing yet"):
        moment("+5s", extent=extent_of(store), option="--since")
