"""Loading new weights into a server: fetched, verified and staged in a background thread while decoding continues.

The main thread requests a version and swaps it in between two steps; only the swap pauses decoding. One version is
staged at a time. Another request for that version joins it; a later order replaces one that has not started.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kintsugi.errors import RefusedError
from kintsugi.protocol.weights import LoadWeights
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.spans import SPANS
from kintsugi.transport import Delivery
from kintsugi.types import WeightManifest, WeightSource
from kintsugi.weights.fetch import Fetched

if TYPE_CHECKING:
    from torch import Tensor

Fetch = Callable[[WeightManifest, Sequence[WeightSource]], Fetched]
"""Fetches the tensors of a manifest, verified against its digests."""
Stage = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]
"""Brings tensors to where a swap takes only a moment."""
Background = Callable[[Callable[[], None]], None]
"""Runs a function in the background."""


@dataclass(slots=True)
class WeightLoad:
    """One version and all requests for it."""

    order: LoadWeights
    deliveries: list[Delivery] = field(default_factory=list)
    fetched: Fetched | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    fetch_s: float = 0.0
    error: Exception | None = None

    def is_of(self, manifest: WeightManifest) -> bool:
        own = self.order.manifest
        return (own.version, own.digest) == (manifest.version, manifest.digest)

    def check(self) -> None:
        """Raise IntegrityError if the fetched weights have been overwritten by a later version since they were
        verified."""
        if self.fetched is not None:
            self.fetched.check()

    def swapped(self, pause_ms: float) -> None:
        """Record the swap and its pause."""
        since = SYSTEM_CLOCK.monotonic() - pause_ms / 1e3
        SPANS.add("weights_swap", {"version": self.order.manifest.version}, since=since)
        self.release()

    def release(self) -> None:
        """Free the tensors: the weights are loaded, or not wanted."""
        self.tensors = {}
        if self.fetched is not None:
            self.fetched.release()
            self.fetched = None


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="staging", daemon=True).start()


class WeightLoader:
    """Belongs to the main thread, except for the work that runs in the background."""

    def __init__(
        self, fetch: Fetch, stage: Stage, *, wake: Callable[[], None], background: Background, clock: Clock
    ) -> None:
        """`wake` is called from the background thread when a load is ready."""
        self._fetch = fetch
        self._stage = stage
        self._wake = wake
        self._background = background
        self._clock = clock
        self._current: WeightLoad | None = None
        self._next: WeightLoad | None = None
        self._ready: deque[WeightLoad] = deque()

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    @property
    def is_ready(self) -> bool:
        """Whether a version is ready to be swapped in, or has failed."""
        return bool(self._ready)

    def request(self, delivery: Delivery, order: LoadWeights) -> list[Delivery]:
        """Start a load, or join the current one; return the requests that it supersedes."""
        manifest = order.manifest
        superseded_deliveries: list[Delivery] = []
        if self._next is not None and not self._next.is_of(manifest):
            superseded_deliveries, self._next = self._next.deliveries, None
        if self._current is not None and self._current.is_of(manifest):
            self._current.deliveries.append(delivery)
        elif self._next is not None:
            self._next.deliveries.append(delivery)
        else:
            self._next = WeightLoad(order, [delivery])
            self._begin_next()
        return superseded_deliveries

    def take(self) -> WeightLoad | None:
        """Next load that is ready to be swapped in, or has failed; the caller releases it."""
        if not self._ready:
            return None
        load = self._ready.popleft()
        self._current = None
        self._begin_next()
        return load

    def _begin_next(self) -> None:
        if self._current is None and self._next is not None:
            load, self._current, self._next = self._next, self._next, None
            self._background(lambda: self._prepare(load))

    def _prepare(self, load: WeightLoad) -> None:
        """Fetch and stage; runs in the background thread."""
        since = self._clock.monotonic()
        try:
            load.fetched = self._fetch(load.order.manifest, load.order.sources)
            load.tensors = self._stage(load.fetched.tensors())
        except Exception as error:  # noqa: BLE001 - the thread's outermost boundary: the main thread answers with it.
            load.error = error
        load.fetch_s = self._clock.monotonic() - since
        failed = None if load.error is None else type(load.error).__name__
        about = {"version": load.order.manifest.version, "error": failed}
        SPANS.add("weights_fetch", about, since=since)
        self._ready.append(load)
        self._wake()


def superseded(version: int) -> RefusedError:
    return RefusedError(f"version {version} was ordered before this one was begun")
