"""Generated tasks of the library reasoning-gym by name. `rollout/rewards/reasoning_gym.py` scores their answers."""

from __future__ import annotations

from typing import Any

import msgspec

from kintsugi.config.schema import SourceSection
from kintsugi.errors import DataError, UserError
from kintsugi.types import Row

TASK = "reasoning_gym:"
NUM_PROBLEMS = 100_000
"""Default number of problems (option `size`); problems are generated on demand, so any number is possible."""
_TRIES = 50

_DIFFERS = "its problems differ between processes (they follow the order of Python's sets), so none is the same twice"
REFUSED = {
    "acre": "it makes all of its problems before the first can be asked",
    "codeio": _DIFFERS,
    "composite": "it mixes other tasks: name those in `data.sources`",
    "isomorphic_strings": _DIFFERS,
    "knight_swap": _DIFFERS,
    "list_functions": _DIFFERS,
    "number_sequence": "some of its problems take minutes to make",
    "polynomial_multiplication": _DIFFERS,
    "ransom_note": _DIFFERS,
    "word_ladder": _DIFFERS,
}
"""Tasks of reasoning-gym 0.1.25 that can not be trained on, with the reason."""


class ReasoningGymTasks:
    """Problems of one task: the first `num_eval` are held out, and none of those is ever trained on.

    Problem n depends on the task, its options (their `seed` included) and n only.
    """

    def __init__(self, section: SourceSection, *, split: str) -> None:
        self._name = section.source.removeprefix(TASK)
        self._options = section.options
        self._num_eval = section.num_eval
        self._split = split
        self._problems = open_task(self._name, self._options)
        self._size = len(self._problems)
        self._held_out: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self._num_eval if self._split == "eval" else max(0, self._size - self._num_eval - _TRIES)

    @property
    def num_problems(self) -> int:
        """Number of problems of both splits."""
        return self._size

    def row(self, index: int) -> Row:
        number = index if self._split == "eval" else self._not_held_out(self._num_eval + index)
        problem = self._problems[number]
        columns = {"task": self._name, "options": self._options, "number": number}
        if problem["answer"] is not None:
            answer = str(problem["answer"])
            columns |= {"answer": answer, "completion": answer}
        return Row(prompt=problem["question"], columns=columns)

    def _not_held_out(self, number: int) -> int:
        """Return the problem's number, or the next one that does not repeat a held-out problem."""
        if not self._held_out:
            self._held_out = frozenset(self._problems[each]["question"] for each in range(self._num_eval))
        for each in range(number, number + _TRIES):
            if self._problems[each]["question"] not in self._held_out:
                return each
        raise UserError(
            f"`data.num_eval`: expected far fewer than there are problems of '{self._name}', got {self._num_eval}: "
            "nearly all of them are held out"
        )


def open_task(name: str, options: dict[str, Any]) -> Any:
    """Open the library's data set, which generates problem n on demand and scores answers."""
    if name in REFUSED:
        raise DataError(f"the task '{name}' can not be used: {REFUSED[name]}")
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError("reasoning-gym needs the extra `tasks`: pip install 'kintsugi[tasks]'") from error
    if name not in DATASETS:
        known = ", ".join(sorted(DATASETS.keys() - REFUSED.keys()))
        raise DataError(f"expected a task of reasoning-gym, got '{name}'; there are {known}")
    try:
        problems = reasoning_gym.create_dataset(name, **{"seed": 0, "size": NUM_PROBLEMS, **options})
        problems[0]  # Some options are checked only when the first problem is generated.
        return problems
    except (TypeError, ValueError, AssertionError, LookupError) as error:
        given = msgspec.json.encode(options).decode()
        raise DataError(
            f"`data.options`: expected options of the task '{name}', got {given}: {error}"
        ) from error
