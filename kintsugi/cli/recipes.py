"""The recipes of the package: list, text, copy."""

from __future__ import annotations

from pathlib import Path

from kintsugi.config.recipe import description, find_recipe, packaged_recipes
from kintsugi.errors import StorageError, UserError


def recipe_list() -> str:
    """Return one line per recipe: its name and the first sentence of its comment."""
    recipes = packaged_recipes()
    width = max(map(len, recipes), default=0)
    return "\n".join(f"{name:{width}}  {description(path)}" for name, path in recipes.items())


def recipe_text(name: str) -> str:
    """Return the file of a packaged recipe as it is."""
    return _packaged(name).read_text(encoding="utf-8")


def copy_recipe(name: str, target: Path) -> Path:
    """Write a recipe to a new file that extends the packaged one by name, if it extended another."""
    if target.exists():
        raise UserError(f"{target}: expected a file that does not exist yet; nothing is overwritten")
    lines = recipe_text(name).splitlines(keepends=True)
    lines = [_by_name(line) if line.startswith("extends: ") else line for line in lines]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"could not write {target}: {error.strerror or error}") from error
    return target


def _by_name(line: str) -> str:
    """`extends: base_cpu.yaml` is relative to the package; `extends: base_cpu` is found from everywhere."""
    return line.replace(".yaml", "", 1)


def _packaged(name: str) -> Path:
    """Return the packaged recipe of a name, even where the current folder has a file of that name."""
    return packaged_recipes().get(name) or find_recipe(Path(name))
