from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.lab.testbed.tools import ToolFailed


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
    testbed, journal = RunTestbed(tmp_path / "place"), Journal()
    parts: Any = (Stuck(), journal)
    testbed._hosts, testbed._guard = parts
    (testbed.folder / "disk").mkdir()
    with pytest.raises(ToolFailed):
        testbed.close()
    assert journal.did == ["the mount", "the image", "the reaper's turn"]
    assert not (testbed.folder / "disk").exists()
