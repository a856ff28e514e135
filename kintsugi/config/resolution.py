"""Values that a recipe leaves to the algorithm, filled in: a run folder says what the run used."""

from __future__ import annotations

import msgspec

from kintsugi.config.algorithm_rules import algorithm_problems
from kintsugi.config.recipe import DEFAULT_OF, Resolved
from kintsugi.config.schema import Config
from kintsugi.config.stages import stages

NOT_USED = "not used"
"""Origin of an open value that this algorithm, or this combination of values, does not use."""


def with_resolved_algorithm(resolved: Resolved) -> Resolved:
    """Fill in the defaults of the algorithm where the recipe leaves a value open, with that as their origin.

    A stage takes the same values (`config/stages.py`), so the run is the same. A value that would be refused, because
    the run does not use it, stays open.
    """
    config = resolved.config
    used = stages(config)[-1].algorithm
    open_fields = [name for name in used.__struct_fields__ if getattr(config.algorithm, name) is None]
    filled = {name: getattr(used, name) for name in open_fields if getattr(used, name) is not None}
    complete = _with(config, filled)
    problems = algorithm_problems(complete, stages(complete)[-1])
    refused = {field.removeprefix("algorithm.") for field, _ in problems}
    filled = {name: value for name, value in filled.items() if name not in refused}
    unused = {f"algorithm.{name}": NOT_USED for name in refused if name in open_fields}
    origins = {f"algorithm.{name}": f"{DEFAULT_OF}{used.name}" for name in filled}
    return Resolved(_with(config, filled), {**resolved.origins, **unused, **origins})


def _with(config: Config, values: dict[str, object]) -> Config:
    return msgspec.structs.replace(config, algorithm=msgspec.structs.replace(config.algorithm, **values))
