"""How a message looks on the socket: one frame with an envelope and one of `messages.Body`, then any bulk frames."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi import leasing, messages, operations, supervision, transfers
from kintsugi.messages import Body
from kintsugi.types import Role


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


_NOBODY: frozenset[Role] = frozenset()
_ANYONE = frozenset(Role)
_MASTER = frozenset({Role.MASTER})
_AGENT = frozenset({Role.AGENT})
_MODEL = frozenset({Role.MODEL})
_ON_DEVICE = frozenset({Role.MODEL, Role.SERVER})

SPOKEN_BY: dict[type[Body], frozenset[Role]] = {
    messages.Ping: _ANYONE,
    messages.Register: _ANYONE,
    messages.Heartbeat: _ANYONE,
    messages.AddressBook: _MASTER,
    messages.Shutdown: _MASTER,
    supervision.StartProcess: _MASTER,
    supervision.StopProcess: _MASTER,
    supervision.Inspect: _MASTER,
    supervision.ProcessExited: _AGENT,
    supervision.ProcessSuspected: _AGENT,
    supervision.ChipFault: _AGENT,
    supervision.AskTime: _AGENT,
    messages.RunEpisodes: _MASTER,
    messages.Drop: _MASTER,
    messages.FetchSamples: _MODEL,
    transfers.FetchRelayed: _MODEL,
    messages.Generate: frozenset({Role.ROLLOUT, Role.MANAGER}),
    messages.Interrupt: frozenset({Role.MANAGER}),
    messages.Retire: _MASTER,
    messages.Cancel: frozenset({Role.MANAGER}),
    messages.Produced: frozenset({Role.SERVER}),
    messages.RunCall: _MASTER,
    messages.EvaluatePairs: _MASTER,
    messages.StartStage: _MASTER,
    messages.CommitStep: _MASTER,
    messages.Publish: _MASTER,
    messages.Save: _MASTER,
    messages.HashWeights: _MASTER,
    messages.LoadWeights: frozenset({Role.MASTER, Role.MANAGER}),
    messages.FetchWeights: frozenset({Role.SERVER}),
    messages.UploadWeights: _MODEL,
    operations.PreLock: _MASTER,
    operations.DeviceStop: _MASTER,
    operations.DeviceClean: _MASTER,
    operations.RebuildGroup: _MASTER,
    operations.Repair: _MASTER,
    operations.Rollback: _MASTER,
    operations.NotifyNormal: _MASTER,
    operations.FetchState: _MODEL,
    operations.KeepState: _MODEL,
    leasing.LeaseRequested: _ON_DEVICE,
    leasing.LeaseAcknowledged: _ON_DEVICE,
    leasing.LeaseReleased: _ON_DEVICE,
    leasing.LeaseGranted: _AGENT,
    leasing.LeaseExtended: _AGENT,
    leasing.LeaseRecalled: _AGENT,
    # Replies: nobody says them unasked.
    messages.Ok: _NOBODY,
    messages.Failed: _NOBODY,
    messages.Registered: _NOBODY,
    supervision.ProcessStarted: _NOBODY,
    supervision.Inspected: _NOBODY,
    supervision.TimeTold: _NOBODY,
    messages.EpisodesDone: _NOBODY,
    messages.SamplesFetched: _NOBODY,
    transfers.Relayed: _NOBODY,
    messages.Generated: _NOBODY,
    messages.CallDone: _NOBODY,
    messages.PairsEvaluated: _NOBODY,
    messages.Published: _NOBODY,
    messages.Saved: _NOBODY,
    messages.WeightsHashed: _NOBODY,
    messages.WeightsLoaded: _NOBODY,
    messages.WeightsFetched: _NOBODY,
    operations.RankReady: _NOBODY,
    operations.StateFetched: _NOBODY,
}
"""Whose word a request or one-way message is: a worker does not order another about, whatever its key is."""


_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)
_sealed_decoder = msgspec.msgpack.Decoder(_Sealed)


def encode(envelope: Envelope, body: Body) -> bytes:
    """The first frame of a message."""
    return _encoder.encode(Message(envelope, body))


def decode(frame: bytes | memoryview) -> Message:
    """Strict: an unknown tag, a missing field or a wrong type raises msgspec.DecodeError with its path."""
    try:
        return _message_decoder.decode(frame)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def decode_envelope(frame: bytes | memoryview) -> Envelope:
    """Of a message whose body can not be read, so that its sender can be told."""
    try:
        return _sealed_decoder.decode(frame).envelope
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
