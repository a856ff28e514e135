"""Continuous batching over paged keys and values: decides who runs, in which pages; a `Runner` computes.

A request waits, then has a slot and pages and its prompt is prefilled, then its row decodes, until it ends:

    WAITING ──► PREFILLING ──► RUNNING ──► Output
       ▲             │            │
       └─────────────┴────────────┘  put back: pages ran out, or new weights want new keys and values

Nothing is lost by being put back: the tokens it has are kept, and computed again like a prompt, or in deterministic
mode fed again through the same step that first made them. A sample's tokens depend on its own tokens and noise only,
not on its slot, its neighbours, the engine or an interruption; in deterministic mode, to the bit.

Each `step` is one visit to the device: some prefill and some decode steps for every row. With `overlap` a visit is
launched before the result of the one before is read, so the device never waits for the host; that a row has ended is
then known one visit late, and what it sampled since is discarded.
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
from kintsugi.generation.pages import PagePool, num_pages_of, page_keys
from kintsugi.generation.requests import Output, Request, RequestId, Tokens
from kintsugi.generation.rows import Flight, Landed, Rows
from kintsugi.generation.runner import Chunk, Row, Runner
from kintsugi.generation.scheduler import Part, admit, must_give_way, num_steps_of_visit, plan_chunks
from kintsugi.generation.stops import TextOf, first_stop
from kintsugi.generation.validation import MAX_STOP_TOKENS, check_request
from kintsugi.types import Finish

if TYPE_CHECKING:
    from torch import Tensor

_FEW_GONE = 64
"""So many interrupted requests are not worth searching the queue for."""


class _State(Enum):
    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False)
class _Sequence:
    """A request under way."""

    request: Request
    arrival: int
    produced: Tokens
    """All that it had when it was last put into the queue."""
    known: NDArray[np.int32]
    """Prompt and `produced`."""
    prefill_length: int = 0
    """So many of its first tokens are prefilled; those after are fed by decode steps."""
    keys: Sequence[bytes] = ()
    """Of the pages that are prefilled."""
    state: _State = _State.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_filled: int = 0
    copy: tuple[int, int] | None = None
    generation: int = -1
    """Of the pages, when it was admitted."""

    def __lt__(self, other: _Sequence) -> bool:
        return self.arrival < other.arrival


class Engine:
    """Samples with one model. Not thread-safe: whoever calls `step` also submits, interrupts and loads."""

    def __init__(
        self,
        runner: Runner,
        *,
        end_token_ids: Sequence[int] = (),
        deterministic: bool,
        text_of: TextOf | None = None,
        steps_per_visit: int = 1,
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
        assert shape.chunk_size % shape.page_size == 0 and steps_per_visit > 0
        self._runner = self.runner = runner
        self._shape = shape
        self._end_token_ids = tuple(end_token_ids)
        self._deterministic = deterministic
        self._text_of = text_of
        self._steps_per_visit = steps_per_visit
        self._overlap = overlap
        self._pool = PagePool(shape.num_pages, page_size=shape.page_size)
        self.used_pages = self._pool.filled
        self._rows = Rows(shape.num_slots, max_length=shape.max_length)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._queue: list[_Sequence] = []
        """A heap by arrival; who has been interrupted since may still be in it."""
        self._prefilling: list[_Sequence] = []
        """In order of arrival."""
        self._running: dict[int, _Sequence] = {}
        self._stop_slots: set[int] = set()
        """Those of `_running` whose requests have stop texts."""
        self._last_keys: tuple[NDArray[np.int32], Sequence[bytes]] | None = None
        self._free_slots = list(reversed(range(shape.num_slots)))
        self._flight: Flight | None = None
        self._finished: list[Output] = []
        self._version = -1
        self._num_steps = 0
        self._num_arrived = 0
        self._counts = dict.fromkeys(
            ("preemptions", "prefix_hit_tokens", "prefilled_tokens", "decoded_tokens"), 0
        )
        self.last_reason = ""
        """Why the oldest waiting request waits, or why one was put back."""

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

    def submit(self, requests: Iterable[Request]) -> None:
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

    def step(self) -> list[Output]:
        """One visit; gives the requests that ended."""
        flight = self._launch()
        self._settle()
        self._flight = flight
        if not self._overlap:
            self._settle()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self, request_id: RequestId) -> Output | None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        tokens = self._tokens_of(sequence)
        if sequence.state is _State.PREFILLING:
            # Others may be waiting for what it has promised to compute.
            for other in reversed(self._prefilling[self._prefilling.index(sequence) + 1 :]):
                self._put_back(other)
        if sequence.state is not _State.WAITING:
            self._take_out([sequence])
        sequence.state = _State.GONE
        if len(self._queue) > 2 * self._num_waiting + _FEW_GONE:
            self._queue = [each for each in self._queue if each.state is _State.WAITING]
            heapify(self._queue)
        return Output(sequence.request, tokens, None)

    def produced(self, request_id: RequestId) -> Tokens | None:
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._tokens_of(sequence)

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._runner.stage(tensors)

    def load(self, version: int, tensors: Mapping[str, Tensor], *, running: Running = "keep") -> Pause | None:
        """Change the weights after the visit that is under way, whose tokens keep the old version.

        A prompt whose prefill is under way begins again in any case: nothing has been sampled from it yet.
        """
        if running == "recompute":
            self._settle()
        pause = self._runner.load(tensors)
        self._version = version
        for sequence in reversed(self._prefilling.copy()):
            self._put_back(sequence)
        if running == "recompute":
            for sequence in list(self._running.values()):
                self._put_back(sequence)
        self._pool.forget_all()
        return pause

    def _enqueue(self, sequence: _Sequence) -> None:
        """Let it wait for its turn, by its arrival, however often it had its turn before."""
        sequence.known = known = sequence.request.prompt
        if len(sequence.produced.ids) > 0:
            sequence.known = np.concatenate([known, sequence.produced.ids])
        prefilled = known if self._deterministic else sequence.known
        sequence.prefill_length = len(prefilled) - 1
        sequence.keys = self._keys_of(prefilled)
        sequence.state = _State.WAITING
        heappush(self._queue, sequence)

    def _keys_of(self, prefilled: NDArray[np.int32]) -> Sequence[bytes]:
        """Samples of one prompt come one after the other, with the same array."""
        if self._last_keys is None or self._last_keys[0] is not prefilled:
            self._last_keys = (prefilled, page_keys(prefilled[:-1], page_size=self._shape.page_size))
        return self._last_keys[1]

    def _tokens_of(self, sequence: _Sequence) -> Tokens:
        if sequence.state is _State.RUNNING:
            return self._rows.sampled(sequence.slot, start=len(sequence.request.prompt))
        return sequence.produced

    def _ends_of(self, sequence: _Sequence) -> tuple[int, ...]:
        sampling = sequence.request.sampling
        return (*(() if sampling.ignore_end else self._end_token_ids), *sampling.stop_token_ids)

    def _launch(self) -> Flight | None:
        """Everything that a visit gives to the device."""
        self._grow()
        self._admit()
        self._prefill()
        self._start()
        if not self._running:
            return None
        slots = np.sort(np.fromiter(self._running, np.int64, len(self._running)))
        num_left = self._rows.max_lengths[slots] - 1 - self._rows.positions[slots]
        slots = slots[num_left > 0]
        if len(slots) == 0:
            return None
        num_steps = num_steps_of_visit(
            steps_per_visit=self._steps_per_visit,
            num_left=int(num_left.max()),
            is_prefill_left=bool(self._prefilling),
        )
        pending = self._runner.decode(slots.tolist(), num_steps=num_steps)
        self._num_steps += num_steps
        return self._rows.launch(pending, slots=slots, num_steps=num_steps, version=self._version)

    def _grow(self) -> None:
        """Give every running row the pages that this visit may write to."""
        slots, num_more = self._pages_to_come()
        if num_more.sum() > self._pool.num_available:
            # Rows may have ended, and who is put back takes along all that it has sampled.
            self._settle()
            slots, num_more = self._pages_to_come()
        while True:
            is_needed, reason = must_give_way(
                num_needed=int(num_more.sum()),
                num_available=self._pool.num_available,
                num_admitted=self._num_admitted,
            )
            if not is_needed:
                break
            self.last_reason = reason
            self._counts["preemptions"] += 1
            self._put_back(max((*self._running.values(), *self._prefilling)))
            slots, num_more = self._pages_to_come()
        if len(slots) == 0:
            return
        tables = {}
        pages = iter(self._pool.allocate(int(num_more.sum())))
        for slot, count in zip(slots.tolist(), num_more.tolist(), strict=True):
            sequence = self._running[slot]
            sequence.pages += islice(pages, count)
            tables[slot] = sequence.pages
        self._rows.num_pages[slots] += num_more
        self._runner.set_pages(tables)

    def _pages_to_come(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots whose rows need more pages for this visit, and how many each."""
        rows = self._rows
        slots = np.fromiter(self._running, np.int64, len(self._running))
        num_written = np.minimum(rows.positions[slots] + self._steps_per_visit, rows.max_lengths[slots] - 1)
        num_more = -(-num_written // self._shape.page_size) - rows.num_pages[slots]
        needs_more = num_more > 0
        return slots[needs_more], num_more[needs_more]

    def _admit(self) -> None:
        """Give slots and pages to waiting requests, first come first served."""
        while self._queue:
            sequence = self._queue[0]
            if sequence.state is _State.GONE:
                heappop(self._queue)
                continue
            length = sequence.prefill_length
            num_ahead = min(self._steps_per_visit, sequence.request.max_length - 1 - length)
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
            sequence.generation = self._pool.generation
            sequence.slot = self._free_slots.pop()
            sequence.state = _State.PREFILLING
            self._prefilling.append(sequence)
            self._counts["prefix_hit_tokens"] += placed.num_known

    def _prefill(self) -> None:
        """The chunks of this visit, in one call."""
        shape = self._shape
        spans = plan_chunks(
            [Part(sequence.num_filled, sequence.prefill_length) for sequence in self._prefilling],
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
            chunks.append(Chunk(tokens, start, sequence.pages[:num_pages], num_known))
            self._pool.fill(sequence.pages[(start + num_known) // shape.page_size : num_pages])
            sequence.num_filled = end
            self._counts["prefilled_tokens"] += end - start
        self._runner.prefill(chunks)

    def _start(self) -> None:
        """Let rows decode whose prompts are in their pages."""
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
            self._rows.start(
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
            starting.append(Row(sequence.slot, request, sequence.prefill_length, sequence.known, ends))
            sequence.state = _State.RUNNING
            self._running[sequence.slot] = sequence
            if request.sampling.stop:
                self._stop_slots.add(sequence.slot)
        self._prefilling = [each for each in self._prefilling if each.state is _State.PREFILLING]
        self._runner.start(starting)
        self._runner.set_pages({sequence.slot: sequence.pages for sequence in ready})

    def _is_ready(self, sequence: _Sequence) -> bool:
        """Whether its prompt is in its pages, computed by itself or by one that came before it."""
        if sequence.num_filled < sequence.prefill_length or not self._pool.are_filled(sequence.pages):
            return False
        return sequence.copy is None or self._pool.are_filled(sequence.copy[:1])

    def _settle(self) -> None:
        """Read the visit that is under way, if one is, and take out what has ended in it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        landed = self._rows.land(flight, flight.pending.result())
        self._counts["decoded_tokens"] += landed.num_tokens
        finishes = self._find_stops(flight, landed)
        for column in np.flatnonzero(landed.ended).tolist():
            slot = int(flight.slots[column])
            finish = Finish.EOS if landed.stopped[column] else Finish.LENGTH
            finishes.setdefault(slot, finish)
            if landed.broken[column]:
                self._pool.spoil(self._running[slot].pages)
        ended = [self._running[slot] for slot in finishes]
        for sequence, finish in zip(ended, finishes.values(), strict=True):
            del self._sequences[sequence.request.id]
            self._finished.append(Output(sequence.request, self._tokens_of(sequence), finish))
        self._take_out(ended)

    def _find_stops(self, flight: Flight, landed: Landed) -> dict[int, Finish]:
        """Slots in which a stop text has been completed; what was sampled after it is cut off."""
        finishes = {}
        for slot in sorted(self._stop_slots):
            column = flight.column_of(slot)
            if column is None or not landed.is_live[column]:
                continue
            assert self._text_of is not None, "stop texts are refused without a tokenizer"
            request = self._running[slot].request
            known = self._rows.known(slot)[len(request.prompt) :]
            # What made a stop text complete before the logits overflowed is as good as ever.
            tokens = known[:-1] if landed.broken[column] else known
            start = int(landed.starts[column]) - len(request.prompt)
            place = first_stop(tokens, start=start, stop=request.sampling.stop, text_of=self._text_of)
            if place is None or (landed.stopped[column] and place == len(tokens) - 1):
                continue
            self._rows.lengths[slot] = len(request.prompt) + place + 1
            self._counts["decoded_tokens"] -= len(known) - place - 1
            finishes[slot] = Finish.STOP
        return finishes

    def _put_back(self, sequence: _Sequence) -> None:
        """Into the queue, with all tokens that it has."""
        sequence.produced = self._tokens_of(sequence)
        self._take_out([sequence])
        self._enqueue(sequence)

    def _take_out(self, sequences: Sequence[_Sequence]) -> None:
        """Free the slots and pages of requests that are prefilled or running."""
        slots = [sequence.slot for sequence in sequences if sequence.state is _State.RUNNING]
        if slots:
            self._runner.stop(slots)
        for sequence in sequences:
            if sequence.state is _State.RUNNING:
                self._remember(sequence)
                self._rows.stop(sequence.slot)
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

    def _remember(self, sequence: _Sequence) -> None:
        """Let a later request find the pages that decoding filled: the next turn begins with this one's tokens. Not in
        deterministic mode, where a prefill would have given other bits."""
        if self._deterministic or sequence.generation != self._pool.generation:
            return
        # The last token was never fed.
        num_full = (int(self._rows.lengths[sequence.slot]) - 1) // self._shape.page_size
        num_known = sequence.prefill_length // self._shape.page_size
        tokens = self._rows.known(sequence.slot)[: num_full * self._shape.page_size]
        keys = page_keys(tokens, page_size=self._shape.page_size, known=sequence.keys[:num_known])
        for page, key in zip(sequence.pages[num_known:num_full], keys[num_known:], strict=True):
            self._pool.enter(page, key)
