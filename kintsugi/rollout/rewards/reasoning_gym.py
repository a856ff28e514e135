"""Reward of reasoning-gym's tasks: their own verifiers, with guards against known defects."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

import msgspec

from kintsugi.data.reasoning_gym import open_task

_PARSING_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    ArithmeticError,
    RecursionError,
)
"""Errors of verifiers when an answer has an unexpected form (`prime_factorization`: "two" is not a factor)."""
_EXACT = frozenset({"game_of_life_halting"})
"""Tasks with two possible answers and a verifier that accepts everything but the wrong one."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def task_score(
    completions: list[str],
    task: list[str],
    options: list[dict[str, Any]],
    number: list[int],
    **columns: Any,
) -> list[float]:
    """Score of the task's verifier, 0 to 1, for the text in the last `<answer>…</answer>`, or for the whole text.

    Tasks with several right answers, or without a known one, are scored in the same way.
    """
    return [_score(*each) for each in zip(completions, task, options, number, strict=True)]


def _score(completion: str, task: str, options: dict[str, Any], number: int) -> float:
    tagged = _TAGGED.findall(completion)
    answer = (tagged[-1] if tagged else completion).strip()
    encoded = msgspec.json.encode(options)
    problem = _problem(task, encoded, number)
    if task in _EXACT:
        return float(answer == problem["answer"])
    verify = _opened(task, encoded).score_answer
    try:
        return min(1.0, max(0.0, float(verify(answer, problem))))
    except _PARSING_ERRORS:
        # The answer is wrong, unless the verifier fails on the right answer too: then this raises.
        if problem["answer"] is not None:
            verify(problem["answer"], problem)
        return 0.0


def opened_task(task: str, options: dict[str, Any]) -> Any:
    """Open a task; cached by its options, because opening some tasks reads a dictionary."""
    return _opened(task, msgspec.json.encode(options))


@cache
def _opened(task: str, options: bytes) -> Any:
    return open_task(task, msgspec.json.decode(options))


@lru_cache(maxsize=1024)
def _problem(task: str, options: bytes, number: int) -> Any:
    """Generate a problem by its number; problems are not serialized, because they are not always plain data."""
    return _opened(task, options)[number]
