from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.generation.engine.rng import stream_key, uniforms
from kintsugi.generation.engine.sampler import LogitsEditing, Sampled, sample


def _noise(rows: int) -> Tensor:
    keys = torch.tensor([stream_key("t", seed=0, sample=row, turn=0) for row in range(rows)])
    return uniforms(keys, counters=torch.zeros_like(keys))


def _many_uniforms(rows: int) -> Tensor:
    """Of one stream: making a key for each would take longer than the test."""
    return uniforms(
        torch.full((rows,), stream_key("t", seed=0, sample=0, turn=0)), counters=torch.arange(rows)
    )


def _logits(rows: int, *, vocabulary: int) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


def _sample(logits: Tensor, **arguments: Any) -> Sampled:
    """Of a copy, because logits are overwritten."""
    return sample(logits.clone(), **arguments)


@dataclass
class Processors:
    """One row's bending, and what it does to a distribution, by sorting, in float64."""

    penalty: float = 1.0
    seen: list[int] = field(default_factory=list)
    biases: dict[int, float] = field(default_factory=dict)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def rows(self, count: int, *, vocabulary: int) -> LogitsEditing:
        seen = torch.zeros(count, vocabulary, dtype=torch.bool)
        seen[:, self.seen] = True
        biases = torch.zeros(count, vocabulary)
        for token, bias in self.biases.items():
            biases[:, token] = bias
        return LogitsEditing(
            penalties=torch.full((count,), self.penalty),
            seen=seen,
            biases=biases,
            top_ks=torch.full((count,), self.top_k),
            top_ps=torch.full((count,), self.top_p),
            min_ps=torch.full((count,), self.min_p),
        )

    def distribution(self, logits: Tensor, *, temperature: float) -> Tensor:
        processed = logits.double()
        for token in self.seen:
            processed[token] *= 1 / self.penalty if processed[token] > 0 else self.penalty
        for token, bias in self.biases.items():
            processed[token] += bias
        probabilities = (processed / temperature).softmax(-1)
        order = probabilities.argsort(descending=True)
        if self.top_k:
            probabilities[order[self.top_k :]] = 0.0
            probabilities /= probabilities.sum()
        before = probabilities[order].cumsum(-1) - probabilities[order]
        probabilities[order[before >= self.top_p]] = 0.0
        probabilities[probabilities < self.min_p * probabilities.max()] = 0.0
        return probabilities / probabilities.sum()


BENDS = {
    "none": None,
    "top_k": Processors(top_k=5),
    "top_p": Processors(top_p=0.8),
    "min_p": Processors(min_p=0.1),
    "penalty": Processors(penalty=1.7, seen=[0, 3, 4, 9]),
    "bias": Processors(biases={2: 1.5, 7: -100.0}),
    "all": Processors(penalty=1.3, seen=[1, 2], biases={2: 1.0}, top_k=9, top_p=0.9, min_p=0.02),
}


def _passes_chi_square(tokens: Tensor, distribution: Tensor) -> bool:
    possible = distribution > 0
    counts = tokens.bincount(minlength=len(distribution))
    if counts[~possible].any():
        return False
    expected = distribution[possible] * len(tokens)
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    degrees = (possible.sum() - 1).double() / 2
    return bool(torch.special.gammaincc(degrees, statistic / 2) > 1e-3)


@pytest.mark.parametrize(("vocabulary", "temperature"), [(14, 0.5), (14, 1.0), (14, 2.0), (1200, 0.7)])
@pytest.mark.parametrize("name", BENDS)
def test_sampled_frequencies_pass_a_chi_square_test(name: str, temperature: float, vocabulary: int) -> None:
    """The larger vocabulary takes both stages; only its first tokens, around the border of blocks, are likely."""
    rows = 20_000 if vocabulary == 14 else 3_000
    logits = torch.full((vocabulary,), float("-inf"))
    likely = torch.arange(14) if vocabulary == 14 else torch.arange(14) * 37 + 5
    logits[likely] = _logits(1, vocabulary=14)[0].div(2)
    process_logits = BENDS[name]
    if process_logits is not None and vocabulary > 14:
        process_logits = Processors(**{**vars(process_logits), "seen": likely[process_logits.seen].tolist()})
        process_logits.biases = {int(likely[token]): bias for token, bias in process_logits.biases.items()}
    tokens = _sample(
        logits.expand(rows, vocabulary),
        temperatures=torch.full((rows,), temperature),
        uniforms=_many_uniforms(rows),
        logits_processors=None
        if process_logits is None
        else process_logits.rows(rows, vocabulary=vocabulary),
    ).tokens
    distribution = (process_logits or Processors()).distribution(logits, temperature=temperature)
    assert _passes_chi_square(tokens, distribution)


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_even_the_least_likely_of_many_tokens_keeps_its_probability(vocabulary: int) -> None:
    """A token is drawn exactly where the uniform number lies within its part of the cumulative distribution."""
    logits = _logits(1, vocabulary=vocabulary)
    logits[0, 7] = 30.0
    probabilities = logits[0].double().softmax(-1)
    cumulative = probabilities.cumsum(-1)
    tokens = torch.tensor([0, 1, 6, 8, 127, 128, 129, vocabulary // 2, vocabulary - 2, vocabulary - 1])
    assert probabilities[tokens].max() < 1e-8
    middles = cumulative[tokens] - probabilities[tokens] / 2
    found = _sample(
        logits.expand(len(tokens), vocabulary), temperatures=torch.ones(len(tokens)), uniforms=middles
    ).tokens
    # Sums in another order move borders by some 10⁻⁷ of what lies before them: a few of these tokens.
    near = (cumulative[found] - cumulative[tokens]).abs()
    assert (near <= 1e-6 * cumulative[tokens].clamp_min(1e-9)).all()


def test_the_masses_of_a_large_vocabulary_are_exact() -> None:
    """Over an even grid of uniform numbers, every stretch of the vocabulary is drawn as often as it should be."""
    vocabulary, rows = 49_152, 1_024
    logits = _logits(1, vocabulary=vocabulary)
    grid = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    parts = [
        _sample(
            logits.expand(len(part), vocabulary), temperatures=torch.ones(len(part)), uniforms=part
        ).tokens
        for part in grid.split(256)
    ]
    tokens = torch.cat(parts)
    assert (tokens.diff() >= 0).all()
    counts = torch.bincount(tokens // 512, minlength=96)
    expected = logits[0].double().softmax(-1).unflatten(0, (96, 512)).sum(-1) * rows
    assert (counts - expected).abs().max() <= 1.01


def test_log_probabilities_are_those_at_the_sampling_temperature() -> None:
    logits, temperatures = _logits(8, vocabulary=50), torch.tensor([0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.5, 2.0])
    sampled = _sample(logits, temperatures=temperatures, uniforms=_noise(8))
    expected = (
        (logits / temperatures[:, None]).log_softmax(-1).gather(-1, sampled.tokens[:, None]).squeeze(-1)
    )
    assert sampled.logprobs.dtype == torch.float32
    torch.testing.assert_close(sampled.logprobs, expected, atol=1e-5, rtol=0)


def test_bending_does_not_change_the_reported_log_probabilities() -> None:
    logits, temperatures = _logits(8, vocabulary=50), torch.full((8,), 0.7)
    logits_processors = Processors(penalty=2.0, seen=[1, 2, 3], biases={7: 4.0}, top_k=3).rows(
        8, vocabulary=50
    )
    sampled = _sample(
        logits, temperatures=temperatures, uniforms=_noise(8), logits_processors=logits_processors, num_top=4
    )
    expected = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(
        sampled.logprobs, expected.gather(-1, sampled.tokens[:, None]).squeeze(-1), atol=1e-5, rtol=0
    )
    values, tokens = expected.topk(4, dim=-1)
    assert sampled.top_tokens.equal(tokens)
    torch.testing.assert_close(sampled.top_logprobs, values, atol=1e-5, rtol=0)


def test_greedy_rows_take_the_most_likely_token_at_its_plain_log_probability() -> None:
    logits = _logits(6, vocabulary=50)
    temperatures = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    sampled = _sample(logits, temperatures=temperatures, uniforms=_noise(6))
    greedy = sampled.tokens[::2]
    assert greedy.tolist() == logits[::2].argmax(-1).tolist()
    torch.testing.assert_close(sampled.logprobs[::2], logits[::2].log_softmax(-1).amax(-1), atol=1e-5, rtol=0)


def test_greedy_rows_follow_the_bias() -> None:
    logits_processors = Processors(biases={11: 100.0}).rows(4, vocabulary=50)
    logits = _logits(4, vocabulary=50)
    sampled = _sample(
        logits, temperatures=torch.zeros(4), uniforms=_noise(4), logits_processors=logits_processors
    )
    assert sampled.tokens.tolist() == [11] * 4


def test_rows_are_bent_each_by_its_own_measure() -> None:
    rows = [
        Processors(),
        Processors(top_k=1),
        Processors(top_p=1e-6),
        Processors(min_p=1.0),
        Processors(top_k=2),
        Processors(),
    ]
    parts = [row.rows(1, vocabulary=3000) for row in rows]
    logits_processors = LogitsEditing(*(torch.cat(column) for column in zip(*parts, strict=True)))
    logits = _logits(1, vocabulary=3000).expand(6, 3000)
    almost_one = torch.full((6,), 1 - 2.0**-52, dtype=torch.float64)
    tokens = _sample(
        logits, temperatures=torch.ones(6), uniforms=almost_one, logits_processors=logits_processors
    ).tokens
    likeliest = logits[0].topk(2).indices
    assert tokens[1:4].tolist() == [int(likeliest[0])] * 3
    assert tokens[4] == likeliest.max()
    assert tokens[0] == tokens[5] == 2999


def test_a_nucleus_beyond_the_first_thousand_tokens_is_found() -> None:
    logits = torch.zeros(2, 5000)
    logits[:, 0] = 1.0
    logits_processors = Processors(top_p=0.5).rows(2, vocabulary=5000)
    ends = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    tokens = _sample(
        logits, temperatures=torch.ones(2), uniforms=ends, logits_processors=logits_processors
    ).tokens
    assert tokens.tolist() == [0, 4999], "tokens as likely as the last of the nucleus stay"


def test_tokens_as_likely_as_the_last_that_stays_stay_too() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(200, 5)
    logits_processors = Processors(top_k=2).rows(200, vocabulary=5)
    sampled = _sample(
        logits,
        temperatures=torch.ones(200),
        uniforms=_many_uniforms(200),
        logits_processors=logits_processors,
    )
    assert set(sampled.tokens.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("vocabulary", [14, 16, 3000])
def test_a_row_has_the_same_bits_alone_and_at_any_place_among_others(vocabulary: int) -> None:
    logits, noise = _logits(64, vocabulary=vocabulary), _noise(64)
    temperatures = torch.linspace(0, 2, 64)
    together = _sample(logits, temperatures=temperatures, uniforms=noise)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    shuffled = _sample(logits[order], temperatures=temperatures[order], uniforms=noise[order])
    assert shuffled.tokens.equal(together.tokens[order])
    assert shuffled.logprobs.equal(together.logprobs[order])
    for row in (0, 1, 31, 63):
        alone = slice(row, row + 1)
        single = _sample(logits[alone], temperatures=temperatures[alone], uniforms=noise[alone])
        assert single.tokens.item() == together.tokens[row].item()
        assert single.logprobs.item() == together.logprobs[row].item()


@pytest.mark.parametrize("vocabulary", [6, 2000])
def test_a_token_of_probability_zero_is_never_drawn(vocabulary: int) -> None:
    logits = torch.zeros(4, vocabulary)
    possible = [1, 2, vocabulary - 2]
    impossible = [token for token in range(vocabulary) if token not in possible]
    logits[:, impossible] = float("-inf")
    extremes = torch.tensor([0.0, 1 - 2.0**-52, 1 / 3, 2 / 3], dtype=torch.float64)
    tokens = _sample(logits, temperatures=torch.ones(4), uniforms=extremes).tokens
    assert tokens.tolist()[:2] == [1, vocabulary - 2]
    assert set(tokens.tolist()) <= set(possible)


@pytest.mark.parametrize("vocabulary", [6, 2000])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["none", "all"])
def test_logits_that_are_not_finite_give_a_log_probability_that_is_not_finite(
    name: str, value: float, vocabulary: int
) -> None:
    logits = torch.zeros(4, vocabulary)
    logits[2, 1] = value
    process_logits = BENDS[name]
    logits_processors = None if process_logits is None else process_logits.rows(4, vocabulary=vocabulary)
    sampled = _sample(
        logits, temperatures=torch.ones(4), uniforms=_noise(4), logits_processors=logits_processors
    )
    assert sampled.logprobs.isfinite().tolist() == [True, True, False, True]
    assert 0 <= sampled.tokens[2] < vocabulary
