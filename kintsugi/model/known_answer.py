"""A small computation whose result is known: whether a device still computes what it did.

Ranks that come to different states say that one of them is wrong, and of two nobody knows which. Each can tell of
itself: it repeats, after every piece of work, what it computed when it began, and bits that have changed are its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kintsugi.errors import DeviceError

SIZE = 48
"""Rows: enough for every lane of a vector unit to have its turn, and done in 30 microseconds."""


class KnownAnswer:
    """`KnownAnswer(device, dtype=dtype).check()` raises DeviceError once the device, or this thread's processor,
    computes something else than when this was made."""

    def __init__(self, device: torch.device, *, dtype: torch.dtype) -> None:
        # Fractions that no binary number holds, so that every product and every sum has to be rounded.
        numbers = torch.arange(1, SIZE * SIZE + 1, dtype=torch.float64).remainder(97).div(89.0)
        self._question = numbers.view(SIZE, SIZE).to(device=device, dtype=dtype)
        self._answer = self._compute()

    def _compute(self) -> Tensor:
        """The operations that a model is made of: products, sums of them, exponentials, square roots."""
        with torch.inference_mode():
            products = (self._question @ self._question.T).float()
            return torch.softmax(products, dim=-1) @ products.rsqrt()

    def check(self) -> None:
        found = self._compute()
        if not torch.equal(found, self._answer):
            wrong = int((found != self._answer).sum())
            raise DeviceError(
                f"the {found.device.type} of this process does not compute any more what it did: {wrong} of "
                f"{found.numel()} numbers of a known answer differ"
            )
