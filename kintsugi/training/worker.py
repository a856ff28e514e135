"""Model worker process: a data-parallel rank that serves the master's calls and the operations of a recovery.

The main thread computes. While it waits for other processes, and between two micro-batches, it looks at the requests
that have arrived. Most of them wait until the current one is done; the end of the process group interrupts it.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

import msgspec

from kintsugi.bulk.endpoint import BulkEndpoint, open_bulk
from kintsugi.bulk.server import BulkServer
from kintsugi.checkpoint.snapshot import SnapshotSegments
from kintsugi.checkpoint.store import load_checkpoint, stored_weights, unfinished_folder
from kintsugi.cluster.shared_memory import SegmentClient
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.device_lease.client import UNSHARED, LeaseHandle, open_lease
from kintsugi.errors import (
    DeadlineExceeded,
    DeviceOutOfMemory,
    GroupBroken,
    ProcessDied,
    RefusedError,
    RemoteError,
    Unfit,
)
from kintsugi.model.device_errors import as_world_error
from kintsugi.model.folder import VALUE_HEAD
from kintsugi.model.folder_files import folder_files
from kintsugi.model.plan import plan_model
from kintsugi.model.seats import Mesh, seat_of
from kintsugi.model.tensor_file import FileContent
from kintsugi.model.tensor_slices import join_all
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.process.main import run_worker
from kintsugi.process.membership import ShuttingDown
from kintsugi.process.shell import Mailbox, ReplyHandle, Shell
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import (
    AskStanding,
    DeviceClean,
    DeviceStop,
    FetchState,
    KeepState,
    PreLock,
    RankReady,
    RankStanding,
    RebuildGroup,
    Repair,
    Rollback,
)
from kintsugi.protocol.sample_transfer import FetchRelayed
from kintsugi.protocol.training import (
    CallDone,
    CommitStep,
    EvaluatePairs,
    HashWeights,
    PairsEvaluated,
    RunCall,
    Save,
    SavePiece,
    StartStage,
    WeightsHashed,
)
from kintsugi.protocol.weights import FetchWeights, Publish, Published
from kintsugi.recovery.rank import Operation, Processor
from kintsugi.recovery.step_calls import StepCalls
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.spans import SPANS
from kintsugi.samples.sharding import shards_of_rank
from kintsugi.telemetry.events import AlertEvent, Note, NoteEvent
from kintsugi.training.box_saving import BoxSaver, BoxWriters, own_tensors
from kintsugi.training.calls import TrainingCalls
from kintsugi.training.checkpoint_delivery import CheckpointDelivery
from kintsugi.training.framework import Framework, open_framework
from kintsugi.training.gathered_weights import OwnWeights
from kintsugi.training.group import Groups
from kintsugi.training.held_out_pairs import HeldOutPairs
from kintsugi.training.joint_answer import Joint, JointAnswer
from kintsugi.training.peer_replication import KEEP_TIMEOUT_S, PeerReplica, choose_agent
from kintsugi.training.rank_adapter import RankAdapter
from kintsugi.training.rank_state import RankState
from kintsugi.training.rollout_writer import RolloutStore
from kintsugi.training.sample_fetch import StepSamples, await_answer
from kintsugi.training.saving import CheckpointSaver
from kintsugi.training.seating import OpenState, RankSeating
from kintsugi.training.snapshots import CopyCounters, HeldState, StoredState, counters_of
from kintsugi.training.stage_weights import stage_weights_sha256
from kintsugi.training.state_transfer import StateFetcher, StateSource
from kintsugi.transport import Delivery, Reply, subject
from kintsugi.transport.store import StoreServer
from kintsugi.types import Peer, Role, is_process, process_id, role_of, ticket_of
from kintsugi.weights.manifest import layout_of, manifest_of, weights_sha256
from kintsugi.weights.publish import Publisher, share_of
from kintsugi.weights.transports.relay import RelayTransport
from kintsugi.weights.transports.shared_memory import WeightSegments

IDLE_WAIT_S = 1.0
"""Interval between two checks, in a long call too, whether the agents that hold copies of the state have changed."""
STATE_TIMEOUT_S = 60.0
"""Deadline of one request to a replica."""
WEIGHTS_FOLDER = "weights"
"""Folder in the run folder with the versions of the transport `disk`, by rank."""
QUICK_S = 0.1
FREQUENT = (FetchWeights, FetchState, FetchRelayed, Save, SavePiece)
"""Requests that come often, for one piece each, or are only begun (a save has its own span): slow ones get a span."""
WITHOUT_WEIGHTS = (AskStanding, PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, *FREQUENT)
"""Requests that do not need the initial weights."""
MOST_TICKETS = 64
"""A span names its tickets up to this number; the journal has those of a larger batch."""
CALLS_PER_STEP = 1 << 10
"""More than a graph has, so that the calls of all steps are in one order."""
WITH_OTHERS = 0
"""Lease order of requests that are no call: they run with any call of another rank, which may be waiting for them."""


class ModelWorker:
    """Consumes the requests of master, servers and other ranks and produces their replies. Waits for the next request
    and, within a call, for samples and for the other ranks."""

    def __init__(
        self,
        shell: Mailbox,
        state: RankState,
        *,
        framework: Framework,
        config: Config,
        tokenizer: Callable[[], Tokenizer],
        publisher: Publisher,
        bulk: BulkEndpoint,
        host: str,
        run_dir: Path,
        segments: WeightSegments | None = None,
        emit: Callable[[NoteEvent | AlertEvent], object] = lambda event: None,
        renew: Callable[[], object] = lambda: None,
        lease_guard: DeviceLeaseGuard | None = None,
        is_blank: bool = False,
        open_state: OpenState | None = None,
        snapshots: SnapshotSegments | None = None,
        delivery: CheckpointDelivery | None = None,
    ) -> None:
        """`bulk` offers and fetches states. `emit` records events, from any thread. `renew` offers the snapshots to a
        new agent. `segments` is the shared memory through which samples are relayed to other ranks of this host.
        `is_blank`: the initial weights are not loaded, because a repair is expected; they are where none comes.
        `open_state` opens the state of this process for another seat; `snapshots`: where this host keeps those of
        states."""
        self._shell = shell
        self._state = state
        self._framework = framework
        self._config = config
        self._tokenizer = tokenizer
        self._publisher = publisher
        self._emit = emit
        self._renew = renew
        self._renewed_at = 0.0
        self._lease_guard = lease_guard or DeviceLeaseGuard()
        self._is_blank = is_blank
        self._host = host
        self._pairs = HeldOutPairs(config, tokenizer=tokenizer, run_dir=run_dir)
        self._stages = {stage.name: stage for stage in stages(config)}
        self._backlog: deque[Delivery] = deque()
        self._step_calls = StepCalls()
        self._joint_answer = JointAnswer()
        self._samples = StepSamples(
            shell.submit, check=self._check, process=shell.process, segments=segments, emit=emit
        )
        self._rollouts = RolloutStore(config, tokenizer=tokenizer, run_dir=run_dir)
        self._calls = self._open_calls(state)
        self._state_fetcher = StateFetcher(bulk.client, self._ask, check=self._check)
        self._seating = self._open_seating(snapshots, open_state or self._open_nothing)
        self._bulk_server = bulk.server
        self._source = StateSource(state, bulk.server, boxes=self._seating.boxes)
        self._saver = self._open_saver(delivery)
        self._box_saver = BoxSaver(reply=shell.reply, fail=shell.fail, delivery=delivery)
        self._delivery = delivery
        self._peer_replica = PeerReplica(
            self._send_copy,
            bulk.server,
            process=shell.process,
            bytes_per_s=config.cluster.bandwidth.copies,
            emit=emit,
        )
        self._adapter = self._open_adapter()
        self._processor = Processor(self._adapter)

    def _open_seating(self, snapshots: SnapshotSegments | None, open_state: OpenState) -> RankSeating:
        return RankSeating(
            self._state,
            self._config,
            process=self._shell.process,
            segments=snapshots,
            open_state=open_state,
            fetch=self._fetch_box,
            changed=self._take_state,
        )

    def _open_saver(self, delivery: CheckpointDelivery | None) -> CheckpointSaver:
        return CheckpointSaver(
            model_files=self._model_files,
            keep=self._config.checkpoint.keep,
            reply=self._shell.reply,
            fail=self._shell.fail,
            emit=self._emit,
            delivery=delivery,
        )

    def _open_adapter(self) -> RankAdapter:
        return self._framework.open_adapter(
            self._state,
            process=self._shell.process,
            keys=self._shell.keys,
            stages=self._stages,
            load_state=self._load_state,
            forget=self._forget,
            interruption=self._interruption,
            seating=self._seating,
        )

    def _open_calls(self, state: RankState) -> TrainingCalls:
        return self._framework.open_calls(
            state,
            deterministic=self._config.deterministic,
            check=self._check,
            store=lambda call: self._rollouts.write(call, self._samples.trajectories),
        )

    def _take_state(self, state: RankState) -> None:
        """Go on with a fresh state, for another seat."""
        self._source.forget()
        self._source.forget_others()
        self._state, self._is_blank = state, True
        self._calls = self._open_calls(state)
        self._source = StateSource(state, self._bulk_server, boxes=self._seating.boxes)
        self._framework.release_memory()

    def _open_nothing(self, mesh: Mesh) -> RankState:
        raise RefusedError(f"this rank can not take a seat in mesh {mesh}")

    def serve(self) -> NoReturn:
        """Handle requests until the shell raises ShuttingDown."""
        while True:
            self.turn(IDLE_WAIT_S)

    def turn(self, idle_wait_s: float) -> None:
        """Handle the next request; those that arrived while another was being handled come first."""
        self._saver.raise_fatal()
        self._renew_snapshots()
        delivery = self._next_in_backlog() or self._shell.next_request(idle_wait_s)
        if delivery is not None and self._must_wait(delivery.body):
            self._backlog.append(delivery)
            return
        if delivery is not None:
            self._handle(delivery)
        elif self._adapter.ranks:
            self._offer_copy()  # Sent again if the other host's agent lost it, or could not keep it.

    def _next_in_backlog(self) -> Delivery | None:
        """The oldest request that can be handled now."""
        for index, delivery in enumerate(self._backlog):
            if not self._must_wait(delivery.body):
                del self._backlog[index]
                return delivery
        return None

    def _must_wait(self, body: Body) -> bool:
        """Whether a request has to wait for another call of the current step. All ranks run the calls in one order, or
        their collectives would not match. A request of an ended step or group does not wait: it is refused."""
        if isinstance(body, FetchRelayed):
            is_next = body.step == self._state.committed_step + 1 and self._adapter.is_in(body.generation)
            return is_next and self._samples.is_fetching
        if not isinstance(body, RunCall) or not self._adapter.is_in(body.generation):
            return False
        if body.step != self._state.committed_step + 1 or self._state.prepared_step is not None:
            return False
        return not all(self._step_calls.is_done(body.step, name) for name in body.after)

    def close(self) -> None:
        """End a save that is under way, leave the group and withdraw the published weights."""
        self._saver.close()
        self._box_saver.close()
        self._adapter.leave()
        self._forget()
        self._publisher.close()

    def _handle(self, delivery: Delivery) -> None:
        """Reply to a request, with its failure if it failed. A save is only begun here: it replies when it has ended.

        An `Unfit` process, or one with a bug of ours (AssertionError), then ends: a retry would fail again, and its
        state can not be trusted.
        """
        if not delivery.wants_reply:
            return
        fault: Exception | None = None
        body: Body | None = None
        try:
            with record_span(delivery.body), self._lease_guard.around(delivery.body, check=self._check):
                if isinstance(delivery.body, Save):
                    self._begin_save(delivery, delivery.body)
                elif isinstance(delivery.body, SavePiece):
                    self._begin_box(delivery, delivery.body)
                else:
                    body = self._answer(delivery.body)
        except ShuttingDown:
            raise
        except Exception as error:  # noqa: BLE001 - the failure of a request is its reply, with the cause.
            fault = as_world_error(error)
        if not isinstance(delivery.body, FREQUENT):
            self._state.note_peak()
        if gauges := self._framework.gauges():
            self._shell.report(load=0.0, gauges=gauges)
        if fault is None:
            if body is not None:
                self._shell.reply(delivery, body)
            return
        self._shell.fail(delivery, fault)
        if isinstance(fault, Unfit | AssertionError):
            raise fault
        if isinstance(fault, DeviceOutOfMemory):
            self._framework.release_memory()
        # The error's traceback references this frame. With this reference it would be a cycle, which keeps what the
        # other frames hold (the sockets and the thread of a broken collective) until the garbage collector runs.
        del fault

    def _answer(self, body: Body) -> Body:
        if self._is_blank and not isinstance(body, WITHOUT_WEIGHTS):
            self._is_blank = False
            with SPANS.around("load_model"):
                self._framework.fill_initial(self._state, self._config)
        match body:
            case RunCall():
                return self._run_call(body)
            case AskStanding():
                return self._standing()
            case StartStage():
                self._start_stage(body)
                return self._adapter.standing()
            case CommitStep():
                self._state.commit(body.step)
                self._forget()
                self._source.forget_others()
                self._seating.committed(body.step)
                self._offer_copy()
                return Ok()
            case Publish() | HashWeights() | EvaluatePairs() if self._state.gathers_layers:
                return self._take_part(body)
            case Publish():
                return self._publish(body)
            case FetchWeights():
                return self._publisher.answer(body)
            case FetchState():
                return self._source.answer(body)
            case FetchRelayed():
                return self._samples.relayed(body)
            case EvaluatePairs():
                return self._evaluate(body)
            case HashWeights():
                return WeightsHashed(self._weights_sha256())
            case RebuildGroup():
                return self._rebuild(body)
            case _ if isinstance(body, Operation):
                return self._carry_out(body)
            case _:
                raise RefusedError(f"a model worker does not answer {type(body).__name__}")

    def _carry_out(self, operation: Operation) -> RankReady:
        COUNTERS.add("recovery_operations")
        if not isinstance(operation, Repair):
            return self._processor.carry_out(operation)
        self._is_blank = self._state.is_fresh  # A repair that fails may leave anything in a fresh state.
        ready = self._processor.carry_out(operation)
        self._is_blank = self._state.is_fresh
        return ready

    def _rebuild(self, request: RebuildGroup) -> RankReady:
        ready = self._carry_out(request)
        group = self._adapter.groups(request.generation).world
        if group.size > 1:
            message = f"generation {group.group_id} of {group.size} ranks exchanges by {group.route}"
            self._emit(Note(message))
        return ready

    def _run_call(self, call: RunCall) -> CallDone:
        answer = self._step_calls.answer_to(call)
        if answer is not None:
            return answer
        self._processor.admit(call.step, goes_on=self._state.is_between_calls)
        groups = self._adapter.groups(call.generation)
        if call.stage != self._state.counters.stage:
            raise RefusedError(
                f"step {call.step} belongs to stage {call.stage!r}, this rank is in {self._state.counters.stage!r}"
            )
        part, parts = groups.data.rank, groups.data.size
        block = call.blocks[part] if call.blocks else part
        mine = shards_of_rank(call.num_shards, rank=block, world_size=parts)
        if [shard.index for shard in call.shards] != list(mine):
            raise RefusedError(
                f"rank {part} of {parts} expected shards {mine.start} to {mine.stop - 1} of "
                f"{call.num_shards}, got {[shard.index for shard in call.shards]}"
            )
        self._step_calls.begin(call)
        try:
            done = self._compute(call, groups)
        finally:
            self._step_calls.fail()  # Without effect once the call has ended well.
        return done

    def _compute(self, call: RunCall, groups: Groups) -> CallDone:
        """Fetch the samples of a call and run it; its answer is recorded for a master that asks again."""
        start = time.perf_counter()
        try:
            samples = self._samples.of_shards(
                call.shards, step=call.step, generation=call.generation, routes=call.routes
            )
        except (
            ProcessDied,
            RemoteError,
            DeadlineExceeded,
        ) as error:  # A failure of the process that holds them.
            raise GroupBroken(f"samples could not be fetched: {error}", cause=error.cause) from error
        fetch_s = time.perf_counter() - start
        self._answer_neighbours()
        with self._lease_guard.of_call(call, check=self._check):
            self._adapter.complete()
            result = self._calls.run(call, samples, groups=groups)
        done = CallDone(
            call.step,
            self._state.prepared_digest,
            result.metrics,
            {"fetch": fetch_s, **result.timing},
            result.outputs,
            self._samples.take_transfers(),
        )
        self._step_calls.end(call, done)
        if self._state.prepared_step == call.step:
            self._offer_copy()
        return done

    def _standing(self) -> RankStanding:
        """Where this rank stands, for a new master; also while a call is running."""
        queued = [delivery.body for delivery in self._backlog if isinstance(delivery.body, RunCall)]
        return self._step_calls.standing(
            self._adapter.standing(),
            group=self._adapter.group_id,
            ranks=self._adapter.ranks,
            is_normal=self._processor.is_normal,
            is_between_calls=self._state.is_between_calls,
            queued=queued,
        )

    def _answer_neighbours(self) -> None:
        """Answer the ranks of this host that wait for relayed samples, before this rank begins to compute."""
        waiting = [delivery for delivery in self._backlog if isinstance(delivery.body, FetchRelayed)]
        for delivery in waiting:
            self._backlog.remove(delivery)
            self._handle(delivery)

    def _start_stage(self, request: StartStage) -> None:
        if request.stage not in self._stages:
            known = ", ".join(self._stages)
            raise RefusedError(f"expected a stage of this run ({known}), got {request.stage!r}")
        self._state.start_stage(self._stages[request.stage], step=request.step)

    def _take_part(self, request: Joint) -> Body:
        """Answer a request for which all ranks gather weights, once for each group and step."""

        def answer() -> Body:
            match request:
                case Publish():
                    return self._publish(request)
                case EvaluatePairs():
                    return self._evaluate(request)
                case HashWeights():
                    return WeightsHashed(self._weights_sha256())

        group, step = self._adapter.group_id, self._state.committed_step
        return self._joint_answer.once(request, group=group, step=step, answer=answer)

    def _publish(self, request: Publish) -> Published:
        if request.step != self._state.committed_step:
            raise RefusedError(
                f"expected to publish the committed step {self._state.committed_step}, got {request.step}"
            )
        if self._state.gathers_layers:
            return self._publish_gathered(request)
        weights = {
            name: tensor for name, tensor in self._state.weights().items() if name not in VALUE_HEAD
        }  # Servers generate text; a value head is only saved in checkpoints.
        state, places = self._state, None
        if state.seat.mesh.model_ranks > 1:
            named = {name: shape for name, shape in state.published_shapes.items() if name not in VALUE_HEAD}
            places = list(layout_of(named, itemsize=state.dtype.itemsize))
            weights = {name: weights[name] for name in weights if state.publishes(name)}
        manifest, sources = self._publisher.publish(
            weights, request, places=places, shapes=state.weight_shapes
        )
        return Published(manifest, sources)

    def _publish_gathered(self, request: Publish) -> Published:
        """Publish weights that no rank has, or help to gather them for those that publish. A collective."""
        state, groups = self._state, self._adapter.groups(self._adapter.group_id)
        gathered = self._framework.joined_weights(state, groups)
        named = {name: shape for name, shape in state.weight_shapes.items() if name not in VALUE_HEAD}
        places = list(layout_of(named, itemsize=state.dtype.itemsize))
        index, count = request.share
        chosen = share_of([size for _, _, size in places], index=index, count=count)
        own = {places[number][0] for number in chosen} if request.transports else set()
        weights = OwnWeights(gathered, names=[name for name, _, _ in places], own=own)
        if not request.transports:
            weights.finish()
            return Published(manifest_of((), version=request.version, step=request.step), ())
        manifest, sources = self._publisher.publish(
            weights, request, places=places, shapes=state.weight_shapes
        )
        weights.finish()
        return Published(manifest, sources)

    def _weights_sha256(self) -> str:
        """Identity of the weights. Of those that are cut over ranks it is a collective, and only the first stage knows
        the result."""
        state = self._state
        if state.seat.mesh.model_ranks == 1 and not state.gathers_layers:
            return weights_sha256(state.weights())
        groups = self._adapter.groups(self._adapter.group_id)
        weights = self._framework.joined_weights(state, groups)
        if groups.stages is None:
            return weights_sha256(weights)
        return stage_weights_sha256(
            weights, shapes=state.weight_shapes, stage_of=state.part_of_weights, stages=groups.stages
        )

    def _evaluate(self, request: EvaluatePairs) -> PairsEvaluated:
        standing = self._adapter.standing()
        if request.step != standing.step or standing.half_updated or standing.prepared_step >= 0:
            raise RefusedError(f"expected to evaluate the committed step {standing.step}, got {request.step}")
        correct = self._framework.score_pairs(
            self._state,
            self._pairs.block,
            first=request.first,
            count=request.count,
            groups=self._adapter.groups(self._adapter.group_id)
            if self._state.seat.mesh.model_ranks > 1 or self._state.gathers_layers
            else None,
            check=self._check,
        )
        return PairsEvaluated(request.step, request.first, tuple(correct))

    def _begin_save(self, delivery: Delivery, request: Save) -> None:
        if self._saver.join(delivery):
            return
        if request.step != self._state.committed_step:
            raise RefusedError(
                f"expected to save the committed step {self._state.committed_step}, got {request.step}"
            )
        held = self._state.hold_committed()
        others = None
        if not held.seat.is_whole:
            others = BoxWriters(
                self._request,
                process=self._shell.process,
                seat=held.seat,
                mesh=self._state.mesh,
                num_ranks=self._config.actor.workers,
                counters=held.counters,
                check=held.hold.check,
                destination=unfinished_folder(Path(request.folder), step=held.counters.step),
                delivery=self._delivery,
            )
        self._saver.begin(delivery, request=request, held=own_tensors(held), others=others)

    def _begin_box(self, delivery: Delivery, request: SavePiece) -> None:
        if request.state.box != self._state.seat.box:
            raise RefusedError(f"this rank holds box {self._state.seat.box!r}, not {request.state.box!r}")
        held = self._state.hold(counters_of(request.state))
        self._box_saver.begin(delivery, request, own_tensors(held))

    def _model_files(self, held: HeldState, others: BoxWriters | None) -> Iterator[tuple[str, FileContent]]:
        """Files of a Hugging Face folder: the committed weights and their tokenizer."""
        origin = self._config.model.path
        shapes = self._state.weight_shapes
        if others is None:
            weights = join_all(held.weights, shapes=shapes)
        else:
            weights = stored_weights(others.folder, shapes=shapes)
        yield from folder_files(
            weights,
            config=self._state.config,
            tokenizer_folder=Path(origin) if origin is not None else None,
            dtype=held.dtype,
        )
        if origin is None:
            yield from self._tokenizer().files().items()

    def _load_state(self, step: int, source: str) -> tuple[StoredState, CopyCounters]:
        if not is_process(source):
            if self._delivery is not None:
                stored, counters = self._delivery.open(Path(source), ask=self._ask, check=self._check)
            else:
                stored, counters = load_checkpoint(
                    Path(source), on_bytes=lambda size: COUNTERS.add("bytes_loaded", size)
                )
            return stored, msgspec.convert(counters, CopyCounters)
        owner = self._shell.process if role_of(source) is Role.AGENT else ""
        return self._state_fetcher.open(step, replica=source, owner=owner, box=self._state.seat.box)

    def _fetch_box(self, step: int, process: str, owner: str, box: str) -> tuple[StoredState, CopyCounters]:
        return self._state_fetcher.open(step, replica=process, owner=owner, box=box)

    def _ask(self, process: str, body: Body) -> Reply:
        """Send a request and wait for its reply; meanwhile answer other processes, which may wait for this rank."""
        pending = self._shell.submit(process, body, deadline_s=STATE_TIMEOUT_S)
        what = type(body).__name__
        await_answer(pending, check=self._check, whom=process, what=what, timeout_s=STATE_TIMEOUT_S)
        return pending.result()

    def _offer_copy(self) -> None:
        """Send the latest state to the agent of another host, if no rank of another host has it."""
        agents = [process_id(Role.AGENT, index) for index in range(self._config.cluster.hosts)]
        if len(agents) == 1:
            return
        seat = self._state.seat
        same = [name for name in self._adapter.ranks if seat_of(name, self._state.mesh) == seat]
        agent = choose_agent(
            is_first=same[:1] in ([], [self._shell.process]),
            host=self._host,
            others=self._peers(same),
            agents=self._peers(agents),
        )
        if agent is not None:
            digest = self._state.prepared_digest
            self._peer_replica.offer(self._state.hold_latest, digest=digest, agent=agent)

    def _peers(self, processes: Sequence[str]) -> list[Peer]:
        """Entries of the address book for these processes; it has none for this process itself."""
        return [peer for name in processes if (peer := self._shell.peer(name)) is not None]

    def _send_copy(self, agent: str, body: KeepState) -> ReplyHandle:
        return self._shell.submit(agent, body, deadline_s=KEEP_TIMEOUT_S)

    def _request(self, process: str, body: Body, deadline_s: float) -> ReplyHandle:
        return self._shell.submit(process, body, deadline_s=deadline_s)

    def _forget(self) -> None:
        """Drop the data of the step that has ended."""
        self._step_calls.forget()
        self._samples.forget()
        self._calls.forget()
        self._source.forget()

    def _renew_snapshots(self) -> None:
        self._renewed_at = time.monotonic()
        self._renew()

    def _interruption(self) -> str | None:
        """Take the requests that arrived meanwhile: answer the short ones, put the others into the backlog. Return the
        reason if one of them ends the group."""
        if time.monotonic() >= self._renewed_at + IDLE_WAIT_S:
            self._renew_snapshots()
        for delivery in self._shell.take_all():
            if self._is_short(delivery.body) and not self._must_wait(delivery.body):
                self._handle(delivery)
            else:
                self._backlog.append(delivery)
        for delivery in self._backlog:
            body = delivery.body
            if isinstance(body, DeviceStop | RebuildGroup) and self._processor.interrupts(body):
                return f"{type(body).__name__} of generation {body.generation} has arrived"
        return None

    def _is_short(self, body: Body) -> bool:
        """Whether a request is answered also while a call runs. So is a call that has ended, when a new master asks
        again: it must have the answer before it sends the running call to a rank that has not received it."""
        if isinstance(body, RunCall):
            return self._step_calls.is_done(body.step, body.call)
        return isinstance(body, (PreLock, AskStanding, *FREQUENT))

    def _check(self) -> None:
        why = self._interruption()
        if why is not None:
            raise GroupBroken(f"the call was given up: {why}")


@contextmanager
def record_span(body: Body) -> Iterator[None]:
    """Record a span around the answer to a request. A call of the graph gives its own name, other requests their type;
    frequent requests are recorded only if they took longer than `QUICK_S`."""
    since = SYSTEM_CLOCK.monotonic()
    error: str | None = None
    try:
        yield
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        is_quick = SYSTEM_CLOCK.monotonic() - since < QUICK_S
        if not (isinstance(body, FREQUENT) and is_quick):
            SPANS.add(_span_name(body), {**subject(body), **_call(body), "error": error}, since=since)


def _span_name(body: Body) -> str:
    """`CommitStep` → `commit_step`."""
    if isinstance(body, RunCall):
        return body.call
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(body).__name__).lower()


def _call(body: Body) -> dict[str, object]:
    if not isinstance(body, RunCall):
        return {}
    tickets = dict.fromkeys(ticket_of(item.key) for shard in body.shards for item in shard.items)
    named = ",".join(tickets) if len(tickets) <= MOST_TICKETS else None
    return {"stage": body.stage, "generation": body.generation, "tickets": named}


class DeviceLeaseGuard:
    """Takes the device lease for the requests that need the device, where processes share one.

    Computing waits for the lease. Reading the state only keeps the state in place. Other requests need neither.
    """

    def __init__(self, lease: LeaseHandle = UNSHARED) -> None:
        self._lease = lease

    def around(self, body: Body, *, check: Callable[[], object]) -> AbstractContextManager[None]:
        """Guard a request; calls of the graph use `of_call` once their samples have arrived."""
        match body:
            case StartStage() | EvaluatePairs() | DeviceClean() | Repair() | Rollback():
                return self._lease.entered(order=WITH_OTHERS, check=check)
            case Publish() | HashWeights() | FetchState():
                return self._lease.still()
            case _:
                return nullcontext()

    def of_call(self, call: RunCall, *, check: Callable[[], object]) -> AbstractContextManager[None]:
        """Guard a call of the graph. All ranks run the calls in this order and may wait for each other within one."""
        order = call.step * CALLS_PER_STEP + len(call.after)
        return self._lease.entered(order=order, check=check)


def open_publisher(
    shell: Shell,
    bulk: BulkServer,
    framework: Framework,
    state: RankState,
    config: Config,
    *,
    segments: SegmentClient | None,
    store: str,
) -> Publisher:
    """Create the publisher of a rank's weights with every transport; `store` is where servers of a collective meet."""

    def submit(process: str, body: Body, deadline_s: float) -> ReplyHandle:
        return shell.submit(process, body, deadline_s=deadline_s)

    host, emit = shell.bootstrap.host, shell.events.emit
    return Publisher(
        process=shell.process,
        host=host,
        segments=segments,
        bulk=bulk,
        emit=emit,
        folder=RunFolder(shell.bootstrap.run_dir).published_weights_folder(shell.process).absolute(),
        device=framework.device_publisher(state, config, host=host),
        transports=(
            *framework.transports(process=shell.process, store=store, keys=shell.keys, emit=emit),
            RelayTransport(submit, process=shell.process, agent=shell.bootstrap.agent, emit=emit),
        ),
    )


def open_delivery(shell: Shell, bulk: BulkEndpoint) -> CheckpointDelivery:
    """Create what brings checkpoints to and from the run folder of another host."""
    own = shell.bootstrap
    folder = RunFolder(own.run_dir).checkpoints_folder
    return CheckpointDelivery(
        shell.call, bulk, process=own.process, agent=own.run_folder_agent, folder=folder
    )


def main(bootstrap: Bootstrap) -> int:
    """Load the model, register, and serve until the process is asked to shut down."""
    config = load_config(RunFolder(bootstrap.run_dir).config_file)
    with SPANS.around("open_device"):
        framework = open_framework(config, bootstrap)
    with ExitStack() as resources:
        keys = (bootstrap.public_key, bootstrap.secret_key)
        store = StoreServer(_interface(bootstrap.bind), keys=keys, known_as=bootstrap.known_as)
        server = resources.enter_context(closing(store))
        segments = SegmentClient(bootstrap.segments) if bootstrap.segments else None
        if segments is not None:
            resources.enter_context(closing(segments))
        with SPANS.around("open_state"):
            state = framework.open_state(config, process=bootstrap.process, segments=segments)
        # A replacement, and a rank of a resumed run, is about to be repaired from a later state.
        is_blank = state.has_snapshot or any(RunFolder(bootstrap.run_dir).checkpoints_folder.glob("step-*"))
        if not is_blank:
            with SPANS.around("load_model"):
                framework.fill_initial(state, config)
        elif state.has_snapshot and config.cluster.share_device != "offload":
            state.begin_load()  # Beside the registration, and the group of the ranks.

        def body(shell: Shell) -> None:
            server.admit(lambda key: shell.role_of_key(key) in (Role.MODEL, Role.SERVER))
            bulk = resources.enter_context(closing(open_bulk(shell)))
            publisher = open_publisher(
                shell, bulk.server, framework, state, config, segments=segments, store=server.address
            )
            policy = config.cluster.share_device
            memory = framework.device_memory(state, policy=policy)
            lease = open_lease(shell, policy=policy, device=framework.chip, memory=memory)
            opening = SYSTEM_CLOCK.monotonic()
            worker = ModelWorker(
                shell,
                state,
                framework=framework,
                config=config,
                tokenizer=lambda: plan_model(config)[1],
                publisher=publisher,
                bulk=bulk,
                host=bootstrap.host,
                run_dir=Path(bootstrap.run_dir),
                segments=segments,
                emit=shell.events.emit,
                renew=segments.renew if segments is not None else lambda: None,
                lease_guard=DeviceLeaseGuard(lease),
                is_blank=is_blank,
                open_state=lambda mesh: framework.open_state(
                    config, process=bootstrap.process, segments=segments, mesh=mesh
                ),
                snapshots=segments,
                delivery=open_delivery(shell, bulk) if bootstrap.run_folder_agent else None,
            )
            SPANS.add("open_calls", {}, since=opening)
            if state.why_private:
                shell.events.emit(Note(f"snapshots of the state end with this process: {state.why_private}"))
            with closing(worker):
                worker.serve()

        capabilities = {"device": framework.device, "chip": framework.chip}
        capabilities |= {"store": server.address, "flow": framework.flow.value}
        return run_worker(bootstrap, body, capabilities=capabilities)


def _interface(bind: str) -> str:
    """Address at which this process can be reached: `_interface("tcp://127.0.0.1:*") == "127.0.0.1"`."""
    return bind.removeprefix("tcp://").rpartition(":")[0]
