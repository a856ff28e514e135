"""Eager runner for the CPU, with torch; the fallback of `native`.

Pages outlive a row and are shared. While a row decodes, its KV cache lies in a region of its own (`kv_cache`): a row
that starts copies its pages into its region, and a row that stops copies what it has decoded to its pages. Not in
deterministic mode: these pages would not be used, because a prefill gives other bits.

In deterministic mode a row is the slot itself, and every step has the same shape: all rows, keys of the full length,
prefill always of `max_chunks` × `chunk_size` tokens. Otherwise rows are compacted, and a step takes the rows in use and
as many keys as the longest needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.generation.cpu.kv_cache import KvCacheSlots, untouched_zeros
from kintsugi.generation.cpu.network import CpuNetwork
from kintsugi.generation.cpu.slots import CpuRows
from kintsugi.generation.engine.runner import DecodedTokens, DecodeRow, PrefillChunk, RunnerDone, RunnerShape
from kintsugi.model.attention import MIN_EQUAL_BITS_ROWS, with_whole_runs
from kintsugi.model.transformer import Transformer

PAGE_SIZE = 16
_KEY_STEP = 32
"""In fast mode, the length of regions is a multiple of this."""


class CpuRunner:
    def __init__(
        self, model: Transformer, *, num_slots: int, max_length: int, num_pages: int, deterministic: bool
    ) -> None:
        """`model` must be packed."""
        config = model.config
        if max_length > config.max_positions:
            raise ModelError(
                f"expected `generation.max_length` of at most the model's `max_positions` {config.max_positions}, "
                f"got {max_length}"
            )
        self._model = model
        self._deterministic = deterministic
        chunk_size, max_chunks = _prefill_shape(max_length, deterministic=deterministic)
        self._shape = RunnerShape(
            num_slots=num_slots,
            max_length=max_length,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            chunk_size=chunk_size,
            max_chunks=max_chunks,
            vocab_size=config.vocab_size,
        )
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        num_rows = max(num_slots, MIN_EQUAL_BITS_ROWS)
        max_pages = -(-max_length // PAGE_SIZE)
        self._num_keys = max_pages * PAGE_SIZE
        self._network = CpuNetwork(model, max_length=self._num_keys)
        self._rows = CpuRows(num_rows, max_length=max_length, vocab_size=config.vocab_size)
        self._row_of = np.full(num_slots, -1, np.int64)
        self._slot_of = np.full(num_rows, -1, np.int64)
        self._tables = np.zeros((num_slots, max_pages), np.int64)
        self._num_saved = np.zeros(num_slots, np.int64)
        """Number of tokens of a slot that are in its pages."""
        self._unread: set[int] = set()
        """Slots that have yet to copy their pages into their region."""
        self._scratch_page = num_pages
        self._blank_page = num_pages + 1
        kv_size = 2 * config.num_kv_heads * config.head_dim
        self._pages = untouched_zeros(
            (num_pages + 2) * PAGE_SIZE, config.num_layers, kv_size, dtype=model.dtype
        )
        """The keys and values of a token in all layers are contiguous."""
        self._regions = KvCacheSlots(
            num_layers=config.num_layers,
            num_rows=num_rows,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_length=self._num_keys,
            dtype=model.dtype,
        )
        self._resize_regions(self._num_keys if deterministic else self._round_up(1))

    @property
    def shape(self) -> RunnerShape:
        return self._shape

    @property
    def model(self) -> Transformer:
        return self._model

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        shape = self._shape
        assert 0 < len(chunks) <= shape.max_chunks, f"{len(chunks)} chunks in one call"
        num_chunks, size, num_keys = shape.max_chunks, shape.chunk_size, self._num_keys
        if not self._deterministic:
            num_chunks, size = len(chunks), max(len(chunk.tokens) for chunk in chunks)
            num_keys = self._round_up(max(chunk.start + len(chunk.tokens) for chunk in chunks))
        tokens = np.zeros((num_chunks, size), np.int64)
        positions = np.zeros((num_chunks, size), np.int64)
        targets = np.full((num_chunks, size), self._scratch_page * PAGE_SIZE, np.int64)
        tables = np.full((num_chunks, num_keys // PAGE_SIZE), self._blank_page, np.int64)
        for index, chunk in enumerate(chunks):
            count = len(chunk.tokens)
            tokens[index, :count] = chunk.tokens
            positions[index, :count] = places = np.arange(chunk.start, chunk.start + count)
            pages = np.asarray(chunk.pages, np.int64)
            tables[index, : len(pages)] = pages
            # The mask does not help against non-finite values, and the last page may hold those of its previous owner.
            end = pages[-1] * PAGE_SIZE + places[-1] % PAGE_SIZE + 1
            self._pages[end : (pages[-1] + 1) * PAGE_SIZE].zero_()
            rows = pages[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            targets[index, chunk.num_known : count] = rows[chunk.num_known :]
        self._run_prefill(
            torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            targets=torch.from_numpy(targets).flatten(),
            tables=torch.from_numpy(tables).flatten(),
        )

    def _run_prefill(self, tokens: Tensor, *, positions: Tensor, targets: Tensor, tables: Tensor) -> None:
        num_chunks, size = tokens.shape
        group = self._num_heads // self._num_kv_heads
        num_keys = len(tables) // num_chunks * PAGE_SIZE
        is_hidden = torch.arange(num_keys) > positions.unsqueeze(-1)
        mask = torch.zeros(num_chunks, size, num_keys, dtype=self._model.dtype).masked_fill_(
            is_hidden, float("-inf")
        )
        mask = mask[:, None, :, None].expand(-1, self._num_kv_heads, -1, group, -1)
        mask = mask.reshape(num_chunks * self._num_kv_heads, size * group, num_keys)
        pages = self._pages.unflatten(0, (-1, PAGE_SIZE))

        def write(layer: int, heads: Tensor) -> None:
            new = heads.narrow(1, self._num_heads, 2 * self._num_kv_heads)
            self._pages.select(1, layer).index_copy_(0, targets, new.flatten(1))

        def attend(layer: int, heads: Tensor) -> Tensor:
            write(layer, heads)
            query = heads.narrow(1, 0, self._num_heads)
            held = pages.select(2, layer).index_select(0, tables)
            held = held.view(num_chunks, num_keys, 2, self._num_kv_heads, self._head_dim)
            keys, values = held.permute(2, 0, 3, 1, 4).flatten(1, 2)
            query = query.reshape(num_chunks, size, self._num_kv_heads, group, self._head_dim)
            query = query.permute(0, 2, 1, 3, 4).reshape(len(mask), size * group, self._head_dim)
            attended = self._attend(query, keys=keys, values=values, mask=mask)
            attended = attended.view(num_chunks, self._num_kv_heads, size, group, self._head_dim)
            return attended.permute(0, 2, 1, 3, 4).reshape(num_chunks * size, -1)

        self._network.fill(tokens.flatten(), positions=positions.flatten(), attend=attend, write=write)

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            sources, targets = torch.tensor(pairs).t()
            pages = self._pages.unflatten(0, (-1, PAGE_SIZE))
            pages.index_copy_(0, targets, pages.index_select(0, sources))

    @torch.inference_mode()
    def start(self, rows: Sequence[DecodeRow]) -> None:
        for new in rows:
            row = self._free_row(new.slot)
            self._row_of[new.slot] = row
            self._slot_of[row] = new.slot
            if self._rows.is_broken[row]:
                # Non-finite values would reach this request through the mask.
                self._regions.of_row(row).zero_()
            self._rows.start(row, new)
            self._num_saved[new.slot] = new.start
            self._unread.add(new.slot)

    def _free_row(self, slot: int) -> int:
        assert self._row_of[slot] < 0, f"slot {slot} is in use"
        return slot if self._deterministic else int(np.flatnonzero(self._slot_of < 0)[0])

    def set_pages(self, tables: Mapping[int, Sequence[int]]) -> None:
        for slot, pages in tables.items():
            self._tables[slot, : len(pages)] = pages

    @torch.inference_mode()
    def stop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            row = self._row_of[slot]
            if row >= 0:
                if not self._deterministic and slot not in self._unread:
                    self._write_pages(slot)
                self._rows.stop(row)
                self._slot_of[row] = self._row_of[slot] = -1
                self._unread.discard(slot)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], *, num_steps: int) -> RunnerDone:
        self._fit_regions(num_steps)
        for slot in self._unread:
            self._read_pages(slot)
        self._unread.clear()
        num_rows = len(self._slot_of) if self._deterministic else self._gather_rows()
        rows = self._row_of[np.asarray(slots, np.int64)]
        assert (rows >= 0).all(), "decode of a slot that has not been started"
        is_asked = np.zeros(num_rows, np.bool_)
        is_asked[rows] = True
        num_top = int(self._rows.num_top[:num_rows].max())
        decoded = DecodedTokens(
            np.empty((num_steps, len(rows)), np.int32),
            np.empty((num_steps, len(rows)), np.float32),
            np.empty((num_steps, len(rows), num_top), np.int32),
            np.empty((num_steps, len(rows), num_top), np.float32),
        )
        for step in range(num_steps):
            is_fed = is_asked & ~self._rows.has_ended[:num_rows]
            sampled = self._rows.sample(self._network.logits(self._feed(num_rows)), rows=slice(num_rows))
            tokens, logprobs = sampled.tokens.numpy(), sampled.logprobs.numpy()
            decoded.tokens[step], decoded.logprobs[step] = tokens[rows], logprobs[rows]
            if num_top:
                decoded.top_tokens[step] = sampled.top_tokens.numpy()[rows]
                decoded.top_logprobs[step] = sampled.top_logprobs.numpy()[rows]
            self._rows.advance(tokens, logprobs=logprobs, rows=slice(num_rows), is_fed=is_fed)
        return RunnerDone(decoded)

    def _feed(self, num_rows: int) -> Tensor:
        """Feed each row's token at its position through all layers. A row that has ended, or was not selected, writes
        again what it wrote before."""
        state = self._rows
        positions = torch.from_numpy(state.positions[:num_rows])
        targets = self._regions.open(positions)
        num_pairs = num_rows * self._num_kv_heads
        mask = self._regions.masks[:num_pairs]

        def attend(layer: int, heads: Tensor) -> Tensor:
            query = heads.narrow(1, 0, self._num_heads).reshape(num_pairs, -1, self._head_dim)
            new = heads.narrow(1, self._num_heads, 2 * self._num_kv_heads)
            self._regions.write(layer, targets=targets, heads=new.reshape(-1, self._head_dim))
            keys, values = self._regions.read(layer)
            attended = self._attend(query, keys=keys[:num_pairs], values=values[:num_pairs], mask=mask)
            return attended.reshape(num_rows, -1)

        return self._network.forward(
            torch.from_numpy(state.tokens[:num_rows]), positions=positions, attend=attend
        )

    def _attend(self, query: Tensor, *, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of [pairs of sequence and kv head, queries, head_dim]; the heads that share a kv head are its
        queries."""
        if query.dtype == torch.float32:
            scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=self._scale)
            return torch.bmm(torch.softmax(scores, dim=-1), values)
        # Half as fast for many short rows, but it rounds where the trainer's attention rounds: to the same bits, if
        # there are enough queries for the same kernel.
        num_queries = query.shape[1]
        if num_queries < MIN_EQUAL_BITS_ROWS:
            query = functional.pad(query, (0, 0, 0, MIN_EQUAL_BITS_ROWS - num_queries))
        num_keys = keys.shape[1]
        keys, values = with_whole_runs(keys), with_whole_runs(values)
        if keys.shape[1] > num_keys:
            mask = functional.pad(mask, (0, keys.shape[1] - num_keys), value=float("-inf"))
        attended = functional.scaled_dot_product_attention(
            query.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1), attn_mask=mask.unsqueeze(1)
        )
        return attended[:, 0, :num_queries]

    def _write_pages(self, slot: int) -> None:
        """Copy what a row has decoded from its region to its pages."""
        row = int(self._row_of[slot])
        new = np.arange(self._num_saved[slot], self._rows.positions[row] + self._rows.has_ended[row])
        if len(new) > 0:
            targets = self._tables[slot, new // PAGE_SIZE] * PAGE_SIZE + new % PAGE_SIZE
            held = self._regions.of_row(row)[:, :, :, new[0] : new[-1] + 1].permute(3, 0, 1, 2, 4)
            self._pages.index_copy_(0, torch.from_numpy(targets), held.flatten(2))

    def _read_pages(self, slot: int) -> None:
        """Copy a row's first tokens from its pages to its region."""
        length = int(self._num_saved[slot])
        num_pages = -(-length // PAGE_SIZE)
        table = torch.from_numpy(self._tables[slot, :num_pages])
        held = self._pages.unflatten(0, (-1, PAGE_SIZE)).index_select(0, table).flatten(0, 1)[:length]
        held = held.unflatten(-1, (2, self._num_kv_heads, self._head_dim))
        row = int(self._row_of[slot])
        self._regions.of_row(row)[:, :, :, :length] = held.permute(1, 2, 3, 0, 4)
        self._regions.unmask(row, length)

    def _fit_regions(self, num_steps: int) -> None:
        """Make regions long enough for the next steps, and shorter where they are far too long."""
        if self._deterministic:
            return
        longest = min(int(self._rows.positions.max()) + num_steps, self._num_keys)
        length = self._round_up(longest)
        if longest > self._regions.length or 2 * length < self._regions.length:
            self._resize_regions(length)

    def _resize_regions(self, length: int) -> None:
        self._regions.resize(length, held=torch.from_numpy(self._rows.positions))

    def _gather_rows(self) -> int:
        """Move rows so that those in use come first; return the batch size of a step. It takes few values: each has its
        own kernels, which take time to create."""
        in_use = np.flatnonzero(self._slot_of >= 0)
        num_rows = _batch_size(len(in_use), most=len(self._slot_of))
        while len(in_use) and in_use[-1] >= num_rows:
            self._move(int(in_use[-1]), to=int(np.flatnonzero(self._slot_of < 0)[0]))
            in_use = np.flatnonzero(self._slot_of >= 0)
        return num_rows

    def _move(self, source: int, *, to: int) -> None:
        length = int(self._rows.positions[source])
        if self._rows.is_broken[to]:
            self._regions.of_row(to).zero_()
        self._regions.of_row(to)[:, :, :, :length] = self._regions.of_row(source)[:, :, :, :length]
        self._regions.unmask(to, length)
        self._rows.move(source, to=to)
        self._rows.stop(source)
        slot = self._slot_of[source]
        self._slot_of[to], self._slot_of[source] = slot, -1
        self._row_of[slot] = to

    def _round_up(self, num_keys: int) -> int:
        """Round a length up; long regions grow by more, so that resizing them stays cheap."""
        step = _KEY_STEP * max(1, num_keys // (8 * _KEY_STEP))
        return min(-(-num_keys // step) * step, self._num_keys)

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._model.check_weights(tensors)
        return tensors

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._model.copy_weights(tensors)
        self._network.refresh()


def _batch_size(num_rows: int, *, most: int) -> int:
    """The smallest of few batch sizes that is at least `num_rows`."""
    if num_rows > 2:
        step = 4 if num_rows <= 16 else 8
        num_rows = -(-num_rows // step) * step
    return min(max(num_rows, 1), most)


def _prefill_shape(max_length: int, *, deterministic: bool) -> tuple[int, int]:
    """Tokens of a chunk, and chunks of a call. Where padding is computed too, both are small for short prompts;
    otherwise a call takes many, so that rows start together and decode together."""
    longest = -(-max_length // PAGE_SIZE) * PAGE_SIZE
    if not deterministic:
        return min(2 * PAGE_SIZE, longest), 16
    return min((1 if max_length <= 128 else 2 if max_length <= 1024 else 4) * PAGE_SIZE, longest), 4
