"""A generated task: additions whose answer is written with its digits reversed.

Reversed, because a model that writes from left to right then meets each carry when it knows it. `12+39=` → `15`.
"""

from __future__ import annotations

from kintsugi.runtime import random_stream
from kintsugi.types import Row

_SPLIT_SEED = 20_240_117
"""One fixed shuffle decides what is held out, so that runs with different seeds are judged on the same problems."""


class Arithmetic:
    """All additions of two numbers with exactly `num_digits` digits; `num_eval` of them are held out.

    >>> Arithmetic(num_digits=2, split="eval", num_eval=500).row(0).columns.keys()
    dict_keys(['answer', 'completion'])
    """

    def __init__(self, *, num_digits: int, split: str, num_eval: int) -> None:
        low, high = 10 ** (num_digits - 1), 10**num_digits
        self._low, self._span = low, high - low
        order = list(range(self._span**2))
        random_stream(_SPLIT_SEED, "arithmetic", num_digits).shuffle(order)
        self._order = order[:num_eval] if split == "eval" else order[num_eval:]

    def __len__(self) -> int:
        return len(self._order)

    def row(self, index: int) -> Row:
        first, second = divmod(self._order[index], self._span)
        first, second = first + self._low, second + self._low
        answer = str(first + second)[::-1]
        return Row(prompt=f"{first}+{second}=", columns={"answer": answer, "completion": answer})
