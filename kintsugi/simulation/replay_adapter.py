"""A second framework under the same protocol, without torch, arrays or devices: for the simulator and tests.

It trains a vector of integers by a rule that depends on the step and on the exact samples in it; so two ranks agree in
their digests only if they trained the same samples in the same order. It is a real state machine: an update can be left
half-way, a step is prepared before it is committed, and a snapshot of each lies in a dictionary that survives the
process, as the memory of the agent does.

Its native flow is `restore` (as in MindSpore): clean only resets the snapshot state, and the device is reset while the
group is formed again, so that nothing in its memory counts afterwards, and every rank is repaired from its snapshot.
With `flow=Flow.ROLLBACK` the same machine keeps its memory and follows the flow of PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kintsugi.errors import IntegrityError, RefusedError, WorldError, no_source
from kintsugi.model.seats import UNCUT, Mesh, Seat, seat_of, snapshots_of
from kintsugi.protocol.recovery import BoxCopies, RankReady, RebuildGroup
from kintsugi.recovery.rank import SNAPSHOT_PREFIX, Flow

SHARED = 2
"""Numbers at the beginning of the vector that all ranks have in common, as they have the gathered weights."""
GRAINS = 12
"""Further numbers, which are cut over the boxes."""
_DIGESTS = 1 << 64
_MODULUS = (1 << 61) - 1
_FACTOR = 6364136223846793005 % _MODULUS

Vector = tuple[int, ...]


class ReplaySnapshot(NamedTuple):
    """State of one step outside of the process."""

    step: int
    stage: str
    vector: Vector
    digest: str
    committed: bool
    box: str = ""
    """Part of the state that it is; empty for all of it."""


Snapshots = dict[str, tuple[ReplaySnapshot, ...]]
"""Process (or `snapshots_of` it) → its committed step and, if there is one, the prepared next: the snapshots that the
agent of a host keeps."""

Fetch = Callable[[str, int], ReplaySnapshot]
"""(source, step) → committed state of a replica, a peer or a checkpoint; a WorldError if it has none."""


FetchBox = Callable[[str, int, str, str], ReplaySnapshot]
"""(source, step, owner, box) → box of a committed state at a rank or an agent; a WorldError if it has none."""


def _fetch_nothing(source: str, step: int, owner: str = "", box: str = "") -> ReplaySnapshot:
    raise RefusedError(f"{source} can not be reached")


def _ignore(request: RebuildGroup) -> None:
    pass


class ReplayAdapter:
    """One rank. `train` prepares a step, `commit` adopts it; the callbacks of recovery are those of `Adapter`."""

    def __init__(
        self,
        process: str,
        snapshots: Snapshots,
        *,
        flow: Flow = Flow.RESTORE,
        fetch: Fetch = _fetch_nothing,
        probe: Callable[[RebuildGroup], None] = _ignore,
        mesh: Mesh = UNCUT,
        fetch_box: FetchBox = _fetch_nothing,
    ) -> None:
        """`snapshots` survives the process. `probe` is the collective that tests a new group. `mesh`: the configured
        one, in which this rank has a seat."""
        self.process, self.mesh, self._configured = process, mesh, mesh
        self._snapshots = snapshots
        self._fetch_box = fetch_box
        self._flow = flow
        self._fetch = fetch
        self._probe = probe
        self._generation = 0
        self._heard_generation = 0
        self._device_is_set = True
        self._become_fresh()

    def _become_fresh(self) -> None:
        """Be a fresh rank in the seat that the mesh gives it."""
        self._stage = ""
        self._vector: Vector = (0,) * (SHARED + len(grains_of(self.box)))
        self._prepared: ReplaySnapshot | None = None
        self._half_updated = False
        self._between_calls = False
        self._committed = self._snapshot(0, "", committed=True)

    @property
    def seat(self) -> Seat:
        return seat_of(self.process, self.mesh)

    @property
    def box(self) -> str:
        return self.seat.box

    @property
    def owner(self) -> str:
        """Name under which the snapshots of the box are kept."""
        return snapshots_of(self.process, self.seat, self._configured)

    @property
    def flow(self) -> Flow:
        return self._flow

    @property
    def generation(self) -> int:
        """Generation of the group that calls may use; 0 while there is none."""
        return self._generation

    @property
    def is_between_calls(self) -> bool:
        """Whether it is half updated as expected: one training call of the step is done, and another one follows."""
        return self._half_updated and self._between_calls

    @property
    def committed(self) -> ReplaySnapshot:
        """State that a replica is given."""
        return self._committed

    def standing(self) -> RankReady:
        committed = self._committed
        return RankReady(
            committed.step,
            committed.digest,
            self._half_updated,
            -1 if self._prepared is None else self._prepared.step,
            self._heard_generation,
            self._stage,
        )

    # Training.

    def start_stage(self, stage: str) -> None:
        """Start a fresh optimizer on the committed state. Starting the current stage again does nothing."""
        if stage == self._stage:
            return
        if self._prepared is not None or self._half_updated:
            raise RefusedError(f"stage {stage!r} cannot start on top of a step that is not committed")
        self._stage = stage
        self._keep(self._snapshot(self._committed.step, stage, committed=True))

    def train(
        self, step: int, keys: Iterable[str], *, prepares: bool = True, interrupted: bool = False
    ) -> str:
        """Update from the samples of the whole batch; the last training call of a step `prepares` it and returns its
        digest. An `interrupted` update stops in the middle: the rank is half updated."""
        assert self._prepared is None and step == self._committed.step + 1
        assert not self._half_updated or self._between_calls
        assert self._device_is_set, "no step runs on a device that was reset"
        content = f"{step}|{self._stage}|{','.join(sorted(keys))}".encode()
        moved = [
            (number * _FACTOR + _hash(content + str(place).encode())) % _MODULUS
            for place, number in zip(places_of(self.box), self._vector, strict=True)
        ]
        if interrupted:
            self._vector = (*moved[:SHARED], *self._vector[SHARED:])
            self._half_updated, self._between_calls = True, False
            return ""
        self._vector = tuple(moved)
        self._half_updated = self._between_calls = not prepares
        if not prepares:
            return ""
        prepared = self._snapshot(step, self._stage, committed=False)
        self._prepared = prepared
        self._snapshots[self.owner] = (self._committed, prepared)
        return prepared.digest

    def commit(self, step: int) -> None:
        """Adopt the prepared step. Committing the committed step again does nothing."""
        if step == self._committed.step and self._prepared is None:
            return
        if self._prepared is None or self._half_updated or step != self._prepared.step:
            raise RefusedError(
                f"step {step} cannot be committed: this rank committed {self._committed.step} and prepared "
                f"{-1 if self._prepared is None else self._prepared.step}"
            )
        self._keep(self._prepared)

    # Recovery.

    def stop(self, generation: int) -> None:
        self._heard_generation = max(self._heard_generation, generation)
        if self._generation <= generation:
            self._generation = 0

    def clean(self) -> None:
        """Do nothing: only memory can be left over here, and a dictionary never holds half a snapshot."""

    def rebuild(self, request: RebuildGroup) -> None:
        if request.generation == self._generation:
            return
        if request.generation <= self._heard_generation:
            raise RefusedError(
                f"generation {request.generation} is over: this rank has heard of {self._heard_generation}"
            )
        if self.process not in request.ranks:
            raise RefusedError(f"{self.process} is not among the ranks {', '.join(request.ranks)}")
        self._generation, self._heard_generation = 0, request.generation
        self._take_seat(request)
        if self._flow is Flow.RESTORE and self._stage:
            self._reset_device()
        self._probe(request)
        self._generation = request.generation
        self._device_is_set = True

    def mesh_of(self, request: RebuildGroup) -> Mesh:
        """Mesh whose seats the ranks of a request take."""
        shape = request.mesh
        if shape is None:
            return self._configured
        return Mesh(shape.shards, shape.stages, shape.tensors, request.ranks)

    def _take_seat(self, request: RebuildGroup) -> None:
        """Be a fresh rank if the request gives it another box; the snapshots of the one before stay for the others."""
        mesh, box = self.mesh_of(request), self.box
        if seat_of(self.process, mesh).box != box:
            if self._prepared is not None and self._prepared.step == request.step:
                self._keep(self._prepared)
            self.mesh = mesh
            self._become_fresh()
        self.mesh = mesh

    def assemble(self, step: int, *, boxes: Sequence[BoxCopies], digest: str, begun: str) -> None:
        """Load the grains of the own box from those of the others."""
        try:
            self._assemble(step, boxes=boxes, digest=digest)
        except WorldError:
            if not begun:
                raise
            self._assemble(step, boxes=boxes, digest=digest, begun=begun)

    def _assemble(self, step: int, *, boxes: Sequence[BoxCopies], digest: str, begun: str = "") -> None:
        mine, grains = grains_of(self.box), dict[int, int]()
        found: list[ReplaySnapshot] = []
        for copies in boxes:
            theirs = grains_of(copies.box)
            if max(theirs.start, mine.start) < min(theirs.stop, mine.stop):
                held = self._load(step, copies, begun=begun)
                found.append(held)
                grains |= dict(zip(theirs, held.vector[SHARED:], strict=True))
        if len({held.stage for held in found}) != 1:
            raise IntegrityError(f"the boxes of step {step} are of several stages")
        vector = (*found[0].vector[:SHARED], *(grains[grain] for grain in mine))
        actual = digest_of(step, found[0].stage, vector, box=self.box)
        if digest not in ("", actual):
            raise IntegrityError(f"expected digest {digest} of the assembled step {step}, got {actual}")
        self._stage, self._vector, self._half_updated = found[0].stage, vector, False
        self._keep(self._snapshot(step, self._stage, committed=True))

    def _load(self, step: int, copies: BoxCopies, *, begun: str) -> ReplaySnapshot:
        failures: list[tuple[str, WorldError]] = []
        for copy in copies.copies:
            try:
                if copy.source.startswith(SNAPSHOT_PREFIX):
                    held = self._held(step, copy.owner, digest="" if begun else copies.digest)
                else:
                    held = self._fetch_box(copy.source, step, copy.owner, copies.box)
                actual = digest_of(held.step, held.stage, held.vector, box=held.box)
                is_right = begun == held.stage if begun else copies.digest in ("", actual)
                if (held.step, held.box) != (step, copies.box) or not is_right:
                    raise IntegrityError(f"expected box {copies.box!r} of step {step}, got {held}")
            except WorldError as error:
                failures.append((copy.source, error))
            else:
                return held
        tried = "; ".join(f"{source}: {error}" for source, error in failures)
        raise no_source(
            f"box {copies.box!r} of step {step} is nowhere: {tried}", [error for _, error in failures]
        )

    def repair(self, step: int, *, source: str, digest: str) -> None:
        found = self._find(step, source=source, digest=digest)
        if found.box != self.box:
            raise IntegrityError(f"expected box {self.box!r} of the state from {source}, got {found.box!r}")
        actual = digest_of(found.step, found.stage, found.vector, box=found.box)
        if found.step != step or actual != (digest or found.digest):
            raise IntegrityError(
                f"expected step {step} with digest {digest or found.digest} from {source}, "
                f"got step {found.step} with {actual}"
            )
        self._stage, self._vector, self._half_updated = found.stage, found.vector, False
        self._keep(found)

    def rollback(self, step: int) -> None:
        if self._prepared is not None and step == self._prepared.step:
            self._keep(self._prepared)
            return
        if step != self._committed.step:
            raise RefusedError(f"this rank can return to step {self._committed.step} only, not to {step}")
        self._stage, self._vector, self._half_updated = self._committed.stage, self._committed.vector, False
        self._keep(self._committed)

    def _find(self, step: int, *, source: str, digest: str) -> ReplaySnapshot:
        """Return the snapshot of a step. A prepared one counts as well: the master only requests committed steps."""
        if not source.startswith(SNAPSHOT_PREFIX):
            return self._fetch(source, step)
        return self._held(step, source.removeprefix(SNAPSHOT_PREFIX), digest=digest)

    def _held(self, step: int, owner: str, *, digest: str) -> ReplaySnapshot:
        held = self._snapshots.get(owner, ())
        for snapshot in reversed(held):
            if snapshot.step == step and digest in ("", snapshot.digest):
                return snapshot
        steps = ", ".join(str(snapshot.step) for snapshot in held) or "none"
        raise RefusedError(f"{SNAPSHOT_PREFIX}{owner} has no snapshot of step {step}; there are: {steps}")

    def _snapshot(self, step: int, stage: str, *, committed: bool) -> ReplaySnapshot:
        digest = digest_of(step, stage, self._vector, box=self.box)
        return ReplaySnapshot(step, stage, self._vector, digest, committed, self.box)

    def _keep(self, snapshot: ReplaySnapshot) -> None:
        """Make this the committed state; later states are dropped, or a repair could use them by mistake."""
        self._committed = snapshot._replace(committed=True)
        self._prepared = None
        self._snapshots[self.owner] = (self._committed,)

    def _reset_device(self) -> None:
        """Lose the device memory: only a repair makes this rank usable again. A rank that has begun no stage has
        nothing there yet."""
        self._device_is_set = False
        self._vector = (0,) * len(self._vector)
        self._half_updated, self._between_calls = True, False


def grains_of(box: str) -> range:
    """Grains of a box: `grains_of("1/4") == range(3, 6)`."""
    seat = Seat.of(box)
    return range(seat.number * GRAINS // seat.boxes, (seat.number + 1) * GRAINS // seat.boxes)


def places_of(box: str) -> list[int]:
    """Places of a box's numbers in the vector of the whole state."""
    return [*range(SHARED), *(SHARED + grain for grain in grains_of(box))]


def digest_of(step: int, stage: str, vector: Vector, *, box: str = "") -> str:
    """Return the digest of a box: the sum of those of its grains, so that the sum over all boxes is that of the whole
    state, however it is cut (`digest_of_whole`)."""
    shared, own = vector[:SHARED], vector[SHARED:]
    total = sum(
        _hash(repr((step, stage, shared, grain)).encode()) for grain in zip(grains_of(box), own, strict=True)
    )
    return f"{total % _DIGESTS:016x}"


def digest_of_whole(joined: str) -> str:
    """Digest of the whole state from those of its boxes: "9f….07…", "1x2x1:9f….07…"."""
    joined = joined.rpartition(":")[2]
    return f"{sum(int(part, 16) for part in joined.split('.') if part) % _DIGESTS:016x}"


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
