"""Reward functions of a recipe: their names and weights, their arguments, and the check of their results.

A function is called once per group, with TRL's signature: `f(completions=[…], prompts=[…], **columns)`, every column of
the row repeated for each completion. It returns one finite number per completion. None or an exception instead of a
number quarantines that sample with the reason; the other samples of the group count. Any other result fails the whole
group (`RewardFailed`), which is retried. A missing reward is never replaced by a number.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError, WorldError
from kintsugi.rollout.user_code.failures import TRACEBACKS, described, shortened
from kintsugi.runtime.user_modules import IN_A_FILE, function_name, import_function

RewardFunction = Callable[..., Any]
RETURN = "return"
"""Name of the component that is an episode's reward."""


class RewardFailed(WorldError):
    """A reward function raised, took too long, or returned something that is not one value per completion."""


class RewardName(msgspec.Struct, frozen=True):
    """One entry of `algorithm.reward`: `RewardName("my.module.brevity", "brevity", 0.1)`."""

    path: str
    name: str
    """Name of the reward's component; the last part of the path."""
    weight: float = 1.0


class RewardSpec(msgspec.Struct, frozen=True):
    """An imported reward function."""

    name: str
    function: RewardFunction

    @property
    def is_async(self) -> bool:
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object's own `async def __call__`
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)


def parse_rewards(entries: Sequence[str]) -> tuple[RewardName, ...]:
    """Parse paths, names and weights, without importing anything.

    >>> parse_rewards(["my.module.right", "my.module.brevity * 0.1"])[1]
    RewardName(path='my.module.brevity', name='brevity', weight=0.1)
    """
    names = tuple(map(_parse, entries))
    if not names:
        raise ConfigError("`algorithm.reward`: expected at least one function, found none")
    for index, each in enumerate(names):
        if any(each.name == other.name for other in names[:index]):
            raise ConfigError(
                "`algorithm.reward`: expected distinct names (they name the reward's components), "
                f"got {each.name!r} twice"
            )
    return names


def rewards_of(config: Config) -> tuple[RewardName, ...]:
    """Components of a sample's reward: the recipe's functions or, for an episode, its return."""
    if config.rollout.environment is None:
        return parse_rewards(config.algorithm.reward)
    return (RewardName(config.rollout.environment, RETURN),)


def _parse(entry: str) -> RewardName:
    path, star, weight = entry.rpartition("*") if "*" in entry else (entry, "", "1")
    path, weight = path.strip(), weight.strip()
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(
            "`algorithm.reward`: expected a path, or a path and its weight like `my.module.brevity * 0.1`, "
            f"got {entry!r}" + (f" with the weight {weight!r}" if star else "")
        )
    parts = [function_name(path)] if IN_A_FILE in path else path.split(".")
    is_dotted = len(parts) > 1 or IN_A_FILE in path
    if not is_dotted or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            "`algorithm.reward`: expected dotted paths like `package.module.function` or files like "
            f"`rewards.py:function`, got {entry!r}"
        )
    return RewardName(path, function_name(path), number)


def load_rewards(entries: Sequence[str]) -> tuple[RewardSpec, ...]:
    """Import the functions; ConfigError names the one that can not be."""
    return tuple(RewardSpec(each.name, import_function(each.path)) for each in parse_rewards(entries))


def total(components: Mapping[str, float], names: Sequence[RewardName]) -> float:
    """Weighted sum of the components, in the recipe's order; 0 for a demonstration, which has none."""
    return sum((each.weight * components[each.name] for each in names if each.name in components), start=0.0)


def arguments(prompt: str, completions: Sequence[str], columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Keyword arguments of a reward function; the column of SFT completions is left out."""
    count = len(completions)
    repeated = {name: [value] * count for name, value in columns.items() if name != "completion"}
    return {**repeated, "completions": list(completions), "prompts": [prompt] * count}


def failure(name: str, error: BaseException) -> RewardFailed:
    """Describe an exception of a reward function, with the line that raised it; its traceback goes to the log."""
    TRACEBACKS.write(error)
    return RewardFailed(f"reward '{name}' raised {described(error)}")


def checked(name: str, rewards: Any, *, count: int) -> list[float | str]:
    """Check a result: a number per completion, or the reason why there is none. RewardFailed if it is not a list of the
    right length."""
    if inspect.isawaitable(rewards):
        if inspect.iscoroutine(rewards):
            rewards.close()
        raise RewardFailed(f"reward '{name}': returned something to await; make it an `async def` function")
    if not isinstance(rewards, list | tuple) and hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple):
        raise RewardFailed(
            f"reward '{name}': expected a list of {count} numbers, got {type(rewards).__name__}"
        )
    if len(rewards) != count:
        raise RewardFailed(f"reward '{name}': expected {count} numbers, got {len(rewards)}")
    return [_number(name, value) for value in rewards]


def _number(name: str, value: Any) -> float | str:
    if isinstance(value, BaseException):
        return f"reward '{name}': {shortened(value) or type(value).__name__}"
    number = finite_number(value)
    return f"reward '{name}': expected a finite number, got {value!r:.200}" if number is None else number


def finite_number(value: Any) -> float | None:
    """Convert a value to a finite number: Python's, numpy's or a boolean, but not text; None if it is none."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # The last is a tensor's of several numbers.
        return None
    return number if math.isfinite(number) else None


def combined(
    values: Mapping[str, Sequence[float | str]], *, count: int
) -> tuple[list[dict[str, float]], dict[int, str]]:
    """Components of each completion, and reasons for those that could not be scored, which have no components.

    >>> combined({"right": [1.0, 0.0], "brevity": [0.5, "reward 'brevity': no text"]}, count=2)
    ([{'right': 1.0, 'brevity': 0.5}, {}], {1: "reward 'brevity': no text"})
    """
    components: list[dict[str, float]] = []
    reasons: dict[int, str] = {}
    for index in range(count):
        given = {name: each[index] for name, each in values.items()}
        why = [value for value in given.values() if isinstance(value, str)]
        if why:
            reasons[index] = "; ".join(why)
        components.append({} if why else {n: v for n, v in given.items() if not isinstance(v, str)})
    return components, reasons
