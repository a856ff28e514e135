import pytest
import torch

from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (5, 1, 70, 33)
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=200,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=128,
    qk_norm=True,
)


def make_models(dtype: torch.dtype) -> tuple[Transformer, Transformer]:
    """The same weights on the CPU in fp32 and on the GPU in `dtype`."""
    reference, model = Transformer(CONFIG), Transformer(CONFIG, dtype=dtype, device="cuda")
    initialize(model, 0)
    reference.load_state_dict(model.state_dict())
    return reference, model


TOLERANCES = [(torch.float32, 1e-3), (torch.bfloat16, 0.15)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_packed_logprobs_and_gradients_on_the_gpu_are_those_of_the_cpu(
    dtype: torch.dtype, tolerance: float
) -> None:
    tokens = torch.arange(sum(LENGTHS)) % CONFIG.vocab_size
    results = []
    for model in make_models(dtype):
        layout = PackedLayout.from_lengths(LENGTHS, device=model.device)
        packed = tokens.to(model.device)
        hidden = model.forward_packed(packed, layout.positions, layout)
        logprobs, entropy = model.token_logprobs(hidden, packed, temperature=0.8, chunk_size=40)
        (logprobs + 0.1 * entropy).mean().backward()
        gradient = dict(model.named_parameters())["model.layers.0.self_attn.k_proj.weight"].grad
        assert gradient is not None
        results.append([tensor.detach().float().cpu() for tensor in (logprobs, entropy, gradient)])
    (expected_logprobs, expected_entropy, expected_gradient), (logprobs, entropy, gradient) = results
    torch.testing.assert_close(logprobs, expected_logprobs, atol=tolerance, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=tolerance, rtol=0)
    assert (gradient - expected_gradient).norm() <= tolerance * expected_gradient.norm()
