"""One model worker: a data-parallel rank that serves the master's calls and recovery's operations.

The main thread computes; while it waits for others, or between two micro-batches, it looks at what has arrived. Most
of that can wait; that the group's generation is over can not, and ends what runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from kintsugi.config import Config, stages
from kintsugi.errors import GroupBroken, RefusedError
from kintsugi.messages import (
    Body,
    CallDone,
    CommitStep,
    DeviceClean,
    DeviceStop,
    FetchState,
    FetchWeights,
    HashWeights,
    Ok,
    PreLock,
    Publish,
    Published,
    RebuildGroup,
    Repair,
    Rollback,
    RunCall,
    Save,
    Saved,
    StartStage,
    WeightsHashed,
)
from kintsugi.model import huggingface
from kintsugi.model.device import choose_device, use_deterministic_kernels
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.observe.events import Note
from kintsugi.recipe import load_config
from kintsugi.training.group import StoreServer
from kintsugi.training.interfaces import ModelCalls
from kintsugi.training.processor import RankProcessor
from kintsugi.training.replica import StateSource, fetch_state
from kintsugi.training.samples import Answer, StepSamples
from kintsugi.training.state import Counters, TrainingState
from kintsugi.transport import Blob, Delivery, Reply
from kintsugi.types import Peer
from kintsugi.weights.manifest import weights_sha256
from kintsugi.weights.publish import Publisher
from kintsugi.worker import Shell, ShuttingDown, run_worker

IDLE_WAIT_S = 5.0
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

    def submit(self, process: str, body: Body, *, deadline_s: float) -> Answer: ...

    def call(self, process: str, body: Body, *, deadline_s: float) -> Reply: ...


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
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`note` is told what the group's collectives run on."""
        self._shell = shell
        self._state = state
        self._config = config
        self._tokenizer = tokenizer
        self._publisher = publisher
        self._note = note
        self._stages = {stage.name: stage for stage in stages(config)}
        self._backlog: deque[Delivery] = deque()
        self._prepared: CallDone | None = None
        self._calls = ModelCalls(state, deterministic=config.deterministic, check=self._check)
        self._samples = StepSamples(shell.submit, check=self._check)
        self._source = StateSource(state, process=shell.process, host=host)
        self._processor = RankProcessor(
            state,
            process=shell.process,
            stages=self._stages,
            load_state=self._load_state,
            forget=self._forget,
            interruption=self._interruption,
        )

    def serve(self) -> NoReturn:
        """Until the shell raises ShuttingDown."""
        while True:
            self.turn(IDLE_WAIT_S)

    def turn(self, idle_wait_s: float) -> None:
        """Handle the next request, those first that arrived while another was being handled."""
        delivery = self._backlog.popleft() if self._backlog else self._shell.next_request(idle_wait_s)
        if delivery is not None:
            self._handle(delivery)

    @property
    def has_backlog(self) -> bool:
        """Whether requests wait that arrived while another was being handled."""
        return bool(self._backlog)

    def close(self) -> None:
        """Leave the group and withdraw what was published."""
        self._processor.leave()
        self._source.forget()
        self._publisher.close()

    def _handle(self, delivery: Delivery) -> None:
        if not delivery.wants_reply:
            return
        try:
            body, blobs = self._answer(delivery.body)
        except ShuttingDown:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a request ends in is its answer, with the cause.
            self._shell.fail(delivery, error)
        else:
            self._shell.reply(delivery, body, blobs=blobs)

    def _answer(self, body: Body) -> tuple[Body, Sequence[Blob]]:
        match body:
            case RunCall():
                return self._run_call(body), ()
            case StartStage():
                self._start_stage(body)
                return Ok(), ()
            case CommitStep():
                self._state.commit(body.step)
                self._forget()
                return Ok(), ()
            case Publish():
                return self._publish(body), ()
            case FetchWeights():
                return self._publisher.answer(body)
            case FetchState():
                return self._source.answer(body)
            case HashWeights():
                return WeightsHashed(weights_sha256(self._state.weights())), ()
            case Save():
                return self._save(body) if self._processor.rank == 0 else Ok(), ()
            case _:
                return self._recover(body), ()

    def _recover(self, body: Body) -> Body:
        """Recovery's operations; each is answered with where the rank stands afterwards."""
        match body:
            case PreLock():
                self._processor.pre_lock(body.step)
            case DeviceStop():
                self._processor.stop(body.generation)
            case DeviceClean():
                self._processor.clean()
            case RebuildGroup():
                self._rebuild(body)
            case Repair():
                self._processor.repair(body.step, body.source)
            case Rollback():
                self._processor.rollback(body.step)
            case _:
                raise RefusedError(f"a model worker does not answer {type(body).__name__}")
        return self._processor.ready()

    def _rebuild(self, request: RebuildGroup) -> None:
        self._processor.rebuild(request)
        group = self._processor.group(request.generation)
        if group.size > 1:
            self._note(f"generation {group.generation} of {group.size} ranks exchanges by {group.route}")

    def _run_call(self, call: RunCall) -> CallDone:
        if self._prepared is not None and self._state.prepared_step == call.step:
            return self._prepared
        self._processor.admit(call.step)
        group = self._processor.group(call.generation)
        if call.stage != self._state.counters.stage:
            raise RefusedError(
                f"step {call.step} belongs to stage {call.stage!r}, this rank is in {self._state.counters.stage!r}"
            )
        mine = shards_of_rank(call.num_shards, rank=group.rank, world_size=group.size)
        if [shard.index for shard in call.shards] != list(mine):
            raise RefusedError(
                f"rank {group.rank} of {group.size} expected shards {mine.start} to {mine.stop - 1} of "
                f"{call.num_shards}, got {[shard.index for shard in call.shards]}"
            )
        start = time.perf_counter()
        samples = self._samples.of_shards(call.shards)
        fetch_s = time.perf_counter() - start
        result = self._calls.run(call, samples, group=group)
        done = CallDone(
            call.step,
            self._state.digest(),
            result.metrics,
            {"fetch": fetch_s, **result.timing},
            result.outputs,
        )
        if self._state.prepared_step == call.step:
            self._prepared = done
        return done

    def _start_stage(self, request: StartStage) -> None:
        if request.stage not in self._stages:
            known = ", ".join(self._stages)
            raise RefusedError(f"expected a stage of this run ({known}), got {request.stage!r}")
        self._state.start_stage(self._stages[request.stage])

    def _publish(self, request: Publish) -> Published:
        if request.step != self._state.committed_step:
            raise RefusedError(
                f"expected to publish the committed step {self._state.committed_step}, got {request.step}"
            )
        manifest, sources = self._publisher.publish(
            self._state.weights(), version=request.version, step=request.step
        )
        return Published(manifest, sources)

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
            write_model=self._write_model,
            keep=self._config.checkpoint.keep,
        )
        return Saved(checkpoint.step, str(checkpoint.path), checkpoint.digest)

    def _write_model(self, folder: Path) -> None:
        """A Hugging Face folder of the committed weights, with the tokenizer they were trained with."""
        origin = self._config.model.path
        huggingface.save(
            self._state.weights(),
            config=self._state.model.config,
            folder=folder,
            tokenizer_folder=Path(origin) if origin is not None else None,
        )
        if origin is None:
            self._tokenizer.save(folder)

    def _load_state(self, step: int, source: str) -> tuple[Mapping[str, Tensor], Counters]:
        if self._shell.peer(source) is not None:
            return fetch_state(step, replica=source, ask=self._ask)
        tensors, counters = load_checkpoint(Path(source))
        return tensors, msgspec.convert(counters, Counters)

    def _ask(self, process: str, body: Body) -> Reply:
        return self._shell.call(process, body, deadline_s=STATE_TIMEOUT_S)

    def _forget(self) -> None:
        """Drop what belongs to the step that has ended."""
        self._prepared = None
        self._samples.forget()
        self._calls.forget()
        self._source.forget()

    def _interruption(self) -> str | None:
        """Look at what arrived meanwhile: some is answered at once, the rest waits its turn in the backlog."""
        for delivery in self._shell.take_all():
            if isinstance(delivery.body, FetchWeights | PreLock):
                self._handle(delivery)
            else:
                self._backlog.append(delivery)
        for delivery in self._backlog:
            if isinstance(delivery.body, DeviceStop | RebuildGroup):
                return f"{type(delivery.body).__name__} of generation {delivery.body.generation} has arrived"
        return None

    def _check(self) -> None:
        why = self._interruption()
        if why is not None:
            raise GroupBroken(f"the call was given up: {why}")


def load_model(config: Config, *, device: torch.device) -> Transformer:
    """The model as the run begins: read from its folder, or initialised from the run's seed; float32."""
    if config.model.path is not None:
        return huggingface.load(Path(config.model.path), dtype=torch.float32, device=device)
    model_config, _ = plan_model(config)
    model = Transformer(model_config, device=device)
    assert config.model.new is not None
    initialize(model, config.model.new.seed)
    return model


def main(bootstrap: Bootstrap) -> int:
    """Load the model, register, serve until told to end."""
    torch.set_num_threads(1)
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    device = choose_device(bootstrap.process)
    if device.type == "cuda" and config.deterministic:
        use_deterministic_kernels()
    _, tokenizer = plan_model(config)
    state = TrainingState(load_model(config, device=device), compute_dtype=getattr(torch, config.actor.dtype))
    with ExitStack() as resources:
        server = resources.enter_context(closing(StoreServer(_interface(bootstrap.bind))))
        segments = SegmentClient(bootstrap.segments) if bootstrap.segments else None
        if segments is not None:
            resources.enter_context(closing(segments))

        def body(shell: Shell) -> None:
            publisher = Publisher(process=shell.process, host=bootstrap.host, segments=segments)
            worker = ModelWorker(
                shell,
                state,
                config=config,
                tokenizer=tokenizer,
                publisher=publisher,
                host=bootstrap.host,
                note=lambda message: shell.events.emit(Note(message)),
            )
            with closing(worker):
                worker.serve()

        return run_worker(bootstrap, body, capabilities={"device": str(device), "store": server.address})


def _interface(bind: str) -> str:
    """The address that this process may be reached at: `_interface("tcp://127.0.0.1:*") == "127.0.0.1"`."""
    return bind.removeprefix("tcp://").rpartition(":")[0]
