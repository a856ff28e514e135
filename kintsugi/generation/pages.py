"""The pages that hold keys and values: whose they are, and which beginnings of which prompts stand in them.

A page is *free*, *used* (by as many requests as it has references) or *cached*: nobody uses it, but it is in the index
and may serve a later request with the same beginning, until its room is needed. The index maps a chained hash of all
tokens up to a page's end to that page, so equal keys mean equal contents:

    tokens   5 6 7 8 | 9 3 2 1 | 4 4          page_size 4
    keys     H(0,5678) → k1, H(k1,9321) → k2, H(k2,44) → k3, of the last, partial page

A full page is shared as it is. The partial last page of a prompt is copied: whoever shares it writes behind the prompt.
What stands before that never changes, so it can be copied while its owner writes; and where nobody uses it any more,
the next one takes it without a copy.

Keys are *promised* as soon as somebody has begun to compute the page, so that requests that come together compute their
prompt once; `fill` says that a page has been computed.
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
    """A key for each page that `tokens` fill, the last one perhaps in part; `known` are those of the first pages.

    A cryptographic hash, because prompts come from strangers: nobody may build one that finds another's pages.
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
class Found:
    """What the index has of a beginning."""

    full: list[int]
    last: int | None
    """A page that begins with the tokens after the full ones, if they do not fill a page."""
    num_needed: int
    """Pages that it takes from those that are available, to have this and the rest."""


@dataclass(frozen=True)
class Placed:
    """The pages of a request that was admitted."""

    pages: list[int]
    num_known: int
    """So many of its first tokens are, or will be, in these pages without its doing."""
    copy: tuple[int, int] | None
    """(from, to), once the first is filled. A reference to it is held until then."""


class PagePool:
    def __init__(self, num_pages: int, *, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.generation = 0
        """Grows with every `forget_all`: what was computed in an older one must not enter the index."""
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
        """What can be allocated, cached pages included."""
        return len(self._free) + len(self._cached)

    def filled(self) -> list[int]:
        """Used and cached pages."""
        free = set(self._free)
        return [page for page in range(self.num_pages) if page not in free]

    def allocate(self, count: int) -> list[int]:
        """Pages with one reference; the cached ones that were used longest ago give way."""
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
        """One more reference to pages that are used or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less. Of pages that stay cached, the last ones are given up first: no page of a prompt is of
        use without those before it."""
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

    def look_up(self, keys: Sequence[bytes], *, num_tokens: int, num_ahead: int) -> Found:
        """How much of a beginning of `num_tokens`, whose pages have these keys, is there or promised; and what has to
        be allocated for it and for `num_ahead` tokens more."""
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
        # A cached page is taken from those available by being held; so is the last one, in place of a new one.
        num_cached = sum(1 for page in full if self._references[page] == 0)
        return Found(full, last, num_pages - len(full) + num_cached)

    def place(self, found: Found, *, keys: Sequence[bytes], num_tokens: int, num_ahead: int) -> Placed:
        """Pages for a beginning of `num_tokens` and for `num_ahead` more. Those of the beginning that were not found
        are promised to the index: the caller computes them and says so by `fill`."""
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
        return Placed(pages, num_known, copy)

    def _take_over(self, page: int, key: bytes) -> None:
        """What stood behind the prompt will be overwritten: the page keeps only its key as the prompt's last page."""
        self.hold([page])
        for other in self._keys_of[page]:
            if other != key:
                del self._page_of[other]
        self._keys_of[page] = [key]

    def enter(self, page: int, key: bytes) -> bool:
        """Make a used page known by its contents; False where another page with the same contents is known."""
        assert self._references[page] > 0, f"page {page} is entered and belongs to nobody"
        if page in self._spoiled or key in self._page_of:
            return False
        self._page_of[key] = page
        self._keys_of.setdefault(page, []).append(key)
        return True

    def fill(self, pages: Iterable[int]) -> None:
        """These have been computed."""
        self._promised.difference_update(pages)

    def are_filled(self, pages: Iterable[int]) -> bool:
        return self._promised.isdisjoint(pages)

    def spoil(self, pages: Iterable[int]) -> None:
        """These hold values that are not finite: nobody may find them."""
        for page in pages:
            self._drop_keys(page)
            self._spoiled.add(page)

    def forget_all(self) -> None:
        """The weights have changed: what the pages hold is of use only to those who already read them."""
        self.generation += 1
        self._page_of.clear()
        self._keys_of.clear()
        self._promised.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _drop_keys(self, page: int) -> None:
        for key in self._keys_of.pop(page, ()):
            del self._page_of[key]

    def check(self) -> None:
        """That every page is in exactly one place, and that index and references agree."""
        used = [page for page, count in enumerate(self._references) if count > 0]
        places = [*self._free, *self._cached, *used]
        assert sorted(places) == list(range(self.num_pages)), "a page is lost or in two places"
        assert all(count >= 0 for count in self._references), "a page was given back too often"
        assert len(used) == self.num_used, f"{len(used)} pages are used, {self.num_used} are counted"
        listed = {key: page for page, keys in self._keys_of.items() for key in keys}
        assert listed == self._page_of, "the index and its inverse differ"
        assert self._cached.keys() <= self._keys_of.keys(), "a cached page cannot be found"
        assert self._keys_of.keys() <= {*used, *self._cached}, "a free page is in the index"
        assert self._promised <= {*used}, "nobody computes a promised page"
