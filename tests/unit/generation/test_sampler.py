import pytest
import torch

from kintsugi.generation.noise import stream_key, uniforms
from kintsugi.generation.sampler import sample


def _noise(rows: int) -> torch.Tensor:
    keys = torch.tensor([stream_key("t", seed=0, sample=row, turn=0) for row in range(rows)])
    return uniforms(keys, counters=torch.zeros_like(keys))


def _logits(rows: int, *, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_pass_a_chi_square_test(temperature: float) -> None:
    rows, vocabulary = 40_000, 14
    logits = _logits(1, vocabulary=vocabulary).div(2).expand(rows, vocabulary)
    tokens = sample(logits, temperatures=torch.full((rows,), temperature), uniforms=_noise(rows)).tokens
    expected = (logits[0].double() / temperature).softmax(-1) * rows
    statistic = ((tokens.bincount(minlength=vocabulary) - expected) ** 2 / expected).sum()
    degrees = torch.tensor((vocabulary - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(degrees, statistic / 2) > 1e-3


def test_log_probabilities_are_those_at_the_sampling_temperature() -> None:
    logits, temperatures = _logits(8, vocabulary=50), torch.tensor([0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.5, 2.0])
    sampled = sample(logits, temperatures=temperatures, uniforms=_noise(8))
    expected = (
        (logits / temperatures[:, None]).log_softmax(-1).gather(-1, sampled.tokens[:, None]).squeeze(-1)
    )
    assert sampled.logprobs.dtype == torch.float32
    torch.testing.assert_close(sampled.logprobs, expected, atol=1e-5, rtol=0)


def test_greedy_rows_take_the_most_likely_token_at_its_plain_log_probability() -> None:
    logits = _logits(6, vocabulary=50)
    temperatures = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    sampled = sample(logits, temperatures=temperatures, uniforms=_noise(6))
    greedy = sampled.tokens[::2]
    assert greedy.tolist() == logits[::2].argmax(-1).tolist()
    torch.testing.assert_close(sampled.logprobs[::2], logits[::2].log_softmax(-1).amax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [14, 16, 1000])
def test_a_row_has_the_same_bits_alone_and_at_any_place_among_others(vocabulary: int) -> None:
    logits, noise = _logits(64, vocabulary=vocabulary), _noise(64)
    temperatures = torch.linspace(0, 2, 64)
    together = sample(logits, temperatures=temperatures, uniforms=noise)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    shuffled = sample(logits[order], temperatures=temperatures[order], uniforms=noise[order])
    assert shuffled.tokens.equal(together.tokens[order])
    assert shuffled.logprobs.equal(together.logprobs[order])
    for row in (0, 1, 31, 63):
        alone = slice(row, row + 1)
        single = sample(logits[alone], temperatures=temperatures[alone], uniforms=noise[alone])
        assert single.tokens.item() == together.tokens[row].item()
        assert single.logprobs.item() == together.logprobs[row].item()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.zeros(4, 6)
    logits[:, [0, 3, 5]] = float("-inf")
    extremes = torch.tensor([0.0, 1 - 2.0**-52, 1 / 3, 2 / 3], dtype=torch.float64)
    tokens = sample(logits, temperatures=torch.ones(4), uniforms=extremes).tokens
    assert tokens.tolist()[:2] == [1, 4]
    assert set(tokens.tolist()) <= {1, 2, 4}


def test_logits_that_are_not_finite_give_a_log_probability_that_is_not_finite() -> None:
    logits = torch.zeros(4, 6)
    logits[2, 1] = float("nan")
    sampled = sample(logits, temperatures=torch.ones(4), uniforms=_noise(4))
    assert sampled.logprobs.isfinite().tolist() == [True, True, False, True]
    assert 0 <= sampled.tokens[2] < 6
