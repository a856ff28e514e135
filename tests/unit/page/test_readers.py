"""Readers of single files: metrics, samples, line files, changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kintsugi.page import line_files, samples
from kintsugi.page.changes import ChangeDetector
from kintsugi.page.metrics import MetricsTable, places, thinned
from kintsugi.page.run_reader import RunReader, turns_of
from kintsugi.page.samples import SampleFilter, SampleIndex
from kintsugi.telemetry.readings import time_of
from tests.unit.page.made_runs import make_run, sample, write_lines


def table_of(folder: Path) -> MetricsTable:
    table = MetricsTable(folder)
    table.refresh(budget_s=60.0)
    return table


def index_of(folder: Path) -> SampleIndex:
    index = SampleIndex(folder)
    while index.extend():
        pass
    return index


def test_a_damaged_metrics_line_costs_that_line_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "ti\n\xff\xfe\n{"time": 1}\n[1]\n')
        file.write(json.dumps({"step": 5, "time": 1005.0, "reward/mean": 0.5}).encode() + b"\n")
    table = table_of(run)
    assert list(table.steps) == [1, 2, 3, 5]
    assert len(table.all_problems()) == 4
    assert "line 4" in table.all_problems()[0]


def test_an_incomplete_last_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with (run / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(b'{"step": 3, "time"')
        table = table_of(run)
        assert list(table.steps) == [1, 2]
        file.write(b": 1003.0}\n")
    table.refresh()
    assert list(table.steps) == [1, 2, 3]
    assert table.all_problems() == ()


def test_metrics_that_were_cut_back_by_a_resume_are_read_from_the_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6)
    table = table_of(run)
    write_lines(run / "new", [{"step": 1, "time": 1.0, "reward/mean": 0.9}])
    (run / "new").replace(run / "metrics.jsonl")
    table.refresh()
    assert list(table.steps) == [1]
    assert table.column("reward/mean").tolist() == [0.9]


def test_a_step_that_was_repeated_is_there_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 2000.0, "reward/mean": 0.7, "new": 1.0}\n')
    table = table_of(run)
    assert list(table.steps) == [1, 2, 3]
    assert table.column("reward/mean").tolist() == [0.1, 0.2, 0.7]
    assert np.isnan(table.column("new")[:2]).all()


def test_a_value_that_is_not_finite_is_no_value() -> None:
    values = np.array([1.0, np.nan, np.inf, 3.0, 5.0])
    assert thinned(values, every=1) == [1.0, None, None, 3.0, 5.0]
    assert thinned(values, every=2) == [1.0, 3.0, 5.0]
    assert thinned(np.empty(0), every=3) == []
    assert places([1.0, 2.0, 3.0, 4.0, 5.0], every=2) == [2.0, 4.0, 5.0]


def test_the_index_of_samples_finds_the_worst_and_the_longest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    records = [sample(1, number, reward=number / 10, completion="x" * number) for number in range(9)]
    write_lines(run / "samples.jsonl", records)
    index = index_of(run)
    worst = samples.find(index, SampleFilter(sort="worst", limit=3)).items
    longest = samples.find(index, SampleFilter(sort="longest", limit=2)).items
    surprising = samples.find(index, SampleFilter(sort="surprising", limit=1)).items
    assert [row.reward for row in worst] == [0.0, 0.1, 0.2]
    assert [row.length for row in longest] == [8, 7]
    assert surprising[0].advantage == -0.5


def test_pages_of_any_order_have_every_sample_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5, per_step=20)
    index = index_of(run)
    for sort in ("order", "worst", "longest", "surprising"):
        seen, cursor = [], None
        while True:
            found = samples.find(index, SampleFilter(sort=sort, limit=7, cursor=cursor))
            seen += [row.n for row in found.items]
            cursor = found.next
            if cursor is None:
                break
        assert len(seen) == len(set(seen)) == 100, sort


def test_samples_of_a_step_are_found_without_an_index(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=300, per_step=16)
    index = SampleIndex(run)
    for step in (1, 2, 150, 299, 300):
        found = samples.find(index, SampleFilter(step=step, limit=100))
        assert [row.step for row in found.items] == [step] * 16
        assert [group.samples for group in found.groups] == [8, 8]
    assert samples.find(index, SampleFilter(step=301)).total == 0
    assert samples.step_range(run) == (1, 300)


def test_filters_of_reward_outcome_group_and_words_hold_together(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    index = index_of(run)
    right = samples.find(index, SampleFilter(min=0.5))
    assert right.total == 16
    assert sum(right.histogram.counts) == 64
    assert samples.find(index, SampleFilter(outcome="length")).total == 0
    assert samples.find(index, SampleFilter(group="grpo:0:3:0")).total == 8
    found = samples.find(index, SampleFilter(text="17+1="))
    assert [row.prompt for row in found.items] == ["17+1="]
    assert samples.find(index, SampleFilter(text="reward_components")).items == []


def test_words_are_found_whatever_characters_they_have(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    texts = ['say "hi"\n', "back\\slash", "ÄÖ 日本", "<script>", "\x1b[31m"]
    write_lines(run / "samples.jsonl", [sample(1, n, completion=text) for n, text in enumerate(texts)])
    index = index_of(run)
    for text in (*texts, "äö", "SAY"):
        assert len(samples.find(index, SampleFilter(text=text)).items) == 1, text


def test_a_damaged_sample_is_counted_and_the_others_are_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, per_step=3)
    with (run / "samples.jsonl").open("ab") as file:
        file.write(b"{broken\n" + json.dumps(sample(1, 3)).encode() + b"\n" + b'{"torn": ')
    index = index_of(run)
    assert len(index) == 4
    assert "1 lines could not be read" in index.problems()[0]
    assert index.extend() is False


def test_a_sample_has_its_neighbours(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, per_step=3)
    first = samples.sample_at(run, 0)
    assert first is not None and first.previous is None and first.next is not None
    second = samples.sample_at(run, first.next)
    assert second is not None and second.previous == 0
    assert second.record.sample == 1
    assert samples.sample_at(run, 1) is None
    assert samples.sample_at(run, 1 << 40) is None


def test_the_index_grows_with_the_file_and_starts_again_where_it_was_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, per_step=3)
    index = index_of(run)
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(2, 9)) + "\n")
    index.extend()
    assert len(index) == 4
    os.truncate(run / "samples.jsonl", 0)
    index.extend()
    assert len(index) == 0


def test_a_window_of_time_has_the_lines_of_that_time(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    path.write_bytes(b"".join(b'{"time":%d.0,"x":"%s"}\n' % (n, b"y" * 90) for n in range(5000)))
    lines, is_cut = line_files.window(path, since=1200.0, until=1210.0, most_bytes=1 << 20)
    assert [time_of(line) for line in lines] == [float(n) for n in range(1200, 1211)]
    assert not is_cut
    assert line_files.window(path, since=9000.0, until=9999.0, most_bytes=1 << 20)[0] == []
    assert line_files.window(tmp_path / "none", since=0.0, until=1.0, most_bytes=100) == ([], False)


def test_only_what_changed_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    detector = ChangeDetector(run)
    assert detector.changes() == set()
    with (run / "samples.jsonl").open("a") as file:
        file.write("{}\n")
    assert detector.changes() == {"samples"}
    (run / "summary.json").write_text("{}")
    assert detector.changes() == {"state"}


@pytest.mark.parametrize(
    ("completion", "kinds"),
    [
        ("42", ["text", "text"]),
        ("<tool>6*7</tool>⟨42⟩42", ["text", "tool_call", "tool_output", "text"]),
        ("a⟨one\ntwo⟩b⟨⟩", ["text", "text", "tool_output", "text", "tool_output"]),
        ("", ["text", "text"]),
    ],
)
def test_an_episode_is_split_at_calls_and_observations(completion: str, kinds: list[str]) -> None:
    assert [turn.kind for turn in turns_of("6*7=", completion)] == kinds


def test_messages_of_a_chat_are_turns() -> None:
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [(turn.role, turn.text) for turn in turns_of(prompt, "hello")] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("completion", "hello"),
    ]


def test_a_run_of_another_version_is_shown_with_its_problem(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("name: mine\nfrom_the_future: 1\n")
    (run / "summary.json").write_text("[]")
    header = RunReader(run).header()
    assert header.state == "interrupted"
    assert any("from_the_future" in problem for problem in header.problems)
    assert any("another version" in problem for problem in header.problems)
    assert header.step == 4


def test_a_journal_that_is_no_journal_is_a_problem_and_the_rest_works(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "journal").write_bytes(b"nothing of the kind")
    reader = RunReader(run)
    assert reader.incidents().incidents == ()
    assert reader.metrics(keys=None, points=100).steps == (1, 2, 3, 4)
