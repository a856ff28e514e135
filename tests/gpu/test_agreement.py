"""What the sampler says of its tokens is what the trainer says of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.generation.engine.rng import stream_key
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.logprobs import token_logprobs
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.types import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CudaRunner = pytest.importorskip("kintsugi.generation.cuda.runner", reason="needs Triton").CudaRunner

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=4000,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=256,
    qk_norm=True,
)
TEMPERATURE = 0.9


def sampled(model: Transformer) -> tuple[list[np.ndarray], list[int], np.ndarray]:
    """Whole sequences, their prompts' lengths, and the sampler's log-probabilities of what it sampled."""
    random = np.random.default_rng(0)
    runner = CudaRunner(model, num_slots=32, max_length=160, num_pages=320, deterministic=False)
    engine = Engine(runner, deterministic=False, steps_per_iteration=8, overlap=True)
    engine.submit(
        GenerationRequest(
            (index, 0),
            prompt=random.integers(0, CONFIG.vocab_size, 4 + index % 29).astype(np.int32),
            rng_key=stream_key(f"grpo:0:{index}:0", seed=0, sample=0, turn=0),
            sampling=SamplingParams(temperature=TEMPERATURE, max_new_tokens=120),
        )
        for index in range(48)
    )
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    sequences = [np.concatenate([output.request.prompt, output.tokens.ids]) for output in outputs]
    logprobs = np.concatenate([output.tokens.logprobs for output in outputs])
    return sequences, [len(output.request.prompt) for output in outputs], logprobs


def differences(dtype: torch.dtype) -> np.ndarray:
    """Between sampler and trainer, at every sampled token."""
    model = Transformer(CONFIG, packed=True, dtype=dtype, device="cuda")
    initialize(model, seed=2)
    sequences, prompt_lengths, expected = sampled(model)
    layout = PackedLayout.from_lengths([len(sequence) for sequence in sequences], device="cuda")
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).cuda()
    starts = np.cumsum([0, *(len(sequence) for sequence in sequences[:-1])])
    targets = torch.from_numpy(
        np.concatenate(
            [
                start + np.arange(prompt, len(sequence))
                for start, prompt, sequence in zip(starts, prompt_lengths, sequences, strict=True)
            ]
        )
    ).cuda()
    hidden = model.forward_packed(tokens, layout.positions, layout)
    logprobs, _ = model.token_logprobs(hidden[targets - 1], tokens[targets], temperature=TEMPERATURE)
    return np.asarray(np.abs(logprobs.detach().cpu().numpy() - expected))


@pytest.mark.parametrize(
    ("dtype", "largest_mean", "largest"), [(torch.float32, 2e-6, 5e-5), (torch.bfloat16, 5e-3, 0.2)]
)
def test_sampler_and_trainer_agree_on_logprobs(
    dtype: torch.dtype, largest_mean: float, largest: float
) -> None:
    difference = differences(dtype)
    assert difference.mean() < largest_mean, f"mean {difference.mean():.2e}, worst {difference.max():.2e}"
    assert difference.max() < largest, f"worst {difference.max():.2e}"


@pytest.mark.parametrize("vocabulary", [23, 4096, 4097, 20_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_one_pass_are_those_of_torchs_operations(vocabulary: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=generator) for rows in (300, vocabulary))
    targets = torch.randint(0, vocabulary, (300,), generator=generator)
    found = []
    for device in ("cuda", "cpu"):
        inputs = [each.to(device, torch.float32).requires_grad_() for each in (hidden, weight)]
        pair = token_logprobs(
            inputs[0],
            weight=inputs[1],
            targets=targets.to(device),
            temperature=temperature,
            chunk_size=128,
        )
        steep = torch.linspace(-1, 2, 300, device=device)
        gradients = torch.autograd.grad((steep * (pair[0] - 0.3 * pair[1])).sum(), inputs)
        found.append([each.detach().cpu() for each in (*pair, *gradients)])
    torch.testing.assert_close(found[0], found[1], atol=2e-4, rtol=2e-4)
