"""One complete decode step, from the slots' tokens to their next ones, without the host.

All memory of a step is allocated once, so that the step can be captured and replayed. The host changes only small state
between steps, through `Slots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.generation.cuda.logits_processors import (
    LogitsEdits,
    is_edited,
    is_processed,
    packed_cuts,
    process_logits,
    report_top,
)
from kintsugi.generation.cuda.network import PagedNetwork
from kintsugi.generation.cuda.sampling import SamplingSummary, draw, summarize
from kintsugi.generation.cuda.slot_state import ALIVE, NUM_FIELDS, packed_rows
from kintsugi.generation.engine.runner import DecodeRow
from kintsugi.generation.engine.validation import MAX_TOP_LOGPROBS
from kintsugi.types import SamplingParams

MAX_STEPS = 64
"""Most steps of one iteration."""

Upload = Callable[[NDArray[np.generic]], Tensor]
"""Copies an array to the device, in stream order."""


class StepKind(NamedTuple):
    """Properties that determine a step's shape and kernels."""

    num_rows: int
    num_splits: int
    """Splits of the attention that the longest context needs."""
    is_processed: bool = False
    is_edited: bool = False
    has_top: bool = False


class Slots:
    """Device state of each slot, and of one more that no request uses."""

    def __init__(
        self,
        num_slots: int,
        *,
        max_length: int,
        page_size: int,
        scratch_page: int,
        vocab_size: int,
        device: torch.device,
        upload: Upload,
    ) -> None:
        self.num_slots = num_slots
        self._scratch_page = scratch_page
        self._vocab_size = vocab_size
        self._device = device
        self._upload = upload
        num_rows = num_slots + 1
        self.state = torch.zeros(num_rows, NUM_FIELDS, dtype=torch.int64, device=device)
        self.known = torch.zeros(num_rows, max_length, dtype=torch.int32, device=device)
        max_pages = -(-max_length // page_size)
        self.tables = torch.full((num_rows, max_pages), scratch_page, dtype=torch.int32, device=device)
        self.cuts = self._upload(packed_cuts([SamplingParams()])).expand(num_rows, 4).contiguous()
        self.edits: LogitsEdits | None = None
        self._samplings: dict[int, SamplingParams] = {}
        """Sampling parameters of the slots that need logits processors or top log-probabilities."""
        self._processed_slots: set[int] = set()
        """Slots with processor state that differs from the default, also after their row has ended."""
        self.limits = np.zeros(num_slots, np.int64)
        """Upper bound of the tokens in each slot's context, as far as the host knows."""

    def start(self, rows: Sequence[DecodeRow]) -> None:
        slots = np.array([row.slot for row in rows], np.int64)
        index = self._upload(slots)
        self.state.index_copy_(0, index, self._upload(packed_rows(rows)))
        self.limits[slots] = [row.start for row in rows]
        replayed = [row for row in rows if len(row.tokens) > row.start + 1]
        if replayed:
            known = np.zeros((len(replayed), max(len(row.tokens) for row in replayed)), np.int32)
            for target, row in zip(known, replayed, strict=True):
                target[: len(row.tokens)] = row.tokens
            index = self._upload(np.array([row.slot for row in replayed], np.int64))
            self.known[:, : known.shape[1]].index_copy_(0, index, self._upload(known))
        self._start_processing(rows)

    def _start_processing(self, rows: Sequence[DecodeRow]) -> None:
        for row in rows:
            sampling = row.request.sampling
            if is_processed(sampling) or sampling.top_logprobs > 0:
                self._samplings[row.slot] = sampling
        changed = [
            row for row in rows if row.slot in self._processed_slots or is_processed(row.request.sampling)
        ]
        if not changed:
            return
        self._processed_slots.difference_update(row.slot for row in changed)
        self._processed_slots.update(row.slot for row in changed if is_processed(row.request.sampling))
        index = self._upload(np.array([row.slot for row in changed], np.int64))
        self.cuts.index_copy_(0, index, self._upload(packed_cuts([row.request.sampling for row in changed])))
        if self.edits is None and any(is_edited(row.request.sampling) for row in changed):
            self.edits = LogitsEdits.none(
                self.num_slots + 1, vocab_size=self._vocab_size, device=self._device
            )
        if self.edits is not None:
            self._write_edits(self.edits, changed, index)

    def _write_edits(self, edits: LogitsEdits, rows: Sequence[DecodeRow], index: Tensor) -> None:
        """Copy only non-zero entries from the host: a row of the vocabulary is large."""
        for each in edits:
            each.index_fill_(0, index, 0)
        seen, biased, biases = [], [], []
        for row in rows:
            first, sampling = row.slot * self._vocab_size, row.request.sampling
            if sampling.repetition_penalty != 1.0:
                seen.append(first + np.unique(row.tokens).astype(np.int64))
            biased += [first + token for token, _ in sampling.logit_bias]
            biases += [bias for _, bias in sampling.logit_bias]
        if seen:
            edits.seen.view(-1).index_fill_(0, self._upload(np.concatenate(seen)), 1)
        if biased:
            places = self._upload(np.array(biased, np.int64))
            edits.biases.view(-1).index_copy_(0, places, self._upload(np.array(biases, np.float32)))

    def set_pages(self, tables: Mapping[int, Sequence[int]]) -> None:
        if not tables:
            return
        padded = np.full((len(tables), max(map(len, tables.values()))), self._scratch_page, np.int32)
        for target, pages in zip(padded, tables.values(), strict=True):
            target[: len(pages)] = pages
        index = self._upload(np.array(list(tables), np.int64))
        self.tables[:, : padded.shape[1]].index_copy_(0, index, self._upload(padded))

    def stop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._samplings.pop(slot, None)
        self.state[:, ALIVE].index_fill_(0, self._upload(np.array(slots, np.int64)), 0)

    def kind_of(self, slots: Sequence[int]) -> tuple[bool, bool, int]:
        """Whether some of these rows have logits processors, and edits, and the largest number of top log-probabilities
        they want."""
        if not self._samplings:
            return False, False, 0
        samplings = [self._samplings[slot] for slot in slots if slot in self._samplings]
        return (
            any(map(is_processed, samplings)),
            any(map(is_edited, samplings)),
            max((sampling.top_logprobs for sampling in samplings), default=0),
        )


class DecodeStep:
    """Feeds one token to each row of `rows`, a slot each, and writes the sampled tokens to the results."""

    def __init__(self, network: PagedNetwork, slots: Slots, *, max_rows: int, vocab_size: int) -> None:
        self._network = network
        self._slots = slots
        self._vocab_size = vocab_size
        device = slots.state.device
        self.rows = torch.full((max_rows,), slots.num_slots, dtype=torch.int32, device=device)
        self.cursors = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """Index of each row's next result."""
        self.results = torch.zeros(MAX_STEPS, 2, max_rows, dtype=torch.int32, device=device)
        """Tokens, and the bits of their log-probabilities."""
        self.top_results: Tensor | None = None
        """[steps, 2, rows, MAX_TOP_LOGPROBS], likewise; allocated at the first request for them."""
        self._summary = SamplingSummary.empty(max_rows, vocab_size=vocab_size, device=device)
        self._processed: tuple[Tensor, SamplingSummary] | None = None

    def prepare(self, kind: StepKind) -> None:
        """Allocate memory that only some kinds of step need."""
        device, max_rows = self.rows.device, self.rows.shape[0]
        if kind.is_processed and self._processed is None:
            processed = torch.empty(max_rows, self._vocab_size, dtype=torch.float32, device=device)
            self._processed = (
                processed,
                SamplingSummary.empty(max_rows, vocab_size=self._vocab_size, device=device),
            )
        if kind.has_top and self.top_results is None:
            num_top = min(MAX_TOP_LOGPROBS, self._vocab_size)
            shape = (MAX_STEPS, 2, max_rows, num_top)
            self.top_results = torch.zeros(shape, dtype=torch.int32, device=device)

    def run(self, kind: StepKind) -> None:
        slots = self._slots
        rows, cursors = self.rows[: kind.num_rows], self.cursors[: kind.num_rows]
        logits = self._network.decode(
            rows, state=slots.state, tables=slots.tables, num_splits=kind.num_splits
        )
        summary = self._summary.first(kind.num_rows)
        summarize(logits, slots=rows, state=slots.state, is_scaled=False, summary=summary)
        if kind.has_top:
            assert self.top_results is not None
            report_top(
                logits,
                summary,
                slots=rows,
                state=slots.state,
                cursors=cursors,
                result_tokens=self.top_results[:, 0],
                result_logprobs=self.top_results[:, 1].view(torch.float32),
            )
        draw(
            logits,
            summary,
            processed=self._process_logits(logits, rows, kind) if kind.is_processed else None,
            slots=rows,
            state=slots.state,
            known=slots.known,
            cursors=cursors,
            result_tokens=self.results[:, 0],
            result_logprobs=self.results[:, 1].view(torch.float32),
        )

    def _process_logits(self, logits: Tensor, rows: Tensor, kind: StepKind) -> tuple[Tensor, SamplingSummary]:
        assert self._processed is not None
        processed, summary = self._processed[0][: kind.num_rows], self._processed[1].first(kind.num_rows)
        state = self._slots.state
        edits = self._slots.edits if kind.is_edited else None
        process_logits(logits, slots=rows, state=state, cuts=self._slots.cuts, edits=edits, output=processed)
        summarize(processed, slots=rows, state=state, is_scaled=True, summary=summary)
        return processed, summary
