"""Base of every message."""

from __future__ import annotations

import msgspec


class MessageBody(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Message that is tagged by its class name; fields with their default value are not sent."""
