"""Every message on the wire, one struct each. Nothing here is pickled or evaluated; decoding is strict.

`wire.py` has the envelope that carries them; `operations.py` what recovery asks of a rank; `supervision.py` what
agents are asked and see; `leasing.py` what is said about a shared device. The tables below say who sends what to whom.

| request                          | from → to            | reply              |
|----------------------------------|----------------------|--------------------|
| Register                         | worker → master      | Registered         |
| StartProcess, StopProcess, Inspect | master → agent     | ProcessStarted, Ok, Inspected |
| AskTime                            | agent → master     | TimeTold                      |
| RunEpisodes                      | master → rollout     | EpisodesDone       |
| Generate                         | rollout → manager, manager → server | Generated |
| Retire, Interrupt                | master → manager, manager → server | Ok   |
| RunCall                          | master → model       | CallDone           |
| EvaluatePairs                    | master → model       | PairsEvaluated     |
| StartStage, CommitStep           | master → model       | RankReady, Ok      |
| Publish, Save, HashWeights       | master → model       | Published, Saved, WeightsHashed |
| LoadWeights                      | master → manager, manager → server | WeightsLoaded |
| PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, Rollback, NotifyNormal | master → model | RankReady |
| FetchSamples                     | model → rollout      | SamplesFetched     |
| FetchRelayed                     | model → model        | Relayed            |
| FetchWeights                     | server → model, agent | WeightsFetched (+ bulk frames) |
| UploadWeights (+ bulk frames)    | model → agent        | Ok                 |
| FetchState                       | model → model, agent | StateFetched, or WeightsFetched (+ bulk frames) |
| KeepState (+ bulk frames)        | model → agent        | Ok                 |

| one-way                          | from → to            |
|---|---|
| Heartbeat                        | anyone → master      |
| AddressBook, Shutdown            | master → anyone      |
| ProcessExited, ProcessSuspected, ChipFault | agent → master |
| Drop                             | master → rollout     |
| Produced                         | server → manager     |
| Cancel                           | manager → server     |
| LeaseRequested, LeaseAcknowledged, LeaseReleased | model, server → agent |
| LeaseGranted, LeaseExtended, LeaseRecalled | agent → model, server |
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kintsugi.errors import Fault
from kintsugi.leasing import ToArbiter, ToHolder
from kintsugi.operations import (
    DeviceClean,
    DeviceStop,
    FetchState,
    KeepState,
    NotifyNormal,
    PreLock,
    RankReady,
    RebuildGroup,
    Repair,
    Rollback,
    StateFetched,
)
from kintsugi.supervision import (
    AskTime,
    ChipFault,
    Inspect,
    Inspected,
    ProcessExited,
    ProcessStarted,
    ProcessSuspected,
    StartProcess,
    StopProcess,
    TimeTold,
)
from kintsugi.transfers import FetchRelayed, Relayed, Routes, Transfer
from kintsugi.types import (
    ChildReport,
    Completion,
    Fragment,
    LogicalShard,
    Peer,
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


class _Body(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


# Anyone.


class Ok(_Body, frozen=True):
    pass


class Failed(_Body, frozen=True):
    """The request could not be carried out, and why."""

    fault: Fault


class Ping(_Body, frozen=True):
    """Are you there? Answered with Ok."""

    payload: bytes = b""


class Register(_Body, frozen=True):
    """A process reports to the master: after its start, and again whenever a new master takes over."""

    peer: Peer
    role: Role
    pid: int
    capabilities: dict[str, str] = {}
    children: tuple[ChildReport, ...] = ()
    """Of an agent: the processes that it answers for and that live."""


class Registered(_Body, frozen=True):
    """The master knows the process; `epoch` is the one to use from now on."""

    epoch: int


class Heartbeat(_Body, frozen=True):
    """Alive, how far, how loaded, and what it is waiting for."""

    progress: Progress
    load: float
    waits: tuple[Wait, ...] = ()
    book: int = -1
    """Number of the address book that the process goes by: an older one than the master's is sent again."""
    gauges: dict[str, float] = {}


class AddressBook(_Body, frozen=True):
    """Who is who from now on. Keys that are not in it are no longer admitted."""

    number: int
    """Grows; an older book is ignored."""
    peers: tuple[Peer, ...]


class Shutdown(_Body, frozen=True):
    """Finish and exit."""

    reason: str
    exit_code: int = 0
    """Of the run: what an agent ends with that can not learn the master's own."""


# Rollout.


class RunEpisodes(_Body, frozen=True):
    """Run one group: all samples of one ticket, or one evaluation problem (`split` "train" or "eval")."""

    ticket: Ticket
    split: str
    sampling: Sampling
    version: int
    """Generate with weights at least this new; to evaluate, with exactly these."""
    timeout_s: float
    """When the master gives up; nobody on the way waits longer, or less."""
    lineage: int = 0
    """Grows when steps are undone: what was sampled before is no answer any more."""


class EpisodesDone(_Body, frozen=True):
    ticket: str
    samples: tuple[SampleMeta, ...]
    quarantined: dict[str, str] = {}
    """Sample key → reason."""
    texts: dict[str, SampleText] = {}
    """Sample key → what it says; only of samples that will be trained."""
    timing: dict[str, float] = {}
    """Seconds per call."""


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
    produced: tuple[Completion, ...] = ()
    """What other servers have produced of wanted samples; replayed, not sampled again."""
    stream: bool = False
    """Tell the asker of every token as soon as it is there, by `Produced`; else now and then."""
    number: int = 0
    """The asker's own, for `Produced` and `Cancel`."""

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.samples or tuple(range(self.sampling.num_samples))


class Generated(_Body, frozen=True):
    ticket: str
    turn: int
    completions: tuple[Completion, ...]
    server: str


class Produced(_Body, frozen=True):
    """What a server has produced since it said so last, so that another can go on where it died."""

    fragments: dict[int, tuple[Fragment, ...]]
    """By `Generate.number`."""


class Cancel(_Body, frozen=True):
    """Nobody waits for this `Generate` any more: its pages are wanted."""

    number: int


class Interrupt(_Body, frozen=True):
    """Answer every running `Generate` now, with what it has: completions without a `finish`, to be resumed."""


class Retire(_Body, frozen=True):
    """A server is to be stopped: let others go on with what it does. Answered when nothing is left to lose."""

    process: str
    incarnation: str


# Models and weights.


class RunCall(_Body, frozen=True):
    """One model function call on this worker's share of the batch."""

    call: str
    """Of the graph: "actor_train"."""
    interface: str
    """Of the model that carries it out: "policy_train"."""
    step: int
    shards: tuple[LogicalShard, ...]
    num_shards: int
    """Of the whole batch, over all workers."""
    totals: dict[str, float]
    """Denominators over the whole optimizer batch: {"tokens": …, "sequences": …}."""
    generation: int
    """Of the process group that this call must use."""
    arguments: dict[str, float] = {}
    stage: str = ""
    after: tuple[str, ...] = ()
    """Calls of this step to be finished first: all ranks work them off in one order; their collectives never cross."""
    prepares: bool = True
    """Of a training call: no other follows in this step, so it leaves the rank *prepared*."""
    blocks: tuple[int, ...] = ()
    """By rank: which contiguous block of shards each one has; empty means its own number."""
    routes: Routes = Routes()
    """The rank's way to the samples that it does not have yet."""


class CallDone(_Body, frozen=True):
    """The step's last training call leaves the rank *prepared*: updated, but not committed. Sums are exact."""

    step: int
    state_digest: str
    """Of the prepared state; means nothing in the answer to a call that does not prepare one."""
    metrics: dict[str, float]
    timing: dict[str, float] = {}
    outputs: dict[str, dict[str, float]] = {}
    """Key → sample → value, for calls that give per-sample scalars."""
    transfers: tuple[Transfer, ...] = ()
    """What was fetched for this call."""


class EvaluatePairs(_Body, frozen=True):
    """Rank held-out pairs `first` to `first + count - 1` with the committed reward model."""

    step: int
    first: int
    count: int


class PairsEvaluated(_Body, frozen=True):
    """Which of them are ranked right: the chosen answer's score is the higher one. A tie is wrong."""

    step: int
    first: int
    correct: tuple[bool, ...]


class CommitStep(_Body, frozen=True):
    """The step is in the journal; adopt it."""

    step: int


class Publish(_Body, frozen=True):
    """Lay out the committed weights as a version and say where they can be had."""

    version: int
    step: int
    transports: tuple[str, ...] = ("shared_memory",)
    """How it is to be had: `weights/choice.py` says which of them the servers need."""
    share: tuple[int, int] = (0, 1)
    """(k, n): only the k-th of n parts of the pieces; the others publish the rest, and all are put together."""
    meta_server: str = ""
    """The agent that the pieces are uploaded to, for servers on other hosts to fetch; none: they ask the rank."""
    servers: tuple[str, ...] = ()
    """Who takes part in a collective."""


class Published(_Body, frozen=True):
    manifest: WeightManifest
    sources: tuple[WeightSource, ...]


class FetchWeights(_Body, frozen=True):
    version: int
    pieces: tuple[int, ...] = ()
    """Indices into the manifest; empty means all."""


class WeightsFetched(_Body, frozen=True):
    version: int
    pieces: tuple[int, ...] = ()
    """Which of those that were asked for came: a meta-server gives what it has, as soon as it has any. Empty: all."""


class UploadWeights(_Body, frozen=True):
    """Hold these pieces of a version, which come along, for whoever asks."""

    version: int
    digest: str
    """Of what the rank publishes of this version; another one means that the run went back and began it anew."""
    pieces: dict[int, int]
    """Index → bytes, in the order in which they come."""


class LoadWeights(_Body, frozen=True):
    manifest: WeightManifest
    sources: tuple[WeightSource, ...]
    running: Literal["keep", "recompute", "interrupt"] = "keep"
    """Running requests go on with the keys and values they have, or with new ones, or are answered as they are."""


class WeightsLoaded(_Body, frozen=True):
    version: int
    digest: str
    """Of the bytes as loaded; must equal the manifest's."""
    servers: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    """Servers that live but did not load it in time: they are left behind until they have."""
    pause_ms: dict[str, float] = {}
    """How long each server, by its own measure, decoded nothing while the weights changed."""
    fetch_s: dict[str, float] = {}
    """How long it took to get and verify them before, while decoding went on."""


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


class StartStage(_Body, frozen=True):
    """A stage begins: set up its optimizer and schedule; weights stay as they are."""

    stage: str
    step: int


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
    | ProcessSuspected
    | ChipFault
    | Inspect
    | Inspected
    | AskTime
    | TimeTold
    | RunEpisodes
    | EpisodesDone
    | FetchSamples
    | SamplesFetched
    | FetchRelayed
    | Relayed
    | Drop
    | Generate
    | Generated
    | Produced
    | Cancel
    | Interrupt
    | Retire
    | RunCall
    | CallDone
    | EvaluatePairs
    | PairsEvaluated
    | CommitStep
    | Publish
    | Published
    | FetchWeights
    | WeightsFetched
    | UploadWeights
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
    | NotifyNormal
    | RankReady
    | KeepState
    | ToArbiter
    | ToHolder
)
