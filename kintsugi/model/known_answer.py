"""Known-answer test: a small computation that shows whether a device still computes correctly.

Diverging states of ranks show that one of them is wrong, but with two ranks not which one. Each rank can check itself:
after every piece of work it repeats a computation of its start, and changed bits are its own error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kintsugi.errors import DeviceError, Miscomputed

SIZE = 48
"""Rows: enough to use every lane of a vector unit, and done in 30 microseconds."""


class KnownAnswer:
    """`KnownAnswer(device, dtype=dtype).check()` raises DeviceError once the device, or this thread's CPU, computes
    another result than when this was created."""

    def __init__(self, device: torch.device, *, dtype: torch.dtype) -> None:
        # Fractions without a finite binary representation, so that every product and every sum is rounded.
        numbers = torch.arange(1, SIZE * SIZE + 1, dtype=torch.float64).remainder(97).div(89.0)
        self._question = numbers.view(SIZE, SIZE).to(device=device, dtype=dtype)
        self._answer = self._compute()

    def _compute(self) -> Tensor:
        """The operations of a model: products, sums of them, exponentials, square roots."""
        with torch.inference_mode():
            products = (self._question @ self._question.T).float()
            return torch.softmax(products, dim=-1) @ products.rsqrt()

    def check(self) -> None:
        found = self._compute()
        if not torch.equal(found, self._answer):
            wrong = int((found != self._answer).sum())
            raise DeviceError(
                f"the {found.device.type} of this process does not compute any more what it did: {wrong} of "
                f"{found.numel()} numbers of a known answer differ",
                detail=Miscomputed("known answer"),
            )
