"""Pulls that can not begin, or are given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kintsugi.bulk import pull as pull_module
from kintsugi.bulk.channel import STALL_S
from kintsugi.bulk.exports import SLICE_BYTES, FileExport
from kintsugi.bulk.pull import Pull, Share
from kintsugi.errors import RefusedError
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.telemetry.events import AlertEvent, NoteEvent
from kintsugi.types import Piece, PieceKind
from tests.unit.bulk.peers import Processes, processes

SIZE = 4 * SLICE_BYTES
PIECE = Piece("weight", "uint8", (SIZE,), ((0, SIZE),), {}, PieceKind.FULL, 0, SIZE, "digest")


@pytest.fixture
def both() -> Iterator[Processes]:
    with processes() as made:
        for process in ("model-0", "agent-0", "server-0"):
            made.add(process)
        yield made


def offered(made: Processes, process: str) -> BulkOffer:
    """Offer a piece that never arrives."""
    export = FileExport({0: (0, SIZE)}, memoryview(bytearray(SIZE)))
    return made.endpoints[process].server.offer("weights", export)


def test_a_pull_that_is_given_up_ends_its_requests_and_accuses_no_source(both: Processes) -> None:
    offers = {process: offered(both, process) for process in ("agent-0", "model-0")}
    events: list[AlertEvent | NoteEvent] = []
    is_waiting = threading.Event()

    def check() -> None:
        if any(each.export for each in both.endpoints["agent-0"].server._connections.copy()):
            is_waiting.set()
            raise RefusedError("version 3 is not wanted any more")

    pull = Pull(
        {0: PIECE},
        [Share("model-0", ("agent-0", "model-0"), (0,))],
        into=lambda index: memoryview(bytearray(SIZE)),
        locate=lambda process: offers[process],
        client=both.endpoints["server-0"].client,
        what="version 3",
        emit=events.append,
        check=check,
    )
    with pytest.raises(RefusedError, match="not wanted any more"):
        pull.run()
    assert is_waiting.is_set() and events == []
    assert not [thread for thread in threading.enumerate() if thread.name == "bulk-fetch"]


def test_a_pull_is_ended_that_fails_before_its_connection_stands(both: Processes) -> None:
    offer = offered(both, "model-0")
    is_over, asked = threading.Event(), threading.Event()

    def locate(process: str) -> BulkOffer:
        asked.set()
        assert is_over.wait(10)
        return offer

    def check() -> None:
        if asked.is_set():
            raise RefusedError("version 3 is not wanted any more")

    pull = Pull(
        {0: PIECE},
        [Share("model-0", ("model-0",), (0,))],
        into=lambda index: memoryview(bytearray(SIZE)),
        locate=locate,
        client=both.endpoints["server-0"].client,
        what="version 3",
        check=check,
    )
    fail = pull._fail

    def failed(error: BaseException) -> None:
        fail(error)
        is_over.set()

    pull._fail = failed  # type: ignore[method-assign]
    since = time.monotonic()
    with pytest.raises(RefusedError, match="not wanted any more"):
        pull.run()
    assert time.monotonic() - since < STALL_S / 2


def test_a_pull_without_a_free_thread_fails_and_ends_those_that_were_started(
    both: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = offered(both, "model-0")
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "bulk-fetch" and started:
            raise RuntimeError("can't start new thread")
        if thread.name == "bulk-fetch":
            started.append(thread)
        start(thread)

    monkeypatch.setattr(pull_module, "num_connections", lambda: 2)
    monkeypatch.setattr(pull_module, "REQUEST_BYTES", SLICE_BYTES)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    pull = Pull(
        {0: PIECE},
        [Share("model-0", ("model-0",), (0,))],
        into=lambda index: memoryview(bytearray(SIZE)),
        locate=lambda process: offer,
        client=both.endpoints["server-0"].client,
        what="version 3",
    )
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pull.run()
    assert len(started) == 1 and not started[0].is_alive()
