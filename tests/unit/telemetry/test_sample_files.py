"""Samples are kept in parts within a budget; readers, cut-backs and kills find every sample that is kept once."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.config.recipe import dump
from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.errors import StorageError
from kintsugi.learning_health.follower import LearningFollower
from kintsugi.notebook import RecordedRun
from kintsugi.page import samples as sample_pages
from kintsugi.page.samples import SampleFilter, SampleIndex
from kintsugi.run_folder import pruning, reader
from kintsugi.telemetry.sample_files import SampleFiles, numbered_parts
from kintsugi.telemetry.samples_index import SamplesIndex
from kintsugi.telemetry.step_metrics import MetricsWriter, SampleRecord, SamplesWriter
from kintsugi.types import FinishReason, SampleMeta, SampleText

STEP_SIZE = 6
STEPS = 40
ALL = 1 << 30
FEW = 16_000
"""Budget of about twelve of these steps, a part for each."""


def write(writer: SamplesWriter, step: int, *, seed: int = 0) -> None:
    source = random.Random(f"{step} {seed}")
    metas = [
        SampleMeta(
            f"g:0:{step}:0/{index}",
            f"g:0:{step}:0",
            9,
            3,
            (reward := float(source.randrange(5))),
            {"right": reward},
            FinishReason.EOS,
            step,
            "rollout-0",
            "d",
        )
        for index in range(STEP_SIZE)
    ]
    texts = {meta.key: SampleText(f"prompt {step}", f"text {meta.key} of {seed}") for meta in metas}
    writer.write(step, metas, texts=texts, advantages={})


def writer_of(folder: Path, *, most_size: int, part_size: int = 3000) -> SamplesWriter:
    writer = SamplesWriter(folder, most_size=most_size)
    writer._part_size = part_size
    return writer


def filled(folder: Path, *, most_size: int = ALL, steps: int = STEPS, part_size: int = 3000) -> SamplesWriter:
    folder.mkdir(exist_ok=True)
    writer = writer_of(folder, most_size=most_size, part_size=part_size)
    for step in range(1, steps + 1):
        write(writer, step)
    return writer


def parts_of(folder: Path) -> list[int]:
    return numbered_parts(folder / "samples.jsonl")


def assert_reads_as(folder: Path, twin: Path, *, first_step: int = 1) -> None:
    """Every reader finds in parts what is in the one file of the twin from a step on."""
    expected = [record for record in reader.read_samples(twin) if record.step >= first_step]
    assert expected and reader.read_samples(folder) == expected
    assert list(reader.each_sample(folder)) == expected
    for last in (1, 7, 10_000):
        assert reader.read_samples(folder, last=last) == expected[-last:]
    for count in (1, 10, 60):
        assert reader.read_samples(folder, worst=count) == _worst(expected, count)
    for step in (first_step, first_step + 3, expected[-1].step, 999):
        of_step = [record for record in expected if record.step == step]
        assert reader.read_samples(folder, step=step) == of_step
        found = sample_pages.find(SampleIndex(folder), SampleFilter(step=step, limit=500))
        assert [row.sample for row in found.items] == [record.sample for record in of_step]
    assert sample_pages.step_range(folder) == (first_step, expected[-1].step)


def _worst(records: list[SampleRecord], count: int) -> list[SampleRecord]:
    return sorted(records, key=lambda record: (record.reward, -record.step))[:count]


def assert_page_walks(folder: Path, expected: list[SampleRecord]) -> None:
    """The page walks from the first sample to the last one and back."""
    with SampleFiles(folder) as files:
        offset: int | None = files.start
    walked: list[SampleRecord] = []
    places: list[int] = []
    while offset is not None:
        found = sample_pages.sample_at(folder, offset)
        assert found is not None and found.previous == (places[-1] if places else None)
        walked.append(found.record)
        places.append(offset)
        offset = found.next
    assert walked == expected


def index_of(folder: Path) -> SampleIndex:
    index = SampleIndex(folder)
    while index.extend():
        pass
    return index


def test_samples_in_parts_are_read_as_those_of_one_file(tmp_path: Path) -> None:
    filled(tmp_path / "one", part_size=ALL).close()
    filled(tmp_path / "parts").close()
    assert parts_of(tmp_path / "one") == []
    assert len(parts_of(tmp_path / "parts")) > 5
    assert_reads_as(tmp_path / "parts", tmp_path / "one")
    assert_page_walks(tmp_path / "parts", reader.read_samples(tmp_path / "one"))
    with SampleFiles(tmp_path / "parts") as files:
        assert SamplesIndex(files).rest == []  # All of them are described.


def test_the_oldest_parts_are_removed_and_the_rest_is_within_the_budget(tmp_path: Path) -> None:
    filled(tmp_path / "one", part_size=ALL).close()
    filled(tmp_path / "few", most_size=FEW).close()
    sizes = [path.stat().st_size for path in (tmp_path / "few").glob("samples.*")]
    assert FEW / 2 < sum(sizes) <= FEW
    first = reader.read_samples(tmp_path / "few")[0].step
    assert 20 < first < STEPS - 5
    assert_reads_as(tmp_path / "few", tmp_path / "one", first_step=first)


def test_the_disk_space_does_not_depend_on_the_length_of_a_run(tmp_path: Path) -> None:
    sizes = []
    for steps in (100, 400):
        filled(tmp_path / str(steps), most_size=FEW, steps=steps).close()
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(steps)).iterdir()))
    assert max(sizes) <= FEW


def test_a_small_budget_keeps_a_part_and_the_file_that_is_written(tmp_path: Path) -> None:
    writer = SamplesWriter(tmp_path, most_size=1)
    for step in range(1, 5):
        write(writer, step)
    writer.close()
    assert [record.step for record in reader.read_samples(tmp_path)] == [3] * STEP_SIZE + [4] * STEP_SIZE


@pytest.mark.parametrize("step", [1, 2, 9, 17, 18, 19, 20, 39, 40])
def test_a_rollback_across_parts_leaves_what_one_file_would_have(tmp_path: Path, step: int) -> None:
    for name, part_size in (("one", ALL), ("parts", 3000)):
        writer = filled(tmp_path / name, part_size=part_size)
        writer.truncate_after(step)
        for later in range(step + 1, step + 4):
            write(writer, later, seed=1)
        writer.close()
    assert_reads_as(tmp_path / "parts", tmp_path / "one")


def test_a_rollback_before_everything_that_is_kept_begins_anew(tmp_path: Path) -> None:
    writer = filled(tmp_path, most_size=FEW)
    writer.truncate_after(3)
    assert reader.read_samples(tmp_path) == [] and parts_of(tmp_path) == []
    write(writer, 4, seed=1)
    writer.close()
    assert [record.step for record in reader.read_samples(tmp_path, worst=3)] == [4, 4, 4]


def test_a_new_master_touches_no_part_that_was_put_aside(tmp_path: Path) -> None:
    filled(tmp_path).close()
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    writer = writer_of(tmp_path, most_size=ALL)
    writer.truncate_after(STEPS)
    writer.close()
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def killed_at(number: int, action: Callable[[], None]) -> bool:
    """Carry out an action in a process of its own, which kills itself before its `number`th change of a name or a
    length; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        left = number

        def counted(change: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return change(*arguments, **options)

            return call

        code = 1
        try:
            Path.replace, Path.unlink = counted(Path.replace), counted(Path.unlink)  # type: ignore[method-assign,assignment]
            os.ftruncate = counted(os.ftruncate)  # type: ignore[assignment]
            action()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_moment_of_the_switch_costs_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "one", part_size=ALL).close()
    number, was_killed = 0, True
    while was_killed:
        folder = tmp_path / str(number)
        filled(folder, most_size=FEW, steps=30).close()

        def go_on(folder: Path = folder) -> None:
            writer = writer_of(folder, most_size=FEW)
            for step in range(31, 37):
                write(writer, step)

        was_killed = killed_at(number, go_on)
        written = reader.read_samples(folder)[-1].step
        assert_reads_as(folder, _cut(tmp_path, written), first_step=reader.read_samples(folder)[0].step)
        writer = writer_of(folder, most_size=FEW)
        writer.truncate_after(written - 1)
        for step in range(written, STEPS + 1):
            write(writer, step)
        writer.close()
        assert_reads_as(folder, tmp_path / "one", first_step=reader.read_samples(folder)[0].step)
        number += 1
    assert number > 4  # The kills happened: both renames, and removals.


def _cut(tmp_path: Path, step: int) -> Path:
    """The twin that ends with a step."""
    folder = tmp_path / f"one-{step}"
    if not folder.exists():
        filled(folder, part_size=ALL, steps=step).close()
    return folder


@pytest.mark.parametrize("step", [12, 27])
def test_a_kill_at_any_moment_of_a_rollback_costs_nothing(tmp_path: Path, step: int) -> None:
    twin = filled(tmp_path / "one", part_size=ALL)
    twin.truncate_after(step)
    for later in range(step + 1, STEPS + 1):
        write(twin, later, seed=1)
    twin.close()
    number, was_killed = 0, True
    while was_killed:
        folder = tmp_path / str(number)
        filled(folder, part_size=6000).close()

        def roll_back(folder: Path = folder) -> None:
            writer_of(folder, most_size=ALL).truncate_after(step)

        was_killed = killed_at(number, roll_back)
        writer = writer_of(folder, most_size=ALL)
        writer.truncate_after(step)
        for later in range(step + 1, STEPS + 1):
            write(writer, later, seed=1)
        writer.close()
        assert_reads_as(folder, tmp_path / "one")
        with SampleFiles(folder) as files:
            assert SamplesIndex(files).rest == []
        number += 1
    assert number > 4


def test_a_reader_keeps_what_it_opened_while_parts_are_put_aside_and_removed(tmp_path: Path) -> None:
    writer = filled(tmp_path, most_size=FEW)
    expected = reader.read_samples(tmp_path)
    with SampleFiles(tmp_path) as files:
        for step in range(STEPS + 1, STEPS + 40):
            write(writer, step)
        lines = [line for _, line in files.lines_between()]
        assert len(lines) == len(expected)
        assert SamplesIndex(files).rest == []
    writer.close()
    assert reader.read_samples(tmp_path)[0].step > expected[-1].step


def test_a_failed_removal_costs_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = filled(tmp_path, most_size=FEW, steps=20)

    def refuse(path: Path) -> None:
        raise OSError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    refusals = []
    for step in range(21, 26):
        try:
            write(writer, step)
        except StorageError as error:
            refusals.append(str(error))
    writer.close()
    assert refusals and all("Permission denied" in refusal for refusal in refusals)
    last = reader.read_samples(tmp_path)[-5 * STEP_SIZE :: STEP_SIZE]
    assert [record.step for record in last] == list(range(21, 26))


def test_the_index_of_the_page_follows_the_switch_the_removal_and_the_rollback(tmp_path: Path) -> None:
    writer = filled(tmp_path, most_size=FEW, steps=10)
    index = index_of(tmp_path)
    for step in range(11, 61):
        write(writer, step)
        while index.extend():
            pass
        kept = reader.read_samples(tmp_path)
        assert len(index) == len(kept) and index.share == 1.0
        page = sample_pages.find(index, SampleFilter(sort="worst", limit=20)).items
        assert [row.reward for row in page] == sorted(record.reward for record in kept)[:20]
    writer.truncate_after(52)
    while index.extend():
        pass
    assert len(index) == len(reader.read_samples(tmp_path))
    assert not index.problems()
    writer.close()


def test_the_notebook_and_prune_know_all_parts(tmp_path: Path) -> None:
    filled(tmp_path / "run").close()
    run = RecordedRun(tmp_path / "run")
    assert len(run.samples()) == STEPS * STEP_SIZE
    assert run.samples(step=7)["step"] == [7] * STEP_SIZE
    (samples,) = (part for part in pruning.PARTS if part.name == "samples")
    assert set(samples.paths(tmp_path / "run")) == set((tmp_path / "run").iterdir())


def test_the_follower_of_learning_finds_the_samples_of_steps_in_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    take = LearningFollower._samples_of

    def counted(follower: LearningFollower, step: int) -> object:
        figures = take(follower, step)
        found.append((step, 0 if figures is None else figures.samples))
        return figures

    monkeypatch.setattr(LearningFollower, "_samples_of", counted)
    config = Config(name="test", algorithm=AlgorithmSection(name="grpo", steps=40))
    dump(config, tmp_path / "config.yaml")
    samples, metrics = writer_of(tmp_path, most_size=ALL), MetricsWriter(tmp_path)
    first = range(1, 9)
    for step in first:
        metrics.write(step, {"loss": 1.0})
        write(samples, step)
    follower = LearningFollower(tmp_path)
    follower.look()
    for step in range(9, 25):
        metrics.write(step, {"loss": 1.0})
        write(samples, step)
        follower.look()
    assert len(parts_of(tmp_path)) > 4
    assert found == [(step, STEP_SIZE) for step in range(1, 25)]
    for each in (follower, samples, metrics):
        each.close()
