"""Every message on the wire, one struct each. Nothing here is pickled or evaluated; decoding is strict.

A message on the socket is one `Message` frame (an envelope and one of `Body`) and any number of raw bulk frames. The
tables below say who sends what to whom.

| request                          | from → to            | reply              |
|----------------------------------|----------------------|--------------------|
| Register                         | worker → master      | Registered         |
| StartProcess, StopProcess        | master → agent       | ProcessStarted, Ok |
| RunEpisodes                      | master → rollout     | EpisodesDone       |
| Generate                         | rollout → manager    | Generated          |
| Generate                         | manager → server     | Generated          |
| RunCall                          | master → model       | CallDone           |
| StartStage, CommitStep           | master → model       | Ok                 |
| Publish, Save, HashWeights       | master → model       | Published, Saved, WeightsHashed |
| LoadWeights                      | master → manager, manager → server | WeightsLoaded |
| PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, Rollback | master → model | Ok |
| FetchSamples                     | model → rollout      | SamplesFetched     |
| FetchWeights                     | server → model       | WeightsFetched (+ bulk frames) |
| FetchState                       | model → model        | StateFetched, or WeightsFetched (+ bulk frames) |

| one-way                          | from → to            |
|----------------------------------|----------------------|
| Heartbeat                        | anyone → master      |
| AddressBook                      | master → anyone      |
| ProcessExited                    | agent → master       |
| Drop                             | master → rollout     |
| Shutdown                         | master → anyone      |
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.errors import Fault
from kintsugi.types import (
    Completion,
    LogicalShard,
    Peer,
    Placement,
    Progress,
    Role,
    SampleMeta,
    SampleText,
    Sampling,
    Ticket,
    Trajectory,
    Wait,
    WeightManifest,
    WeightSource,
)


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


class _Body(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


# Anyone.


class Ok(_Body, frozen=True):
    """Done; nothing to report."""


class Failed(_Body, frozen=True):
    """The request could not be carried out, and why."""

    fault: Fault


class Ping(_Body, frozen=True):
    """Are you there? Answered with Ok, with the same payload length. Used by health checks and benchmarks."""

    payload: bytes = b""


class Register(_Body, frozen=True):
    """A process reports to the master: after its start, and again whenever a new master takes over."""

    peer: Peer
    role: Role
    pid: int
    capabilities: dict[str, str] = {}


class Registered(_Body, frozen=True):
    """The master knows the process; `epoch` is the one to use from now on."""

    epoch: int


class Heartbeat(_Body, frozen=True):
    """Alive, how far, how loaded, and what it is waiting for."""

    progress: Progress
    load: float
    waits: tuple[Wait, ...] = ()


class AddressBook(_Body, frozen=True):
    """Who is who from now on. Keys that are not in it are no longer admitted."""

    number: int
    """Grows; an older book is ignored."""
    peers: tuple[Peer, ...]


class Shutdown(_Body, frozen=True):
    """Finish and exit."""

    reason: str


# Agents.


class StartProcess(_Body, frozen=True):
    process: str
    role: Role
    incarnation: str
    placement: Placement = Placement()


class ProcessStarted(_Body, frozen=True):
    """It runs under this pid and will speak with this key; it has not registered yet."""

    process: str
    incarnation: str
    pid: int
    public_key: bytes


class StopProcess(_Body, frozen=True):
    process: str
    incarnation: str
    grace_s: float = 2.0


class ProcessExited(_Body, frozen=True):
    """Seen through the kernel's pidfd. `status` as of waitid: exit code, or minus the signal; None if not our child."""

    process: str
    incarnation: str
    status: int | None
    last_output: str = ""
    """The end of what it wrote to its standard error."""


# Rollout.


class RunEpisodes(_Body, frozen=True):
    """Run one group: all samples of one ticket, or one evaluation problem."""

    ticket: Ticket
    split: str
    """"train" or "eval": which of the stage's data sources."""
    sampling: Sampling
    version: int
    """Generate with weights at least this new."""
    timeout_s: float
    """When the master gives up; nobody on the way waits longer, or less."""


class EpisodesDone(_Body, frozen=True):
    ticket: str
    samples: tuple[SampleMeta, ...]
    quarantined: dict[str, str] = {}
    """Sample key → reason."""
    texts: dict[str, SampleText] = {}
    """Sample key → what it says; only of samples that will be trained."""
    timing: dict[str, float] = {}
    """Seconds per call: {"actor_generate": 0.2, "reward": 0.01}."""


class FetchSamples(_Body, frozen=True):
    keys: tuple[str, ...]


class SamplesFetched(_Body, frozen=True):
    samples: tuple[Trajectory, ...]


class Drop(_Body, frozen=True):
    """The samples of these tickets are trained or dropped; their memory can go."""

    tickets: tuple[str, ...]


# Generation.


class Generate(_Body, frozen=True):
    """Continue a prompt `sampling.num_samples` times. Idempotent: noise is keyed by what stands here."""

    ticket: str
    turn: int
    prompt: bytes
    """int32 token ids."""
    sampling: Sampling
    version: int
    samples: tuple[int, ...] = ()
    """Which sample indices are wanted; empty means all of `range(num_samples)`."""
    timeout_s: float = 120.0
    """How long the asker waits; later the answer is of no use to anyone."""

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.samples or tuple(range(self.sampling.num_samples))


class Generated(_Body, frozen=True):
    ticket: str
    turn: int
    completions: tuple[Completion, ...]
    server: str


# Models and weights.


class RunCall(_Body, frozen=True):
    """One model function call on this worker's share of the batch."""

    call: str
    """MFC name, e.g. "actor_train"."""
    interface: str
    """Which model interface carries it out, e.g. "grpo_train", "sft_train", "inference"."""
    step: int
    shards: tuple[LogicalShard, ...]
    num_shards: int
    """Of the whole batch, over all workers."""
    totals: dict[str, float]
    """Denominators over the whole optimizer batch: {"tokens": …, "sequences": …}."""
    generation: int
    """Of the process group that this call must use."""
    arguments: dict[str, float] = {}
    """{"temperature": 1.0, "clip_low": 0.2, …}"""
    stage: str = ""


class CallDone(_Body, frozen=True):
    """A training call leaves the rank *prepared*: updated, but not committed. Sums are exact over the shards."""

    step: int
    state_digest: str
    metrics: dict[str, float]
    timing: dict[str, float] = {}
    outputs: dict[str, dict[str, float]] = {}
    """Key → sample → value, for calls that give per-sample scalars."""


class CommitStep(_Body, frozen=True):
    """The step is in the journal; adopt it."""

    step: int


class Publish(_Body, frozen=True):
    """Lay out the committed weights as a version and say where they can be had."""

    version: int
    step: int


class Published(_Body, frozen=True):
    manifest: WeightManifest
    sources: tuple[WeightSource, ...]


class FetchWeights(_Body, frozen=True):
    version: int
    pieces: tuple[int, ...] = ()
    """Indices into the manifest; empty means all, concatenated in order as bulk frames."""


class WeightsFetched(_Body, frozen=True):
    version: int


class LoadWeights(_Body, frozen=True):
    manifest: WeightManifest
    sources: tuple[WeightSource, ...]


class WeightsLoaded(_Body, frozen=True):
    version: int
    digest: str
    """Of the bytes as loaded; must equal the manifest's."""
    servers: tuple[str, ...] = ()


class Save(_Body, frozen=True):
    """Write a checkpoint of the committed step."""

    step: int
    stage: str
    folder: str


class Saved(_Body, frozen=True):
    step: int
    path: str
    digest: str


class HashWeights(_Body, frozen=True):
    """Which weights does the committed state hold?"""


class WeightsHashed(_Body, frozen=True):
    sha256: str
    """Over the names and bytes of all weights, in the order of their names."""


class StartStage(_Body, frozen=True):
    """A stage begins: set up its optimizer and schedule; weights stay as they are."""

    stage: str
    step: int


# Recovery operations of a training rank, under the protocol's names.


class PreLock(_Body, frozen=True):
    """Pause at the agreed step: run no call after it."""

    step: int


class DeviceStop(_Body, frozen=True):
    """Abort device work and leave the group's collective, if one is running."""

    generation: int


class DeviceClean(_Body, frozen=True):
    """Drop what the aborted step left behind."""


class RebuildGroup(_Body, frozen=True):
    """Destroy the process group and join the next generation of it."""

    generation: int
    ranks: tuple[str, ...]
    """Process ids in rank order."""
    store: str
    """host:port of the generation's store; the process at `ranks[0]` serves it."""
    timeout_s: float = 30.0


class Repair(_Body, frozen=True):
    """Take over the state of a replica (by stream), or of a checkpoint folder."""

    step: int
    source: str
    """Process id of a replica, or a checkpoint path."""


class FetchState(_Body, frozen=True):
    """A damaged or new rank asks a replica for its committed state: first without `pieces`, for the manifest."""

    step: int
    pieces: tuple[int, ...] = ()
    """Indices into the manifest; answered with WeightsFetched and their bytes, in order, as bulk frames."""


class StateFetched(_Body, frozen=True):
    """What the replica's state consists of, and its counters (`training.state.Counters`)."""

    manifest: WeightManifest
    stage: str
    updates: int
    skipped: int


class Rollback(_Body, frozen=True):
    """Return to the committed state of this step."""

    step: int


class RankReady(_Body, frozen=True):
    """A rank's answer to a recovery operation: where it stands."""

    step: int
    state_digest: str
    half_updated: bool = False


Body = (
    Ok
    | Failed
    | Ping
    | Register
    | Registered
    | Heartbeat
    | AddressBook
    | Shutdown
    | StartProcess
    | ProcessStarted
    | StopProcess
    | ProcessExited
    | RunEpisodes
    | EpisodesDone
    | FetchSamples
    | SamplesFetched
    | Drop
    | Generate
    | Generated
    | RunCall
    | CallDone
    | CommitStep
    | Publish
    | Published
    | FetchWeights
    | WeightsFetched
    | LoadWeights
    | WeightsLoaded
    | Save
    | Saved
    | HashWeights
    | WeightsHashed
    | StartStage
    | PreLock
    | DeviceStop
    | DeviceClean
    | RebuildGroup
    | Repair
    | FetchState
    | StateFetched
    | Rollback
    | RankReady
)


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
