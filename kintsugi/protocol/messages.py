"""Every message between processes, and which process sends it to which. `Body` is their union.

One module per link holds the structs. Nothing is pickled or evaluated; decoding is strict (`protocol/wire.py`).

| request                          | from → to            | reply              |
|----------------------------------|----------------------|--------------------|
| Ping                             | any → any            | Ok                 |
| Register                         | any → master         | Registered         |
| StartProcess                     | master → agent       | ProcessStarted     |
| StopProcess                      | master → agent       | Ok                 |
| Inspect                          | master → agent       | Inspected          |
| AskTime                          | agent → master       | TimeTold           |
| RunEpisodes                      | master → rollout     | EpisodesDone       |
| Generate                         | rollout → manager, manager → server | Generated |
| Retire                           | master → manager     | Ok                 |
| Interrupt                        | manager → server     | Ok                 |
| RunCall                          | master → model       | CallDone           |
| EvaluatePairs                    | master → model       | PairsEvaluated     |
| StartStage                       | master → model       | RankReady          |
| CommitStep                       | master → model       | Ok                 |
| Publish                          | master → model       | Published          |
| Save                             | master → model       | Saved              |
| SavePiece                        | model → model        | PieceSaved         |
| HashWeights                      | master → model       | WeightsHashed      |
| LoadWeights                      | master → manager, manager → server | WeightsLoaded |
| PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, Rollback, NotifyNormal | master → model | RankReady |
| AskStanding                      | master → model       | RankStanding       |
| FetchSamples                     | model → rollout      | SamplesFetched     |
| FetchRelayed                     | model → model        | Relayed            |
| FetchWeights                     | server → model, agent → model | WeightsFetched |
| HoldWeights                      | server → agent, agent → agent | WeightsHeld |
| HoldDelta                        | agent → agent        | DeltaHeld          |
| UploadWeights                    | model → agent        | Ok                 |
| FetchState                       | model → model, model → agent | StateFetched |
| KeepState                        | model → agent        | Ok                 |
| OpenBulk                         | model, server, agent → model, agent | BulkOpened |
| JoinHost                         | supervisor → host_manager | HostJoined    |
| HostBeat                         | supervisor → host_manager | HostOrders    |
| MirrorFiles                      | supervisor → host_manager | Ok            |
| FetchFile                        | supervisor → host_manager | FilePart      |
| ListFiles                        | model → agent        | FilesListed        |
| StoreFile                        | model → agent        | Ok                 |
| KeepCheckpoint                   | model → agent        | CheckpointKept     |

Any request can be answered with Failed instead. Weights and states themselves are fetched over the bulk channel
(`kintsugi/bulk`), from the offers that these messages carry.

| one-way message                  | from → to            |
|----------------------------------|----------------------|
| Heartbeat                        | any → master         |
| AddressBook, Shutdown            | master → any         |
| ProcessExited, ProcessSuspected, ChipFault | agent → master |
| Drop                             | master → rollout     |
| ForgetStates                     | master → agent       |
| Produced                         | server → manager     |
| Cancel                           | manager → server     |
| LeaseRequested, LeaseAcknowledged, LeaseReleased | model → agent, server → agent |
| LeaseGranted, LeaseExtended, LeaseRecalled | agent → model, agent → server |
"""

from __future__ import annotations

from kintsugi.protocol.agents import (
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
from kintsugi.protocol.bulk import BulkOpened, OpenBulk
from kintsugi.protocol.device_lease import ToArbiter, ToHolder
from kintsugi.protocol.generation import Cancel, Generate, Generated, Interrupt, Produced, Retire
from kintsugi.protocol.hosts import (
    CheckpointKept,
    FetchFile,
    FilePart,
    FilesListed,
    HostBeat,
    HostJoined,
    HostOrders,
    JoinHost,
    KeepCheckpoint,
    ListFiles,
    MirrorFiles,
    StoreFile,
)
from kintsugi.protocol.membership import (
    AddressBook,
    Failed,
    Heartbeat,
    Ok,
    Ping,
    Register,
    Registered,
    Shutdown,
)
from kintsugi.protocol.recovery import (
    AskStanding,
    DeviceClean,
    DeviceStop,
    FetchState,
    ForgetStates,
    KeepState,
    NotifyNormal,
    PreLock,
    RankReady,
    RankStanding,
    RebuildGroup,
    Repair,
    Rollback,
    StateFetched,
)
from kintsugi.protocol.rollout import Drop, EpisodesDone, FetchSamples, RunEpisodes, SamplesFetched
from kintsugi.protocol.sample_transfer import FetchRelayed, Relayed
from kintsugi.protocol.training import (
    CallDone,
    CommitStep,
    EvaluatePairs,
    HashWeights,
    PairsEvaluated,
    PieceSaved,
    RunCall,
    Save,
    Saved,
    SavePiece,
    StartStage,
    WeightsHashed,
)
from kintsugi.protocol.weights import (
    DeltaHeld,
    FetchWeights,
    HoldDelta,
    HoldWeights,
    LoadWeights,
    Publish,
    Published,
    UploadWeights,
    WeightsFetched,
    WeightsHeld,
    WeightsLoaded,
)

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
    | HoldDelta
    | HoldWeights
    | DeltaHeld
    | WeightsHeld
    | UploadWeights
    | LoadWeights
    | WeightsLoaded
    | Save
    | Saved
    | SavePiece
    | PieceSaved
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
    | AskStanding
    | RankStanding
    | KeepState
    | ForgetStates
    | OpenBulk
    | BulkOpened
    | ToArbiter
    | ToHolder
    | JoinHost
    | HostJoined
    | HostBeat
    | HostOrders
    | FetchFile
    | FilePart
    | ListFiles
    | FilesListed
    | MirrorFiles
    | StoreFile
    | KeepCheckpoint
    | CheckpointKept
)
