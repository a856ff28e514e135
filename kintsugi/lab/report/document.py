"""A report as a value, so that the page and the Markdown say the same: sections of paragraphs, tables and figures.

Text knows two marks: `code` between backticks and **bold** between double asterisks. Everything else is literal.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup, escape

MISSING = "not measured"
"""What a cell says whose value nobody measured; a value is never made up."""
TEMPLATE = "page.html"
MOST_OF_A_NUMBER = 24
"""Characters: `100% (10/10; 72%–100%)`; what is longer is a sentence that begins with a number."""


class Paragraph(msgspec.Struct, frozen=True, tag=True):
    text: str


class Bullets(msgspec.Struct, frozen=True, tag=True):
    items: tuple[str, ...]


class Table(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first column names the row. Every table is also written as `data/<name>.csv`."""

    name: str
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def is_numeric(self, column: int) -> bool:
        """Numbers stand at the right, so that their sizes can be compared."""
        values = [row[column] for row in self.rows if row[column] not in {"", "–", MISSING}]
        return bool(values) and all(
            len(value) <= MOST_OF_A_NUMBER and re.match(r"[-+±<>≤≥]? ?\d", value) for value in values
        )


class Picture(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A figure: `figures/<name>.svg` and `.png`."""

    name: str
    caption: str
    alternative: str
    """In words, for whoever can not see it."""
    svg: str
    """To be put into the page."""


Block = Paragraph | Bullets | Table | Picture


class Section(msgspec.Struct, frozen=True):
    title: str
    blocks: tuple[Block, ...]
    level: int = 2
    """Of the heading; the document's own title is 1."""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


class Document(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    subtitle: str
    abstract: tuple[Block, ...]
    sections: tuple[Section, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (*self.abstract, *(block for section in self.sections for block in section.blocks))

    @property
    def tables(self) -> list[Table]:
        return [block for block in self.blocks if isinstance(block, Table)]

    @property
    def pictures(self) -> list[Picture]:
        return [block for block in self.blocks if isinstance(block, Picture)]


def listed(items: Sequence[str]) -> str:
    """
    >>> listed(["A", "B", "C"])
    'A, B and C'
    """
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def to_html(document: Document) -> str:
    """One page that needs nothing from outside itself."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kintsugi.lab.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["marked"] = _marked
    numbers = _numbers(document)
    return environment.get_template(TEMPLATE).render(
        document=document,
        number=lambda block: numbers[block.name],
        kind=_kind,
        missing=MISSING,
        Markup=Markup,
    )


def to_markdown(document: Document) -> str:
    """The same words; figures are linked."""
    numbers = _numbers(document)
    parts = [f"# {document.title}", document.subtitle]
    parts += [_block_as_markdown(block, numbers) for block in document.abstract]
    for section in document.sections:
        parts.append(f"{'#' * section.level} {section.title}")
        parts += [_block_as_markdown(block, numbers) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def write_tables(tables: Iterable[Table], folder: Path) -> None:
    """Each as CSV, without the marks of the text."""
    for table in tables:
        with (folder / f"{table.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(table.head)
            writer.writerows([_plain(cell) for cell in row] for row in table.rows)


def _numbers(document: Document) -> dict[str, str]:
    """`Table 2`, `Figure 1`, in the order in which they come."""
    numbers = {table.name: f"Table {number}" for number, table in enumerate(document.tables, 1)}
    return numbers | {picture.name: f"Figure {number}" for number, picture in enumerate(document.pictures, 1)}


def _kind(block: Block) -> str:
    return type(block).__name__.lower()


def _marked(text: str) -> Markup:
    escaped = str(escape(text))
    escaped = re.sub(r"`([^`\s]{,30})`", r'<code class="name">\1</code>', escaped)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped))


def _plain(text: str) -> str:
    return re.sub(r"`([^`]+)`|\*\*([^*]+)\*\*", lambda match: match[1] or match[2], text)


def _block_as_markdown(block: Block, numbers: dict[str, str]) -> str:
    match block:
        case Paragraph(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table():
            return _table_as_markdown(block, numbers[block.name])
        case Picture():
            image = f"![{block.alternative}](figures/{block.name}.svg)"
            return f"{image}\n\n**{numbers[block.name]}.** {block.caption}"


def _table_as_markdown(table: Table, number: str) -> str:
    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    align = ("---:" if table.is_numeric(column) else "---" for column in range(len(table.head)))
    lines = [f"**{number}.** {table.caption}", "", line(table.head), line(align), *map(line, table.rows)]
    return "\n".join([*lines, "", table.note] if table.note else lines)
