"""Difference of a piece to the same piece of an earlier version: the elements that changed, with their places.

    piece ──► chunks of 1 MiB ──► count │ places: one byte each │ values
                                  ALL   │ the chunk as it is, where that is not longer

A place is the distance from the element before, 1 to 256; an element that did not change fills a longer gap. Training
in bfloat16 changes few elements per step, spread over all pieces: one of a hundred takes about 1.6 % of the bytes.
The piece that results has to have the digest of the version, like a piece that is fetched whole.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from kintsugi.errors import IntegrityError
from kintsugi.runtime.digests import PIECE_SLICE_BYTES, piece_digest_of, slice_digests

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger[Any]]

CHUNK_BYTES = 4 * PIECE_SLICE_BYTES
SAMPLED = 1 << 16
"""Elements of a piece by which it is judged before it is compared."""
_MAX_GAP = 256
_COUNT = struct.Struct("<I")
_ALL = 0xFFFFFFFF


def changed_share(new: memoryview, base: memoryview, *, item_bytes: int) -> float:
    """Estimate the share of elements that changed, from some at equal distances.

    >>> changed_share(memoryview(bytes([1, 2, 3, 4])), memoryview(bytes([1, 2, 3, 5])), item_bytes=1)
    0.25
    """
    first, second = _elements(new, item_bytes), _elements(base, item_bytes)
    step = max(1, len(first) // SAMPLED)
    return float((first[::step] != second[::step]).mean()) if len(first) else 0.0


def encode(new: memoryview, base: memoryview, *, item_bytes: int) -> bytes:
    """The difference that leads from `base` to `new`, which are of the same size.

    >>> list(encode(memoryview(bytes(300)), memoryview(bytes([*bytes(299), 7])), item_bytes=1))
    [2, 0, 0, 0, 255, 43, 0, 0]
    """
    assert new.nbytes == base.nbytes, f"{new.nbytes} bytes against {base.nbytes}"
    parts: list[bytes] = []
    for start in range(0, new.nbytes, CHUNK_BYTES):
        chunk = new[start : start + CHUNK_BYTES]
        gaps, values = _changes(
            _elements(chunk, item_bytes), _elements(base[start:][: len(chunk)], item_bytes)
        )
        if len(gaps) + values.nbytes < len(chunk):
            parts += [_COUNT.pack(len(gaps)), gaps.tobytes(), values.tobytes()]
        else:
            parts += [_COUNT.pack(_ALL), bytes(chunk)]
    return b"".join(parts)


def apply(
    difference: memoryview, base: memoryview, target: memoryview, *, item_bytes: int, origin: str
) -> str:
    """Fill the target and return its digest; IntegrityError if this is no difference to a piece of its size."""
    digests: list[int] = []
    place = 0
    for start in range(0, target.nbytes, CHUNK_BYTES):
        chunk = target[start : start + CHUNK_BYTES]
        place = _apply_chunk(
            difference, place, base[start : start + len(chunk)], chunk, item_bytes=item_bytes, origin=origin
        )
        digests += slice_digests(chunk, slice_bytes=PIECE_SLICE_BYTES)
    _check(place == difference.nbytes, origin)
    return piece_digest_of(digests)


def _apply_chunk(
    difference: memoryview, place: int, base: memoryview, chunk: memoryview, *, item_bytes: int, origin: str
) -> int:
    """Return where the next chunk begins in the difference."""
    import numpy as np

    _check(place + _COUNT.size <= difference.nbytes, origin)
    (count,) = _COUNT.unpack_from(difference, place)
    place += _COUNT.size
    if count == _ALL:
        _check(place + len(chunk) <= difference.nbytes, origin)
        chunk[:] = difference[place : place + len(chunk)]
        return place + len(chunk)
    elements = _elements(chunk, item_bytes)
    end = place + count * (1 + item_bytes)
    _check(count <= len(elements) and end <= difference.nbytes, origin)
    elements[...] = _elements(base, item_bytes)
    if count:
        gaps = np.frombuffer(difference, np.uint8, count, place).astype(np.int64)
        places = np.cumsum(gaps + 1) - 1
        _check(int(places[-1]) < len(elements), origin)
        elements[places] = np.frombuffer(difference, elements.dtype, count, place + count)
    return end


def _changes(new: Elements, base: Elements) -> tuple[NDArray[np.uint8], Elements]:
    """Distances less one, and the values at these places."""
    import numpy as np

    changed = np.flatnonzero(new != base)
    gaps = np.diff(changed, prepend=-1)
    fillers = (gaps - 1) // _MAX_GAP
    if fillers.any():
        last = np.cumsum(fillers + 1) - 1
        filled = np.full(int(last[-1]) + 1, _MAX_GAP, gaps.dtype)
        filled[last] = gaps - fillers * _MAX_GAP
        gaps, changed = filled, np.cumsum(filled) - 1
    return (gaps - 1).astype(np.uint8), new[changed]


def _elements(content: memoryview, item_bytes: int) -> Elements:
    import numpy as np

    return np.frombuffer(content, f"<u{item_bytes}")


def _check(is_right: bool, origin: str) -> None:
    if not is_right:
        raise IntegrityError(
            f"expected a difference to a piece of the weights from {origin}, got other bytes"
        )
