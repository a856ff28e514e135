"""Runner for a CUDA device, with CUDA graphs.

A decode step is captured once per number of rows and length of context, on first use, and replayed: the host copies
some numbers to the device, launches several steps and reads their results later. Prefills of few tokens are captured
too, because launching them would take longer than computing them. Everything runs on one stream, so calls take effect
in their order; only new weights are copied on another stream until they are loaded.

In deterministic mode a step always has all rows and a prefill always its full shape. Otherwise a step has as many rows
as the smallest bucket that holds the selected slots.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.device_lease.memory import MappedMemory, MovedPages
from kintsugi.generation.backend import Pause
from kintsugi.generation.cuda.attention import SPLIT_LENGTH
from kintsugi.generation.cuda.decode_step import MAX_STEPS, DecodeStep, Slots, StepKind
from kintsugi.generation.cuda.network import PagedNetwork
from kintsugi.generation.cuda.prefill_inputs import PrefillShape, packed_chunks, unpacked
from kintsugi.generation.engine.runner import DecodedTokens, DecodeRow, PrefillChunk, RunnerShape
from kintsugi.model.attention import MIN_EQUAL_BITS_ROWS
from kintsugi.model.torch_internals import copy_all
from kintsugi.runtime.waits import wait

if TYPE_CHECKING:
    from kintsugi.model.transformer import Transformer

PAGE_SIZE = 16
FAST_PREFILL = (256, 64)
"""Chunk size, and the most chunks of one call: enough tokens to fill the device."""
DETERMINISTIC_PREFILL = (64, 16)
"""Likewise, but always computed in full: small, so that a short prompt does not cost much."""
PREFILL_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens of a captured call, all chunks together; beyond these, computing takes longer than launching."""
FEW_CHUNKS = 16
"""Chunks of a captured call, unless there can not be as many."""
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
DEVICE_TIMEOUT_S = 60.0
"""An iteration takes milliseconds, also on a shared device; a device that hangs ends the process after this time."""
_POLL_S = 1e-4
"""Interval of polling the device. It already has the next iteration, so it does not wait for the host meanwhile."""
_STAGED_BYTES = 64 << 20
"""Pinned memory for staging new weights."""


def row_bucket(num_rows: int, *, num_slots: int) -> int:
    """Number of rows of a step for `num_rows`: `row_bucket(5, num_slots=64) == 8`."""
    return min((bucket for bucket in ROW_BUCKETS if num_rows <= bucket < num_slots), default=num_slots)


def _rounded_up(number: int, *, multiple: int) -> int:
    return -(-number // multiple) * multiple


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: garbage may hold graphs, and freeing a graph during a capture invalidates the
    capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _wait_for(event: torch.cuda.Event, *, what: str) -> None:
    """Poll the event, because synchronising with a hung device never returns; also once after the deadline, so that a
    process that was stopped meanwhile does not take the device for hung."""
    pause = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        if not event.query():
            pause.wait(min(_POLL_S, remaining_s))
        return event.query() or None

    wait(attempt, whom="the device", what=what, timeout_s=DEVICE_TIMEOUT_S)


class _Pending:
    """Results on their way to the host."""

    def __init__(self, results: Tensor, top_results: Tensor | None, *, num_rows: int, num_top: int) -> None:
        self._results = results
        self._top_results = top_results
        self._num_rows, self._num_top = num_rows, num_top
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def result(self) -> DecodedTokens:
        _wait_for(self._arrived, what="decode steps")
        columns = slice(self._num_rows)
        tokens = self._results[:, 0].numpy()[:, columns].copy()
        logprobs = self._results[:, 1].view(torch.float32).numpy()[:, columns].copy()
        if self._top_results is None:
            top_tokens = np.empty((*tokens.shape, 0), np.int32)
            return DecodedTokens(tokens, logprobs, top_tokens, top_tokens.astype(np.float32))
        top = self._top_results[:, :, columns, : self._num_top]
        top_logprobs = top[:, 1].contiguous().view(torch.float32)
        return DecodedTokens(tokens, logprobs, top[:, 0].numpy().copy(), top_logprobs.numpy())


class CudaRunner:
    """A `runner.Runner`. `model` is packed and on the device; its weights never move.

    `uses_graphs` is off in tests that compare a replayed step with the same launches made one by one.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_slots: int,
        max_length: int,
        num_pages: int,
        deterministic: bool,
        uses_graphs: bool = True,
    ) -> None:
        chunk_size, max_chunks = DETERMINISTIC_PREFILL if deterministic else FAST_PREFILL
        self._shape = RunnerShape(
            num_slots=num_slots,
            max_length=max_length,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            chunk_size=chunk_size,
            max_chunks=max_chunks,
            vocab_size=model.config.vocab_size,
        )
        self._model = model
        self._device = model.device
        self._deterministic = deterministic
        self._uses_graphs = uses_graphs
        self._max_rows = max(num_slots, MIN_EQUAL_BITS_ROWS)
        self._stream = torch.cuda.Stream(self._device)
        self._staging_stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._running():
            self._network = PagedNetwork(
                model,
                num_pages=num_pages + 1,
                page_size=PAGE_SIZE,
                max_rows=self._max_rows,
                max_length=max_length,
            )
            self._slots = Slots(
                num_slots,
                max_length=max_length,
                page_size=PAGE_SIZE,
                scratch_page=num_pages,
                vocab_size=model.config.vocab_size,
                device=self._device,
                upload=self._upload,
            )
            self._step = DecodeStep(
                self._network, self._slots, max_rows=self._max_rows, vocab_size=model.config.vocab_size
            )
        self._parameters = {name: each.detach() for name, each in model.named_parameters()}
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._prefill_graphs: dict[PrefillShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """Each graph with the memory that it reads its inputs from."""
        self._graph_memory = torch.cuda.graph_pool_handle()
        self._rows_of_last_step: tuple[int, ...] = ()

    @property
    def shape(self) -> RunnerShape:
        return self._shape

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        """Copy through pinned memory, which torch caches and reuses after the copy."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self._device, non_blocking=True)

    def start(self, rows: Sequence[DecodeRow]) -> None:
        with self._running():
            self._slots.start(rows)

    def set_pages(self, tables: Mapping[int, Sequence[int]]) -> None:
        with self._running():
            self._slots.set_pages(tables)

    def stop(self, slots: Sequence[int]) -> None:
        with self._running():
            self._slots.stop(slots)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        with self._running():
            sources, targets = self._upload(np.array(pairs, np.int64).T)
            pages = self._network.kv_pages
            pages.index_copy_(2, targets, pages.index_select(2, sources))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        if not chunks:
            return
        max_chunks = self._shape.max_chunks
        assert len(chunks) <= max_chunks, f"{len(chunks)} chunks where {max_chunks} fit"
        shape, is_captured = self._prefill_shape_of(chunks)
        packed = packed_chunks(chunks, shape=shape, page_size=PAGE_SIZE, scratch_page=self._shape.num_pages)
        with self._running():
            captured = self._prefill_graphs.get(shape)
            if captured is not None:
                graph, numbers = captured
                numbers.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
                graph.replay()
                return
            numbers = self._upload(packed)
            launch = partial(self._network.prefill, unpacked(numbers, shape=shape))
            launch()
            if is_captured and self._uses_graphs:
                self._prefill_graphs[shape] = self._capture(launch), numbers

    def _prefill_shape_of(self, chunks: Sequence[PrefillChunk]) -> tuple[PrefillShape, bool]:
        """Padded shape of a call, and whether it is one of the captured shapes."""
        shape = self._shape
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if self._deterministic:
            num_rows, num_chunks = shape.max_chunks * shape.chunk_size, shape.max_chunks
        elif num_tokens <= PREFILL_BUCKETS[-1]:
            num_rows = min(bucket for bucket in PREFILL_BUCKETS if num_tokens <= bucket)
            num_chunks = FEW_CHUNKS if len(chunks) <= FEW_CHUNKS else shape.max_chunks
        else:
            max_pages = _rounded_up(max(len(chunk.pages) for chunk in chunks), multiple=16)
            num_rows = _rounded_up(num_tokens, multiple=64)
            return PrefillShape(num_rows, len(chunks), shape.chunk_size, max_pages), False
        max_pages = _rounded_up(self._slots.tables.shape[1], multiple=16)
        return PrefillShape(num_rows, num_chunks, min(num_rows, shape.chunk_size), max_pages), True

    def decode(self, slots: Sequence[int], *, num_steps: int) -> _Pending:
        assert 0 < num_steps <= MAX_STEPS and 0 < len(slots) <= self._shape.num_slots
        rows = tuple(slots)
        kind, num_top = self._kind_of(rows, num_steps=num_steps)
        with self._running():
            self._step.prepare(kind)
            graph = self._graph_of(kind) if self._uses_graphs else None
            self._set_rows(rows)
            self._step.cursors.zero_()
            for _ in range(num_steps):
                if graph is None:
                    self._step.run(kind)
                else:
                    graph.replay()
            top_results = None
            if num_top > 0:
                assert self._step.top_results is not None
                top_results = self._to_host(self._step.top_results[:num_steps])
            return _Pending(
                self._to_host(self._step.results[:num_steps]),
                top_results,
                num_rows=len(rows),
                num_top=num_top,
            )

    def _kind_of(self, rows: tuple[int, ...], *, num_steps: int) -> tuple[StepKind, int]:
        num_rows = self._max_rows
        if not self._deterministic:
            num_rows = row_bucket(len(rows), num_slots=self._max_rows)
        lengths = self._slots.limits
        longest = min(int(lengths[list(rows)].max()) + num_steps, self._shape.max_length)
        lengths[list(rows)] += num_steps
        num_splits = 1
        while num_splits * SPLIT_LENGTH < longest:
            num_splits *= 2
        is_processed, is_edited, num_top = self._slots.kind_of(rows)
        kind = StepKind(
            num_rows,
            min(num_splits, self._network.attention.max_splits),
            is_processed,
            is_edited,
            has_top=num_top > 0,
        )
        return kind, num_top

    def _set_rows(self, rows: tuple[int, ...]) -> None:
        if rows == self._rows_of_last_step:
            return
        padded = np.full(self._max_rows, self._shape.num_slots, np.int32)
        padded[: len(rows)] = rows
        self._step.rows.copy_(torch.from_numpy(padded).pin_memory(), non_blocking=True)
        self._rows_of_last_step = rows

    def _to_host(self, results: Tensor) -> Tensor:
        pinned = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        return pinned.copy_(results, non_blocking=True)

    def _graph_of(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        """Capture with unused slots: the launches before a capture must not advance the state of a request."""
        graph = self._graphs.get(kind)
        if graph is None:
            self._set_rows(())
            self._step.cursors.zero_()
            for _ in range(2):
                self._step.run(kind)
            graph = self._graphs[kind] = self._capture(partial(self._step.run, kind))
        return graph

    def warm_up(self) -> None:
        """Compile and load the kernels of a small prefill and of a step with all rows, before the first request: on a
        new host that takes many seconds. Nothing is changed: the tokens count as known, and the rows as unused."""
        tokens = np.zeros(2, np.int32)
        self.prefill([PrefillChunk(tokens, 0, [self._shape.num_pages], num_known=len(tokens))])
        kind = StepKind(self._max_rows, num_splits=1)
        with self._running():
            self._step.prepare(kind)
            if self._uses_graphs:
                self._graph_of(kind)
        _wait_for(self._stream.record_event(), what="its first kernels")

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a launch that has run before, so that all its kernels are compiled and loaded."""
        _wait_for(self._stream.record_event(), what="what came before a capture")
        graph = torch.cuda.CUDAGraph()
        with _uncollected():
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy weights to the device while it decodes, in the model's type, so that `load` takes only a moment.

        May be called from another thread while this one decodes. Returns when the copies are complete. Until they are
        loaded and freed, the device holds two versions.
        """
        self._model.check_weights(tensors)
        self._staging_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._staging_stream), torch.no_grad():
            staged = {name: self._staged(name, tensor) for name, tensor in tensors.items()}
        _wait_for(self._staging_stream.record_event(), what="new weights")
        return staged

    def _staged(self, name: str, tensor: Tensor) -> Tensor:
        """Copy in pieces, because pinned memory is scarce; torch reuses a piece after its copy."""
        if tensor.is_cuda:
            return tensor.to(self._parameters[name].dtype)
        target = torch.empty_like(self._parameters[name])
        per_piece = max(1, _STAGED_BYTES // tensor.element_size())
        flat, flat_target = tensor.reshape(-1), target.view(-1)
        for piece, target_piece in zip(flat.split(per_piece), flat_target.split(per_piece), strict=True):
            target_piece.copy_(piece.pin_memory(), non_blocking=True)
        return target

    def move_pages(self, used: Callable[[], list[int]]) -> MovedPages:
        """Allow the KV cache to leave the device between two turns of this process on it; call before the first graph
        is captured. `used` returns the pages that hold data."""
        assert not self._graphs and not self._prefill_graphs
        network = self._network
        shape, dtype, size = network.kv_pages.shape, network.kv_pages.dtype, network.kv_pages.nbytes
        network.kv_pages = network.kv_pages.new_empty(0)
        torch.cuda.empty_cache()
        memory = MappedMemory(size, device=self._device)
        with self._running():
            network.kv_pages = memory.tensor.view(dtype).view(shape)
            network.kv_pages.zero_()
        return MovedPages(memory, network.kv_pages, used=used, device=self._device)

    def load(self, tensors: Mapping[str, Tensor]) -> Pause:
        self._model.check_weights(tensors)
        if any(not tensor.is_cuda for tensor in tensors.values()):
            tensors = self.stage(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self._running():
            begin.record()
            copy_all([self._parameters[name] for name in tensors], list(tensors.values()))
            end.record()
            for tensor in tensors.values():
                tensor.record_stream(self._stream)

        def pause_ms() -> float:
            _wait_for(end, what="the swap of the weights")
            return begin.elapsed_time(end)

        return pause_ms
