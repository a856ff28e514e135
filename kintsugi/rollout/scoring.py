"""Calls reward functions and checks what they return. A reward is never guessed: what can not be scored is said so."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kintsugi.errors import ConfigError, WorldError

RewardFunction = Callable[..., Any]


class RewardFailed(WorldError):
    """A reward function raised, or returned something that is not one finite number per completion."""


def load_rewards(paths: Sequence[str]) -> dict[str, RewardFunction]:
    """Import reward functions by dotted path; the last part is the name of the reward's component."""
    functions: dict[str, RewardFunction] = {}
    for path in paths:
        module_name, _, name = path.rpartition(".")
        try:
            function = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"algorithm.reward: expected the dotted path of a function, '{path}' can not be imported: {error}"
            ) from error
        if not callable(function):
            raise ConfigError(
                f"algorithm.reward: expected a function at '{path}', found {type(function).__name__}"
            )
        if name in functions:
            raise ConfigError(
                f"algorithm.reward: two functions are named '{name}'; components need distinct names"
            )
        functions[name] = function
    if not functions:
        raise ConfigError("algorithm.reward: expected at least one reward function, found none")
    return functions


def score(
    functions: Mapping[str, RewardFunction],
    *,
    prompt: str,
    completions: Sequence[str],
    columns: Mapping[str, Any],
) -> list[dict[str, float]]:
    """Reward components of each completion of one prompt; every column is given once per completion, as TRL does."""
    count = len(completions)
    repeated = {name: [value] * count for name, value in columns.items() if name != "completion"}
    components: list[dict[str, float]] = [{} for _ in completions]
    for name, function in functions.items():
        try:
            rewards = function(completions=list(completions), prompts=[prompt] * count, **repeated)
        except Exception as error:  # The user's function may raise anything; it is recorded as the reason.
            raise RewardFailed(f"reward '{name}' raised {type(error).__name__}: {error}") from error
        for component, value in zip(components, checked(name, rewards, count=count), strict=True):
            component[name] = value
    return components


def checked(name: str, rewards: Any, *, count: int) -> list[float]:
    """One finite number per completion, or RewardFailed that says what came instead."""
    if not isinstance(rewards, list | tuple):
        raise RewardFailed(
            f"reward '{name}': expected a list of {count} numbers, got {type(rewards).__name__}"
        )
    if len(rewards) != count:
        raise RewardFailed(f"reward '{name}': expected {count} numbers, got {len(rewards)}")
    values = []
    for value in rewards:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardFailed(f"reward '{name}': expected finite numbers, got {value!r}")
        values.append(float(value))
    return values
