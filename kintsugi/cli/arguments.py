"""Arguments that several commands share, and the step from a recipe to a validated configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kintsugi.config.recipe import Resolved

Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe file, or a name that `kintsugi recipes` lists.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIELD=VALUE…", help="Overrides, e.g. actor.learning_rate=3e-4 seed=1."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name in runs/.")]
Step = Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the last one.")]

Best = Annotated[
    bool, typer.Option("--best", help="The checkpoint with the highest held-out accuracy instead.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with all fields.")]


def load_validated(recipe: Path, overrides: list[str] | None) -> Resolved:
    """Load a recipe with overrides and validate it."""
    return validated(loaded(recipe, overrides))


def loaded(recipe: Path, overrides: list[str] | None) -> Resolved:
    """Load a recipe with overrides; models that it names are taken from the hub."""
    from kintsugi.cli.local_models import with_local_models
    from kintsugi.config.recipe import load

    return with_local_models(load(recipe, overrides or ()))


def validated(resolved: Resolved) -> Resolved:
    """Validate a loaded recipe; UserError names the first wrong field."""
    from kintsugi.config.validation import validate

    validate(resolved.config, origins=resolved.origins)
    return resolved
