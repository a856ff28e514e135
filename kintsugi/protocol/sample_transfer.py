"""Transfer of trajectories to the ranks that train on them: the routes that the master chose, and what they took.

`dataplane/` plans the routes; `training/sample_fetch.py` fetches.
"""

from __future__ import annotations

import msgspec

from kintsugi.protocol.body import MessageBody
from kintsugi.types import ShardItem

BATCH_BYTES = 4 << 20
"""Size of one request for samples where nothing is known about the link."""


class Routes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Routes of one rank to its samples. Empty: it fetches from every holder directly.

    `Routes(via={"rollout-0": "model-2"})`: samples of rollout-0 are fetched by model-2, a rank of the same host, and
    read from the host's shared memory. The `relay` of model-2 lists them.
    """

    via: dict[str, str] = {}
    """Holder → the rank that fetches from it for all ranks of this host."""
    relay: tuple[ShardItem, ...] = ()
    """Samples that this rank fetches for other ranks of its host, in addition to its own."""
    batch_bytes: int = BATCH_BYTES
    """Approximate size of one request: small samples share one, large transfers are split."""
    limits: dict[str, float] = {}
    """Holder → maximum bytes per second: this rank's share of its host's inbound bandwidth."""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that one rank fetched from one process in a step, with durations counted from the first request."""

    source: str
    requests: int
    size: int
    """Bytes."""
    first_s: float
    """Until the first reply was verified."""
    seconds: float
    """Until the last reply was verified."""
    repeated: int = 0
    """Samples that were requested again because their bytes were wrong."""


class FetchRelayed(MessageBody, frozen=True):
    """Request where the relaying rank of this host has put these samples; answered once they are in shared memory."""

    step: int
    generation: int
    keys: tuple[str, ...]


class Relayed(MessageBody, frozen=True):
    """Location of the encoded trajectories: a shared-memory segment of the host."""

    segment: str
    places: dict[str, tuple[int, int]]
    """Sample key → offset and size."""
