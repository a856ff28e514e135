from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kintsugi.lab.places import Place
from kintsugi.lab.tools import ToolFailed


class Stuck:
    """Hosts that can not be taken away."""

    places = ()

    def close(self) -> None:
        raise ToolFailed("a host does not end")


class Journal:
    """A guard with two changes, of which one can not be undone."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def outstanding(self) -> list[str]:
        return ["the mount", "the image"]

    def undo(self, entry: str) -> None:
        self.did.append(entry)
        if entry == "the mount":
            raise ToolFailed("umount: target is busy")

    def close(self) -> None:
        self.did.append("the reaper's turn")


def test_what_can_not_be_taken_away_keeps_nothing_else(tmp_path: Path) -> None:
    place, journal = Place(tmp_path / "place"), Journal()
    parts: Any = (Stuck(), journal)
    place._hosts, place._guard = parts
    (place.folder / "disk").mkdir()
    with pytest.raises(ToolFailed):
        place.close()
    assert journal.did == ["the mount", "the image", "the reaper's turn"]
    assert not (place.folder / "disk").exists()
