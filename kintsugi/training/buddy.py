"""The buddy copy: when all ranks live on one host, another host's agent keeps their latest state in its memory."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from kintsugi.checkpoint.snapshot import Header
from kintsugi.dataplane.pacing import Pace
from kintsugi.errors import KintsugiError
from kintsugi.messages import Ok
from kintsugi.operations import KeepState
from kintsugi.runtime import COUNTERS
from kintsugi.training.copies import Counters, state_fetched
from kintsugi.transport import Blob, chunks
from kintsugi.types import Peer
from kintsugi.weights.manifest import build_manifest, layout_size
from kintsugi.weights.publish import WHOLE_MODEL
from kintsugi.weights.stream import Answer
from kintsugi.worker import ShuttingDown

KEEP_TIMEOUT_S = 120.0

Send = Callable[[str, KeepState, Sequence[Blob]], Answer]
"""Asks a process to keep a state, without waiting; from any thread."""


def buddy_of(*, rank: int, host: str, others: Sequence[Peer], agents: Sequence[Peer]) -> Peer | None:
    """The agent that a rank on `host` has to send its state to; None where there is no need, or nobody.

    Another rank on another host is a better copy than any; of the ranks of one host the first speaks for all.

    >>> buddy_of(rank=0, host="host-0", others=[], agents=[Peer("agent-1", "0", "host-1", "", b"")]).process
    'agent-1'
    """
    if rank != 0 or any(other.host != host for other in others):
        return None
    elsewhere = (agent for agent in agents if agent.host != host)
    return min(elsewhere, key=lambda agent: agent.process, default=None)


@dataclass(frozen=True)
class StateCopy:
    """A prepared or committed state as it lies in its snapshot slot."""

    counters: Counters
    digest: str
    tensors: Mapping[str, Tensor]
    header: Callable[[], Header | None]
    """Waits until the slot is whole and says what it holds; read slowly, it may be overtaken by a later step."""


class BuddyCopy:
    """Sends states off the critical path: one at a time, and the latest when the last has arrived.

    A step is sent as soon as it is prepared, not when it is committed: it should be there when the master writes it
    down. The agent keeps the step before it as well. It counts as kept once that agent has said so, and no longer than
    that agent lives: its successor has nothing.
    """

    def __init__(self, send: Send, *, process: str, bytes_per_s: float | None = None) -> None:
        """`bytes_per_s`: a copy that would exceed it is not sent."""
        self._pace = Pace(bytes_per_s)
        self._send = send
        self._process = process
        self._thread: threading.Thread | None = None
        self._answer: Answer | None = None
        self._sent: tuple[str, str, str] | None = None
        """Digest, agent and the agent's incarnation."""

    def offer(self, copy: StateCopy, *, buddy: Peer) -> bool:
        """Send this state unless it is kept, or another is still on its way; says whether it will."""
        is_reading = self._thread is not None and self._thread.is_alive()
        is_travelling = self._answer is not None and not self._answer.done
        wanted = (copy.digest, buddy.process, buddy.incarnation)
        if is_reading or is_travelling or (wanted == self._sent and self._is_kept()):
            return False
        if not self._pace.admits(time.monotonic()):
            return False
        self._pace.take(layout_size(copy.tensors), now=time.monotonic())
        self._sent, self._answer = wanted, None
        self._thread = threading.Thread(
            target=self._run, args=(copy, buddy.process), name="buddy", daemon=True
        )
        self._thread.start()
        return True

    def _is_kept(self) -> bool:
        """Whether what was sent last has arrived; a copy that was overtaken was never sent."""
        pending = self._answer
        if pending is None:
            return False
        try:
            pending.result().expect(Ok)
        except KintsugiError:
            return False
        return True

    def _run(self, copy: StateCopy, buddy: str) -> None:
        before = copy.header()
        step = copy.counters.step
        buffer = memoryview(mmap.mmap(-1, layout_size(copy.tensors)))
        manifest = build_manifest(copy.tensors, version=step, step=step, mesh=WHOLE_MODEL, into=buffer)
        if before is None or before.digest != copy.digest or copy.header() != before:
            COUNTERS.add("buddy_copies_overtaken")
            return
        state = state_fetched(manifest, copy.counters)
        pieces = [buffer[piece.offset : piece.offset + piece.size] for piece in manifest.pieces]
        frames = [frame for piece in pieces for frame in chunks(piece)]
        with suppress(ShuttingDown):
            self._answer = self._send(buddy, KeepState(self._process, state), frames)
            COUNTERS.add("buddy_copies")
