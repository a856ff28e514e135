"""Hooks of `mkdocs build`: code blocks without the attributes that only tests read, and the tables of recipe fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).parents[1] / "kintsugi" / "config" / "schema.py"
RECIPE_FIELDS = "<!-- recipe fields -->"
TEST_ATTRIBUTES = re.compile(r'^(```\w+)((?: (?:illustration|root|experiment|engine="\w+"))+)', re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn ```` ```console root ```` into ```` ```console ````, and the marker of `recipe.md` into tables."""
    if RECIPE_FIELDS in markdown:
        markdown = markdown.replace(RECIPE_FIELDS, recipe_fields(SCHEMA.read_text(encoding="utf-8")))
    return TEST_ATTRIBUTES.sub(r"\1", markdown)


def recipe_fields(source: str) -> str:
    """Return one table per section of `Config`, from the annotations, defaults and docstrings of the schema."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return "\n".join(_section("", classes["Config"], classes))


def _section(prefix: str, section: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the lines of one section, then those of the sections inside it."""
    title = f"`{prefix}`" if prefix else "The run"
    yield from (
        f"\n## {title}\n",
        f"{_text(ast.get_docstring(section))}\n",
        "| field | type | default | |",
        "|---|---|---|---|",
    )
    inner = []
    for field, text in _fields(section, classes):
        assert isinstance(field.target, ast.Name)
        name, annotation = f"{prefix}{'.' if prefix else ''}{field.target.id}", ast.unparse(field.annotation)
        found = next((each for each in re.findall(r"\w+", annotation) if each in classes), None)
        if found is not None:
            inner.append((f"{name}[]" if annotation.startswith("tuple") else name, classes[found]))
            yield f"| `{name}` | section | | {text} |"
            continue
        default = "required" if field.value is None else ast.unparse(field.value)
        kind = annotation.removesuffix(" | None").replace(" | ", " or ")
        yield f"| `{name}` | `{kind}` | {'' if default == 'None' else f'`{default}`'} | {text} |"
    for name, node in inner:
        yield from _section(name, node, classes)


def _fields(section: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the fields of a section with their docstrings, those of the section that it extends first."""
    for base in section.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields(classes[base.id], classes)
    for statement, following in zip(section.body, [*section.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            yield statement, _text(following.value.value) if is_text else ""  # type: ignore[union-attr]


def _text(docstring: Any) -> str:
    """Return a docstring as one line of a table; what is outside of code must not look like HTML or another column."""
    parts = " ".join(str(docstring or "").split()).split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("|", "&#124;") for part in parts[::2]]
    return "`".join(parts)
