"""Which rank holds which part of the state. Pure: master, simulator and ranks use it.

`actor.layout` cuts the state three ways: its layers into *stages* (pipeline), their matrices into *tensors* (tensor
parallel), and what is left of the flat state into *shards*. Each combination is a *box*; with one of each, every rank
holds the whole state. Rank i holds box i modulo their number. Tensors vary fastest, then stages, then shards:

    rank                           model-0  model-1  model-2  model-3  model-4  model-5  model-6  model-7
    Mesh(shards=2, stages=2)  box        0        1        2        3        0        1        2        3
                            stage        0        1        0        1        0        1        0        1
                            shard        0        0        1        1        0        0        1        1
                    data-parallel        0        0        1        1        2        2        3        3

Ranks with one data-parallel index compute the same samples together. Every box is held by `actor.layout.replicas`
ranks. A replacement finds the box that the lost rank left. Without stages and tensors a group is any set of ranks that
together hold every box, some of them perhaps more often than others; with them it is all ranks.

Where that is not possible, because ranks are lost and nothing can be started in their place, the ranks that live are
given seats of a smaller mesh (`fitting`), in which `Mesh.ranks` names them; those that are left over are idle.

The digest of the whole state is that of its boxes, in their order: "9f…" of one box, "9f….07…" of two shards,
"1x2x1:9f….07…" of two stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from kintsugi.config.schema import LayoutSection

_SEPARATOR = "."
_OTHER_BOX = "@"
"""Stands between a process and its box, in the name of snapshots of one that is not of the configured mesh."""
_MARK = ":"

STATE_FORMAT = 2
"""Number of the definition of a state's digest: that of the bytes in which a rank holds it. Digests in the journal of a
run that another definition began are not compared. 2: stretches of the layout are filled up."""


class Seat(msgspec.Struct, frozen=True):
    """Place of a rank: `Seat(shard=1, shards=4)` holds the second of four boxes."""

    shard: int = 0
    shards: int = 1
    stage: int = 0
    stages: int = 1
    tensor: int = 0
    tensors: int = 1

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.shards, self.stages, self.tensors)

    @property
    def number(self) -> int:
        """Number of the box, from 0."""
        return (self.shard * self.stages + self.stage) * self.tensors + self.tensor

    @property
    def boxes(self) -> int:
        return self.mesh.boxes

    @property
    def is_whole(self) -> bool:
        return self.boxes == 1

    @property
    def is_first(self) -> bool:
        """Whether its stage begins the model."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage ends the model: losses and the outputs of calls are computed here."""
        return self.stage == self.stages - 1

    @property
    def box(self) -> str:
        """Name under which the box is stored and asked for; empty for the whole state.

        >>> Seat(1, 4).box, Seat(1, 2, stage=0, stages=2).box
        ('1/4', '2/4 of 2x2x1')
        """
        if self.is_whole:
            return ""
        return f"{self.number}/{self.boxes}" + (f" of {self.mesh}" if self.mesh.model_ranks > 1 else "")

    @classmethod
    def of(cls, box: str) -> Seat:
        """The place with the box of this name.

        >>> Seat.of("1/4"), Seat.of("2/4 of 2x2x1"), Seat.of("")
        (Seat(shard=1, shards=4, stage=0, stages=1, tensor=0, tensors=1), \
Seat(shard=1, shards=2, stage=0, stages=2, tensor=0, tensors=1), \
Seat(shard=0, shards=1, stage=0, stages=1, tensor=0, tensors=1))
        """
        if not box:
            return WHOLE
        place, _, cut = box.partition(" of ")
        number, boxes = (int(each) for each in place.split("/"))
        if not cut:
            return Mesh(boxes).seat(number)
        shards, stages, tensors = (int(size) for size in cut.split("x"))
        return Mesh(shards, stages, tensors).seat(number)


WHOLE = Seat()


class Mesh(msgspec.Struct, frozen=True):
    """Parts along each axis: `Mesh(shards=4)`, `Mesh(stages=2, tensors=2)`."""

    shards: int = 1
    stages: int = 1
    tensors: int = 1
    ranks: tuple[str, ...] = ()
    """Ranks in the order of their seats, of a mesh that has taken the place of the configured one. Empty: the rank with
    number i has seat i."""

    def __str__(self) -> str:
        return f"{self.shards}x{self.stages}x{self.tensors}"

    @property
    def shape(self) -> Mesh:
        """The parts, without the ranks that hold them."""
        return Mesh(self.shards, self.stages, self.tensors)

    def number_of(self, process: str) -> int:
        """Number of a rank's seat.

        >>> Mesh(2).number_of("model-3"), Mesh(2, ranks=("model-0", "model-3")).number_of("model-3")
        (3, 1)
        """
        return self.ranks.index(process) if self.ranks else number_of(process)

    def seated(self, ranks: Sequence[str]) -> tuple[str, ...]:
        """Those of some ranks that have a seat, in the order of the seats; the others are idle."""
        return tuple(name for name in self.ranks if name in ranks) if self.ranks else tuple(ranks)

    @property
    def boxes(self) -> int:
        return self.shards * self.stages * self.tensors

    @property
    def model_ranks(self) -> int:
        """Ranks that compute the same samples together, each with a part of the model."""
        return self.stages * self.tensors

    def seat(self, number: int) -> Seat:
        """Place of a rank, by its number.

        >>> Mesh(shards=2, stages=2).seat(6)
        Seat(shard=1, shards=2, stage=0, stages=2, tensor=0, tensors=1)
        """
        rest, tensor = divmod(number % self.boxes, self.tensors)
        shard, stage = divmod(rest, self.stages)
        return Seat(shard, self.shards, stage, self.stages, tensor, self.tensors)

    def data_index(self, number: int) -> int:
        """Which of the data-parallel parts of a batch a rank computes."""
        return number // self.model_ranks

    def data_column(self, number: int, *, num_ranks: int) -> range:
        """Ranks with the same part of the model, by number: they add their gradients, in this order."""
        return range(number % self.model_ranks, num_ranks, self.model_ranks)

    def tensor_row(self, number: int) -> range:
        """Ranks with slices of the same layers, for the same samples."""
        first = number - number % self.tensors
        return range(first, first + self.tensors)

    def pipeline(self, number: int) -> range:
        """Ranks with the stages of one model, in their order, for the same samples."""
        first = number - number % self.model_ranks + number % self.tensors
        return range(first, first + self.model_ranks, self.tensors)


UNCUT = Mesh()


def mesh_of(layout: LayoutSection) -> Mesh:
    return Mesh(layout.shards, layout.stages, layout.tensors)


def number_of(process: str) -> int:
    """`number_of("model-3") == 3`."""
    return int(process.rpartition("-")[2])


def seat_of(process: str, mesh: Mesh) -> Seat:
    """`seat_of("model-3", Mesh(shards=2)) == Seat(shard=1, shards=2)`."""
    return WHOLE if mesh.boxes == 1 else mesh.seat(mesh.number_of(process))


def replica_of(process: str, mesh: Mesh) -> int:
    """Number of the ranks that hold the whole state together: `replica_of("model-3", Mesh(shards=2)) == 1`."""
    return mesh.number_of(process) // mesh.boxes


def speakers(ranks: Sequence[str], mesh: Mesh) -> frozenset[str]:
    """Ranks that answer calls with values of samples: those with the last stage.

    >>> sorted(speakers(["model-0", "model-1", "model-2", "model-3"], Mesh(stages=2)))
    ['model-1', 'model-3']
    """
    return frozenset(name for name in ranks if seat_of(name, mesh).is_last)


def without_holder(ranks: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """Boxes that none of these ranks holds.

    >>> without_holder(["model-0", "model-2"], Mesh(2)), without_holder(["model-0", "model-3"], Mesh(2))
    (('1/2',), ())
    """
    held = {seat_of(name, mesh).number for name in ranks}
    return tuple(mesh.seat(box).box for box in range(mesh.boxes) if box not in held)


def fitting(ranks: Sequence[str], mesh: Mesh, *, slices: int = 1) -> Mesh:
    """The largest mesh, no larger along any axis than the configured one, that these ranks can hold. `slices`: logical
    slices of a matrix, which the number of tensors divides.

    As long as there are enough of them each has the same layers and slices as before, and there are fewer shards; one
    that is left over is idle. Fewer than make up one model have fewer stages or tensors.

    >>> fitting(["model-0", "model-1", "model-3"], Mesh(4))
    Mesh(shards=3, stages=1, tensors=1, ranks=('model-0', 'model-1', 'model-3'))
    >>> fitting(["model-0", "model-2", "model-3"], Mesh(shards=2, stages=2)).ranks
    ('model-0', 'model-2')
    """
    assert ranks, "a mesh needs a rank"
    stages, tensors = mesh.stages, mesh.tensors
    if mesh.model_ranks > len(ranks):
        cuts = [
            (count, parts)
            for count in range(1, mesh.stages + 1)
            for parts in range(1, mesh.tensors + 1)
            if count * parts <= len(ranks) and slices % parts == 0
        ]
        stages, tensors = max(cuts, key=lambda cut: (cut[0] * cut[1], cut[0]))
    columns = len(ranks) // (stages * tensors)
    shards = min(mesh.shards, columns)
    return Mesh(shards, stages, tensors, tuple(ranks[: columns * stages * tensors]))


def snapshots_of(process: str, seat: Seat, mesh: Mesh) -> str:
    """Name under which a rank's snapshots of a box are kept; that of the process for its box of the configured mesh.

    >>> snapshots_of("model-3", Seat(3, 4), Mesh(4)), snapshots_of("model-3", Seat(2, 3), Mesh(4))
    ('model-3', 'model-3@2-of-3x1x1')
    """
    if seat == seat_of(process, mesh.shape):
        return process
    return f"{process}{_OTHER_BOX}{seat.number}-of-{seat.mesh}"


def holder_of(owner: str) -> str:
    """Process whose snapshots have this name.

    >>> holder_of("model-3"), holder_of("model-3@2-of-3x1x1")
    ('model-3', 'model-3')
    """
    return owner.partition(_OTHER_BOX)[0]


@lru_cache(maxsize=8)
def sources_of(ranks: tuple[str, ...], mesh: Mesh) -> list[list[int]]:
    """For each rank of a data column, the rank from which it takes each shard: itself, else one of its own replica,
    else one of those that hold the shard, in turn.

    >>> sources_of(("model-0", "model-2", "model-3"), Mesh(2))
    [[0, 2], [1, 2], [1, 2]]
    """
    replicas = [replica_of(name, mesh) for name in ranks]
    held: list[list[int]] = [[] for _ in range(mesh.shards)]
    near: dict[tuple[int, int], int] = {}
    for rank, name in enumerate(ranks):
        shard = seat_of(name, mesh).shard
        held[shard].append(rank)
        near[replicas[rank], shard] = rank
    return [
        [near.get((replica, shard), holders[rank % len(holders)]) for shard, holders in enumerate(held)]
        for rank, replica in enumerate(replicas)
    ]


def joined(digests: Mapping[str, str], mesh: Mesh) -> str:
    """Digest of the whole state from those of the ranks' boxes; of differing replicas the most frequent one counts.

    >>> joined({"model-0": "9f", "model-1": "07", "model-2": "9f", "model-3": "07"}, Mesh(shards=2))
    '9f.07'
    """
    held: list[Counter[str]] = [Counter() for _ in range(mesh.boxes)]
    for process, digest in digests.items():
        held[seat_of(process, mesh).number][digest] += 1
    parts = _SEPARATOR.join(counts.most_common(1)[0][0] if counts else "" for counts in held)
    return _mark(mesh) + parts


def digest_of_box(digest: str, seat: Seat) -> str:
    """Digest of one box within that of the whole state; empty if that is not known, or is of another layout.

    >>> digest_of_box("9f.07", Seat(1, 2)), digest_of_box("9f.07", WHOLE)
    ('07', '')
    """
    mark = _mark(seat.mesh)
    parts = digest.removeprefix(mark).split(_SEPARATOR)
    is_alike = digest.startswith(mark) and len(parts) == seat.boxes and _MARK not in parts[0]
    return parts[seat.number] if is_alike else ""


def _mark(mesh: Mesh) -> str:
    """Beginning of the digest of a state that is cut by more than shards, which their number would not tell."""
    return f"{mesh}{_MARK}" if mesh.model_ranks > 1 else ""
