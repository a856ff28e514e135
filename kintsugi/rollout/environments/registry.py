"""Look-up of `rollout.environment`: a shipped environment, a class of the user, or an agent program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kintsugi.config.schema import RolloutSection
from kintsugi.errors import ConfigError, UserError
from kintsugi.rollout.environments.protocol import Environment
from kintsugi.rollout.user_code.failures import described
from kintsugi.runtime.user_modules import import_function

SHIPPED: Mapping[str, str] = {
    "calculator": "kintsugi.rollout.environments.Calculator",
    "number_game": "kintsugi.rollout.environments.NumberGame",
    "reasoning_gym": "kintsugi.rollout.environments.ReasoningGym",
}
METHODS = ("reset", "step", "close")
AGENT_ARGUMENTS = ("base_url", "api_key", "model")
"""Keyword arguments of an agent program, in addition to its row and `rollout.options`."""
_FIELD = "rollout.environment"


class EnvironmentMaker(msgspec.Struct, frozen=True):
    """A class of environments, and the arguments of each instance."""

    kind: Callable[..., Environment]
    options: dict[str, Any]

    def make(self) -> Environment:
        return self.kind(**self.options)

    @property
    def demonstrates(self) -> bool:
        return callable(getattr(self.kind, "demonstrate", None))


def find_environment(section: RolloutSection) -> EnvironmentMaker | Callable[..., Any]:
    """Find the environment class or agent program; ConfigError if there is none, or the options do not fit."""
    name = section.environment
    assert name is not None
    if name not in SHIPPED and name.isidentifier():
        raise ConfigError(
            f"`{_FIELD}`: expected one of {', '.join(SHIPPED)}, or the dotted path of an environment or an agent "
            f"program, got {name!r}"
        )
    found: Any = import_function(SHIPPED.get(name, name), field=_FIELD)
    if not inspect.isclass(found):
        agent: Callable[..., Any] = found
        _check_agent(agent, section)
        return agent
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(
            f"`{_FIELD}`: expected a class with the methods {', '.join(METHODS)}, {name} has no {missing[0]}"
        )
    _check_options(found, section)
    kind: Callable[..., Environment] = found  # type: ignore[assignment]
    return EnvironmentMaker(kind, section.options)


def try_environment(section: RolloutSection) -> None:
    """Find the environment and instantiate it once; ConfigError if that fails."""
    found = find_environment(section)
    if not isinstance(found, EnvironmentMaker):
        return
    try:
        found.make()
    except UserError:
        raise
    except Exception as error:  # A user's class may raise anything.
        raise ConfigError(
            f"`{_FIELD}`: expected {section.environment} to be made with {section.options}; it raised "
            f"{described(error)}"
        ) from error


def _check_options(kind: type, section: RolloutSection) -> None:
    try:
        inspect.signature(kind).bind(**section.options)
    except ValueError:  # The signature is unknown.
        return
    except TypeError as error:
        raise ConfigError(
            f"`rollout.options`: expected arguments of {section.environment}{inspect.signature(kind)}, "
            f"got {section.options}: {error}"
        ) from error


def _check_agent(agent: Callable[..., Any], section: RolloutSection) -> None:
    if taken := sorted(set(AGENT_ARGUMENTS) & section.options.keys()):
        raise ConfigError(f"`rollout.options`: expected no {taken[0]!r}, which every agent program is given")
    try:
        signature = inspect.signature(agent)
    except ValueError:  # The signature is unknown.
        return
    try:
        signature.bind(None, **dict.fromkeys(AGENT_ARGUMENTS), **section.options)
    except TypeError as error:
        expected = ", ".join(("row, *", *AGENT_ARGUMENTS, *section.options))
        raise ConfigError(
            f"`{_FIELD}`: expected an agent program that can be called with ({expected}), "
            f"got {section.environment}{signature}: {error}"
        ) from error
