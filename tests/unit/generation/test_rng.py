import torch

from kintsugi.generation.engine.rng import stream_key, uniforms

_KEY = stream_key("grpo:0:17:0", seed=0, sample=3, turn=0)


def _numbers(key: int, *, count: int) -> torch.Tensor:
    counters = torch.arange(count)
    return uniforms(torch.full((count,), key), counters=counters)


def _p_value(counts: torch.Tensor) -> float:
    """Of Pearson's chi-square test against equal expectation."""
    counts = counts.to(torch.float64).flatten()
    expected = counts.sum() / counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64), statistic / 2)
    )


def test_the_numbers_are_those_of_splitmix64() -> None:
    # First outputs of the reference implementation for state 0.
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert _numbers(0, count=3).tolist() == [(value >> 12) / 2**52 for value in reference]


def test_numbers_lie_in_the_half_open_unit_interval() -> None:
    numbers = _numbers(_KEY, count=100_000)
    assert numbers.min() >= 0 and numbers.max() < 1


def test_each_part_of_the_key_changes_the_stream() -> None:
    keys = {
        _KEY,
        stream_key("grpo:1:17:0", seed=0, sample=3, turn=0),
        stream_key("grpo:0:17:0", seed=1, sample=3, turn=0),
        stream_key("grpo:0:17:0", seed=0, sample=4, turn=0),
        stream_key("grpo:0:17:0", seed=0, sample=3, turn=1),
    }
    streams = {tuple(_numbers(key, count=4).tolist()) for key in keys}
    assert len(keys) == len(streams) == 5


def test_a_number_depends_on_its_own_row_only() -> None:
    keys = torch.tensor([stream_key("t", seed=0, sample=sample, turn=0) for sample in range(64)])
    counters = torch.arange(64) * 7
    together = uniforms(keys, counters=counters)
    alone = [uniforms(keys[row : row + 1], counters=counters[row : row + 1]).item() for row in range(64)]
    assert together.tolist() == alone


def test_numbers_along_a_stream_are_uniform_and_pairwise_independent() -> None:
    numbers = _numbers(_KEY, count=200_000)
    assert _p_value((numbers * 100).long().bincount(minlength=100)) > 1e-3
    pairs = (numbers[0::2] * 20).long() * 20 + (numbers[1::2] * 20).long()
    assert _p_value(pairs.bincount(minlength=400)) > 1e-3


def test_numbers_across_neighbouring_samples_are_uniform_and_independent() -> None:
    keys = torch.tensor([stream_key("t", seed=0, sample=sample, turn=0) for sample in range(50_000)])
    numbers = uniforms(keys, counters=torch.full_like(keys, 6))
    assert _p_value((numbers * 100).long().bincount(minlength=100)) > 1e-3
    pairs = (numbers[0::2] * 20).long() * 20 + (numbers[1::2] * 20).long()
    assert _p_value(pairs.bincount(minlength=400)) > 1e-3
