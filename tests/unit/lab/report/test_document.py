from __future__ import annotations

from pathlib import Path

from kintsugi.lab.report.document import (
    Bullets,
    Document,
    Paragraph,
    ReportTable,
    Section,
    to_html,
    to_markdown,
    write_tables,
)


def document(*blocks: Paragraph | Bullets | ReportTable) -> Document:
    return Document(title="T & U", subtitle="s", abstract=(), sections=(Section("1 One", blocks),))


def table(*cells: str) -> ReportTable:
    return ReportTable(name="t", caption="c", head=("name", "value"), rows=(tuple(cells),))


def test_what_was_measured_can_not_become_part_of_the_page() -> None:
    text = to_html(document(Paragraph("<script>`a<b`</script>"), table("<i>", "**<b>**")))

    assert "<script>" not in text
    assert '<code class="name">a&lt;b</code>' in text
    assert "<strong>&lt;b&gt;</strong>" in text


def test_tables_can_be_read_aloud() -> None:
    text = to_html(document(table("row", "12 s")))

    assert "<caption><strong>Table 1.</strong> c</caption>" in text
    assert '<th scope="col">name</th>' in text
    assert '<th scope="row">row</th>' in text
    assert '<td class="number">12 s</td>' in text


def test_a_bar_in_a_cell_does_not_end_it_in_markdown() -> None:
    assert "| a \\| b | c d |" in to_markdown(document(table("a | b", "c\nd")))


def test_tables_are_written_without_marks(tmp_path: Path) -> None:
    write_tables([table("`model-1`, train", "**2**")], tmp_path)

    assert (tmp_path / "t.csv").read_text().splitlines() == ["name,value", '"model-1, train",2']
