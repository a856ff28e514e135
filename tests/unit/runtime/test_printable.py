from __future__ import annotations

import json

import pytest

from kintsugi.runtime.printable import printable, printable_json, printable_line


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b]52;c;cm0=\x07",  # sets the clipboard
        "\x9b31m",  # a C1 control sequence introducer
        "\x1bP$q\x1b\\",  # asks the terminal to type
        "a\rb\x08c\x7f",
        "\u202eabc\u2066",
        "\ud800",
        "\u2028",
    ],
)
def test_no_control_character_is_left(hostile: str) -> None:
    shown = printable(f"text {hostile}")
    assert all(char.isprintable() for char in shown)
    assert shown.startswith("text ")
    encoded = json.dumps({"text": hostile}, ensure_ascii=False)
    assert json.loads(printable_json(encoded))["text"] == hostile
    assert all(char.isprintable() for char in printable_json(encoded))


def test_ordinary_text_stays_as_it_is() -> None:
    text = "Zeile 1\n\tnaïve 漢字 🙂 [/bold] ≈ →"
    assert printable(text) == text
    assert printable_line("a\nb\x1b") == "a\\nb\\x1b"
