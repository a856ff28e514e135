"""How trajectories get to the ranks that train them: the way that the master chose, and what it took.

`messages.py` lists the messages with all others. `dataplane/` decides; `training/samples.py` carries it out.
"""

from __future__ import annotations

import msgspec

from kintsugi.types import ShardItem

BATCH_BYTES = 4 << 20
"""Of one request for samples, where nothing is known about the link."""


class _Body(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class Routes(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's way to its samples. Empty: it asks every holder itself.

    `Routes(via={"rollout-0": "model-2"})`: what rollout-0 holds is fetched by model-2, a rank of the same host, and
    read from the host's memory. model-2 finds it in `relay`.
    """

    via: dict[str, str] = {}
    """Holder → the rank that asks it for all ranks of this host."""
    relay: tuple[ShardItem, ...] = ()
    """What this rank fetches for its neighbours, beside its own."""
    batch_bytes: int = BATCH_BYTES
    """About so much is asked for at once: small samples share a request, large transfers are cut."""
    limits: dict[str, float] = {}
    """Holder → bytes per second at most: this rank's share in what its host may take from other hosts."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """What one rank got from one process in a step, and how long that took, counted from the first request."""

    source: str
    requests: int
    size: int
    """Bytes."""
    first_s: float
    """Until the first answer had been verified."""
    seconds: float
    """Until the last one had."""
    repeated: int = 0
    """Samples that were asked for again because their bytes were wrong."""


class FetchRelayed(_Body, frozen=True):
    """A rank asks the one that fetches for its host where these samples lie; answered once they do."""

    step: int
    generation: int
    keys: tuple[str, ...]


class Relayed(_Body, frozen=True):
    """The encoded trajectories lie in this segment of the host."""

    segment: str
    places: dict[str, tuple[int, int]]
    """Sample key → offset and size."""
