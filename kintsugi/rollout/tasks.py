"""The reward of reasoning-gym's tasks: their own verifiers, guarded against what is known to go wrong in them."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

import msgspec

from kintsugi.data.tasks import open_task

_PARSING_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    ArithmeticError,
    RecursionError,
)
"""What verifiers raise when an answer is not of the form they expect (`prime_factorization`: "two" is no factor)."""
_EXACT = frozenset({"game_of_life_halting"})
"""Tasks of two possible answers whose verifier gives full marks to anything that is not the wrong one."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def task_score(
    completions: list[str],
    task: list[str],
    options: list[dict[str, Any]],
    number: list[int],
    **columns: Any,
) -> list[float]:
    """What the task's verifier gives, 0 to 1: to what stands in the last `<answer>…</answer>`, or to the whole text.

    Tasks with several right answers, or without one that is known, are scored the same way.
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
        # The answer's fault, unless the verifier can not do with the right one either: that is told, not scored.
        if problem["answer"] is not None:
            verify(problem["answer"], problem)
        return 0.0


def opened_task(task: str, options: dict[str, Any]) -> Any:
    """Its problems; the same object for the same options, because to make one may mean to read a dictionary."""
    return _opened(task, msgspec.json.encode(options))


@cache
def _opened(task: str, options: bytes) -> Any:
    return open_task(task, msgspec.json.decode(options))


@lru_cache(maxsize=1024)
def _problem(task: str, options: bytes, number: int) -> Any:
    """Made again rather than passed on: what it is made of is not always plain data."""
    return _opened(task, options)[number]
