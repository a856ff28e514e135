"""A message on the socket: one frame with the envelope and a `messages.Body`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.protocol import (
    agents,
    bulk,
    device_lease,
    generation,
    hosts,
    membership,
    recovery,
    rollout,
    sample_transfer,
    training,
    weights,
)
from kintsugi.protocol.messages import Body
from kintsugi.types import Role


class MessageKind(StrEnum):
    """Kind of a message: a request is answered exactly once, a one-way message is not answered."""

    REQUEST = "q"
    REPLY = "r"
    ONE_WAY = "o"


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Header of every message. An old term or a foreign job is refused; a repeated request gets its saved reply."""

    job: str
    term: int
    sender: str
    incarnation: str
    sequence: int
    """Number per sender and peer; grows by one. A request keeps it when it is sent again; its reply repeats it."""
    kind: MessageKind
    cause_id: str | None = None
    """Id of the fault that caused this message, if any."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The first frame. Envelope and body share it because every frame costs an encryption and a decryption."""

    envelope: Envelope
    body: Body


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    envelope: Envelope
    body: msgspec.Raw


_REPLY: frozenset[Role] = frozenset()
_ANYONE = frozenset(Role)
_MASTER = frozenset({Role.MASTER})
_AGENT = frozenset({Role.AGENT})
_MODEL = frozenset({Role.MODEL})
_ON_DEVICE = frozenset({Role.MODEL, Role.SERVER})
_FETCHES_WEIGHTS = frozenset({Role.SERVER, Role.AGENT})
_SUPERVISOR = frozenset({Role.SUPERVISOR})

ALLOWED_SENDERS: dict[type[Body], frozenset[Role]] = {
    membership.Ping: _ANYONE,
    membership.Register: _ANYONE,
    membership.Heartbeat: _ANYONE,
    membership.AddressBook: _MASTER,
    membership.Shutdown: _MASTER,
    agents.StartProcess: _MASTER,
    agents.StopProcess: _MASTER,
    agents.Inspect: _MASTER,
    agents.ProcessExited: _AGENT,
    agents.ProcessSuspected: _AGENT,
    agents.ChipFault: _AGENT,
    agents.AskTime: _AGENT,
    rollout.RunEpisodes: _MASTER,
    rollout.Drop: _MASTER,
    rollout.FetchSamples: _MODEL,
    sample_transfer.FetchRelayed: _MODEL,
    generation.Generate: frozenset({Role.ROLLOUT, Role.MANAGER}),
    generation.Interrupt: frozenset({Role.MANAGER}),
    generation.Retire: _MASTER,
    generation.Cancel: frozenset({Role.MANAGER}),
    generation.Produced: frozenset({Role.SERVER}),
    training.RunCall: _MASTER,
    training.EvaluatePairs: _MASTER,
    training.StartStage: _MASTER,
    training.CommitStep: _MASTER,
    weights.Publish: _MASTER,
    training.Save: _MASTER,
    training.SavePiece: _MODEL,
    training.HashWeights: _MASTER,
    weights.LoadWeights: frozenset({Role.MASTER, Role.MANAGER}),
    weights.FetchWeights: _FETCHES_WEIGHTS,
    weights.HoldWeights: _FETCHES_WEIGHTS,
    weights.HoldDelta: frozenset({Role.AGENT}),
    weights.UploadWeights: _MODEL,
    bulk.OpenBulk: frozenset({Role.MODEL, Role.SERVER, Role.AGENT}),
    recovery.PreLock: _MASTER,
    recovery.DeviceStop: _MASTER,
    recovery.DeviceClean: _MASTER,
    recovery.RebuildGroup: _MASTER,
    recovery.Repair: _MASTER,
    recovery.Rollback: _MASTER,
    recovery.NotifyNormal: _MASTER,
    recovery.AskStanding: _MASTER,
    recovery.FetchState: _MODEL,
    recovery.KeepState: _MODEL,
    recovery.ForgetStates: _MASTER,
    device_lease.LeaseRequested: _ON_DEVICE,
    device_lease.LeaseAcknowledged: _ON_DEVICE,
    device_lease.LeaseReleased: _ON_DEVICE,
    device_lease.LeaseGranted: _AGENT,
    device_lease.LeaseExtended: _AGENT,
    device_lease.LeaseRecalled: _AGENT,
    hosts.JoinHost: _SUPERVISOR,
    hosts.HostBeat: _SUPERVISOR,
    hosts.MirrorFiles: _SUPERVISOR,
    hosts.FetchFile: _SUPERVISOR,
    hosts.ListFiles: _MODEL,
    hosts.StoreFile: _MODEL,
    hosts.KeepCheckpoint: _MODEL,
    # Replies, which no role may send unrequested.
    membership.Ok: _REPLY,
    membership.Failed: _REPLY,
    membership.Registered: _REPLY,
    agents.ProcessStarted: _REPLY,
    agents.Inspected: _REPLY,
    agents.TimeTold: _REPLY,
    rollout.EpisodesDone: _REPLY,
    rollout.SamplesFetched: _REPLY,
    sample_transfer.Relayed: _REPLY,
    generation.Generated: _REPLY,
    training.CallDone: _REPLY,
    training.PairsEvaluated: _REPLY,
    weights.Published: _REPLY,
    training.Saved: _REPLY,
    training.PieceSaved: _REPLY,
    training.WeightsHashed: _REPLY,
    weights.WeightsLoaded: _REPLY,
    weights.WeightsFetched: _REPLY,
    weights.WeightsHeld: _REPLY,
    weights.DeltaHeld: _REPLY,
    bulk.BulkOpened: _REPLY,
    recovery.RankReady: _REPLY,
    recovery.RankStanding: _REPLY,
    recovery.StateFetched: _REPLY,
    hosts.HostJoined: _REPLY,
    hosts.HostOrders: _REPLY,
    hosts.FilePart: _REPLY,
    hosts.FilesListed: _REPLY,
    hosts.CheckpointKept: _REPLY,
}
"""Roles that may send each request or one-way message; any other sender is refused, whatever its key."""


_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)
_sealed_decoder = msgspec.msgpack.Decoder(_Sealed)


def encode(envelope: Envelope, body: Body | msgspec.Raw) -> bytes:
    """Encode the first frame of a message, with a body that may be encoded already."""
    if isinstance(body, msgspec.Raw):
        return _encoder.encode(_Sealed(envelope, body))
    return _encoder.encode(Message(envelope, body))


def encode_body(body: Body) -> msgspec.Raw:
    """Encode a body that is sent to many processes, once for all of them."""
    return msgspec.Raw(_encoder.encode(body))


def decode(frame: bytes | memoryview) -> Message:
    """Decode a frame. An unknown tag, a missing field or a wrong type raises msgspec.DecodeError with its path."""
    try:
        return _message_decoder.decode(frame)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def decode_envelope(frame: bytes | memoryview) -> Envelope:
    """Decode only the envelope: for a message with an unreadable body, so that its sender can get a refusal."""
    try:
        return _sealed_decoder.decode(frame).envelope
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
