import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.config.schema import Config, DataSection, MixedSource
from kintsugi.data import streams
from kintsugi.data.dataset import DataSet, open_data, pin_data
from kintsugi.data.streams import RowNotYet, Spool
from kintsugi.errors import DataError, UserError


def line(number: int) -> bytes:
    return json.dumps({"prompt": f"p{number}"}).encode() + b"\n"


class World:
    """A named pipe with somebody who writes, a spool in a run folder, and what a worker reads of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.run_dir, self.pipe = tmp_path / "run", tmp_path / "pipe"
        self.run_dir.mkdir()
        os.mkfifo(self.pipe)
        (tmp_path / "held.jsonl").write_bytes(line(100))
        self.source = f"stream:{self.pipe}"
        section = DataSection(source=self.source, eval_source=str(tmp_path / "held.jsonl"), num_eval=1)
        self.config = Config(name="t", data=section)
        self.spool = Spool(self.source, run_dir=self.run_dir)
        self.writer = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK)

    def write(self, text: bytes) -> None:
        os.write(self.writer, text)
        self.spool.pump()

    def end(self) -> None:
        os.close(self.writer)
        self.writer = -1
        self.spool.pump()

    def data(self) -> DataSet:
        return open_data(self.config, run_dir=self.run_dir)

    def close(self) -> None:
        self.spool.close()
        if self.writer >= 0:
            os.close(self.writer)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def prompt(data: DataSet, position: int) -> str:
    return data.training_row(stage="grpo", seed=0, epoch=0, position=position).prompt


def test_rows_are_met_in_the_order_in_which_they_come(world: World) -> None:
    data = world.data()
    with pytest.raises(RowNotYet):
        prompt(data, 0)
    world.write(line(0) + line(1) + line(2)[:5])
    assert [prompt(data, position) for position in (1, 0)] == ["p1", "p0"]
    with pytest.raises(RowNotYet):
        prompt(data, 2)
    world.write(line(2)[5:])
    assert prompt(data, 2) == "p2"


def test_a_worker_that_comes_later_reads_the_same_rows(world: World) -> None:
    world.write(line(0) + line(1))
    assert prompt(world.data(), 1) == prompt(world.data(), 1) == "p1"


def test_a_resumed_run_goes_on_where_the_pipe_was_left(world: World) -> None:
    world.write(line(0) + line(1)[:4])
    world.spool.close()
    pin_data(world.config, run_dir=world.run_dir)
    world.spool = Spool(world.source, run_dir=world.run_dir)
    world.write(line(1)[4:] + line(2))
    assert [prompt(world.data(), position) for position in range(3)] == ["p0", "p1", "p2"]


def test_a_stream_that_has_ended_begins_again(world: World) -> None:
    world.write(line(0) + line(1).rstrip())
    world.end()
    data = world.data()
    assert [prompt(data, position) for position in range(5)] == ["p0", "p1", "p0", "p1", "p0"]


def test_a_stream_that_ends_without_a_row_is_an_error(world: World) -> None:
    world.write(b"\n")
    world.end()
    with pytest.raises(UserError, match="at least one row before the stream ended"):
        prompt(world.data(), 0)


def test_bad_lines_are_left_out_until_they_are_too_many(world: World) -> None:
    data = world.data()
    world.write(b"nonsense\n" + b"".join(line(number) for number in range(200)))
    assert prompt(data, 150) == "p150"
    world.write(b"nonsense\n" * 300 + line(200))
    with pytest.raises(UserError, match=r"`data.max_bad_share`=0.01 allows; line 1: expected a JSON object"):
        prompt(data, 200)


def test_whoever_writes_waits_for_those_who_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_AHEAD", 100)
    monkeypatch.setattr(streams, "_MARK_EVERY", 10)
    world.write(b"".join(line(number) for number in range(50)))
    world.write(line(50))
    data = world.data()
    with pytest.raises(RowNotYet):
        prompt(data, 50)
    world.spool.pump()
    assert prompt(data, 50) == "p50"


def test_a_growing_file_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_bytes(line(100))
    (tmp_path / "rows.jsonl").write_bytes(line(0))
    section = DataSection(source=f"stream:{tmp_path}/rows.jsonl", eval_source=str(tmp_path / "held.jsonl"))
    data = open_data(Config(name="t", data=section), run_dir=tmp_path)
    assert prompt(data, 0) == "p0"
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(line(1))
    assert prompt(data, 1) == "p1"


def test_a_stream_is_mixed_with_a_file(world: World) -> None:
    world.write(line(0) + line(1))
    held = world.config.data.eval_source
    sources = (MixedSource(num_eval=1), MixedSource(source=world.source, eval_source=held))
    config = Config(name="t", data=DataSection(sources=sources))
    data = open_data(config, run_dir=world.run_dir)
    assert [prompt(data, position) for position in (1, 3)] == ["p0", "p1"]
    assert data.num_positions == 2 * (8100 - 1)


def test_a_stream_needs_held_out_rows_of_its_own(world: World) -> None:
    with pytest.raises(
        DataError, match=r"`data.eval_source`: expected a source of held-out rows beside a stream"
    ):
        open_data(Config(name="t", data=DataSection(source=world.source)))


def test_standard_input_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_bytes(line(0) + line(1))
    before = os.dup(0)
    descriptor = os.open(tmp_path / "rows.jsonl", os.O_RDONLY)
    try:
        os.dup2(descriptor, 0)
        spool = Spool("stream:-", run_dir=tmp_path)
        spool.pump()
        spool.close()
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(descriptor)
    path = streams.spool_path(tmp_path, "stream:-")
    assert path.read_bytes() == line(0) + line(1)
    assert streams.end_of(path).exists()


def test_checking_a_configuration_takes_nothing_from_the_pipe(world: World) -> None:
    os.write(world.writer, line(0))
    with pytest.raises(RowNotYet):
        prompt(open_data(world.config), 0)
    world.spool.pump()
    assert prompt(world.data(), 0) == "p0"


def test_a_resumed_run_needs_no_pipe_that_has_ended(world: World) -> None:
    world.write(line(0))
    world.end()
    world.pipe.unlink()
    open_data(world.config, resumed=world.run_dir)
    with pytest.raises(DataError, match=r"`data.source`: expected a named pipe"):
        open_data(world.config)


def test_pipes_of_the_same_name_have_spools_of_their_own(tmp_path: Path) -> None:
    one, two = (streams.spool_path(tmp_path, f"stream:/{folder}/pipe") for folder in "ab")
    assert one != two


def test_nothing_is_put_beside_a_growing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MARK_EVERY", 1)
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(line(0) + line(1))
    section = DataSection(source=f"stream:{folder}/rows.jsonl", eval_source="arithmetic", num_eval=1)
    assert prompt(open_data(Config(name="t", data=section), run_dir=tmp_path), 1) == "p1"
    assert [path.name for path in folder.iterdir()] == ["rows.jsonl"]


def test_held_out_rows_are_no_stream(world: World) -> None:
    section = DataSection(eval_source=world.source, num_eval=1)
    with pytest.raises(DataError, match=r"`data.eval_source`: expected rows that are all there"):
        open_data(Config(name="t", data=section))


def test_a_stream_of_nothing_but_bad_lines_says_what_is_wrong_with_them(world: World) -> None:
    world.write(b"nonsense\n")
    world.end()
    with pytest.raises(UserError, match="found none; line 1: expected a JSON object"):
        prompt(world.data(), 0)
