"""Whether a card's known answer stays what it was while the card is busy with other work."""

from __future__ import annotations

import pytest
import torch

from kintsugi.model.known_answer import KnownAnswer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CARD = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_busy_card_gives_the_known_answer_every_time(dtype: torch.dtype) -> None:
    known = KnownAnswer(CARD, dtype=dtype)
    beside = torch.cuda.Stream()
    large = torch.randn(4096, 4096, device=CARD, dtype=torch.bfloat16)
    for _ in range(1000):
        with torch.cuda.stream(beside):
            large @ large
        known.check()
    torch.cuda.synchronize()


def test_two_of_them_have_the_same_answer() -> None:
    first, second = (KnownAnswer(CARD, dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(first._answer, second._answer)
