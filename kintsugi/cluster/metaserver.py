"""The weight meta-server of an agent: ranks upload a version's pieces to it, servers of other hosts fetch them from it.

Who asks for pieces that are not there yet is answered when any of them comes, so downloads begin before the uploads
end. What was uploaded is passed on as it came, without a copy; who fetches verifies it against the manifest. The latest
two versions are held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kintsugi.errors import IntegrityError, KintsugiError, RefusedError
from kintsugi.messages import FetchWeights, Ok, UploadWeights, WeightsFetched
from kintsugi.transport import Delivery, Endpoint
from kintsugi.types import Role, role_of

VERSIONS_HELD = 2
MAX_WAITING = 1024
"""Requests for pieces that are not there; a further one is refused."""

Frames = Sequence[memoryview]


class MetaServer:
    """Never blocks: answers at once, or when a piece comes."""

    def __init__(self, endpoint: Endpoint, *, capacity: int) -> None:
        """`capacity` is the most bytes of all versions together."""
        self._endpoint = endpoint
        self._capacity = capacity
        self._versions: dict[int, dict[int, tuple[str, str, Frames]]] = {}
        """Version → index → (who uploaded it, digest of what that rank publishes, the bytes)."""
        self._waiting: list[Delivery] = []

    @property
    def size(self) -> int:
        """Bytes held."""
        held = (frames for pieces in self._versions.values() for _, _, frames in pieces.values())
        return sum(frame.nbytes for frames in held for frame in frames)

    def handle(self, delivery: Delivery) -> None:
        """Take an upload, or answer who fetches."""
        body = delivery.body
        try:
            if isinstance(body, UploadWeights):
                self._hold(delivery.envelope.sender, body, delivery.blobs)
                self._endpoint.reply(delivery, Ok())
                self._answer_waiting()
            else:
                assert isinstance(body, FetchWeights)
                if not self._answer(delivery, body):
                    self._let_wait(delivery)
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
        """What is older than the last two, and what a run that went back has undone: it did where a rank that had
        uploaded a later version begins this one. One that has not is only late, and the others' stays."""
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
        """Give what there is of what was asked for; False if there is nothing yet."""
        newest = max(self._versions, default=-1)
        if request.version <= newest - VERSIONS_HELD or not request.pieces:
            raise RefusedError(
                f"version {request.version} is not here; there are {sorted(self._versions) or 'none'}"
            )
        held = self._versions.get(request.version, {})
        there = tuple(index for index in request.pieces if index in held)
        if not there:
            return False
        frames = [frame for index in there for frame in held[index][2]]
        self._endpoint.reply(delivery, WeightsFetched(request.version, there), blobs=frames)
        return True

    def _let_wait(self, delivery: Delivery) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise RefusedError(f"{MAX_WAITING} requests wait for pieces already")
        self._waiting.append(delivery)

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for delivery in waiting:
            self.handle(delivery)


def _cut(sizes: Mapping[int, int], blobs: Frames, *, what: str) -> dict[int, Frames]:
    """Each piece's own frames; they were cut piece by piece."""
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
