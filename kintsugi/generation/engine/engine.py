"""Continuous batching over a paged KV cache. The engine schedules; a `Runner` computes.

A request waits for a slot and KV blocks, then its prompt is prefilled, then its sequence decodes until it ends:

    WAITING ──► PREFILLING ──► RUNNING ──► Output
       ▲             │            │
       └─────────────┴────────────┘  preempted: out of KV blocks, or new weights need a new KV cache

A preempted sequence keeps its tokens. They are prefilled again like a prompt, or in deterministic mode fed again
through the decode step that first made them. The tokens of a sample depend only on its own tokens and random numbers,
not on its slot, the other sequences, the engine or an interruption; in deterministic mode this holds for every bit.

Each `step` is one iteration: some prefill chunks, then some decode steps for every running sequence. With `overlap` an
iteration is launched before the result of the previous one is read, so the device never waits for the host. The end of
a sequence is then seen one iteration late, and the tokens sampled meanwhile are discarded.

A KV block is called a page in code, as in paged attention: `block_size` means the tile of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kintsugi.errors import UserError
from kintsugi.generation.backend import Pause, Running
from kintsugi.generation.engine.kv_blocks import KvBlockPool, num_pages_of, page_keys
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, RequestId, Tokens
from kintsugi.generation.engine.runner import DecodeRow, PrefillChunk, Runner
from kintsugi.generation.engine.scheduler import (
    PrefillPart,
    admit,
    must_preempt,
    num_steps_of_iteration,
    plan_chunks,
)
from kintsugi.generation.engine.slots import FinishedStep, InFlightStep, SlotTable
from kintsugi.generation.engine.stop_strings import TextOf, first_stop
from kintsugi.generation.engine.validation import MAX_STOP_TOKENS, check_request
from kintsugi.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

_FEW_GONE = 64
"""The queue is rebuilt when it holds more interrupted requests than this."""


class _State(Enum):
    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False)
class _Sequence:
    """A request that the engine holds."""

    request: GenerationRequest
    arrival: int
    produced: Tokens
    """Tokens it had when it was last queued."""
    known: NDArray[np.int32]
    """Prompt and `produced`."""
    prefill_length: int = 0
    """Number of leading tokens that are prefilled; decode steps feed the tokens after them."""
    keys: Sequence[bytes] = ()
    """Hash keys of the prefilled KV blocks."""
    state: _State = _State.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_filled: int = 0
    copy: tuple[int, int] | None = None
    cache_serial: int = -1
    """Serial of the cache contents when the KV blocks were assigned (`KvBlockPool.cache_serial`)."""

    def __lt__(self, other: _Sequence) -> bool:
        return self.arrival < other.arrival


class Engine:
    """Samples with one model. Not thread-safe: the thread that calls `step` also submits, interrupts and loads."""

    def __init__(
        self,
        runner: Runner,
        *,
        end_token_ids: Sequence[int] = (),
        deterministic: bool,
        text_of: TextOf | None = None,
        steps_per_iteration: int = 1,
        overlap: bool = False,
    ) -> None:
        shape = runner.shape
        num_needed = num_pages_of(shape.max_length, page_size=shape.page_size)
        if shape.num_pages < num_needed:
            raise UserError(
                f"expected memory for at least one request of `generation.max_length` {shape.max_length}, "
                f"which takes {num_needed} pages, got {shape.num_pages}"
            )
        if len(end_token_ids) > MAX_STOP_TOKENS:
            raise UserError(f"expected at most {MAX_STOP_TOKENS} end tokens, got {len(end_token_ids)}")
        assert shape.chunk_size % shape.page_size == 0 and steps_per_iteration > 0
        self._runner = self.runner = runner
        self._shape = shape
        self._end_token_ids = tuple(end_token_ids)
        self._deterministic = deterministic
        self._text_of = text_of
        self._steps_per_iteration = steps_per_iteration
        self._overlap = overlap
        self._pool = KvBlockPool(shape.num_pages, page_size=shape.page_size)
        self.used_pages = self._pool.filled
        self._slots = SlotTable(shape.num_slots, max_length=shape.max_length)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._queue: list[_Sequence] = []
        """Heap by arrival; may still contain interrupted requests."""
        self._prefilling: list[_Sequence] = []
        """In order of arrival."""
        self._running: dict[int, _Sequence] = {}
        self._stop_slots: set[int] = set()
        """Running slots with stop strings."""
        self._last_keys: tuple[NDArray[np.int32], Sequence[bytes]] | None = None
        self._free_slots = list(reversed(range(shape.num_slots)))
        self._in_flight: InFlightStep | None = None
        self._finished: list[GenerationOutput] = []
        self._version = -1
        self._num_steps = 0
        self._num_arrived = 0
        self._counts = dict.fromkeys(
            ("preemptions", "prefix_hit_tokens", "prefilled_tokens", "decoded_tokens"), 0
        )
        self.last_reason = ""
        """Reason why the oldest waiting request waits, or why a sequence was preempted."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def num_requests(self) -> int:
        return len(self._sequences)

    @property
    def idle(self) -> bool:
        return not self._sequences and not self._finished

    def stats(self) -> dict[str, float]:
        return {
            "pages_free": self._pool.num_free,
            "pages_used": self._pool.num_used,
            "pages_cached": self._pool.num_cached,
            "running": self._num_admitted,
            "waiting": self._num_waiting,
            **self._counts,
        }

    @property
    def _num_admitted(self) -> int:
        return len(self._running) + len(self._prefilling)

    @property
    def _num_waiting(self) -> int:
        return len(self._sequences) - self._num_admitted

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        for request in requests:
            check_request(
                request,
                max_length=self._shape.max_length,
                vocab_size=self._shape.vocab_size,
                num_end_tokens=len(self._end_token_ids),
                reads_text=self._text_of is not None,
            )
        ids = {request.id for request in requests}
        assert len(ids) == len(requests) and self._sequences.keys().isdisjoint(ids), (
            "a request is already held"
        )
        for request in requests:
            produced = request.produced
            if produced is None:
                produced = Tokens.none(num_top=request.sampling.top_logprobs)
            sequence = _Sequence(request, self._num_arrived, produced, request.prompt)
            self._num_arrived += 1
            self._sequences[request.id] = sequence
            self._enqueue(sequence)

    def step(self) -> list[GenerationOutput]:
        """Run one iteration and return the requests that ended."""
        in_flight = self._launch()
        self._finish_in_flight()
        self._in_flight = in_flight
        if not self._overlap:
            self._finish_in_flight()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self, request_id: RequestId) -> GenerationOutput | None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        tokens = self._tokens_of(sequence)
        if sequence.state is _State.PREFILLING:
            # Later sequences may wait for prefix blocks that this one promised to compute.
            for other in reversed(self._prefilling[self._prefilling.index(sequence) + 1 :]):
                self._preempt(other)
        if sequence.state is not _State.WAITING:
            self._free([sequence])
        sequence.state = _State.GONE
        if len(self._queue) > 2 * self._num_waiting + _FEW_GONE:
            self._queue = [each for each in self._queue if each.state is _State.WAITING]
            heapify(self._queue)
        return GenerationOutput(sequence.request, tokens, None)

    def produced(self, request_id: RequestId) -> Tokens | None:
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._tokens_of(sequence)

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._runner.stage(tensors)

    def load(self, version: int, tensors: Mapping[str, Tensor], *, running: Running = "keep") -> Pause | None:
        """Change the weights after the iteration in flight; its tokens keep the old version.

        A prompt that is being prefilled starts over in any case: nothing has been sampled from it yet.
        """
        if running == "recompute":
            self._finish_in_flight()
        pause = self._runner.load(tensors)
        self._version = version
        for sequence in reversed(self._prefilling.copy()):
            self._preempt(sequence)
        if running == "recompute":
            for sequence in list(self._running.values()):
                self._preempt(sequence)
        self._pool.forget_all()
        return pause

    def _enqueue(self, sequence: _Sequence) -> None:
        """Queue a sequence by the arrival of its request; a preempted one keeps its position."""
        sequence.known = known = sequence.request.prompt
        if len(sequence.produced.ids) > 0:
            sequence.known = np.concatenate([known, sequence.produced.ids])
        prefilled = known if self._deterministic else sequence.known
        sequence.prefill_length = len(prefilled) - 1
        sequence.keys = self._keys_of(prefilled)
        sequence.state = _State.WAITING
        heappush(self._queue, sequence)

    def _keys_of(self, prefilled: NDArray[np.int32]) -> Sequence[bytes]:
        """Block keys of a prompt, cached for the other samples of the same prompt, which share the array."""
        if self._last_keys is None or self._last_keys[0] is not prefilled:
            self._last_keys = (prefilled, page_keys(prefilled[:-1], page_size=self._shape.page_size))
        return self._last_keys[1]

    def _tokens_of(self, sequence: _Sequence) -> Tokens:
        if sequence.state is _State.RUNNING:
            return self._slots.sampled(sequence.slot, start=len(sequence.request.prompt))
        return sequence.produced

    def _ends_of(self, sequence: _Sequence) -> tuple[int, ...]:
        sampling = sequence.request.sampling
        return (*(() if sampling.ignore_end else self._end_token_ids), *sampling.stop_token_ids)

    def _launch(self) -> InFlightStep | None:
        """Issue all work of one iteration to the device."""
        self._grow()
        self._admit()
        self._prefill()
        self._start()
        if not self._running:
            return None
        slots = np.sort(np.fromiter(self._running, np.int64, len(self._running)))
        num_left = self._slots.max_lengths[slots] - 1 - self._slots.positions[slots]
        slots = slots[num_left > 0]
        if len(slots) == 0:
            return None
        num_steps = num_steps_of_iteration(
            steps_per_iteration=self._steps_per_iteration,
            num_left=int(num_left.max()),
            is_prefill_left=bool(self._prefilling),
        )
        pending = self._runner.decode(slots.tolist(), num_steps=num_steps)
        self._num_steps += num_steps
        return self._slots.launch(pending, slots=slots, num_steps=num_steps, version=self._version)

    def _grow(self) -> None:
        """Allocate the KV blocks that this iteration may write to, for every running sequence."""
        slots, num_more = self._missing_pages()
        if num_more.sum() > self._pool.num_available:
            # Sequences may have ended, and a preempted one must keep all tokens that it has sampled.
            self._finish_in_flight()
            slots, num_more = self._missing_pages()
        while True:
            is_needed, reason = must_preempt(
                num_needed=int(num_more.sum()),
                num_available=self._pool.num_available,
                num_admitted=self._num_admitted,
            )
            if not is_needed:
                break
            self.last_reason = reason
            self._counts["preemptions"] += 1
            self._preempt(max((*self._running.values(), *self._prefilling)))
            slots, num_more = self._missing_pages()
        if len(slots) == 0:
            return
        tables = {}
        pages = iter(self._pool.allocate(int(num_more.sum())))
        for slot, count in zip(slots.tolist(), num_more.tolist(), strict=True):
            sequence = self._running[slot]
            sequence.pages += islice(pages, count)
            tables[slot] = sequence.pages
        self._slots.num_pages[slots] += num_more
        self._runner.set_pages(tables)

    def _missing_pages(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots that need more KV blocks for this iteration, and how many each."""
        rows = self._slots
        slots = np.fromiter(self._running, np.int64, len(self._running))
        num_written = np.minimum(
            rows.positions[slots] + self._steps_per_iteration, rows.max_lengths[slots] - 1
        )
        num_more = -(-num_written // self._shape.page_size) - rows.num_pages[slots]
        needs_more = num_more > 0
        return slots[needs_more], num_more[needs_more]

    def _admit(self) -> None:
        """Assign slots and KV blocks to waiting requests, first come first served."""
        while self._queue:
            sequence = self._queue[0]
            if sequence.state is _State.GONE:
                heappop(self._queue)
                continue
            length = sequence.prefill_length
            num_ahead = min(self._steps_per_iteration, sequence.request.max_length - 1 - length)
            found = self._pool.look_up(sequence.keys, num_tokens=length, num_ahead=num_ahead)
            decision = admit(
                num_free_slots=len(self._free_slots),
                num_needed=found.num_needed,
                num_available=self._pool.num_available,
                num_admitted=self._num_admitted,
            )
            if not decision.admitted:
                self.last_reason = decision.reason
                return
            heappop(self._queue)
            placed = self._pool.place(found, keys=sequence.keys, num_tokens=length, num_ahead=num_ahead)
            sequence.pages, sequence.num_filled, sequence.copy = placed.pages, placed.num_known, placed.copy
            sequence.cache_serial = self._pool.cache_serial
            sequence.slot = self._free_slots.pop()
            sequence.state = _State.PREFILLING
            self._prefilling.append(sequence)
            self._counts["prefix_hit_tokens"] += placed.num_known

    def _prefill(self) -> None:
        """Prefill the chunks of this iteration in one call."""
        shape = self._shape
        spans = plan_chunks(
            [PrefillPart(sequence.num_filled, sequence.prefill_length) for sequence in self._prefilling],
            chunk_size=shape.chunk_size,
            max_chunks=shape.max_chunks,
        )
        if not spans:
            return
        chunks = []
        for index, start, end, num_known in spans:
            sequence = self._prefilling[index]
            num_pages = num_pages_of(end, page_size=shape.page_size)
            tokens = sequence.known[start:end]
            chunks.append(PrefillChunk(tokens, start, sequence.pages[:num_pages], num_known))
            self._pool.fill(sequence.pages[(start + num_known) // shape.page_size : num_pages])
            sequence.num_filled = end
            self._counts["prefilled_tokens"] += end - start
        self._runner.prefill(chunks)

    def _start(self) -> None:
        """Start decoding the sequences with a complete prompt in the KV cache."""
        ready = [sequence for sequence in self._prefilling if self._is_ready(sequence)]
        if not ready:
            return
        copies = [sequence.copy for sequence in ready if sequence.copy is not None]
        if copies:
            self._runner.copy_pages(copies)
            self._pool.release([source for source, _ in copies])
        starting = []
        for sequence in ready:
            sequence.copy = None
            request = sequence.request
            ends = self._ends_of(sequence)
            self._slots.start(
                sequence.slot,
                prompt=request.prompt,
                produced=sequence.produced,
                position=sequence.prefill_length,
                max_length=request.max_length,
                end_token_ids=ends,
                num_pages=len(sequence.pages),
            )
            if request.num_produced < len(sequence.produced.ids):
                request = replace(request, produced=sequence.produced)
            starting.append(DecodeRow(sequence.slot, request, sequence.prefill_length, sequence.known, ends))
            sequence.state = _State.RUNNING
            self._running[sequence.slot] = sequence
            if request.sampling.stop:
                self._stop_slots.add(sequence.slot)
        self._prefilling = [each for each in self._prefilling if each.state is _State.PREFILLING]
        self._runner.start(starting)
        self._runner.set_pages({sequence.slot: sequence.pages for sequence in ready})

    def _is_ready(self, sequence: _Sequence) -> bool:
        """Whether the prompt is in the KV cache, computed by this sequence or by an earlier one with the same
        prefix."""
        if sequence.num_filled < sequence.prefill_length or not self._pool.are_filled(sequence.pages):
            return False
        return sequence.copy is None or self._pool.are_filled(sequence.copy[:1])

    def _finish_in_flight(self) -> None:
        """Read the result of the iteration in flight, if there is one, and remove the sequences that ended in it."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        finished_step = self._slots.finish_step(in_flight, in_flight.pending.result())
        self._counts["decoded_tokens"] += finished_step.num_tokens
        finishes = self._find_stops(in_flight, finished_step)
        for column in np.flatnonzero(finished_step.ended).tolist():
            slot = int(in_flight.slots[column])
            finish = FinishReason.EOS if finished_step.stopped[column] else FinishReason.LENGTH
            finishes.setdefault(slot, finish)
            if finished_step.broken[column]:
                self._pool.spoil(self._running[slot].pages)
        ended = [self._running[slot] for slot in finishes]
        for sequence, finish in zip(ended, finishes.values(), strict=True):
            del self._sequences[sequence.request.id]
            self._finished.append(GenerationOutput(sequence.request, self._tokens_of(sequence), finish))
        self._free(ended)

    def _find_stops(self, in_flight: InFlightStep, finished_step: FinishedStep) -> dict[int, FinishReason]:
        """Slots in which a stop string is complete; tokens sampled after it are cut off."""
        finishes = {}
        for slot in sorted(self._stop_slots):
            column = in_flight.column_of(slot)
            if column is None or not finished_step.is_live[column]:
                continue
            assert self._text_of is not None, "stop texts are refused without a tokenizer"
            request = self._running[slot].request
            known = self._slots.known(slot)[len(request.prompt) :]
            # A stop string that was complete before the logits overflowed is valid.
            tokens = known[:-1] if finished_step.broken[column] else known
            start = int(finished_step.starts[column]) - len(request.prompt)
            place = first_stop(tokens, start=start, stop=request.sampling.stop, text_of=self._text_of)
            if place is None or (finished_step.stopped[column] and place == len(tokens) - 1):
                continue
            self._slots.lengths[slot] = len(request.prompt) + place + 1
            self._counts["decoded_tokens"] -= len(known) - place - 1
            finishes[slot] = FinishReason.STOP
        return finishes

    def _preempt(self, sequence: _Sequence) -> None:
        """Return a sequence to the queue with all its tokens."""
        sequence.produced = self._tokens_of(sequence)
        self._free([sequence])
        self._enqueue(sequence)

    def _free(self, sequences: Sequence[_Sequence]) -> None:
        """Free the slots and KV blocks of sequences that are prefilling or running."""
        slots = [sequence.slot for sequence in sequences if sequence.state is _State.RUNNING]
        if slots:
            self._runner.stop(slots)
        for sequence in sequences:
            if sequence.state is _State.RUNNING:
                self._cache_filled_pages(sequence)
                self._slots.stop(sequence.slot)
                self._stop_slots.discard(sequence.slot)
                del self._running[sequence.slot]
            else:
                self._prefilling.remove(sequence)
            if sequence.copy is not None:
                self._pool.release(sequence.copy[:1])
                sequence.copy = None
            self._pool.release(sequence.pages)
            self._free_slots.append(sequence.slot)
            sequence.pages = []
            sequence.slot = -1

    def _cache_filled_pages(self, sequence: _Sequence) -> None:
        """Add the blocks that decoding filled to the prefix cache: the next turn of a conversation begins with these
        tokens. Not in deterministic mode, where a prefill would compute different bits."""
        if self._deterministic or sequence.cache_serial != self._pool.cache_serial:
            return
        # The last token was never fed.
        num_full = (int(self._slots.lengths[sequence.slot]) - 1) // self._shape.page_size
        num_known = sequence.prefill_length // self._shape.page_size
        tokens = self._slots.known(sequence.slot)[: num_full * self._shape.page_size]
        keys = page_keys(tokens, page_size=self._shape.page_size, known=sequence.keys[:num_known])
        for page, key in zip(sequence.pages[num_known:num_full], keys[num_known:], strict=True):
            self._pool.enter(page, key)
