"""Report as a value, rendered to HTML and Markdown: sections of paragraphs, tables and figures.

Text supports two marks: `code` between backticks and **bold** between double asterisks. Everything else is literal.
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

from kintsugi.types import kind_of

MISSING = "not measured"
"""Text of a cell without a measured value."""
TEMPLATE = "page.html"
MOST_OF_A_NUMBER = 24
"""Longest text that counts as a number: `100% (10/10; 72%–100%)`; a longer text is a sentence that begins with a
number."""


class Paragraph(msgspec.Struct, frozen=True, tag=True):
    text: str


class Bullets(msgspec.Struct, frozen=True, tag=True):
    items: tuple[str, ...]


class ReportTable(msgspec.Struct, frozen=True, kw_only=True, tag="Table"):
    """Table; the first column names the row. Every table is also written as `data/<name>.csv`."""

    name: str
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def is_numeric(self, column: int) -> bool:
        """Whether a column contains numbers, which are aligned to the right."""
        values = [row[column] for row in self.rows if row[column] not in {"", "–", MISSING}]
        return bool(values) and all(
            len(value) <= MOST_OF_A_NUMBER and re.match(r"[-+±<>≤≥]? ?\d", value) for value in values
        )


class ReportFigure(msgspec.Struct, frozen=True, kw_only=True, tag="Picture"):
    """Figure: `figures/<name>.svg` and `.png`."""

    name: str
    caption: str
    alternative: str
    """Text for readers that can not see the figure."""
    svg: str
    """SVG for the HTML page."""


Block = Paragraph | Bullets | ReportTable | ReportFigure


class Section(msgspec.Struct, frozen=True):
    title: str
    blocks: tuple[Block, ...]
    level: int = 2
    """Level of the heading; the title of the document is 1."""

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
    def tables(self) -> list[ReportTable]:
        return [block for block in self.blocks if isinstance(block, ReportTable)]

    @property
    def pictures(self) -> list[ReportFigure]:
        return [block for block in self.blocks if isinstance(block, ReportFigure)]


def listed(items: Sequence[str]) -> str:
    """
    >>> listed(["A", "B", "C"])
    'A, B and C'
    """
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def to_html(document: Document) -> str:
    """Render one self-contained HTML page."""
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
    """Render Markdown with links to the figures."""
    numbers = _numbers(document)
    parts = [f"# {document.title}", document.subtitle]
    parts += [_block_as_markdown(block, numbers) for block in document.abstract]
    for section in document.sections:
        parts.append(f"{'#' * section.level} {section.title}")
        parts += [_block_as_markdown(block, numbers) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def write_tables(tables: Iterable[ReportTable], folder: Path) -> None:
    """Write each table as CSV, without marks."""
    for table in tables:
        with (folder / f"{table.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(table.head)
            writer.writerows([_plain(cell) for cell in row] for row in table.rows)


def _numbers(document: Document) -> dict[str, str]:
    """Number tables and figures in the order of their occurrence: `Table 2`, `Figure 1`."""
    numbers = {table.name: f"Table {number}" for number, table in enumerate(document.tables, 1)}
    return numbers | {picture.name: f"Figure {number}" for number, picture in enumerate(document.pictures, 1)}


def _kind(block: Block) -> str:
    return kind_of(block).lower()


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
        case ReportTable():
            return _table_as_markdown(block, numbers[block.name])
        case ReportFigure():
            image = f"![{block.alternative}](figures/{block.name}.svg)"
            return f"{image}\n\n**{numbers[block.name]}.** {block.caption}"


def _table_as_markdown(table: ReportTable, number: str) -> str:
    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    align = ("---:" if table.is_numeric(column) else "---" for column in range(len(table.head)))
    lines = [f"**{number}.** {table.caption}", "", line(table.head), line(align), *map(line, table.rows)]
    return "\n".join([*lines, "", table.note] if table.note else lines)
