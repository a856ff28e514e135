"""Pool of KV blocks (pages) with reference counts and a prefix cache.

A page is *free*, *used* (with one reference per request that reads it) or *cached*: without references, but in the
index and available to a later request with the same prefix until its memory is needed. The index maps a chained hash of
all tokens up to the end of a page to that page, so equal keys mean equal contents:

    tokens   5 6 7 8 | 9 3 2 1 | 4 4          page_size 4
    keys     H(0,5678) → k1, H(k1,9321) → k2, H(k2,44) → k3, of the last, partial page

A full page is shared. The partial last page of a prompt is copied, because each request writes its own tokens after the
prompt. The prompt's part of a page never changes, so it can be copied while its owner writes; a page without references
is taken over without a copy.

A key is *promised* as soon as a request has started to compute the page, so that requests that arrive together compute
a common prompt once. `fill` marks a page as computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_KEY_SIZE = 16
_ROOT = bytes(_KEY_SIZE)


def page_keys(tokens: NDArray[np.int32], *, page_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Hash keys of the pages that `tokens` fill, the last one possibly in part. `known` are the keys of the first
    pages.

    The hash is cryptographic: prompts are untrusted, and must not be constructed to match the pages of another prompt.
    """
    keys = list(known)
    last = keys[-1] if keys else _ROOT
    contents = np.ascontiguousarray(tokens[len(keys) * page_size :], dtype="<i4").tobytes()
    for start in range(0, len(contents), 4 * page_size):
        last = blake2b(last + contents[start : start + 4 * page_size], digest_size=_KEY_SIZE).digest()
        keys.append(last)
    return keys


def num_pages_of(num_tokens: int, *, page_size: int) -> int:
    return -(-num_tokens // page_size)


@dataclass(frozen=True)
class PrefixMatch:
    """Result of looking up a prefix in the index."""

    full: list[int]
    last: int | None
    """Page that begins with the tokens after the full pages, if they do not fill a page."""
    num_needed: int
    """Pages to take from the available ones, for this prefix and the rest."""


@dataclass(frozen=True)
class PlacedBlocks:
    """Pages of an admitted request."""

    pages: list[int]
    num_known: int
    """Number of leading tokens that other requests have computed, or will compute, in these pages."""
    copy: tuple[int, int] | None
    """Copy to make (source, target) once the source is filled. A reference to the source is held until then."""


class KvBlockPool:
    def __init__(self, num_pages: int, *, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.cache_serial = 0
        """Incremented by `forget_all`: pages computed under an older serial must not enter the index."""
        self._free = list(reversed(range(num_pages)))
        self._references = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._keys_of: dict[int, list[bytes]] = {}
        self._promised: set[int] = set()
        self._spoiled: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated, including cached ones."""
        return len(self._free) + len(self._cached)

    def filled(self) -> list[int]:
        """Used and cached pages."""
        free = set(self._free)
        return [page for page in range(self.num_pages) if page not in free]

    def allocate(self, count: int) -> list[int]:
        """Allocate pages with one reference each, evicting the least recently used cached pages."""
        assert 0 <= count <= self.num_available, f"{count} pages asked for, {self.num_available} available"
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            self._drop_keys(page)
            self._free.append(page)
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            assert self._references[page] == 0, f"page {page} was free and used at once"
            self._references[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are used or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference. Of pages that stay cached, the last ones are evicted first: a page of a prompt is useless
        without the pages before it."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} was given back twice"
            self._references[page] -= 1
            if self._references[page] > 0:
                continue
            if page in self._promised:
                self._promised.remove(page)
                self._drop_keys(page)
            self._spoiled.discard(page)
            if page in self._keys_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def num_references(self, page: int) -> int:
        return self._references[page]

    def look_up(self, keys: Sequence[bytes], *, num_tokens: int, num_ahead: int) -> PrefixMatch:
        """Find how much of a prefix of `num_tokens` is computed or promised, and how many pages to allocate for it and
        for `num_ahead` further tokens. `keys` are the keys of the prefix."""
        full: list[int] = []
        num_full = num_tokens // self.page_size
        for key in keys[:num_full]:
            page = self._page_of.get(key)
            if page is None:
                break
            full.append(page)
        last = None
        if len(full) == num_full and len(keys) > num_full:
            last = self._page_of.get(keys[num_full])
        num_pages = num_pages_of(num_tokens + num_ahead, page_size=self.page_size)
        # Holding a cached page takes it from the available ones; so does the last one, in place of a new one.
        num_cached = sum(1 for page in full if self._references[page] == 0)
        return PrefixMatch(full, last, num_pages - len(full) + num_cached)

    def place(
        self, found: PrefixMatch, *, keys: Sequence[bytes], num_tokens: int, num_ahead: int
    ) -> PlacedBlocks:
        """Assign pages for a prefix of `num_tokens` and `num_ahead` further tokens. Pages of the prefix that were not
        found are promised to the index: the caller computes them and reports this by `fill`."""
        num_pages = num_pages_of(num_tokens + num_ahead, page_size=self.page_size)
        num_begun = num_pages_of(num_tokens, page_size=self.page_size)
        self.hold(found.full)
        pages = list(found.full)
        copy = None
        if found.last is not None:
            if self._references[found.last] == 0:
                self._take_over(found.last, keys[-1])
                pages.append(found.last)
            else:
                self.hold([found.last])
                pages += self.allocate(1)
                copy = (found.last, pages[-1])
        num_known = num_tokens if len(pages) == num_begun else len(pages) * self.page_size
        num_placed = len(pages)
        pages += self.allocate(num_pages - num_placed)
        for index in range(num_placed, num_begun):
            if self.enter(pages[index], keys[index]):
                self._promised.add(pages[index])
        return PlacedBlocks(pages, num_known, copy)

    def _take_over(self, page: int, key: bytes) -> None:
        """Keep only the key of the page as the prompt's last page: the tokens after the prompt will be overwritten."""
        self.hold([page])
        for other in self._keys_of[page]:
            if other != key:
                del self._page_of[other]
        self._keys_of[page] = [key]

    def enter(self, page: int, key: bytes) -> bool:
        """Add a used page to the index; return False if another page with the same contents is in it."""
        assert self._references[page] > 0, f"page {page} is entered and has no references"
        if page in self._spoiled or key in self._page_of:
            return False
        self._page_of[key] = page
        self._keys_of.setdefault(page, []).append(key)
        return True

    def fill(self, pages: Iterable[int]) -> None:
        """Mark pages as computed."""
        self._promised.difference_update(pages)

    def are_filled(self, pages: Iterable[int]) -> bool:
        return self._promised.isdisjoint(pages)

    def spoil(self, pages: Iterable[int]) -> None:
        """Remove pages with non-finite values from the index."""
        for page in pages:
            self._drop_keys(page)
            self._spoiled.add(page)

    def forget_all(self) -> None:
        """Empty the index, because the weights have changed. Requests that already read a page keep it."""
        self.cache_serial += 1
        self._page_of.clear()
        self._keys_of.clear()
        self._promised.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _drop_keys(self, page: int) -> None:
        for key in self._keys_of.pop(page, ()):
            del self._page_of[key]

    def check(self) -> None:
        """Assert that every page is in exactly one state, and that index and reference counts agree."""
        used = [page for page, count in enumerate(self._references) if count > 0]
        places = [*self._free, *self._cached, *used]
        assert sorted(places) == list(range(self.num_pages)), "a page is lost or in two places"
        assert all(count >= 0 for count in self._references), "a page was given back too often"
        assert len(used) == self.num_used, f"{len(used)} pages are used, {self.num_used} are counted"
        listed = {key: page for page, keys in self._keys_of.items() for key in keys}
        assert listed == self._page_of, "the index and its inverse differ"
        assert self._cached.keys() <= self._keys_of.keys(), "a cached page cannot be found"
        assert self._keys_of.keys() <= {*used, *self._cached}, "a free page is in the index"
        assert self._promised <= {*used}, "no request computes a promised page"
