from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.journal.facts import ProcessRequested, StepCommitted
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.events import EventLog, Note, Span
from kintsugi.telemetry.jsonl_log import old_path
from kintsugi.telemetry.readings import ClockOffsetReading, HostReading
from kintsugi.telemetry.store.index import RunStore
from kintsugi.telemetry.store.search import FoundLine, SearchQuery, search
from kintsugi.telemetry.store.sources import CHUNK, LONGEST_LINE, whole_lines
from kintsugi.types import Role
from tests.unit.conftest import SmallDisk
from tests.unit.telemetry.recorded_run import NOON, RecordedRun, begun_run


def found(folder: Path, query: SearchQuery | None = None) -> list[FoundLine]:
    with RunStore(folder) as store:
        store.refresh()
        return list(search(store, query or SearchQuery()))


def texts(folder: Path, query: SearchQuery | None = None) -> list[str]:
    return [line.text for line in found(folder, query)]


def test_what_processes_said_decided_and_printed_is_found_in_the_order_of_time(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.say("model-1", Note("third"), at=3.0)
    run.say("model-0", Note("first"), at=1.0)
    run.decide(StepCommitted(7, "abc"), at=2.0)
    run.print("model-0", "Traceback: last\n")
    lines = found(run.folder)
    told = [(line.process, line.kind, line.text) for line in lines if line.time > NOON]
    assert told == [
        ("model-0", "Note", "first"),
        ("master-0", "StepCommitted", "step 7, state_digest abc"),
        ("model-1", "Note", "third"),
        ("model-0", "log", "Traceback: last"),
    ]
    assert [line.exact for line in lines if line.time > NOON] == [True, True, True, False]


def test_a_fact_has_the_time_of_the_input_that_it_follows_from(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.decide(StepCommitted(1, "a"), StepCommitted(2, "b"), at=4.5)
    assert [line.time - NOON for line in found(run.folder, SearchQuery(kind="StepCommitted"))] == [4.5, 4.5]


def test_filling_it_again_takes_in_only_what_is_new(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    for number in range(5):
        run.say("model-0", Note(f"note {number}"), at=number)
        run.print("model-0", f"line {number}\n")
        run.decide(StepCommitted(number + 1, "d"), at=number)
        assert len(texts(run.folder, SearchQuery(kind="Note"))) == number + 1
        assert len(texts(run.folder, SearchQuery(kind="log"))) == number + 1
        assert len(texts(run.folder, SearchQuery(kind="StepCommitted"))) == number + 1


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.print("model-0", "whole\nhal")
    assert texts(run.folder, SearchQuery(kind="log")) == ["whole"]
    run.print("model-0", "f\n")
    assert texts(run.folder, SearchQuery(kind="log")) == ["whole", "half"]


def test_a_torn_event_is_skipped(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.say("model-0", Note("one"), at=1.0)
    with RunFolder(run.folder).events_file("model-0").open("ab") as file:
        file.write(b'{"time":1.0,"mono\n\0\0\0')
    run.say("model-0", Note("two"), at=2.0)
    assert texts(run.folder, SearchQuery(kind="Note")) == ["one", "two"]


def test_who_dies_in_the_middle_of_a_piece_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun_run(tmp_path / "run")
    run.print("model-0", "a line\n" * 100)
    with RunStore(run.folder) as store:
        insert = store._insert

        def dies(*arguments: object, **named: object) -> None:
            insert(*arguments, **named)  # type: ignore[arg-type]
            raise KeyboardInterrupt

        monkeypatch.setattr(store, "_insert", dies)
        with pytest.raises(KeyboardInterrupt):
            store.refresh()
    assert len(texts(run.folder, SearchQuery(kind="log"))) == 100


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_fills_the_store_leaves_it_whole(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    count = 60_000
    run.print("model-0", "".join(f"line {number} of many that are printed\n" for number in range(count)))
    program = (
        "import sys, pathlib; from kintsugi.telemetry.store.index import RunStore; "
        "RunStore(pathlib.Path(sys.argv[1])).refresh(progress=lambda done, size: print(done, flush=True))"
    )
    command = [sys.executable, "-c", program, str(run.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as filler:
        assert filler.stdout is not None and filler.stdout.readline()
        filler.send_signal(signal.SIGKILL)
        assert filler.wait(timeout=10) == -signal.SIGKILL
    with closing(sqlite3.connect(RunFolder(run.folder).index_file)) as database:
        (before,) = database.execute("SELECT count(*) FROM records").fetchone()
    lines = texts(run.folder, SearchQuery(kind="log"))
    assert before < count
    assert len(lines) == len(set(lines)) == count


def test_several_may_fill_it_at_once(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.print("model-0", "".join(f"line {number}\n" for number in range(4_000)))
    run.print("model-1", "".join(f"other {number}\n" for number in range(4_000)))
    failures: list[BaseException] = []

    def fill() -> None:
        try:
            with RunStore(run.folder) as store:
                store.refresh()
        except BaseException as error:  # noqa: BLE001 - told to the test.
            failures.append(error)

    threads = [threading.Thread(target=fill) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    lines = texts(run.folder, SearchQuery(kind="log"))
    assert len(lines) == len(set(lines)) == 8_000


def test_somebody_who_reads_is_not_disturbed_by_who_fills(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.print("model-0", "".join(f"line {number}\n" for number in range(1000)))
    with RunStore(run.folder) as reading, RunStore(run.folder) as filling:
        reading.refresh()
        lines = search(reading, SearchQuery(kind="log"))
        seen = [next(lines)]
        run.print("model-0", "later\n")
        filling.refresh()
        seen += lines
    assert len(seen) == 1000


def test_times_of_another_host_are_the_masters(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.say("model-1", Note("before its clock was known"), at=101.0)
    run.say("model-1", Span("train", 5_100.0, 1.5), at=102.0)
    assert [line.time - NOON for line in found(run.folder, SearchQuery(process="model-1"))] == [101.0, 102.0]
    run.measure("agent-1", ClockOffsetReading("host-1", 100.0, 0.002), HostReading("host-1"), at=102.5)
    run.measure("agent-0", ClockOffsetReading("host-0", 0.001, 0.003), at=2.5)
    run.say("model-1", Note("after it was"), at=103.0)
    run.say("model-0", Note("of the master's host"), at=3.0)
    lines = found(run.folder, SearchQuery(process="model"))
    assert [(line.process, round(line.time - NOON, 6)) for line in lines] == [
        ("model-1", 1.0),
        ("model-1", 2.0),
        ("model-0", 3.0),
        ("model-1", 3.0),
    ]
    assert lines[1].begun is not None and round(lines[1].begun - NOON, 6) == 0.0


def test_a_clock_that_is_set_counts_from_then_on(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    for at, offset_s in ((10.0, 0.0), (20.0, -5.0)):
        run.measure("agent-1", ClockOffsetReading("host-1", offset_s, 0.001), at=at)
    run.say("model-1", Note("before"), at=19.0)
    run.say("model-1", Note("after"), at=21.0)
    assert [line.time - NOON for line in found(run.folder, SearchQuery(kind="Note"))] == [19.0, 26.0]


@pytest.mark.parametrize("is_known_before", [True, False])
def test_what_a_process_wrote_on_a_host_is_corrected_by_that_hosts_clock(
    tmp_path: Path, is_known_before: bool
) -> None:
    run = begun_run(tmp_path / "run")
    run.decide(ProcessRequested("model-0", Role.MODEL, "host-1", "1.3"), at=50.0)

    def measure() -> None:
        run.measure("agent-1", ClockOffsetReading("host-1", 100.0, 0.001), at=0.0)

    if is_known_before:
        measure()
    run.say("model-0", Note("on host-0"), at=20.0)
    run.say("model-0", Note("on host-1"), at=160.0)
    run.say("model-1", Note("there all the time"), at=120.0)
    notes = SearchQuery(kind="Note")
    if not is_known_before:
        assert [line.time - NOON for line in found(run.folder, notes)] == [20.0, 120.0, 160.0]
        measure()
    lines = found(run.folder, notes)
    assert [(line.text, line.time - NOON) for line in lines] == [
        ("on host-0", 20.0),
        ("there all the time", 20.0),
        ("on host-1", 60.0),
    ]


def test_many_comparisons_of_a_clock_are_taken_in_without_reading_all_that_are_known(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    samples = [ClockOffsetReading("host-1", float(number), 0.001) for number in range(50)]
    for number, sample in enumerate(samples):
        run.measure("agent-1", sample, at=float(number))
    with RunStore(run.folder) as store:
        asked: list[str] = []
        store.database.set_trace_callback(asked.append)
        store.refresh()
        store.database.set_trace_callback(None)
        assert len(store.clocks("host-1")) == 50
    looks = [query for query in asked if "FROM clocks" in query and "LIMIT 1" not in query]
    assert looks == [], "of each only the last one before is looked at"


def test_figures_that_were_put_aside_are_known_again_and_forgotten_when_they_are_gone(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    path = RunFolder(run.folder).readings_file("agent-1")
    run.measure("agent-1", ClockOffsetReading("host-1", 1.0, 0.001), at=1.0)
    with RunStore(run.folder) as store:
        store.refresh()
        path.rename(old_path(path, 1))
        run.measure("agent-1", ClockOffsetReading("host-1", 2.0, 0.001), at=2.0)
        store.refresh()
        assert [state.offset_s for state in store.clocks("host-1")] == [1.0, 2.0]
        old_path(path, 1).unlink()
        store.refresh()
        paths = [
            path for (path,) in store.database.execute("SELECT path FROM sources WHERE family = 'figures'")
        ]
        assert paths == ["figures/agent-1.jsonl"]


@pytest.mark.parametrize("most", [1_000_000, -10])
def test_spans_that_were_put_aside_are_found_once_and_forgotten_with_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """With `most` forgotten entries at most: beyond that the index is made anew."""
    run = begun_run(tmp_path / "run")
    path = RunFolder(run.folder).spans_file("server-0")

    def generate(*numbers: int) -> None:
        log = EventLog(path, process="server-0")
        for number in numbers:
            log.emit(Span("generate", 0.0, 1.0, {"ticket": f"grpo:0:{number}:0"}))
        log.close()

    generate(1, 2)
    query = SearchQuery(keyword="generate", process="server-0")
    assert len(texts(run.folder, query)) == 2
    path.rename(old_path(path, 1))
    generate(3)
    assert len(texts(run.folder, query)) == 3
    monkeypatch.setattr("kintsugi.telemetry.store.index.MOST_FORGOTTEN", most)
    old_path(path, 1).unlink()
    assert texts(run.folder, query) == ["generate took 1.000 s (ticket=grpo:0:3:0)"]
    assert texts(run.folder, SearchQuery(request="grpo:0:1:0")) == []
    assert len(texts(run.folder)) == 4
    with RunStore(run.folder) as store:
        (highest,) = store.database.execute("SELECT max(id) FROM records").fetchone()
    assert highest == (5 if most < 0 else 7)


def test_a_run_folder_that_was_copied_with_its_store_is_not_taken_in_again(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.say("model-0", Note("once"), at=1.0)
    assert texts(run.folder, SearchQuery(kind="Note")) == ["once"]
    shutil.copytree(run.folder, tmp_path / "copy")
    assert texts(tmp_path / "copy", SearchQuery(kind="Note")) == ["once"]


@pytest.mark.parametrize("damage", [b"no database at all, but a file of some length" * 100, b""])
def test_a_store_that_is_none_is_made_again(tmp_path: Path, damage: bytes) -> None:
    run = begun_run(tmp_path / "run")
    run.say("model-0", Note("once"), at=1.0)
    RunFolder(run.folder).index_file.write_bytes(damage)
    assert texts(run.folder, SearchQuery(kind="Note")) == ["once"]


def test_a_store_of_another_layout_is_made_again(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.decide(StepCommitted(7, "abc"), at=1.0)
    with closing(sqlite3.connect(RunFolder(run.folder).index_file)) as database:
        database.execute("CREATE TABLE places (process TEXT PRIMARY KEY, host TEXT) WITHOUT ROWID")
        database.execute("PRAGMA user_version = 1")
        database.commit()
    assert texts(run.folder, SearchQuery(keyword="committed")) == ["step 7, state_digest abc"]


def test_where_the_run_folder_can_not_be_written_the_index_is_made_elsewhere(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.say("model-0", Note("once"), at=1.0)
    RunFolder(run.folder).index_file.mkdir()
    assert texts(run.folder, SearchQuery(kind="Note")) == ["once"]
    assert list(RunFolder(run.folder).index_file.iterdir()) == []


@pytest.mark.parametrize("room", [0, 64 << 10])
def test_a_full_disk_keeps_nobody_from_looking(small_disk: SmallDisk, room: int) -> None:
    run = begun_run(small_disk.folder / "run")
    run.print("model-0", "".join(f"line {number} of many that are printed\n" for number in range(5000)))
    small_disk.fill(room=room)
    assert len(texts(run.folder, SearchQuery(kind="log"))) == 5000
    small_disk.clear()
    assert len(texts(run.folder, SearchQuery(kind="log"))) == 5000


def test_a_journal_that_another_master_went_on_with_is_read_anew(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.decide(StepCommitted(1, "d"), at=1.0)
    assert texts(run.folder, SearchQuery(kind="StepCommitted")) == ["step 1, state_digest d"]
    copy = run.folder / "journal.new"
    shutil.copy(run.folder / "journal", copy)
    os.replace(copy, run.folder / "journal")
    assert texts(run.folder, SearchQuery(kind="StepCommitted")) == ["step 1, state_digest d"]


def test_facts_of_a_compacted_journal_are_found_once_and_where_they_are_now(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.decide(StepCommitted(1, "d"), at=1.0)
    assert texts(run.folder, SearchQuery(kind="StepCommitted")) == ["step 1, state_digest d"]
    run.compact()
    run.decide(StepCommitted(2, "e"), at=2.0)
    both = ["step 1, state_digest d", "step 2, state_digest e"]
    assert texts(run.folder, SearchQuery(kind="StepCommitted")) == both
    run.compact()
    (run.folder / "store.db").unlink()
    assert texts(run.folder, SearchQuery(kind="StepCommitted")) == both
    assert texts(run.folder, SearchQuery(kind="StateFolded")) == []


def test_a_file_is_read_in_pieces_whatever_its_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "endless.log"
    path.write_bytes(b"x" * (3 * CHUNK) + b"\nend\n")
    offset, largest, last = 0, 0, b""
    while True:
        lines, end = whole_lines(path, offset=offset)
        if end == offset:
            break
        largest = max(largest, *(len(line) for _, line in lines))
        last, offset = lines[-1][1], end
    assert (last, offset) == (b"end", 3 * CHUNK + 5)
    assert largest <= CHUNK and LONGEST_LINE <= CHUNK


def test_zeros_that_a_crash_left_hide_nothing_that_follows(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.print("model-0", "before\n")
    with (run.folder / "logs" / "model-0.log").open("ab") as file:
        file.write(bytes(2 * CHUNK))
    run.print("model-0", "after\n")
    assert texts(run.folder, SearchQuery(kind="log")) == ["before", "after"]


def test_what_is_read_of_a_file_that_was_put_aside_is_still_its_own(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    path = run.folder / "events" / "server-0.jsonl"
    run.say("server-0", Note("first"), at=1.0)
    with RunStore(run.folder) as store:
        store.refresh()
        assert [line.text for line in search(store, SearchQuery(kind="Note"))] == ["first"]
        path.rename(old_path(path, 1))
        run.say("server-0", Note("later"), at=2.0)
        store.refresh()
        assert [line.text for line in search(store, SearchQuery(kind="Note"))] == ["first", "later"]


def test_a_printed_line_has_its_own_time_if_it_says_one_and_what_follows_has_the_same(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.print("model-0", "no time\n2026-11-16 08:39:30,250 ERROR it broke\nTraceback\n")
    lines = {line.text.split()[-1]: line for line in found(run.folder, SearchQuery(kind="log"))}
    assert lines["broke"].time == lines["Traceback"].time and lines["broke"].time % 1 == 0.25
    assert [lines[word].exact for word in ("time", "broke", "Traceback")] == [False, True, True]
    assert lines["time"].time <= SYSTEM_CLOCK.wall()


def test_a_run_that_recorded_nothing_yet_is_an_empty_store(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "run")
    assert found(tmp_path / "run") == []
    (tmp_path / "none").mkdir()
    assert found(tmp_path / "none") == []
