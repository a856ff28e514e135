"""Peer replication: when all ranks run on one host, the agent of another host keeps their latest state in memory.

The copy survives the loss of the ranks' host. The agent fetches it while training continues, straight from the snapshot
slot: neither side needs memory for a second copy. A background thread holds the slot meanwhile. When
the step after the next needs the slot, the copy is given up: peer replication never makes training wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kintsugi.bulk.exports import ViewExport
from kintsugi.bulk.server import BulkServer
from kintsugi.checkpoint.snapshot import SlotHeader
from kintsugi.dataplane.rate_limit import RateLimit
from kintsugi.model.arrays import Array, dtype_name
from kintsugi.model.tensor_file import PIECE_BYTES
from kintsugi.process.membership import ShuttingDown
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.recovery import KeepState
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.digests import piece_digest
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import OperationFailed
from kintsugi.training.snapshots import CopyCounters, SlotHold, state_fetched
from kintsugi.types import Peer, Piece, PieceKind, WeightManifest
from kintsugi.weights.manifest import layout, layout_size, manifest_of, tensor_bytes
from kintsugi.weights.publish import WHOLE_MODEL

KEEP_TIMEOUT_S = 120.0
"""Deadline of a copy."""
POLL_S = 0.005
OVERTAKEN_LIMIT = 3
"""Copies in a row that were given up for a later step, before this is reported."""

EXPORT = "peer-replica"
"""Name of the offer of the state that is being copied."""

Send = Callable[[str, KeepState], ReplyHandle]
"""Send a request to an agent without waiting for its answer; may be called by any thread."""


def describe_state(tensors: Mapping[str, Array], *, step: int) -> WeightManifest:
    """Describe a state in host memory, in the order of names. Large tensors are cut into pieces of some rows, so that
    neither a message nor the memory that it needs on either side is large."""
    pieces: list[Piece] = []
    for name, offset, size in layout(tensors):
        tensor = tensors[name]
        for start, stop in _rows(tuple(tensor.shape), size=size):
            rows = ((start, stop),) if tensor.shape else ()
            piece = Piece(
                name=name,
                dtype=dtype_name(tensor),
                shape=tuple(tensor.shape),
                slice=(*rows, *((0, extent) for extent in tensor.shape[1:])),
                mesh=dict(WHOLE_MODEL),
                kind=PieceKind.FULL,
                offset=offset,
                size=size if not tensor.shape else size // max(1, tensor.shape[0]) * (stop - start),
                digest="",
            )
            first, _ = piece_range(piece)
            digest = piece_digest(piece_bytes(tensor, piece))
            pieces.append(msgspec.structs.replace(piece, offset=offset + first, digest=digest))
    return manifest_of(pieces, version=step, step=step)


def piece_range(piece: Piece) -> tuple[int, int]:
    """[start, stop) of a piece of whole rows within the bytes of its tensor."""
    start, stop = piece.slice[0] if piece.slice else (0, 1)
    first = piece.size // max(1, stop - start) * start
    return first, first + piece.size


def piece_bytes(tensor: Array, piece: Piece) -> memoryview:
    """Bytes of a piece, as a view of its tensor, which is in host memory."""
    first, last = piece_range(piece)
    return tensor_bytes(tensor)[first:last]


def state_export(manifest: WeightManifest, tensors: Mapping[str, Array]) -> ViewExport:
    """Offer of a state in host memory, by the pieces of its manifest."""
    pieces = manifest.pieces
    sizes = {index: piece.size for index, piece in enumerate(pieces)}
    return ViewExport(sizes, lambda index: piece_bytes(tensors[pieces[index].name], pieces[index]))


def _rows(shape: tuple[int, ...], *, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the rows of each piece of a tensor."""
    if not shape or shape[0] == 0 or size <= PIECE_BYTES:
        yield 0, shape[0] if shape else 1
        return
    step = max(1, PIECE_BYTES // (size // shape[0]))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def choose_agent(*, is_first: bool, host: str, others: Sequence[Peer], agents: Sequence[Peer]) -> Peer | None:
    """Choose the agent to which a rank on `host` sends its state; None if no copy is needed or no agent qualifies.

    `others` are the other ranks with the same state, or box of it. No copy is needed while one of them runs on another
    host. Of the ranks of one host only the first one sends.

    >>> agent = Peer("agent-1", "0", "host-1", "", b"")
    >>> choose_agent(is_first=True, host="host-0", others=[], agents=[agent]).process
    'agent-1'
    """
    if not is_first or any(other.host != host for other in others):
        return None
    elsewhere = (agent for agent in agents if agent.host != host)
    return min(elsewhere, key=lambda agent: agent.process, default=None)


@dataclass(frozen=True)
class StateCopy:
    """A prepared or committed state in its snapshot slot."""

    counters: CopyCounters
    digest: str
    tensors: Mapping[str, Array]
    header: Callable[[], SlotHeader | None]
    """Wait until the slot is completely written, then return its header."""
    hold: SlotHold
    """Keeps the slot as it is until it is released, or taken away for a later step."""
    box: str = ""
    """Which part of the state it is; empty for all of it."""


class PeerReplica:
    """Sends states to an agent in the background, one at a time; after each, the latest state is next.

    A step is sent as soon as it is prepared, so that the copy has usually arrived when the master commits the step.
    The agent keeps the previous step as well. A copy counts as kept once the agent has confirmed it, and only for that
    incarnation of the agent: a restarted agent has lost its copies.

    A copy that fails is reported and counted, and the next `offer` tries again. So is a network that is so slow that
    copies are given up for later steps again and again.
    """

    def __init__(
        self,
        send: Send,
        server: BulkServer,
        *,
        process: str,
        bytes_per_s: float | None = None,
        emit: Callable[[OperationFailed], object] = lambda event: None,
    ) -> None:
        """`server` offers the state to the agent. `bytes_per_s`: a copy that would exceed this rate is not sent. `emit`
        receives the failure of a copy, in the background thread."""
        self._rate_limit = RateLimit(bytes_per_s)
        self._send = send
        self._server = server
        self._process = process
        self._emit = emit
        self._reported = ""
        self._num_overtaken = 0
        self._thread: threading.Thread | None = None
        self._kept: tuple[str, str, str] | None = None
        """Digest, agent and the agent's incarnation, once the agent has confirmed the copy."""

    def offer(self, take: Callable[[], StateCopy | None], *, digest: str, agent: Peer) -> bool:
        """Send the state with this digest, which `take` holds for this purpose, unless the agent has it or another copy
        is in progress; return whether it will be sent."""
        wanted = (digest, agent.process, agent.incarnation)
        if (self._thread is not None and self._thread.is_alive()) or wanted == self._kept:
            return False
        if not self._rate_limit.admits(time.monotonic()):
            return False
        copy = take()
        if copy is None:
            return False
        self._rate_limit.take(layout_size(copy.tensors), now=time.monotonic())
        self._thread = threading.Thread(
            target=self._run, args=(copy, wanted), name="peer-replica", daemon=True
        )
        self._thread.start()
        return True

    def _run(self, copy: StateCopy, wanted: tuple[str, str, str]) -> None:
        """Boundary of the background thread: a failure is counted, and reported unless it repeats the last one."""
        agent = wanted[1]
        try:
            if self._replicate(copy, agent):
                self._kept, self._reported, self._num_overtaken = wanted, "", 0
        except ShuttingDown:
            return
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: reported with its cause, then retried.
            if copy.hold.revoked:
                self._overtaken(copy, agent)
                return
            COUNTERS.add("buddy_copies_failed")
            self._report(
                f"the state could not be copied to {agent}: {type(error).__name__}: {error}", error=str(error)
            )
        finally:
            copy.hold.release()

    def _overtaken(self, copy: StateCopy, agent: str) -> None:
        COUNTERS.add("buddy_copies_overtaken")
        self._num_overtaken += 1
        if self._num_overtaken >= OVERTAKEN_LIMIT:
            self._report(
                f"{self._num_overtaken} copies of the state to {agent} in a row took longer than two steps",
                error=f"step {copy.counters.step} was given up for a later one",
            )

    def _report(self, message: str, *, error: str) -> None:
        if message != self._reported:
            self._reported = message
            self._emit(OperationFailed(message, operation="peer replication", error=error))

    def _replicate(self, copy: StateCopy, agent: str) -> bool:
        """Send the slot; False if it was given up for a later step."""
        header = copy.header()
        if header is None or header.digest != copy.digest:
            self._overtaken(copy, agent)
            return False
        manifest = describe_state(copy.tensors, step=copy.counters.step)
        offer = self._server.offer(EXPORT, state_export(manifest, copy.tensors))
        try:
            state = msgspec.structs.replace(state_fetched(manifest, copy.counters, box=copy.box), offer=offer)
            _await(self._send(agent, KeepState(self._process, state)), copy.hold, agent=agent)
        finally:
            self._server.withdraw(EXPORT)  # Nothing is sent from the slot any more when it is released.
        COUNTERS.add("buddy_bytes", sum(piece.size for piece in manifest.pieces))
        COUNTERS.add("buddy_copies")
        return True


def _await(pending: ReplyHandle, hold: SlotHold, *, agent: str) -> None:
    """Wait for the agent's confirmation; raises what the agent replied, or if the copy is given up."""
    idle = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        hold.check()
        if pending.done:
            return True
        idle.wait(min(POLL_S, remaining_s))
        return None

    wait(attempt, whom=agent, what=KeepState.__name__, timeout_s=KEEP_TIMEOUT_S)
    pending.result().expect(Ok)
