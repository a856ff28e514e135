"""One model worker: a data-parallel rank that serves the master's calls and recovery's operations.

The main thread computes; while it waits for others, or between two micro-batches, it looks at what has arrived. Most
of that can wait; that the group's generation is over can not, and ends what runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
import torch
from torch import Tensor

from kintsugi.bootstrap import Bootstrap
from kintsugi.buffer.packing import shards_of_rank
from kintsugi.checkpoint.store import load_checkpoint, save_checkpoint
from kintsugi.cluster.segments import SegmentClient
from kintsugi.config import Config
from kintsugi.errors import (
    DeadlineExceeded,
    DeviceOutOfMemory,
    GroupBroken,
    ProcessDied,
    RefusedError,
    RemoteError,
    Unfit,
)
from kintsugi.messages import (
    Body,
    CallDone,
    CommitStep,
    EvaluatePairs,
    FetchWeights,
    HashWeights,
    Ok,
    PairsEvaluated,
    Publish,
    Published,
    RunCall,
    Save,
    Saved,
    StartStage,
    WeightsHashed,
)
from kintsugi.model import huggingface
from kintsugi.model.device import choose_device, identity, use_deterministic_kernels
from kintsugi.model.faults import as_world_error
from kintsugi.model.folder import VALUE_HEAD
from kintsugi.model.plan import plan_companions, plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.observe.events import Note
from kintsugi.operations import DeviceStop, FetchState, KeepState, PreLock, RankReady, RebuildGroup
from kintsugi.recipe import load_config
from kintsugi.recovery.processor import Operation, Processor
from kintsugi.runtime import COUNTERS
from kintsugi.stages import stages
from kintsugi.training.adapter import TorchAdapter
from kintsugi.training.buddy import KEEP_TIMEOUT_S, BuddyCopy, buddy_of
from kintsugi.training.copies import Counters
from kintsugi.training.group import StoreServer
from kintsugi.training.interfaces import ModelCalls
from kintsugi.training.origins import load_model
from kintsugi.training.pairs import HeldOutPairs, score_pairs
from kintsugi.training.publishing import open_publisher
from kintsugi.training.recording import recorded
from kintsugi.training.replica import StateSource, fetch_state
from kintsugi.training.samples import StepSamples, await_answer
from kintsugi.training.state import TrainingState
from kintsugi.training.storing import RolloutStore
from kintsugi.training.turns import DeviceTurns, open_turns
from kintsugi.transfers import FetchRelayed
from kintsugi.transport import Blob, Delivery, Reply
from kintsugi.types import Peer, Role, process_id, role_of
from kintsugi.weights.manifest import weights_sha256
from kintsugi.weights.memory import Segments
from kintsugi.weights.publish import Publisher
from kintsugi.weights.stream import Answer
from kintsugi.worker import Shell, ShuttingDown, run_worker

IDLE_WAIT_S = 1.0
"""Between two looks whether the agents that hold copies of the state are still the same, in a long call too."""
STATE_TIMEOUT_S = 60.0
"""Of one request to a replica."""


class Speaker(Protocol):
    """What the worker needs of a `worker.Shell`."""

    @property
    def process(self) -> str: ...

    def peer(self, process: str) -> Peer | None: ...

    def next_request(self, timeout_s: float) -> Delivery | None: ...

    def take_all(self) -> list[Delivery]: ...

    def reply(self, delivery: Delivery, body: Body, *, blobs: Sequence[Blob] = ()) -> None: ...

    def fail(self, delivery: Delivery, error: BaseException) -> None: ...

    def submit(
        self, process: str, body: Body, *, deadline_s: float, blobs: Sequence[Blob] = ()
    ) -> Answer: ...


class ModelWorker:
    """Consumes the requests of master, servers and replicas and produces their replies; waits only for the next
    request, and within a call for samples and for the other ranks."""

    def __init__(
        self,
        shell: Speaker,
        state: TrainingState,
        *,
        config: Config,
        tokenizer: Tokenizer,
        publisher: Publisher,
        host: str,
        run_dir: Path,
        segments: Segments | None = None,
        note: Callable[[str], None] = lambda message: None,
        renew: Callable[[], object] = lambda: None,
        turns: DeviceTurns | None = None,
    ) -> None:
        """`note` is told what the group's collectives run on; `renew` offers the snapshots to a new agent; through
        `segments` samples are passed on to other ranks of this host."""
        self._shell = shell
        self._state = state
        self._config, cluster = config, config.cluster
        self._tokenizer = tokenizer
        self._publisher = publisher
        self._note = note
        self._renew = renew
        self._renewed_at = 0.0
        self._turns = turns or DeviceTurns()
        self._host = host
        self._pairs = HeldOutPairs(config, tokenizer=tokenizer, run_dir=run_dir)
        self._stages = {stage.name: stage for stage in stages(config)}
        self._backlog: deque[Delivery] = deque()
        self._answers: dict[tuple[int, str], CallDone] = {}
        """To the calls of the current step that are done, by step and name."""
        self._samples = StepSamples(
            shell.submit, check=self._check, process=shell.process, segments=segments, note=note
        )
        rollouts = RolloutStore(run_dir, tokenizer)
        self._calls = ModelCalls(
            state,
            deterministic=config.deterministic,
            check=self._check,
            store=lambda call: rollouts.write(call, self._samples.trajectories),
        )
        self._source = StateSource(state, process=shell.process, host=host)
        self._buddy = BuddyCopy(self._send_copy, process=shell.process, bytes_per_s=cluster.bandwidth.copies)
        self._adapter = TorchAdapter(
            state,
            process=shell.process,
            stages=self._stages,
            load_state=self._load_state,
            forget=self._forget,
            interruption=self._interruption,
        )
        self._processor = Processor(self._adapter)

    def serve(self) -> NoReturn:
        """Until the shell raises ShuttingDown."""
        while True:
            self.turn(IDLE_WAIT_S)

    def turn(self, idle_wait_s: float) -> None:
        """Handle the next request, those first that arrived while another was being handled."""
        self._renew_snapshots()
        delivery = self._next_in_backlog() or self._shell.next_request(idle_wait_s)
        if delivery is not None and self._comes_early(delivery.body):
            self._backlog.append(delivery)
            return
        if delivery is not None:
            self._handle(delivery)
        elif self._adapter.ranks:
            self._offer_copy()  # What the other host's agent lost, or could not keep when it was sent.

    def _next_in_backlog(self) -> Delivery | None:
        """The oldest request that can be handled now."""
        for index, delivery in enumerate(self._backlog):
            if not self._comes_early(delivery.body):
                del self._backlog[index]
                return delivery
        return None

    def _comes_early(self, body: Body) -> bool:
        """Whether a call of the step under way has to wait for another one: all ranks work them off in one order, or
        their collectives would cross. What waits for a step or a group that is over is refused when its turn comes."""
        if isinstance(body, FetchRelayed):
            is_next = body.step == self._state.committed_step + 1 and self._adapter.is_in(body.generation)
            return is_next and self._samples.is_fetching
        if not isinstance(body, RunCall) or not self._adapter.is_in(body.generation):
            return False
        if body.step != self._state.committed_step + 1 or self._state.prepared_step is not None:
            return False
        return any((body.step, name) not in self._answers for name in body.after)

    def close(self) -> None:
        """Leave the group and withdraw what was published."""
        self._adapter.leave()
        self._forget()
        self._publisher.close()

    def _handle(self, delivery: Delivery) -> None:
        """Answer, if only with what went wrong. Who is unfit ends: another one has to go on."""
        if not delivery.wants_reply:
            return
        fault: Exception | None = None
        try:
            with recorded(delivery.body), self._turns.around(delivery.body, check=self._check):
                body, blobs = self._answer(delivery.body)
        except ShuttingDown:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a request ends in is its answer, with the cause.
            fault = as_world_error(error)
        if fault is None:
            self._shell.reply(delivery, body, blobs=blobs)
            return
        self._shell.fail(delivery, fault)
        if isinstance(fault, Unfit):
            raise fault
        if isinstance(fault, DeviceOutOfMemory):
            torch.cuda.empty_cache()
        # The error's trace holds this frame. Named here, it would keep itself until the collector comes by, and with it
        # what its other frames hold: a broken collective's sockets and thread.
        del fault

    def _answer(self, body: Body) -> tuple[Body, Sequence[Blob]]:
        match body:
            case RunCall():
                return self._run_call(body), ()
            case StartStage():
                self._start_stage(body)
                return self._adapter.standing(), ()
            case CommitStep():
                self._state.commit(body.step)
                self._forget()
                self._offer_copy()
                return Ok(), ()
            case Publish():
                return self._publish(body), ()
            case FetchWeights():
                return self._publisher.answer(body)
            case FetchState():
                return self._source.answer(body)
            case FetchRelayed():
                return self._samples.relayed(body), ()
            case EvaluatePairs():
                return self._evaluate(body), ()
            case HashWeights():
                return WeightsHashed(weights_sha256(self._state.weights())), ()
            case Save():
                return self._save(body), ()
            case RebuildGroup():
                return self._rebuild(body), ()
            case _ if isinstance(body, Operation):
                return self._carry_out(body), ()
            case _:
                raise RefusedError(f"a model worker does not answer {type(body).__name__}")

    def _carry_out(self, operation: Operation) -> RankReady:
        COUNTERS.add("recovery_operations")
        return self._processor.carry_out(operation)

    def _rebuild(self, request: RebuildGroup) -> RankReady:
        ready = self._carry_out(request)
        group = self._adapter.group(request.generation)
        if group.size > 1:
            self._note(f"generation {group.generation} of {group.size} ranks exchanges by {group.route}")
        return ready

    def _run_call(self, call: RunCall) -> CallDone:
        if (call.step, call.call) in self._answers:
            return self._answers[call.step, call.call]
        self._processor.admit(call.step, goes_on=self._state.is_between_calls)
        group = self._adapter.group(call.generation)
        if call.stage != self._state.counters.stage:
            raise RefusedError(
                f"step {call.step} belongs to stage {call.stage!r}, this rank is in {self._state.counters.stage!r}"
            )
        block = call.blocks[group.rank] if call.blocks else group.rank
        mine = shards_of_rank(call.num_shards, rank=block, world_size=group.size)
        if [shard.index for shard in call.shards] != list(mine):
            raise RefusedError(
                f"rank {group.rank} of {group.size} expected shards {mine.start} to {mine.stop - 1} of "
                f"{call.num_shards}, got {[shard.index for shard in call.shards]}"
            )
        start = time.perf_counter()
        try:
            samples = self._samples.of_shards(
                call.shards, step=call.step, generation=call.generation, routes=call.routes
            )
        except (ProcessDied, RemoteError, DeadlineExceeded) as error:  # The fault of who keeps them.
            raise GroupBroken(f"samples could not be fetched: {error}", cause=error.cause) from error
        fetch_s = time.perf_counter() - start
        self._answer_neighbours()
        with self._turns.of_call(call, check=self._check):
            result = self._calls.run(call, samples, group=group)
        done = CallDone(
            call.step,
            self._state.prepared_digest,
            result.metrics,
            {"fetch": fetch_s, **result.timing},
            result.outputs,
            self._samples.take_transfers(),
        )
        self._answers[call.step, call.call] = done
        if self._state.prepared_step == call.step:
            self._offer_copy()
        return done

    def _answer_neighbours(self) -> None:
        """Those of this host who wait for what was just fetched for them, before this rank begins to compute."""
        waiting = [delivery for delivery in self._backlog if isinstance(delivery.body, FetchRelayed)]
        for delivery in waiting:
            self._backlog.remove(delivery)
            self._handle(delivery)

    def _start_stage(self, request: StartStage) -> None:
        if request.stage not in self._stages:
            known = ", ".join(self._stages)
            raise RefusedError(f"expected a stage of this run ({known}), got {request.stage!r}")
        self._state.start_stage(self._stages[request.stage], step=request.step)

    def _publish(self, request: Publish) -> Published:
        if request.step != self._state.committed_step:
            raise RefusedError(
                f"expected to publish the committed step {self._state.committed_step}, got {request.step}"
            )
        weights = {
            name: tensor for name, tensor in self._state.weights().items() if name not in VALUE_HEAD
        }  # Servers write text; a reward model's head is only for its checkpoints.
        manifest, sources = self._publisher.publish(weights, request)
        return Published(manifest, sources)

    def _evaluate(self, request: EvaluatePairs) -> PairsEvaluated:
        standing = self._adapter.standing()
        if request.step != standing.step or standing.half_updated or standing.prepared_step >= 0:
            raise RefusedError(f"expected to evaluate the committed step {standing.step}, got {request.step}")
        correct = score_pairs(self._state.model, self._pairs.block, first=request.first, count=request.count)
        return PairsEvaluated(request.step, request.first, tuple(correct))

    def _save(self, request: Save) -> Saved:
        counters = self._state.committed_counters
        if request.step != counters.step:
            raise RefusedError(f"expected to save the committed step {counters.step}, got {request.step}")
        checkpoint = save_checkpoint(
            Path(request.folder),
            step=counters.step,
            stage=counters.stage,
            state=self._state.tensors(),
            extra=msgspec.to_builtins(counters),
            model_files=self._model_files(),
            keep=self._config.checkpoint.keep,
        )
        return Saved(checkpoint.step, str(checkpoint.path), checkpoint.digest)

    def _model_files(self) -> Iterator[tuple[str, bytes]]:
        """A Hugging Face folder of the committed weights, with the tokenizer they were trained with."""
        origin = self._config.model.path
        yield from huggingface.files(
            self._state.weights(),
            config=self._state.model.config,
            tokenizer_folder=Path(origin) if origin is not None else None,
        )
        if origin is None:
            yield from self._tokenizer.files().items()

    def _load_state(self, step: int, source: str) -> tuple[Mapping[str, Tensor], Counters]:
        if self._shell.peer(source) is None:
            tensors, counters = load_checkpoint(Path(source))
            return tensors, msgspec.convert(counters, Counters)
        owner = self._shell.process if role_of(source) is Role.AGENT else ""
        return fetch_state(step, replica=source, ask=self._ask, owner=owner)

    def _ask(self, process: str, body: Body) -> Reply:
        """Ask and wait; others are answered meanwhile, who may be waiting for this rank."""
        pending = self._shell.submit(process, body, deadline_s=STATE_TIMEOUT_S)
        what = type(body).__name__
        await_answer(pending, check=self._check, whom=process, what=what, timeout_s=STATE_TIMEOUT_S)
        return pending.result()

    def _offer_copy(self) -> None:
        """Give the latest step to another host's agent, where no rank lives that has it."""
        agents = [process_id(Role.AGENT, index) for index in range(self._config.cluster.hosts)]
        if len(agents) == 1:
            return
        buddy = buddy_of(
            rank=self._adapter.rank,
            host=self._host,
            others=self._peers(self._adapter.ranks),
            agents=self._peers(agents),
        )
        copy = self._state.latest_copy()
        if buddy is not None and copy is not None:
            self._buddy.offer(copy, buddy=buddy)

    def _peers(self, processes: Sequence[str]) -> list[Peer]:
        """As the address book has them, in which this process itself is not."""
        return [peer for name in processes if (peer := self._shell.peer(name)) is not None]

    def _send_copy(self, agent: str, body: KeepState, blobs: Sequence[Blob]) -> Answer:
        return self._shell.submit(agent, body, deadline_s=KEEP_TIMEOUT_S, blobs=blobs)

    def _forget(self) -> None:
        """Drop what belongs to the step that has ended."""
        self._answers.clear()
        self._samples.forget()
        self._calls.forget()
        self._source.forget()

    def _renew_snapshots(self) -> None:
        self._renewed_at = time.monotonic()
        self._renew()

    def _interruption(self) -> str | None:
        """Look at what arrived meanwhile: some is answered at once, the rest waits its turn in the backlog."""
        if time.monotonic() >= self._renewed_at + IDLE_WAIT_S:
            self._renew_snapshots()
        for delivery in self._shell.take_all():
            at_once = isinstance(delivery.body, FetchWeights | FetchState | PreLock | FetchRelayed)
            if at_once and not self._comes_early(delivery.body):
                self._handle(delivery)
            else:
                self._backlog.append(delivery)
        for delivery in self._backlog:
            body = delivery.body
            if isinstance(body, DeviceStop | RebuildGroup) and self._processor.interrupts(body):
                return f"{type(body).__name__} of generation {body.generation} has arrived"
        return None

    def _check(self) -> None:
        why = self._interruption()
        if why is not None:
            raise GroupBroken(f"the call was given up: {why}")


def main(bootstrap: Bootstrap) -> int:
    """Load the model, register, serve until told to end."""
    torch.set_num_threads(1)
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    device = choose_device(bootstrap.process, broken=bootstrap.broken_chips)
    if device.type == "cuda" and config.deterministic:
        use_deterministic_kernels()
    _, tokenizer = plan_model(config)
    model = load_model(config, device=device)
    with ExitStack() as resources:
        store = StoreServer(_interface(bootstrap.bind), known_as=bootstrap.known_as)
        server = resources.enter_context(closing(store))
        segments = SegmentClient(bootstrap.segments) if bootstrap.segments else None
        if segments is not None:
            resources.enter_context(closing(segments))
        state = TrainingState(
            model,
            companions=plan_companions(config),
            compute_dtype=getattr(torch, config.actor.dtype),
            process=bootstrap.process,
            segments=segments,
        )
        del model  # Of which the state may have made another.

        def body(shell: Shell) -> None:
            publisher = open_publisher(shell, device=device, segments=segments, store=server.address)
            worker = ModelWorker(
                shell,
                state,
                config=config,
                tokenizer=tokenizer,
                publisher=publisher,
                host=bootstrap.host,
                run_dir=Path(bootstrap.run_dir),
                segments=segments,
                note=lambda message: shell.events.emit(Note(message)),
                renew=segments.renew if segments is not None else lambda: None,
                turns=open_turns(shell, state, policy=config.cluster.share_device, device=device),
            )
            if state.why_private:
                shell.events.emit(Note(f"snapshots of the state end with this process: {state.why_private}"))
            with closing(worker):
                worker.serve()

        capabilities = {"device": str(device), "chip": identity(device)}
        capabilities |= {"store": server.address, "flow": TorchAdapter.flow.value}
        return run_worker(bootstrap, body, capabilities=capabilities)


def _interface(bind: str) -> str:
    """The address that this process may be reached at: `_interface("tcp://127.0.0.1:*") == "127.0.0.1"`."""
    return bind.removeprefix("tcp://").rpartition(":")[0]
