"""Compiled runner for one CPU core (`kernels.cpp`).

The KV cache stays in its pages, and a step is one call. The bits of a row depend only on its own tokens, prefilled or
decoded, alone or in a batch: there are no fixed shapes, and deterministic mode costs nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.generation.cpu.kv_cache import untouched_zeros
from kintsugi.generation.cpu.slots import CpuRows
from kintsugi.generation.engine.runner import DecodedTokens, DecodeRow, PrefillChunk, RunnerDone, RunnerShape
from kintsugi.generation.engine.sampler import processed_logits
from kintsugi.generation.native import library
from kintsugi.generation.native.library import PAGE_SIZE, HeadShape, library_of
from kintsugi.generation.native.weights import PackedWeights, Packing
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.transformer import Transformer

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_CHUNK_SIZE = 2 * PAGE_SIZE
_MAX_CHUNKS = 16
_MOST_PREFILLED = 128
"""Most tokens of one prefill call: more would not stay in the CPU cache between two products."""


def head_shape(config: ModelConfig, *, dtype: torch.dtype) -> HeadShape:
    assert dtype in NATIVE_DTYPES, f"no compiled steps in {dtype}"
    return HeadShape(
        config.head_dim, group=config.num_heads // config.num_kv_heads, is_half=dtype == torch.bfloat16
    )


class NativeRunner:
    def __init__(self, model: Transformer, *, num_slots: int, max_length: int, num_pages: int) -> None:
        """`model` gives only shapes: its memory is never touched, and so never allocated."""
        config = model.config
        if max_length > config.max_positions:
            raise ModelError(
                f"expected `generation.max_length` of at most the model's `max_positions` {config.max_positions}, "
                f"got {max_length}"
            )
        self._model = model
        self._shape = RunnerShape(
            num_slots=num_slots,
            max_length=max_length,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            chunk_size=_CHUNK_SIZE,
            max_chunks=_MAX_CHUNKS,
            vocab_size=config.vocab_size,
        )
        heads = head_shape(config, dtype=model.dtype)
        self._library = library_of(heads)
        self._packing = Packing(config, dtype=model.dtype, panel=self._library.panel, shape=heads)
        self._weights = PackedWeights()
        self._turns = self._packing.turns(max_length)
        self._rows = CpuRows(num_slots, max_length=max_length, vocab_size=config.vocab_size)
        self._scratch_page = num_pages
        self._tables = np.full((num_slots, -(-max_length // PAGE_SIZE)), self._scratch_page, np.int64)
        self._pages = untouched_zeros(
            config.num_layers,
            num_pages + 1,
            config.num_kv_heads * 2 * PAGE_SIZE * heads.size,
            dtype=model.dtype,
        )
        most_rows = (
            -(-max(num_slots, _MOST_PREFILLED) // self._library.rows_at_once) * self._library.rows_at_once
        )
        self._logits = torch.zeros(most_rows, self._packing.vocabulary)
        self._masses = np.empty(self._packing.vocabulary, np.float32)
        self._memory, self._work = self._new_work(most_rows, query_size=config.num_heads * heads.size)
        self._layers = (library.Layer * config.num_layers)()
        self._native = library.Model()

    def _new_work(self, num_rows: int, *, query_size: int) -> tuple[list[Tensor], library.Work]:
        widths = self._packing
        # Rows past the last one are computed too, and not read.
        memory = {
            "hidden": torch.zeros(num_rows, widths.hidden),
            "heads": torch.zeros(num_rows, widths.heads),
            "gate_up": torch.zeros(num_rows, 2 * widths.inner),
            "normed": torch.zeros(num_rows, widths.hidden, dtype=self._model.dtype),
            "attended": torch.zeros(num_rows, query_size, dtype=self._model.dtype),
            "activated": torch.zeros(num_rows, widths.inner, dtype=self._model.dtype),
        }
        work = library.Work(**{name: tensor.data_ptr() for name, tensor in memory.items()})
        return list(memory.values()), work

    def _describe(self, weights: PackedWeights) -> library.Model:
        config, widths = self._model.config, self._packing
        for number, layer in enumerate(self._layers):
            for name in library.LAYER_FIELDS:
                tensor = weights.get(f"{number}.{name}")
                setattr(layer, name, None if tensor is None else tensor.data_ptr())
        return library.Model(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            hidden=widths.hidden,
            inner=widths.inner,
            vocabulary=widths.vocabulary,
            heads=widths.heads,
            true_hidden=config.hidden_size,
            num_pages=self._shape.num_pages + 1,
            epsilon=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            layers=self._layers,
            turns=self._turns.data_ptr(),
            pages=self._pages.data_ptr(),
            **{name: weights[name].data_ptr() for name in ("embedding", "to_vocabulary", "last_norm")},
        )

    @property
    def shape(self) -> RunnerShape:
        return self._shape

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        assert 0 < len(chunks) <= self._shape.max_chunks, f"{len(chunks)} chunks in one call"
        tables = np.full((len(chunks), self._tables.shape[1]), self._scratch_page, np.int64)
        tokens, positions, targets = [], [], []
        for table, chunk in zip(tables, chunks, strict=True):
            places = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            table[: len(chunk.pages)] = chunk.pages
            rows = table[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            # Known positions are in pages that other requests may be reading.
            rows[: chunk.num_known] = self._scratch_page * PAGE_SIZE
            tokens.append(chunk.tokens)
            positions.append(places)
            targets.append(rows)
        of_row = np.repeat(tables, [len(each) for each in tokens], axis=0)
        fed = (
            np.concatenate(tokens).astype(np.int64),
            np.concatenate(positions),
            np.concatenate(targets),
            of_row,
        )
        # In order: later tokens of a sequence attend to earlier ones.
        for first in range(0, len(of_row), _MOST_PREFILLED):
            self._forward(*(each[first : first + _MOST_PREFILLED] for each in fed), logits=None)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            sources, targets = torch.tensor(pairs).t()
            self._pages.index_copy_(1, targets, self._pages.index_select(1, sources))

    def start(self, rows: Sequence[DecodeRow]) -> None:
        for new in rows:
            assert self._rows.has_ended[new.slot], f"slot {new.slot} is in use"
            self._rows.start(new.slot, new)

    def set_pages(self, tables: Mapping[int, Sequence[int]]) -> None:
        for slot, pages in tables.items():
            self._tables[slot, : len(pages)] = pages

    def stop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._rows.stop(slot)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], *, num_steps: int) -> RunnerDone:
        rows = np.asarray(slots, np.int64)
        num_top = int(self._rows.num_top[rows].max())
        decoded = DecodedTokens(
            np.empty((num_steps, len(rows)), np.int32),
            np.empty((num_steps, len(rows)), np.float32),
            np.empty((num_steps, len(rows), num_top), np.int32),
            np.empty((num_steps, len(rows), num_top), np.float32),
        )
        for step in range(num_steps):
            is_fed = ~self._rows.has_ended[rows]
            logits = self._feed(rows)
            tokens, logprobs, normalizers = self._draw(logits, rows)
            decoded.tokens[step], decoded.logprobs[step] = tokens, logprobs
            if num_top:
                scaled = logits / self._divisors(rows)
                top_logprobs, top_tokens = scaled.topk(num_top, dim=-1)
                decoded.top_tokens[step] = top_tokens.numpy()
                decoded.top_logprobs[step] = top_logprobs.numpy() - normalizers[:, None]
            self._rows.advance(tokens, logprobs=logprobs, rows=rows, is_fed=is_fed)
        return RunnerDone(decoded)

    def _feed(self, rows: NDArray[np.int64]) -> Tensor:
        """Feed each row's token at its position. A row that has ended writes again what it wrote before."""
        positions = self._rows.positions[rows]
        tables = self._tables[rows]
        targets = self._tables[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        self._forward(self._rows.tokens[rows], positions, targets, tables, logits=self._logits)
        return self._logits[: len(rows), : self._shape.vocab_size]

    def _draw(
        self, logits: Tensor, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Draw tokens; return them, their log-probabilities and normalizers. Rows are independent, with processors or
        without."""
        state = self._rows
        (processed_rows,) = np.nonzero(state.is_processed[rows])
        processed_index = np.full(len(rows), -1, np.int64)
        processed = None
        if len(processed_rows) > 0:
            processed_index[processed_rows] = np.arange(len(processed_rows))
            chosen = rows[processed_rows]
            processed = processed_logits(
                logits[torch.from_numpy(processed_rows)],
                logits_processors=state.logits_processors(chosen),
                divisors=self._divisors(chosen),
            )
        temperatures, keys, counters = (
            state.temperatures[rows],
            state.rng_keys[rows],
            state.positions[rows] + 1,
        )
        tokens = np.empty(len(rows), np.int64)
        logprobs, normalizers = np.empty((2, len(rows)), np.float32)
        self._library.draw(
            *(len(rows), self._shape.vocab_size, logits.stride(0)),
            logits.data_ptr(),
            None if processed is None else processed.data_ptr(),
            *(each.ctypes.data for each in (processed_index, temperatures, keys, counters, self._masses)),
            *(each.ctypes.data for each in (tokens, logprobs, normalizers)),
        )
        return tokens, logprobs, normalizers

    def _divisors(self, rows: NDArray[np.int64]) -> Tensor:
        temperatures = torch.from_numpy(self._rows.temperatures[rows])
        return temperatures.masked_fill(temperatures == 0, 1.0).unsqueeze(-1)

    def _forward(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        targets: NDArray[np.int64],
        tables: NDArray[np.int64],
        *,
        logits: Tensor | None,
    ) -> None:
        assert self._weights, "a step before the first weights"
        self._library.forward(
            ctypes.byref(self._native),
            ctypes.byref(self._work),
            len(tokens),
            *(each.ctypes.data for each in (tokens, positions, targets, tables)),
            tables.shape[1],
            None if logits is None else logits.data_ptr(),
        )

    def stage(self, tensors: Mapping[str, Tensor]) -> PackedWeights:
        """Pack weights; reads no state that steps change."""
        self._model.check_weights(tensors)
        return self._packing.packed(tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Exchange pointers to the weights and free the old version."""
        weights = tensors if isinstance(tensors, PackedWeights) else self.stage(tensors)
        self._native = self._describe(weights)
        self._weights = weights
