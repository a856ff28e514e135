"""New weights on their way into a server: fetched, verified and brought near in a thread beside the decoding.

The main thread asks, and swaps what is ready between two of its steps; only that pauses it. One version is staged at a
time. Who asks for the one that is under way joins it; a later order takes the place of one that waits for its turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kintsugi.errors import RefusedError
from kintsugi.messages import LoadWeights
from kintsugi.runtime import SPANS, SYSTEM_CLOCK, Clock
from kintsugi.transport import Delivery
from kintsugi.types import WeightManifest, WeightSource
from kintsugi.weights.fetch import Fetched

if TYPE_CHECKING:
    from torch import Tensor

Fetch = Callable[[WeightManifest, Sequence[WeightSource]], Fetched]
"""Gets the tensors of a manifest, verified against its digests."""
Stage = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]
"""Brings them to where a swap takes a moment."""
Beside = Callable[[Callable[[], None]], None]
"""Carries something out beside the caller."""


@dataclass(slots=True)
class Load:
    """One version, for all who asked for it."""

    order: LoadWeights
    deliveries: list[Delivery] = field(default_factory=list)
    fetched: Fetched | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    fetch_s: float = 0.0
    error: Exception | None = None

    def is_of(self, manifest: WeightManifest) -> bool:
        own = self.order.manifest
        return (own.version, own.digest) == (manifest.version, manifest.digest)

    def swapped(self, pause_ms: float) -> None:
        """The weights are in place, for which decoding stood still so long."""
        since = SYSTEM_CLOCK.monotonic() - pause_ms / 1e3
        SPANS.add("weights_swap", {"version": self.order.manifest.version}, since=since)
        self.release()

    def release(self) -> None:
        """The weights are in place, or not wanted."""
        self.tensors = {}
        if self.fetched is not None:
            self.fetched.release()
            self.fetched = None


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="staging", daemon=True).start()


class Stager:
    """Belongs to the main thread, but for what it carries out beside."""

    def __init__(
        self, fetch: Fetch, stage: Stage, *, wake: Callable[[], None], beside: Beside, clock: Clock
    ) -> None:
        """`wake` is called from the other thread when something is ready."""
        self._fetch, self._stage = fetch, stage
        self._wake, self._beside, self._clock = wake, beside, clock
        self._under_way: Load | None = None
        self._next: Load | None = None
        self._ready: deque[Load] = deque()

    @property
    def is_busy(self) -> bool:
        return self._under_way is not None

    @property
    def is_ready(self) -> bool:
        """Whether there is something to swap in, or to say that it failed."""
        return bool(self._ready)

    def ask(self, delivery: Delivery, order: LoadWeights) -> list[Delivery]:
        """Begin, or join what is under way; gives those whose version nobody wants any more."""
        manifest = order.manifest
        passed_over: list[Delivery] = []
        if self._next is not None and not self._next.is_of(manifest):
            passed_over, self._next = self._next.deliveries, None
        if self._under_way is not None and self._under_way.is_of(manifest):
            self._under_way.deliveries.append(delivery)
        elif self._next is not None:
            self._next.deliveries.append(delivery)
        else:
            self._next = Load(order, [delivery])
            self._begin_next()
        return passed_over

    def take(self) -> Load | None:
        """The next one that is ready to be swapped in, or has failed; the caller releases it."""
        if not self._ready:
            return None
        load = self._ready.popleft()
        self._under_way = None
        self._begin_next()
        return load

    def _begin_next(self) -> None:
        if self._under_way is None and self._next is not None:
            load, self._under_way, self._next = self._next, self._next, None
            self._beside(lambda: self._prepare(load))

    def _prepare(self, load: Load) -> None:
        """In the other thread."""
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
