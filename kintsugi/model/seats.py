"""Which rank holds which part of the state. Pure: master, simulator and ranks use it.

With `actor.layout.shards` = 1 every rank holds the whole state. Otherwise the state is cut into that many *boxes*, and
rank i holds box i modulo their number: `model-0` … `model-3` hold the boxes 0, 1, 0, 1 of two, so that every box is
held by `actor.layout.replicas` ranks. A process keeps its box for the whole run: a replacement finds the box that the
lost rank left. A group is any set of ranks that together hold every box, some of them perhaps more often than others.

The digest of the whole state is that of its boxes, in their order: "9f…" of one box, "9f….07…" of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

_SEPARATOR = "."


class Seat(msgspec.Struct, frozen=True):
    """Place of a rank: `Seat(shard=1, shards=4)` holds the second of four boxes."""

    shard: int = 0
    shards: int = 1

    @property
    def is_whole(self) -> bool:
        return self.shards == 1

    @property
    def box(self) -> str:
        """Name under which the box is stored and asked for; empty for the whole state."""
        return "" if self.shards == 1 else f"{self.shard}/{self.shards}"


WHOLE = Seat()


def seat_of(process: str, *, shards: int) -> Seat:
    """`seat_of("model-3", shards=2) == Seat(shard=1, shards=2)`."""
    return WHOLE if shards == 1 else Seat(int(process.rpartition("-")[2]) % shards, shards)


def replica_of(process: str, *, shards: int) -> int:
    """Number of the group of ranks that hold the whole state together: `replica_of("model-3", shards=2) == 1`."""
    return int(process.rpartition("-")[2]) // shards


def without_holder(ranks: Sequence[str], *, shards: int) -> tuple[str, ...]:
    """Boxes that none of these ranks holds.

    >>> without_holder(["model-0", "model-2"], shards=2), without_holder(["model-0", "model-3"], shards=2)
    (('1/2',), ())
    """
    held = {seat_of(name, shards=shards).shard for name in ranks}
    return tuple(Seat(shard, shards).box for shard in range(shards) if shard not in held)


def sources_of(ranks: Sequence[str], *, shards: int) -> list[list[int]]:
    """For each rank of a group, the rank from which it takes each box: itself, else one of its own replica, else one of
    those that hold the box, in turn.

    >>> sources_of(["model-0", "model-2", "model-3"], shards=2)
    [[0, 2], [1, 2], [1, 2]]
    """
    boxes = [seat_of(name, shards=shards).shard for name in ranks]
    replicas = [replica_of(name, shards=shards) for name in ranks]

    def source(rank: int, shard: int) -> int:
        holders = [other for other, box in enumerate(boxes) if box == shard]
        near = [other for other in holders if replicas[other] == replicas[rank]]
        return rank if rank in holders else next(iter(near), holders[rank % len(holders)])

    return [[source(rank, shard) for shard in range(shards)] for rank in range(len(ranks))]


def joined(digests: Mapping[str, str], *, shards: int) -> str:
    """Digest of the whole state from those of the ranks' boxes; of differing replicas the most frequent one counts.

    >>> joined({"model-0": "9f", "model-1": "07", "model-2": "9f", "model-3": "07"}, shards=2)
    '9f.07'
    """
    held: list[Counter[str]] = [Counter() for _ in range(shards)]
    for process, digest in digests.items():
        held[seat_of(process, shards=shards).shard][digest] += 1
    return _SEPARATOR.join(counts.most_common(1)[0][0] if counts else "" for counts in held)


def digest_of_box(digest: str, seat: Seat) -> str:
    """Digest of one box within that of the whole state; empty if that is not known, or is of another number of boxes.

    >>> digest_of_box("9f.07", Seat(1, 2)), digest_of_box("9f.07", WHOLE)
    ('07', '')
    """
    parts = digest.split(_SEPARATOR)
    return parts[seat.shard] if len(parts) == seat.shards else ""
