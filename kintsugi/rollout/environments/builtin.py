"""The shipped environments: a calculator as a tool, a game of several turns, and the tasks of reasoning-gym.

Each is also an example of how one is written (`docs/own_environment.md`).
"""

from __future__ import annotations

import re
from typing import Any

from kintsugi.errors import ConfigError, DataError
from kintsugi.rollout.environments.arithmetic import NotAnExpression, evaluate
from kintsugi.rollout.environments.protocol import Observation, Step
from kintsugi.rollout.rewards.reasoning_gym import opened_task, task_score
from kintsugi.runtime.clock import random_stream
from kintsugi.types import Row

_CALL, _CALL_END = "<tool>", "</tool>"
_NUM_DRAWN = 2**31 - 1
"""Number of problems to draw from: so large that a held-out problem is hardly ever trained on."""
_TOOL_CALL = re.compile(rf"{_CALL}(.*?){_CALL_END}", re.DOTALL)


class Calculator:
    """An arithmetic problem, and a tool that can calculate.

    The model may write `<tool>12*(3+4)</tool>` and reads the result, `84`, on a line of its own; what it writes without
    a call is its answer, compared with the row's column `answer`. A call that can not be understood is answered by what
    is wrong with it.
    """

    def __init__(self, *, call_reward: float = 0.0) -> None:
        """`call_reward` is earned by the first call that has a result: a hint that tools are worth a try."""
        self._call_reward = call_reward
        self._row = Row("")
        self._results = 0

    def reset(self, row: Row, *, seed: int) -> Observation:
        if not isinstance(row.columns.get("answer"), str):
            raise DataError(
                "the calculator needs rows with a column `answer` of text, to compare answers with"
            )
        self._row = row
        return Observation(stop=(_CALL_END,))

    def step(self, action: str) -> Step:
        if _CALL not in action:
            right = action.strip() == self._row.columns["answer"].strip()
            return Step("", float(right), done=True, info={"success": right, "calls": 0, "tool_errors": 0})
        called = _TOOL_CALL.search(action)
        try:
            if called is None:
                raise NotAnExpression(f"no {_CALL_END}")
            result = str(evaluate(called[1]))
        except NotAnExpression as error:
            return Step(f"error: {error}\n", info={"success": False, "calls": 1, "tool_errors": 1})
        self._results += 1
        reward = self._call_reward if self._results == 1 else 0.0
        return Step(f"{result}\n", reward, info={"success": False, "calls": 1, "tool_errors": 0})

    def demonstrate(self) -> str:
        """Let the tool calculate what the prompt asks for, then say its answer."""
        if self._results:
            return str(self._row.columns["answer"])
        return f"{_CALL}{self._row.prompt.strip().rstrip('=?')}{_CALL_END}"

    def close(self) -> None:
        pass


class NumberGame:
    """Guess a number from `low` to `high`; each wrong guess is answered by `higher` or `lower`.

    The number is the row's column `answer` if it has one, else drawn by the seed. The right guess earns 1; every guess
    before that costs `guess_cost`. A guess that is not a number is answered by `?` and costs the same.
    """

    def __init__(self, *, low: int = 0, high: int = 99, guess_cost: float = 0.0) -> None:
        if not low <= high:
            raise ConfigError(f"`rollout.options`: expected `low` ≤ `high`, got {low} and {high}")
        self._low, self._high, self._guess_cost = low, high, guess_cost
        self._secret = low
        self._bounds = (low, high)

    def reset(self, row: Row, *, seed: int) -> Observation:
        answer = row.columns.get("answer")
        self._secret = random_stream(seed, "number game").randint(self._low, self._high)
        if answer is not None:
            try:
                self._secret = int(answer)
            except (TypeError, ValueError):
                raise DataError(
                    f"the number game needs a number in the column `answer`, got {answer!r}"
                ) from None
        return Observation(stop=("\n",))

    def step(self, action: str) -> Step:
        try:
            guess = int(action)
        except ValueError:
            return Step("?\n", -self._guess_cost, info={"success": False, "bad_guesses": 1})
        if guess == self._secret:
            return Step("", 1.0, done=True, info={"success": True})
        low, high = self._bounds
        is_low = guess < self._secret
        self._bounds = (max(low, guess + 1), high) if is_low else (low, min(high, guess - 1))
        return Step(f"{'higher' if is_low else 'lower'}\n", -self._guess_cost, info={"success": False})

    def demonstrate(self) -> str:
        """Guess the middle of the remaining range."""
        return f"{sum(self._bounds) // 2}\n"

    def close(self) -> None:
        pass


class ReasoningGym:
    """A problem of reasoning-gym, scored by the task's own verifier; `tries` answers may be given.

    Problems are those of the data (`data.source: reasoning_gym:TASK`, which holds some of them out for evaluation) or,
    with `task`, drawn by the seed. After a wrong answer the model may try again. Each answer earns the improvement of
    its score over the best one before.
    """

    def __init__(self, *, task: str | None = None, tries: int = 1, **options: Any) -> None:
        """`options` are those of the task."""
        if tries < 1:
            raise ConfigError(f"`rollout.options`: expected `tries` of at least 1, got {tries}")
        if task is None and options:
            raise ConfigError(f"`rollout.options`: expected a `task` beside its options {sorted(options)}")
        self._task, self._options, self._tries = task, {"size": _NUM_DRAWN, **options}, tries
        self._problems = None if task is None else opened_task(task, self._options)
        self._columns: dict[str, Any] = {}
        self._best = 0.0
        self._num_tries = 0

    def reset(self, row: Row, *, seed: int) -> str | None:
        if self._problems is None:
            if not {"task", "options", "number"} <= row.columns.keys():
                raise DataError(
                    "`rollout.environment`=reasoning_gym needs `data.source: reasoning_gym:TASK`, or the name of a "
                    "task as `rollout.options.task`"
                )
            self._columns = row.columns
            return None
        number = seed % self._options["size"]
        problem = self._problems[number]
        answer = problem["answer"]
        self._columns = {"task": self._task, "options": self._options, "number": number, "answer": answer}
        return str(problem["question"])

    def step(self, action: str) -> Step:
        (score,) = task_score([action], *([self._columns[name]] for name in ("task", "options", "number")))
        self._num_tries += 1
        gained, self._best = max(0.0, score - self._best), max(score, self._best)
        right = score >= 1.0
        done = right or self._num_tries == self._tries
        return Step("Wrong. Try again.\n", gained, done=done, info={"success": right})

    def demonstrate(self) -> str:
        """Return the task's own answer."""
        answer = self._columns.get("answer")
        if answer is None:
            raise DataError(f"the task '{self._columns['task']}' has no answers to show")
        return str(answer)

    def close(self) -> None:
        pass
