"""Cost of logical tensor slices: one rank computes all slices of a model, compared with the model as a whole.

    python benchmarks/tensor_slices.py [--model tiny|100m] [--dtype float32|bfloat16] [--slices 2 4] [--repeats 20]

A pass is the forward pass, log-probabilities and entropies of all tokens, and the backward pass. The whole model and
the sliced ones take turns; reported are medians of the processor time of this process, with one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.sliced_transformer import SlicedTransformer
from kintsugi.model.tensor_group import OneRank
from kintsugi.model.tensor_slices import cut
from kintsugi.model.transformer import Transformer, initialize

MODELS = {
    "tiny": ModelConfig(
        family="qwen2",
        vocab_size=14,
        hidden_size=96,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=24,
        max_positions=64,
        tie_embeddings=True,
        attention_bias=True,
    ),
    "100m": ModelConfig(
        family="qwen3",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=12,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        max_positions=8192,
        tie_embeddings=True,
        qk_norm=True,
    ),
}


def packed_pass(model: Transformer, *, num_tokens: int, length: int) -> Callable[[], None]:
    layout = PackedLayout.from_lengths([length] * (num_tokens // length))
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, model.config.vocab_size, (2, layout.num_tokens), generator=generator)

    def run() -> None:
        hidden = model.forward_packed(tokens, layout.positions, layout)
        logprobs, entropy = model.token_logprobs(hidden, targets)
        (logprobs.sum() + entropy.sum()).backward()
        model.zero_grad(set_to_none=False)

    return run


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    config, dtype = MODELS[arguments.model], getattr(torch, arguments.dtype)
    whole = Transformer(config, dtype=dtype)
    initialize(whole, 0)
    weights = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    models: dict[str, Transformer] = {"whole": whole}
    for count in arguments.slices:
        model = SlicedTransformer(config, group=OneRank(count), dtype=dtype)
        model.copy_weights(cut(weights, slices=range(count), count=count))
        models[f"{count} slices"] = model
    passes = {
        name: packed_pass(model, num_tokens=arguments.tokens, length=arguments.length)
        for name, model in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(arguments.repeats + 1):
        for name, run in passes.items():
            started = time.process_time()
            run()
            if number:  # The first pass allocates.
                seconds[name].append(time.process_time() - started)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    costs = {f"cost of {name}": found[name] / found["whole"] - 1 for name in found if name != "whole"}
    return {name: round(number, 4) for name, number in (found | costs).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="100m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--slices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    sys.stdout.write(json.dumps(measure(parser.parse_args()), indent=2) + "\n")


if __name__ == "__main__":
    main()
