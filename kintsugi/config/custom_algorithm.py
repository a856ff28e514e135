"""Algorithms in the user's own code: a description that `algorithm.name` names by path.

    # my_algorithms.py
    def against_median(rewards, *, scale_by_std):
        middle = statistics.median(rewards)
        return [reward - middle for reward in rewards]

    median_grpo = CustomAlgorithm(base="grpo", group_advantages=against_median)

    # recipe.yaml
    algorithm:
      name: my_algorithms.py:median_grpo        # or `my_package.my_algorithms.median_grpo`

When a recipe is loaded, the name is replaced by its base (`algorithm.name`) and its path (`algorithm.custom`), so the
recorded configuration of a run can be read without the user's code. The master and the ranks import the description;
the master runs without torch, so the module must not import it at its top level.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kintsugi.config.schema import LEARN_SAMPLES, AlgorithmSection
from kintsugi.errors import ConfigError
from kintsugi.runtime.user_modules import function_name, import_object

if TYPE_CHECKING:
    from torch import Tensor

    from kintsugi.config.schema import Algorithm
    from kintsugi.config.stages import Stage
    from kintsugi.graph.dfg import Graph
    from kintsugi.training.objectives import PolicyTokens

FIELD = "algorithm.custom"
_RESERVED = frozenset({"name", "custom"})


@dataclass(frozen=True, kw_only=True)
class CustomAlgorithm:
    """A variant of a built-in algorithm: `CustomAlgorithm(base="grpo", group_advantages=against_median)`.

    All functions must be pure: the same arguments give the same result in every process. A step that is repeated after
    a fault calls them again.
    """

    base: str
    """Built-in algorithm whose graph, loss, settings and validation rules apply unless replaced below: ppo, grpo,
    dr_grpo, dapo, gspo, rloo or reinforce_pp."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of `algorithm:` for a recipe that sets none: `{"clip_high": 0.3}`."""
    group_advantages: Callable[..., Sequence[float]] | None = None
    """Advantages of one prompt's samples, called by the master as `f(rewards, *, scale_by_std)`; see
    `graph/advantages.py`. A group with fewer than two valid samples has advantages of 0 without a call."""
    token_loss: Callable[[PolicyTokens, Algorithm], Tensor] | None = None
    """Loss of every token of a micro-batch, called by the ranks as `f(tokens, settings)`; see
    `training/objectives.PolicyTokens`. The mean over the batch is taken by `algorithm.denominator`."""
    graph: Callable[[Stage], Graph] | None = None
    """Model calls of a step, built from the parts in `graph/algorithms.py`; None: those of `base`."""

    def __post_init__(self) -> None:
        if self.base not in LEARN_SAMPLES:
            raise ConfigError(
                f"`base`: expected one of {', '.join(sorted(LEARN_SAMPLES))}, got {self.base!r}"
            )
        settable = [name for name in AlgorithmSection.__struct_fields__ if name not in _RESERVED]
        for name in self.defaults:
            if name not in settable:
                raise ConfigError(f"`defaults`: expected fields of {', '.join(settable)}, got {name!r}")
        for name in ("group_advantages", "token_loss", "graph"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(f"`{name}`: expected a function, got {type(function).__name__}")


def is_custom_name(name: str) -> bool:
    """Whether `algorithm.name` is a path. No built-in name contains a dot or a colon."""
    return "." in name or ":" in name


@lru_cache
def load_custom_algorithm(path: str, *, field: str = FIELD) -> CustomAlgorithm:
    """Import a description, once per process. ConfigError names the field, the path and what was expected there."""
    has_torch = "torch" in sys.modules
    found = import_object(path, field=field)
    if not isinstance(found, CustomAlgorithm):
        kind = "nothing" if found is None else type(found).__name__
        raise ConfigError(
            f"`{field}`: expected `{function_name(path)} = kintsugi.CustomAlgorithm(base=…, …)` at {path}, found {kind}"
        )
    if "torch" in sys.modules and not has_torch:
        raise ConfigError(
            f"`{field}`: expected a module that imports torch inside its functions only (the master imports the module "
            f"and runs without torch), but importing {path} imports torch"
        )
    return found


def custom_algorithm(algorithm: AlgorithmSection) -> CustomAlgorithm | None:
    """Return the description of an algorithm that is not built in; None for one that is."""
    return None if algorithm.custom is None else load_custom_algorithm(algorithm.custom)
