"""Plain technical English: processes are things, and a docstring stands on its own."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
BANNED = re.compile(
    r"\b(whoever|whomever|nobody|somebody|everybody|anybody|who|whom|anew|behind \w+ back)\b", re.IGNORECASE
)
"""Words for people that were used of processes, and idioms that a reader has to decode."""
FRAGMENT = re.compile(r"(Of|What|Who|Whose|Whom|That|So)\b(?! is\b)")
"""First words of a docstring that neither names a thing nor says what a function does."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and literal strings of a module, with their lines."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and the strings below attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value.strip()


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders or ("kintsugi",) for path in sorted((ROOT / folder).rglob("*.py"))]


def banned_words(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} in {text.strip()[:100]!r}"
        for path in paths
        for line, text in (
            texts(path)
            if path.suffix == ".py"
            else enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        )
        for match in BANNED.finditer(text)
    ]


def fragments(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {text[:100]!r}"
        for path in paths
        for line, text in docstrings(path)
        if FRAGMENT.match(text)
    ]


def test_no_text_of_the_package_speaks_of_processes_as_of_people() -> None:
    assert banned_words(modules()) == []


def test_no_identifier_is_a_word_for_people() -> None:
    word = re.compile(r"\b(whoever|nobody|somebody|everybody)\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in modules()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if word.search(line)
    ]
    assert found == []


def test_no_page_speaks_of_processes_as_of_people() -> None:
    assert banned_words(PAGES) == []


def test_every_docstring_begins_with_a_verb_or_a_noun_phrase() -> None:
    assert fragments(modules()) == []
