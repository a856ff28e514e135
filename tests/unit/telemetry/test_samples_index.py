"""The index of samples gives what a search of the whole file gives, and costs nothing but time where it is wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kintsugi.run_folder import reader
from kintsugi.telemetry.step_metrics import SampleRecord, SamplesWriter
from kintsugi.types import FinishReason, SampleMeta, SampleText


def meta(step: int, index: int, reward: float, *, scored: bool = True) -> SampleMeta:
    components = {"right": reward} if scored else {}
    ticket = f"g:0:{step}:0"
    return SampleMeta(
        f"{ticket}/{index}", ticket, 9, 3, reward, components, FinishReason.EOS, step, "rollout-0", "d"
    )


def write(writer: SamplesWriter, step: int, rewards: list[float], *, scored: bool = True) -> None:
    metas = [meta(step, index, reward, scored=scored) for index, reward in enumerate(rewards)]
    texts = {each.key: SampleText(f"prompt {step}", f"text {each.key}") for each in metas}
    writer.write(step, metas, texts=texts, advantages={})


def filled(folder: Path, *, steps: int = 30, size: int = 24) -> SamplesWriter:
    writer, source = SamplesWriter(folder), random.Random(7)
    for step in range(1, steps + 1):
        rewards = [float(source.randrange(4)) for _ in range(size)]
        write(writer, step, rewards, scored=step % 5 != 0)
    return writer


def searched(folder: Path, count: int) -> list[SampleRecord]:
    """The worst samples of the whole file."""
    scored = [record for record in reader.read_samples(folder) if record.reward_components]
    return sorted(scored, key=lambda record: (record.reward, -record.step))[:count]


@pytest.mark.parametrize("count", [1, 10, 11, 200, 10_000])
def test_the_worst_samples_by_the_index_are_those_of_a_search(tmp_path: Path, count: int) -> None:
    filled(tmp_path).close()
    assert reader.read_samples(tmp_path, worst=count) == searched(tmp_path, count)


@pytest.mark.parametrize("count", [3, 50])
@pytest.mark.parametrize(
    "damage", ["none", "lost", "of the end", "of the middle", "of another file", "zeros"]
)
def test_what_the_index_does_not_describe_is_searched(tmp_path: Path, damage: str, count: int) -> None:
    filled(tmp_path).close()
    index = tmp_path / "samples.index"
    lines = index.read_bytes().splitlines(keepends=True)
    match damage:
        case "lost":
            index.unlink()
        case "of the end":
            index.write_bytes(b"".join(lines[:20]))
        case "of the middle":
            index.write_bytes(b"".join(lines[:4] + lines[9:]))
        case "of another file":
            index.write_bytes(b"".join(lines) + b'{"step":31,"offset":900000000,"end":900000100}\n')
        case "zeros":
            index.write_bytes(b"".join(lines[:5]) + bytes(len(lines[5]) - 1) + b"\n" + b"".join(lines[6:]))
        case _:
            pass
    assert reader.read_samples(tmp_path, worst=count) == searched(tmp_path, count)
    for step in (1, 7, 30, 99):
        expected = [record for record in reader.read_samples(tmp_path) if record.step == step]
        assert reader.read_samples(tmp_path, step=step) == expected


def test_a_rollback_cuts_samples_and_index_in_place_and_both_go_on(tmp_path: Path) -> None:
    writer = filled(tmp_path)
    before = (tmp_path / "samples.jsonl").stat()
    writer.truncate_after(12)
    assert (tmp_path / "samples.jsonl").stat().st_ino == before.st_ino
    assert {record.step for record in reader.read_samples(tmp_path)} == set(range(1, 13))
    write(writer, 13, [-5.0, 1.0])
    writer.close()
    assert [record.step for record in reader.read_samples(tmp_path, worst=1)] == [13]
    assert reader.read_samples(tmp_path, worst=40) == searched(tmp_path, 40)


def test_nothing_is_written_when_nothing_is_to_be_cut(tmp_path: Path) -> None:
    filled(tmp_path).close()
    before = [(path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    writer = SamplesWriter(tmp_path)
    writer.truncate_after(30)
    writer.close()
    after = [(path.name, path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert after == before


@pytest.mark.parametrize("damage", [bytes(700), b"not json", b'{"step": "five"}', b"\xff\xfe"])
def test_a_line_that_can_not_be_decoded_costs_that_line(tmp_path: Path, damage: bytes) -> None:
    writer = filled(tmp_path, steps=4, size=3)
    path = tmp_path / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], damage + b"\n", *lines[5:]]))
    assert len(reader.read_samples(tmp_path)) == 11
    assert len(reader.read_samples(tmp_path, last=100)) == 11
    assert len(reader.read_samples(tmp_path, worst=100)) == 11
    writer.close()
    writer = SamplesWriter(tmp_path)
    writer.truncate_after(3)
    writer.truncate_after(1)
    writer.close()
    assert {record.step for record in reader.read_samples(tmp_path)} == {1}


@pytest.mark.parametrize("last", [1, 5, 1000])
def test_the_last_samples_are_read_from_the_end(tmp_path: Path, last: int) -> None:
    filled(tmp_path).close()
    everything = reader.read_samples(tmp_path)
    assert reader.read_samples(tmp_path, last=last) == everything[-last:]
    some = [record for record in everything if "/7" in record.completion]
    assert reader.read_samples(tmp_path, last=last, grep="/7") == some[-last:]
    of_step = [record for record in everything if record.step == 9]
    assert reader.read_samples(tmp_path, last=last, step=9) == of_step[-last:]
