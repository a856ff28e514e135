"""llama.cpp (by `llama-cpp-python`) as a side of `generation.py`: many sequences in one batch, one thread."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import llama_cpp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.generation_rounds import Order, Round, answer_rounds

TOKENS_PER_BATCH = 2048


class LlamaCpp:
    """Its own loop, as its `batched` example has it: a batch holds one token of each sequence, each with a sampler."""

    def __init__(self, order: Order) -> None:
        assert order.dtype == "bfloat16", "the file's dtype"
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        llama_cpp.llama_backend_init()
        path = str(Path(order.folder) / "model.gguf").encode()
        self._model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        assert self._model, f"llama.cpp could not read {path!r}"
        self._max_length = order.max_length
        self._contexts: dict[int, llama_cpp.llama_context_p] = {}
        self._batch = llama_cpp.llama_batch_init(TOKENS_PER_BATCH, 0, 1)

    def play(self, work: Round) -> list[list[int]]:
        num_sequences = len(work.prompts)
        if num_sequences not in self._contexts:
            self._contexts[num_sequences] = self._new_context(num_sequences)
        context = self._contexts[num_sequences]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        samplers = [self._new_sampler(work, number) for number in range(num_sequences)]
        sampled = self._generate(context, samplers, work=work)
        for sampler in samplers:
            llama_cpp.llama_sampler_free(sampler)
        return sampled

    def _new_context(self, num_sequences: int) -> llama_cpp.llama_context_p:
        """Of just this many sequences, as its own tools would make one."""
        parameters = llama_cpp.llama_context_default_params()
        # A sequence's part of the cache is a multiple of 256 cells.
        parameters.n_ctx = num_sequences * (-(-self._max_length // 256) * 256)
        parameters.n_batch = TOKENS_PER_BATCH
        parameters.n_seq_max = num_sequences
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        assert context, "llama.cpp made no context"
        return context

    @staticmethod
    def _new_sampler(work: Round, number: int) -> llama_cpp.llama_sampler_p:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if work.temperature:
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(work.temperature))
            llama_cpp.llama_sampler_chain_add(
                chain, llama_cpp.llama_sampler_init_dist((work.seed * 1009 + number) % 2**32)
            )
        else:
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        return chain

    def _generate(
        self,
        context: llama_cpp.llama_context_p,
        samplers: Sequence[llama_cpp.llama_sampler_p],
        *,
        work: Round,
    ) -> list[list[int]]:
        sampled: list[list[int]] = [[] for _ in work.prompts]
        length = len(work.prompts[0])
        together = TOKENS_PER_BATCH // length
        for first in range(0, len(work.prompts), together):
            numbers = range(first, min(first + together, len(work.prompts)))
            fed = [
                (token, position, number)
                for number in numbers
                for position, token in enumerate(work.prompts[number])
            ]
            self._decode(context, fed, last=length - 1)
            for index, number in enumerate(numbers):
                place = index * length + length - 1
                sampled[number].append(llama_cpp.llama_sampler_sample(samplers[number], context, place))
        for step in range(max(work.new_tokens) - 1):
            position = length + step
            fed = [(tokens[-1], position, number) for number, tokens in enumerate(sampled)]
            self._decode(context, fed, last=position)
            for number, tokens in enumerate(sampled):
                tokens.append(llama_cpp.llama_sampler_sample(samplers[number], context, number))
        return sampled

    def _decode(
        self, context: llama_cpp.llama_context_p, fed: Sequence[tuple[int, int, int]], *, last: int
    ) -> None:
        """Feed (token, position, sequence); logits are wanted at position `last` only."""
        batch = self._batch
        batch.n_tokens = len(fed)
        for place, (token, position, sequence) in enumerate(fed):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = position == last
        code = llama_cpp.llama_decode(context, batch)
        assert code == 0, f"llama_decode answered {code}"


if __name__ == "__main__":
    answer_rounds(LlamaCpp)
