"""The one way of the commands to print: control characters and markup in texts of a run stay text."""

from __future__ import annotations

import typer

from kintsugi.runtime.printable import printable, printable_json


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text."""
    typer.echo(printable(text), err=err, nl=nl)


def say_json(encoded: bytes) -> None:
    """Print JSON; it decodes to what was encoded."""
    typer.echo(printable_json(encoded.decode()))
