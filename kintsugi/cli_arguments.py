"""What the commands have in common: their arguments, and how a recipe becomes a configuration that can run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kintsugi.recipe import Resolved

Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe file, e.g. recipes/grpo_arithmetic.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIELD=VALUE…", help="For example actor.learning_rate=3e-4 seed=1."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name inside runs/.")]
Step = Annotated[int | None, typer.Option(help="Of a step that has a checkpoint; the last one if not given.")]


def checked(recipe: Path, overrides: list[str] | None) -> Resolved:
    from kintsugi.recipe import load

    return validated(load(recipe, overrides or ()))


def validated(resolved: Resolved) -> Resolved:
    from kintsugi.validation import validate

    allow_modules_of_this_folder()
    validate(resolved.config, origins=resolved.origins)
    return resolved


def allow_modules_of_this_folder() -> None:
    """Reward functions may live beside the recipe's user, as with `python -m`; workers find them the same way."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
