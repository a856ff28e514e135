"""Calls reward functions and checks what they return. A reward is never guessed: what can not be scored is said so."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from kintsugi.errors import ConfigError, DeadlineExceeded, WorldError
from kintsugi.runtime import wait

RewardFunction = Callable[..., Any]
IDLE_S = 1.0


class RewardFailed(WorldError):
    """A reward function raised, or returned something that is not one finite number per completion."""


def load_rewards(paths: Sequence[str]) -> dict[str, RewardFunction]:
    """Import reward functions by dotted path; the last part is the name of the reward's component."""
    functions: dict[str, RewardFunction] = {}
    for path in paths:
        name = path.rpartition(".")[2]
        if name in functions:
            raise ConfigError(
                f"`algorithm.reward`: expected distinct names (they name the reward's components), got {name!r} twice"
            )
        functions[name] = _import_function(path)
    if not functions:
        raise ConfigError("`algorithm.reward`: expected at least one function, found none")
    return functions


def _import_function(path: str) -> RewardFunction:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"`algorithm.reward`: expected dotted paths like `package.module.function`, got {path!r}"
        )
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # Somebody else's module may raise anything while it is imported.
        raise ConfigError(
            f"`algorithm.reward`: expected {path} to be importable; {module_name} gives {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise ConfigError(
            f"`algorithm.reward`: expected a function {name!r} in {module_name}, found {found} at {path}"
        )
    loaded: RewardFunction = function
    return loaded


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
    return [_number(name, value) for value in rewards]


def _number(name: str, value: Any) -> float:
    """Anything that is one finite number: Python's, numpy's, a truth value; not text that looks like one."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardFailed(f"reward '{name}': expected finite numbers, got {value!r}")
    return number


class RewardThread:
    """Computes rewards one after the other beside the worker's loop.

    The functions are the user's and may hang, so the thread is a daemon: it can be left behind, and it never keeps
    the process from ending.
    """

    def __init__(self, functions: Mapping[str, RewardFunction]) -> None:
        self._functions = functions
        self._work: SimpleQueue[tuple[Future[list[dict[str, float]]], dict[str, Any]]] = SimpleQueue()
        self._abandoned = Event()
        Thread(target=self._run, name="reward", daemon=True).start()

    def submit(
        self, *, prompt: str, completions: Sequence[str], columns: Mapping[str, Any]
    ) -> Future[list[dict[str, float]]]:
        future: Future[list[dict[str, float]]] = Future()
        self._work.put((future, {"prompt": prompt, "completions": completions, "columns": columns}))
        return future

    def abandon(self) -> None:
        """Take no more work; a function that hangs is left to hang."""
        self._abandoned.set()

    def _run(self) -> None:
        """Consumes submitted work until abandoned; waits for the next piece only."""
        while not self._abandoned.is_set():
            try:
                future, arguments = wait(
                    self._attempt, whom="rollout worker", what="a reward", timeout_s=IDLE_S
                )
            except DeadlineExceeded:
                continue
            try:
                future.set_result(score(self._functions, **arguments))
            except RewardFailed as error:
                future.set_exception(error)

    def _attempt(self, remaining_s: float) -> tuple[Future[list[dict[str, float]]], dict[str, Any]] | None:
        try:
            return self._work.get(timeout=remaining_s)
        except Empty:
            return None
