import pytest
import torch
from torch import Tensor

from kintsugi.model.logprobs import token_logprobs

TOKENS, HIDDEN, VOCABULARY = 37, 12, 23


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def full_vocabulary(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    log_distribution = ((hidden.float() @ weight.float().t()) / temperature).log_softmax(dim=-1)
    entropy = -(log_distribution.exp() * log_distribution).sum(dim=-1)
    return log_distribution.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("chunk_size", [1, 5, 36, 37, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("logprob_weight", "entropy_weight"), [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_chunks_give_the_values_and_gradients_of_the_whole(
    chunk_size: int, temperature: float, logprob_weight: float, entropy_weight: float
) -> None:
    hidden, weight, targets = make_inputs()
    per_token = torch.linspace(-1, 2, TOKENS)

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        terms = [
            part * share for part, share in zip(pair, (logprob_weight, entropy_weight), strict=True) if share
        ]
        return torch.stack(terms).sum(dim=0).mul(per_token).sum()

    ours = token_logprobs(
        hidden, weight=weight, targets=targets, temperature=temperature, chunk_size=chunk_size
    )
    expected = full_vocabulary(hidden, weight, targets, temperature)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    ours_gradients = torch.autograd.grad(loss(ours), (hidden, weight))
    expected_gradients = torch.autograd.grad(loss(expected), (hidden, weight))
    torch.testing.assert_close(ours_gradients, expected_gradients, atol=1e-4, rtol=1e-4)


def test_the_same_input_gives_the_same_bits() -> None:
    hidden, weight, targets = make_inputs()

    def once() -> tuple[Tensor, ...]:
        pair = token_logprobs(hidden, weight=weight, targets=targets, temperature=0.9, chunk_size=8)
        return *pair, *torch.autograd.grad((pair[0] + pair[1]).sum(), (hidden, weight))

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_half_precision_inputs_give_full_precision_logprobs() -> None:
    hidden, weight, targets = make_inputs(torch.bfloat16)
    ours = token_logprobs(hidden, weight=weight, targets=targets)
    torch.testing.assert_close(ours, full_vocabulary(hidden, weight, targets, 1.0), atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(ours[0].sum(), (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]


def test_a_frozen_output_matrix_gets_no_gradient() -> None:
    hidden, weight, targets = make_inputs()
    logprobs, _ = token_logprobs(hidden, weight=weight.detach(), targets=targets)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
