"""Copies of a large state between an accelerator and host memory, through a few small pinned buffers.

    accelerator ──► buffer of a lane, pinned ──► snapshot, not pinned        and the other way around

A lane has a thread, a stream and a buffer, and takes one piece after the other. One thread copies about 10 GB/s within
host memory and clears 2 GB/s of new pages, so several lanes are needed to use what the link to the device offers.

The snapshots themselves are not pinned. That would save the copy within host memory, but the driver serves no other
call of the process while it pins: a rank with two snapshots of 21 GB could not compute for seconds at its start, and
again when it replaces another one. Pinned memory also takes longer to be freed when its process is killed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kintsugi.runtime.waits import join

PIECE_BYTES = 16 << 20
"""Size of one transfer. Small transfers of other threads can run between two of these."""
MOST_LANES = 8
COPY_TIMEOUT_S = 600.0


class Lane(Protocol):
    """Way between device and host for one piece after the other, in one thread at a time."""

    def begin(self, after: Any) -> None:
        """Order the following copies after an event of the device."""
        ...

    def carry(self, source: Tensor, *, into: Tensor) -> None:
        """Copy a piece; return when it has arrived."""
        ...


class DeviceLane:
    """A stream of the device and a pinned buffer; if the host has no memory to pin, copies are only slower."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        try:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def begin(self, after: Any) -> None:
        self._stream.wait_event(after)

    def carry(self, source: Tensor, *, into: Tensor) -> None:
        buffer = self._buffer[: source.nbytes].view(source.dtype)
        with torch.cuda.stream(self._stream), torch.no_grad():
            if source.is_cuda:
                buffer.copy_(source, non_blocking=True)
                self._stream.synchronize()
                into.copy_(buffer)
            else:
                buffer.copy_(source)
                into.copy_(buffer, non_blocking=True)
                self._stream.synchronize()


class StagedCopies:
    """Copies whole tensors, one call at a time; its lanes are opened by the first call that needs them, and kept."""

    def __init__(self, open_lane: Callable[[], Lane], *, most_lanes: int = 0) -> None:
        """`most_lanes`: by default half of the processors, at most `MOST_LANES`."""
        self._open_lane = open_lane
        self._most_lanes = most_lanes or max(1, min(MOST_LANES, (os.cpu_count() or 1) // 2))
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()

    def copy(self, source: Tensor, /, *, into: Tensor, after: Any) -> None:
        """Copy a contiguous tensor into another one of its type; return when all of it has arrived. `after` is an event
        on the device, with which the source is complete and the target free."""
        numel = PIECE_BYTES // source.element_size()
        pieces = deque(zip(source.view(-1).split(numel), into.view(-1).split(numel), strict=True))
        with self._lock:
            count = min(self._most_lanes, len(pieces))
            while len(self._lanes) < count:
                self._lanes.append(self._open_lane())
            lanes = self._lanes[:count]
            errors: list[Exception] = []
            threads = [
                threading.Thread(
                    target=_run, args=(lane, pieces, after, errors), name="state-copy", daemon=True
                )
                for lane in lanes[1:]
            ]
            for thread in threads:
                thread.start()
            _run(lanes[0], pieces, after, errors)
            for thread in threads:
                join(thread, whom="this process", what="a copy of its state", timeout_s=COPY_TIMEOUT_S)
            if errors:
                raise errors[0]


def _run(lane: Lane, pieces: deque[tuple[Tensor, Tensor]], after: Any, errors: list[Exception]) -> None:
    """Copy pieces until none is left, or another lane has failed."""
    try:
        lane.begin(after)
        while not errors:
            try:
                source, into = pieces.popleft()
            except IndexError:
                return
            lane.carry(source, into=into)
    except Exception as error:  # noqa: BLE001 - the boundary of a thread: `copy` raises it.
        errors.append(error)
