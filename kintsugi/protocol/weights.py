"""Weights on their way from training ranks to generation servers: publication, upload, fetch, load."""

from __future__ import annotations

from typing import Literal

from kintsugi.protocol.body import MessageBody
from kintsugi.types import (
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
    """Agent to upload the pieces to, for servers on other hosts to fetch; empty: they fetch from the rank."""
    servers: tuple[str, ...] = ()
    """Servers that take part in a collective."""


class Published(MessageBody, frozen=True):
    manifest: WeightManifest
    sources: tuple[WeightSource, ...]


class FetchWeights(MessageBody, frozen=True):
    version: int
    pieces: tuple[int, ...] = ()
    """Indices into the manifest; empty means all pieces."""


class WeightsFetched(MessageBody, frozen=True):
    version: int
    pieces: tuple[int, ...] = ()
    """Indices of the pieces in this reply: a relay sends those it has as soon as it has any. Empty: all."""


class UploadWeights(MessageBody, frozen=True):
    """Hold these pieces of a version for servers to fetch; their bytes follow as bulk frames."""

    version: int
    digest: str
    """Digest of the rank's part of this version; a different one means that the step was undone and trained again."""
    pieces: dict[int, int]
    """Index → size in bytes, in the order of the bulk frames."""


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
