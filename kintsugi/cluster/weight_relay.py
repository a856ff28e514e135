"""The weight relay of an agent: ranks upload the pieces of a version, servers of other hosts fetch them.

A request for pieces that are not uploaded yet is answered when the first of them arrives, so downloads begin before the
uploads end. Pieces are passed on without a copy; the receiver verifies them against the manifest. The latest two
versions are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kintsugi.errors import IntegrityError, KintsugiError, RefusedError
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.weights import FetchWeights, UploadWeights, WeightsFetched
from kintsugi.transport import Delivery, Endpoint
from kintsugi.types import Role, role_of

VERSIONS_HELD = 2
MAX_WAITING = 1024
"""Maximum of queued requests for pieces that are not uploaded yet; a further one is refused."""

Frames = Sequence[memoryview]


class WeightRelay:
    """Answers requests without blocking: immediately, or when a requested piece arrives."""

    def __init__(self, endpoint: Endpoint, *, capacity: int) -> None:
        """`capacity` is the maximum size of all versions together, in bytes."""
        self._endpoint = endpoint
        self._capacity = capacity
        self._versions: dict[int, dict[int, tuple[str, str, Frames]]] = {}
        """Version → index of the piece → (rank that uploaded it, digest of that rank's part, bytes)."""
        self._queued: list[Delivery] = []

    @property
    def size(self) -> int:
        """Bytes held."""
        held = (frames for pieces in self._versions.values() for _, _, frames in pieces.values())
        return sum(frame.nbytes for frames in held for frame in frames)

    def handle(self, delivery: Delivery) -> None:
        """Store an upload, or answer a fetch."""
        body = delivery.body
        try:
            if isinstance(body, UploadWeights):
                self._hold(delivery.envelope.sender, body, delivery.blobs)
                self._endpoint.reply(delivery, Ok())
                self._answer_queued()
            else:
                assert isinstance(body, FetchWeights)
                if not self._answer(delivery, body):
                    self._queue(delivery)
        except KintsugiError as error:
            self._endpoint.fail(delivery, error)

    def _hold(self, owner: str, upload: UploadWeights, blobs: Frames) -> None:
        if role_of(owner) is not Role.MODEL:
            raise RefusedError(f"expected weights of a rank, got version {upload.version} from {owner}")
        pieces = _cut(upload.pieces, blobs, what=f"version {upload.version} from {owner}")
        self._forget_around(upload.version, owner=owner)
        held = self._versions.setdefault(upload.version, {})
        for index, (other, digest, _) in list(held.items()):
            if index in pieces or (other == owner and digest != upload.digest):
                del held[index]
        size = sum(upload.pieces.values())
        if self.size + size > self._capacity:
            raise RefusedError(
                f"{size} bytes of version {upload.version} do not fit: {self.size} of {self._capacity} are used"
            )
        held |= {index: (owner, upload.digest, frames) for index, frames in pieces.items()}

    def _forget_around(self, version: int, *, owner: str) -> None:
        """Drop versions older than the latest two, and versions that a rollback has undone: those later than one that
        the same rank uploads again. A rank without a later version is only late, and nothing is dropped."""
        later = [held for held in self._versions if held > version]
        if any(owner == other for held in later for other, _, _ in self._versions[held].values()):
            for undone in later:
                del self._versions[undone]
        newest = max(self._versions, default=version)
        if version <= newest - VERSIONS_HELD:
            raise RefusedError(f"version {version} comes too late: version {newest} is here")
        for old in [held for held in self._versions if held <= version - VERSIONS_HELD]:
            del self._versions[old]

    def _answer(self, delivery: Delivery, request: FetchWeights) -> bool:
        """Send those of the requested pieces that are available; False if none is."""
        newest = max(self._versions, default=-1)
        if request.version <= newest - VERSIONS_HELD or not request.pieces:
            raise RefusedError(
                f"version {request.version} is not here; there are {sorted(self._versions) or 'none'}"
            )
        held = self._versions.get(request.version, {})
        available = tuple(index for index in request.pieces if index in held)
        if not available:
            return False
        frames = [frame for index in available for frame in held[index][2]]
        self._endpoint.reply(delivery, WeightsFetched(request.version, available), blobs=frames)
        return True

    def _queue(self, delivery: Delivery) -> None:
        if len(self._queued) >= MAX_WAITING:
            raise RefusedError(f"{MAX_WAITING} requests wait for pieces already")
        self._queued.append(delivery)

    def _answer_queued(self) -> None:
        waiting, self._queued = self._queued, []
        for delivery in waiting:
            self.handle(delivery)


def _cut(sizes: Mapping[int, int], blobs: Frames, *, what: str) -> dict[int, Frames]:
    """Assign the frames to their pieces; no frame contains parts of two pieces."""
    pieces: dict[int, Frames] = {}
    frames = list(blobs)
    for index, size in sizes.items():
        own: list[memoryview] = []
        while sum(frame.nbytes for frame in own) < size and frames:
            own.append(frames.pop(0))
        if size < 0 or sum(frame.nbytes for frame in own) != size:
            raise IntegrityError(f"{what}: piece {index} did not come as {size} bytes")
        pieces[index] = own
    if frames:
        raise IntegrityError(f"{what}: {len(frames)} frames more than its pieces")
    return pieces
