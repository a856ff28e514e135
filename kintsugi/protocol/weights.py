"""Weights on their way from training ranks to generation servers: publication, upload, fetch, load."""

from __future__ import annotations

from typing import Literal

import msgspec

from kintsugi.protocol.body import MessageBody
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.types import (
    Piece,
    StreamSource,
    WeightManifest,
    WeightSource,
)


class Publish(MessageBody, frozen=True):
    """Publish the committed weights as a version, and report where they can be fetched."""

    version: int
    step: int
    transports: tuple[str, ...] = ("shared_memory",)
    """Transports to offer; `weights/selection.py` decides which the servers need."""
    share: tuple[int, int] = (0, 1)
    """(k, n): publish only the k-th of n parts of the pieces; other ranks publish the rest."""
    meta_server: str = ""
    """Agent that holds the pieces for servers on other hosts; empty: they fetch from the rank."""
    chain: tuple[str, ...] = ()
    """Agents of the hosts of these servers: the first fetches from the meta-server, each other from the one before."""
    servers: tuple[str, ...] = ()
    """Servers that take part in a collective."""


class Published(MessageBody, frozen=True):
    manifest: WeightManifest
    sources: tuple[WeightSource, ...]


class FetchWeights(MessageBody, frozen=True):
    """Ask a rank for its share of a version."""

    version: int


class WeightsFetched(MessageBody, frozen=True):
    """The pieces are ready to be fetched."""

    version: int
    offer: BulkOffer | None = None
    """Offer of the pieces, by their indices in the manifest of the whole version."""


class HoldWeights(MessageBody, frozen=True):
    """Ask an agent to bring a version into its host's memory, once for all processes of the host, and to offer it to
    the next host while it arrives."""

    manifest: WeightManifest
    source: StreamSource
    is_awaited: bool = False
    """Reply when the version is whole; else immediately."""


class WeightsHeld(MessageBody, frozen=True):
    version: int
    segment: str
    """Shared memory of the agent's host with the version."""
    offer: BulkOffer
    """The same for other hosts; pieces that are still arriving are sent as they arrive."""


class HoldDelta(MessageBody, frozen=True):
    """Ask an agent for the difference of a version to an earlier one, which the host of the sender holds."""

    manifest: WeightManifest
    source: StreamSource
    base_version: int
    base_digest: str
    """Digest of the earlier version; an agent that holds another one under its number refuses."""


class DeltaPiece(msgspec.Struct, frozen=True, array_like=True):
    """Difference of one piece."""

    size: int
    digest: str


class DeltaHeld(MessageBody, frozen=True):
    """The difference (`weights/delta.py`) is ready to be fetched."""

    version: int
    offer: BulkOffer
    pieces: dict[int, DeltaPiece]
    """By the indices of the version's pieces."""
    made_s: float
    """How long it took to make it."""


class UploadWeights(MessageBody, frozen=True):
    """Let an agent hold these pieces of a version for other processes. It replies when it has them."""

    version: int
    size: int
    """Size of the whole version."""
    pieces: dict[int, Piece]
    """By their index in the manifest of the whole version."""
    offer: BulkOffer | None = None
    """Offer from which the agent fetches them."""
    segment: str = ""
    """Shared memory of the agent's host in which they are already; nothing is copied then."""


class LoadWeights(MessageBody, frozen=True):
    manifest: WeightManifest
    sources: tuple[WeightSource, ...]
    running: Literal["keep", "recompute", "interrupt"] = "keep"
    """Running requests keep their KV cache, recompute it, or are answered with what they have produced."""


class WeightsLoaded(MessageBody, frozen=True):
    version: int
    digest: str
    """Digest of the loaded bytes; must equal the manifest's."""
    servers: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    """Living servers that did not load it in time; they get no requests until they have."""
    pause_ms: dict[str, float] = {}
    """Server → how long it decoded nothing while the weights changed, by its own measure."""
    fetch_s: dict[str, float] = {}
    """Server → how long it fetched and verified them, while decoding continued."""
