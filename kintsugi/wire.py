"""How a message looks on the socket: one frame with an envelope and one of `messages.Body`, then any bulk frames."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.messages import Body


class MessageKind(StrEnum):
    """How a message is treated: a request is answered exactly once, a one-way message is not."""

    REQUEST = "q"
    REPLY = "r"
    ONE_WAY = "o"


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Carried by every message; an old epoch or a foreign job is refused, a repeated request gets its saved reply."""

    job: str
    epoch: int
    sender: str
    incarnation: str
    sequence: int
    """Per sender and peer; grows by one. A request keeps its number when it is sent again, its reply carries it."""
    kind: MessageKind
    cause_id: str | None = None
    """The fault that this message follows from, if any."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The first frame. One and not two, because every further frame costs an encryption and a decryption."""

    envelope: Envelope
    body: Body


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    envelope: Envelope
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)
_sealed_decoder = msgspec.msgpack.Decoder(_Sealed)


def encode(envelope: Envelope, body: Body) -> bytes:
    """The first frame of a message."""
    return _encoder.encode(Message(envelope, body))


def decode(frame: bytes | memoryview) -> Message:
    """Strict: an unknown tag, a missing field or a wrong type raises msgspec.DecodeError with its path."""
    return _message_decoder.decode(frame)


def decode_envelope(frame: bytes | memoryview) -> Envelope:
    """Of a message whose body can not be read, so that its sender can be told."""
    return _sealed_decoder.decode(frame).envelope
