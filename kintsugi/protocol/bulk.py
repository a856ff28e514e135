"""The bulk channel: its hand-shake over the control channel, and the two structs that travel on a bulk connection.

Bytes go from the process that offers them to the process that fetches them, over connections of their own
(`kintsugi/bulk`). The control channel, which CURVE authenticates and encrypts, carries the keys and certificates.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kintsugi.protocol.body import MessageBody

BulkMode = Literal["encrypted", "authenticated"]
"""`encrypted`: TLS 1.3. `authenticated`: plain TCP, every chunk with a message authentication code."""


class BulkOffer(msgspec.Struct, frozen=True):
    """Bytes that a process holds ready: `BulkOffer("model-0", "weights-3-9f02")`."""

    process: str
    export: str


class OpenBulk(MessageBody, frozen=True):
    """Open a session for bulk connections to the receiver of this request."""

    certificate: bytes
    """Certificate of the sender (DER); only its key may connect under the session."""


class BulkOpened(MessageBody, frozen=True):
    """A session, valid for one pair of incarnations as long as the address book lists the one that asked."""

    address: str
    """host:port of the listener."""
    session: bytes
    """Identifier, sent in the clear; it selects the keys and proves nothing."""
    key: bytes
    """Secret from which the keys of each connection are derived (`authenticated`)."""
    certificate: bytes
    """Certificate of the listener (DER), the only one to accept (`encrypted`)."""
    mode: BulkMode


class BulkRange(msgspec.Struct, frozen=True, array_like=True):
    """Part of one piece of an export: [offset, offset + size) of piece `index`."""

    index: int
    offset: int
    size: int


class BulkRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request for parts of an export, on a bulk connection."""

    export: str
    ranges: tuple[BulkRange, ...]


class BulkHeader(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a request: a refusal, or the size of each part, whose bytes follow in this order."""

    sizes: tuple[int, ...] = ()
    refusal: str = ""
