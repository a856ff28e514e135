"""Generated tasks: additions with a reversed answer for small models (`12+39=` → `15`), additions as questions, and
products of sums, which small models cannot solve without a tool.

Answers are reversed so that a model that writes from left to right knows each carry when it needs it.
"""

from __future__ import annotations

from kintsugi.data.order import scattered
from kintsugi.runtime.clock import random_stream
from kintsugi.types import Row

_SPLIT_SEED = 20_240_117
"""Seed of the split: fixed, so that runs with different seeds are evaluated on the same problems."""


class ArithmeticTasks:
    """All additions of two numbers with exactly `num_digits` digits; `num_eval` of them are held out.

    >>> ArithmeticTasks(num_digits=2, split="eval", num_eval=500).row(0).columns.keys()
    dict_keys(['answer', 'completion', 'chosen', 'rejected'])
    """

    def __init__(self, *, num_digits: int, split: str, num_eval: int, in_words: bool = False) -> None:
        low, high = 10 ** (num_digits - 1), 10**num_digits
        self._low = low
        self._span = high - low
        self._in_words = in_words
        order = list(range(self._span**2))
        random_stream(_SPLIT_SEED, "arithmetic", num_digits).shuffle(order)
        self._order = order[:num_eval] if split == "eval" else order[num_eval:]

    def __len__(self) -> int:
        return len(self._order)

    def row(self, index: int) -> Row:
        first, second = divmod(self._order[index], self._span)
        first, second = first + self._low, second + self._low
        total = first + second
        if self._in_words:
            prompt, answer, wrong = f"What is {first} + {second}?", str(total), str(_slip(first, second))
        else:
            prompt, answer, wrong = f"{first}+{second}=", str(total)[::-1], str(_slip(first, second))[::-1]
        columns = {"answer": answer, "completion": answer, "chosen": answer, "rejected": wrong}
        return Row(prompt=prompt, columns=columns)


class MultiplicationTasks:
    """`(a+b)*c=` → its value, for all a and b with exactly `num_digits` digits and c from 2 to 9; `num_eval` problems
    are held out.

    >>> MultiplicationTasks(num_digits=1, split="eval", num_eval=10).row(0).columns.keys()
    dict_keys(['answer', 'completion'])
    """

    def __init__(self, *, num_digits: int, split: str, num_eval: int) -> None:
        self._low = 10 ** (num_digits - 1)
        self._span = 10**num_digits - self._low
        self._key = random_stream(_SPLIT_SEED, "products", num_digits).randbytes(16)
        self._places = range(num_eval) if split == "eval" else range(num_eval, self._span**2 * 8)

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> Row:
        number = scattered(self._places[index], num_rows=self._span**2 * 8, key=self._key)
        terms, factor = divmod(number, 8)
        first, second = (term + self._low for term in divmod(terms, self._span))
        answer = str((first + second) * (factor + 2))
        return Row(f"({first}+{second})*{factor + 2}=", {"answer": answer, "completion": answer})


def _slip(first: int, second: int) -> int:
    """Return a reproducible wrong sum: a lost carry, one wrong digit, or the answer to another sum.

    The last kind teaches a reward model to use the question. Without it, the model accepts any number of the right
    length, and a policy exploits that.
    """
    random = random_stream(_SPLIT_SEED, "slip", first, second)
    total, lowest_term = first + second, int(10 ** (len(str(first)) - 1))
    if random.random() < 0.5:
        other = random.randrange(2 * lowest_term, 20 * lowest_term - 2)
        return other + (other >= total)
    without_carries = int(
        "".join(str((int(a) + int(b)) % 10) for a, b in zip(str(first), str(second), strict=True))
    )
    if without_carries != total and random.random() < 0.5:
        return without_carries
    place = int(10 ** random.randrange(len(str(total))))
    digit = total // place % 10
    lowest = 1 if place * 10 > total else 0
    other = random.choice([each for each in range(lowest, 10) if each != digit])
    return total + (other - digit) * place
