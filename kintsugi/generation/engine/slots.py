"""Host-side state of the decode slots: arrays with one entry per slot, so that reading the result of an iteration takes
a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kintsugi.generation.engine.requests import Tokens
from kintsugi.generation.engine.runner import DecodedTokens, PendingStep
from kintsugi.generation.engine.validation import MAX_STOP_TOKENS

_NO_TENANT = 0
_NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class InFlightStep:
    """Decode steps that were issued to the device and not read yet."""

    pending: PendingStep
    slots: NDArray[np.int64]
    """In ascending order."""
    tenants: NDArray[np.int64]
    """Serial numbers of the requests in these slots. Results of a request that has left its slot are ignored."""
    positions: NDArray[np.int64]
    """Position of the first token that was fed."""
    num_steps: int
    version: int

    def column_of(self, slot: int) -> int | None:
        column = int(np.searchsorted(self.slots, slot))
        return column if column < len(self.slots) and self.slots[column] == slot else None


@dataclass(frozen=True, eq=False)
class FinishedStep:
    """Result of an in-flight step, by column of its slots."""

    is_live: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    """Sampled an end token, reached the length limit, or has non-finite logits."""
    stopped: NDArray[np.bool_]
    """Ended by an end token."""
    broken: NDArray[np.bool_]
    """Ended by non-finite logits."""
    starts: NDArray[np.int64]
    """Position of the first new token."""
    num_tokens: int


class SlotTable:
    def __init__(self, num_slots: int, *, max_length: int) -> None:
        self.tenants = np.full(num_slots, _NO_TENANT, np.int64)
        self.positions = np.zeros(num_slots, np.int64)
        """Position of the token that the next launched step feeds."""
        self.max_lengths = np.zeros(num_slots, np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        """Number of tokens that the host knows."""
        self.num_pages = np.zeros(num_slots, np.int64)
        self._num_forced = np.zeros(num_slots, np.int64)
        self._ends = np.full((num_slots, MAX_STOP_TOKENS), _NO_TOKEN, np.int32)
        self._ids = np.empty((num_slots, max_length), np.int32)
        self._logprobs = np.empty((num_slots, max_length), np.float32)
        self._versions = np.empty((num_slots, max_length), np.int32)
        self._tops: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        self._num_tenants = 0

    def start(
        self,
        slot: int,
        *,
        prompt: NDArray[np.int32],
        produced: Tokens,
        position: int,
        max_length: int,
        end_token_ids: Sequence[int],
        num_pages: int,
    ) -> None:
        assert self.tenants[slot] == _NO_TENANT, f"slot {slot} is taken"
        self._num_tenants += 1
        self.tenants[slot] = self._num_tenants
        length = len(prompt) + len(produced.ids)
        self.positions[slot] = position
        self._num_forced[slot] = self.lengths[slot] = length
        self.max_lengths[slot] = max_length
        self.num_pages[slot] = num_pages
        self._ends[slot] = _NO_TOKEN
        self._ends[slot, : len(end_token_ids)] = end_token_ids
        self._ids[slot, : len(prompt)] = prompt
        known = slice(len(prompt), length)
        self._ids[slot, known] = produced.ids
        self._logprobs[slot, known] = produced.logprobs
        self._versions[slot, known] = produced.versions
        num_top = produced.top_ids.shape[1]
        if num_top > 0:
            top_ids = np.empty((max_length, num_top), np.int32)
            top_logprobs = np.empty((max_length, num_top), np.float32)
            top_ids[known] = produced.top_ids
            top_logprobs[known] = produced.top_logprobs
            self._tops[slot] = (top_ids, top_logprobs)

    def stop(self, slot: int) -> None:
        assert self.tenants[slot] != _NO_TENANT, f"slot {slot} is free"
        self.tenants[slot] = _NO_TENANT
        self._tops.pop(slot, None)

    def launch(
        self, pending: PendingStep, *, slots: NDArray[np.int64], num_steps: int, version: int
    ) -> InFlightStep:
        """Record steps that have been launched."""
        in_flight = InFlightStep(
            pending, slots, self.tenants[slots], self.positions[slots], num_steps, version
        )
        self.positions[slots] += num_steps
        return in_flight

    def finish_step(self, in_flight: InFlightStep, decoded: DecodedTokens) -> FinishedStep:
        """Store the sampled tokens of a finished step, up to the token that ends each sequence."""
        slots = in_flight.slots
        limits = self.max_lengths[slots]
        starts = np.maximum(in_flight.positions + 1, self._num_forced[slots])
        is_live = self.tenants[slots] == in_flight.tenants
        steps = np.arange(in_flight.num_steps)[:, None]
        places = in_flight.positions + 1 + steps
        is_open = (places >= starts) & is_live
        ends = self._ends[slots]
        ends = ends[:, : max(1, int((ends != _NO_TOKEN).sum(axis=1).max()))]
        is_end = (decoded.tokens[:, :, None] == ends).any(axis=2)
        is_broken = ~np.isfinite(decoded.logprobs)
        is_last = (is_end | is_broken | (places == limits - 1)) & is_open
        ended = is_last.any(axis=0)
        last_steps = np.where(ended, is_last.argmax(axis=0), in_flight.num_steps - 1)
        step, column = np.nonzero(is_open & (steps <= last_steps))
        where = (slots[column], places[step, column])
        self._ids[where] = decoded.tokens[step, column]
        self._logprobs[where] = decoded.logprobs[step, column]
        self._versions[where] = in_flight.version
        live = slots[is_live]
        last_places = (in_flight.positions + 1 + last_steps)[is_live]
        self.lengths[live] = np.maximum(self.lengths[live], last_places + 1)
        if self._tops:
            self._keep_tops(in_flight, decoded, is_live, starts)
        columns = np.arange(len(slots))
        broken = ended & is_broken[last_steps, columns]
        stopped = ended & ~broken & is_end[last_steps, columns]
        return FinishedStep(is_live, ended, stopped, broken, starts, len(step))

    def _keep_tops(
        self,
        in_flight: InFlightStep,
        decoded: DecodedTokens,
        is_live: NDArray[np.bool_],
        starts: NDArray[np.int64],
    ) -> None:
        """Store the top log-probabilities. A loop, because few requests want them."""
        for slot, (top_ids, top_logprobs) in self._tops.items():
            column = in_flight.column_of(slot)
            if column is None or not is_live[column]:
                continue
            start, end = int(starts[column]), int(self.lengths[slot])
            if start < end:
                first = start - int(in_flight.positions[column]) - 1
                steps = slice(first, first + end - start)
                num_top = top_ids.shape[1]
                top_ids[start:end] = decoded.top_tokens[steps, column, :num_top]
                top_logprobs[start:end] = decoded.top_logprobs[steps, column, :num_top]

    def known(self, slot: int) -> NDArray[np.int32]:
        """Prompt and sampled tokens; a view, not a copy."""
        return self._ids[slot, : self.lengths[slot]]

    def sampled(self, slot: int, *, start: int) -> Tokens:
        """Copies of the sampled tokens from position `start` on."""
        place = slice(start, int(self.lengths[slot]))
        if slot in self._tops:
            top_ids, top_logprobs = self._tops[slot]
            tops = (top_ids[place].copy(), top_logprobs[place].copy())
        else:
            num_tokens = place.stop - place.start
            tops = (np.empty((num_tokens, 0), np.int32), np.empty((num_tokens, 0), np.float32))
        return Tokens(
            self._ids[slot, place].copy(),
            self._logprobs[slot, place].copy(),
            self._versions[slot, place].copy(),
            *tops,
        )
