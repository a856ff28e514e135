"""Telemetry of other hosts arrives once and in order, whatever happens to files, disks and messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.cluster import file_mirror
from kintsugi.cluster.file_mirror import FileReader, FileWriter
from kintsugi.errors import RefusedError
from kintsugi.protocol.hosts import MirrorFiles
from kintsugi.telemetry.jsonl_log import LineFile
from kintsugi.types import Peer

SUPERVISOR = Peer("supervisor-1", "1", "host-1", "", b"")


class Mirror:
    """A host, the run folder, and what carries messages between them."""

    def __init__(self, folder: Path) -> None:
        self.there, self.here = folder / "there", folder / "here"
        for name in ("events", "logs"):
            (self.there / name).mkdir(parents=True)
        self.reader, self.writer = FileReader(self.there), FileWriter(self.here)

    def message(self) -> MirrorFiles:
        parts = self.reader.next_parts()
        sizes = {name: len(part) for name, part in parts.items()}
        return MirrorFiles(sizes, b"".join(parts.values()), self.reader.number)

    def carry(self) -> None:
        """Carry one message, and its answer."""
        self.writer.append(self.message(), sender=SUPERVISOR)
        self.reader.taken()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    made = Mirror(tmp_path)
    yield made
    made.reader.close()
    made.writer.close()


def test_whole_lines_of_a_host_are_appended_once_and_in_order(mirror: Mirror) -> None:
    file = mirror.there / "events" / "model-0.jsonl"
    file.write_bytes(b'{"a": 1}\n{"b"')
    mirror.carry()
    with file.open("ab") as more:
        more.write(b": 2}\n")
    mirror.message()  # It does not arrive.
    mirror.carry()
    mirror.carry()
    assert (mirror.here / "events" / "model-0.jsonl").read_bytes() == b'{"a": 1}\n{"b": 2}\n'


def test_a_message_that_is_sent_again_is_taken_once(mirror: Mirror) -> None:
    log = mirror.there / "logs" / "model-0.log"
    log.write_bytes(b"slow\n")
    for _ in range(2):  # Its answer was lost.
        mirror.writer.append(mirror.message(), sender=SUPERVISOR)
    mirror.reader.taken()
    with log.open("ab") as more:
        more.write(b"slow\n")
    mirror.carry()
    assert (mirror.here / "logs" / "model-0.log").read_bytes() == b"slow\n" * 2


def test_a_supervisor_that_was_started_again_numbers_its_messages_anew(mirror: Mirror) -> None:
    for incarnation in ("1", "2"):
        sender = Peer("supervisor-1", incarnation, "host-1", "", b"")
        mirror.writer.append(MirrorFiles({"logs/agent-1.log": 2}, b"x\n", 1), sender=sender)
    assert (mirror.here / "logs" / "agent-1.log").read_bytes() == b"x\nx\n"


def test_a_disk_that_is_full_in_the_middle_of_a_message_doubles_no_line(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model-0", "model-1"):
        (mirror.there / "events" / f"{name}.jsonl").write_bytes(b'{"a": 1}\n')
    append, is_full = LineFile.append, [True]

    def append_or_fail(file: LineFile, lines: bytes) -> None:
        if is_full and "model-1" in str(file._path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(file, lines)

    monkeypatch.setattr(LineFile, "append", append_or_fail)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            mirror.carry()
    is_full.clear()
    with (mirror.there / "events" / "model-0.jsonl").open("ab") as more:
        more.write(b'{"b": 2}\n')
    mirror.carry()
    mirror.carry()
    assert (mirror.here / "events" / "model-0.jsonl").read_bytes() == b'{"a": 1}\n{"b": 2}\n'
    assert (mirror.here / "events" / "model-1.jsonl").read_bytes() == b'{"a": 1}\n'


def test_a_file_that_is_put_aside_loses_no_line(mirror: Mirror) -> None:
    written = [b'{"number": %d}\n' % number for number in range(40)]
    file = LineFile(mirror.there / "events" / "model-0.jsonl", largest_size=300, reserved_size=0)
    for number, line in enumerate(written):
        file.append(line)
        if number % 7 == 0:
            mirror.carry()
    mirror.carry()
    file.close()
    assert (mirror.there / "events" / "model-0.1.jsonl").exists()
    assert (mirror.here / "events" / "model-0.jsonl").read_bytes() == b"".join(written)


def test_a_line_that_is_longer_than_a_message_does_not_hold_up_those_behind_it(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_mirror, "MOST_BYTES", 1000)
    (mirror.there / "events" / "model-0.jsonl").write_bytes(b'"%s"\n{"a": 1}\n' % (b"x" * 5000))
    for _ in range(3):
        mirror.carry()
    assert (mirror.here / "events" / "model-0.jsonl").read_bytes().endswith(b'{"a": 1}\n')


def test_a_log_that_was_emptied_is_read_from_its_start(mirror: Mirror) -> None:
    log = mirror.there / "logs" / "model-0.log"
    for content in (b"a long first part\n", b"after\n"):
        log.write_bytes(content)
        mirror.carry()
    assert (mirror.here / "logs" / "model-0.log").read_bytes() == b"a long first part\nafter\n"


def test_hosts_that_decide_differently_how_to_compute_are_named(mirror: Mirror) -> None:
    (mirror.there / "steps").write_bytes(b"compiled")
    mirror.here.mkdir()
    mirror.carry()
    assert (mirror.here / "steps").read_bytes() == b"compiled" and not mirror.writer.conflict
    assert mirror.message().sizes == {}
    for number, content, said in ((2, b"compiled", ""), (3, b"eager", "got 'eager'")):
        mirror.writer.append(MirrorFiles({"steps": len(content)}, content, number), sender=SUPERVISOR)
        assert said in mirror.writer.conflict and bool(said) == bool(mirror.writer.conflict)


@pytest.mark.parametrize(
    "name", ["config.yaml", "events/../../x.jsonl", "checkpoints/step-1/a.log", "logs/a.log\n"]
)
def test_only_files_of_telemetry_are_written(name: str, mirror: Mirror) -> None:
    with pytest.raises(RefusedError):
        mirror.writer.append(MirrorFiles({name: 1}, b"x", 1), sender=SUPERVISOR)
