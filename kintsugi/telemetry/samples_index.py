"""`samples.index`: where the samples of each step are in `samples.jsonl`, and the worst of them.

A line per step. Nothing depends on it: readers look through those parts of `samples.jsonl` that it does not describe,
as of a run that an earlier version began, and through all of it where the two do not agree.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kintsugi.telemetry.jsonl_log import lines_between

NUM_WORST = 10
"""Samples with the lowest rewards that are listed for each step."""

WorstKey = tuple[float, int, int, int]
"""(reward, minus the step, offset, end) of a sample: the lowest reward first, then the latest step."""


class SamplesOfStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of `samples.index`."""

    step: int
    offset: int
    """Bytes of the step's lines: from here …"""
    end: int
    """… to here."""
    num_scored: int = 0
    """Samples with a reward."""
    worst: tuple[tuple[float, int, int], ...] = ()
    """(reward, offset, end) of the samples with the lowest rewards, the lowest first."""

    def places(self) -> Iterator[WorstKey]:
        for reward, offset, end in self.worst:
            yield reward, -self.step, offset, end


class SamplesIndex:
    """The index of one `samples.jsonl`, as it is now."""

    def __init__(self, path: Path, *, samples: Path) -> None:
        """`samples`: the file that it describes."""
        self._path, self._samples = path, samples
        self._decoder = msgspec.json.Decoder(SamplesOfStep)
        self._agrees = path.is_file()
        self.rest: list[tuple[int, int]] = self._find_rest()
        """Parts of `samples.jsonl` that the index does not describe: (offset, end), in order."""

    def _find_rest(self) -> list[tuple[int, int]]:
        rest, position, size = [], 0, self._samples.stat().st_size
        entry = None
        for entry in self._entries():
            self._agrees = self._agrees and position <= entry.offset <= entry.end <= size
            if entry.offset > position:
                rest.append((position, entry.offset))
            position = entry.end
        if entry is not None:
            # An edited file has its lines elsewhere.
            self._agrees = self._agrees and all(map(self._begins_line, (entry.offset, entry.end)))
        if not self._agrees:
            return [(0, size)]
        return [*rest, (position, size)] if position < size else rest

    def _begins_line(self, offset: int) -> bool:
        with self._samples.open("rb") as file:
            return offset == 0 or os.pread(file.fileno(), 1, offset - 1) == b"\n"

    def _entries(self) -> Iterator[SamplesOfStep]:
        if not self._agrees:
            return
        for _, line in lines_between(self._path):
            try:
                yield self._decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """Return the parts of `samples.jsonl` that may have samples of this step."""
        found = [(entry.offset, entry.end) for entry in self._entries() if entry.step == step]
        return sorted([*found, *self.rest])

    def worst(self, count: int, others: Iterable[WorstKey]) -> tuple[list[WorstKey], list[tuple[int, int]]]:
        """Return the places of the samples with the lowest rewards, including `others`, and the steps that may have
        further ones among them, since they list as many as they can: (offset, end) of each."""
        keys = (key for entry in self._entries() for key in entry.places())
        found = heapq.nsmallest(count, (key for source in (keys, others) for key in source))
        if count <= NUM_WORST or not found:
            return found, []
        hidden = [
            (entry.offset, entry.end)
            for entry in self._entries()
            if entry.num_scored > len(entry.worst)
            and (len(found) < count or max(entry.places()) <= found[-1])
        ]
        return found, hidden
