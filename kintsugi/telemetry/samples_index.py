"""`samples.index`: where the samples of each step are (`sample_files.py`), and the worst of them.

A line per step. Nothing depends on it: readers look through those parts of the samples that it does not describe, as of
a run that an earlier version began, and through all of them where the two do not agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import msgspec

from kintsugi.telemetry.sample_files import SampleFiles

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
    """The index of the samples of a run, as it is now."""

    def __init__(self, files: SampleFiles) -> None:
        """`files`: what it describes."""
        self._files = files
        self._decoder = msgspec.json.Decoder(SamplesOfStep)
        self._agrees = True
        self.rest: list[tuple[int, int]] = self._find_rest()
        """Parts of the samples that the index does not describe: (offset, end), in order."""

    def _find_rest(self) -> list[tuple[int, int]]:
        rest, position, size = [], self._files.start, self._files.end
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
            return [(self._files.start, size)]
        return [*rest, (position, size)] if position < size else rest

    def _begins_line(self, offset: int) -> bool:
        is_first = any(part.start == offset for part in self._files.parts)
        return is_first or self._files.bytes_at(offset - 1, offset) == b"\n"

    def _entries(self) -> Iterator[SamplesOfStep]:
        """Yield the entries of samples that are still kept."""
        if not self._agrees:
            return
        for line in self._files.index_lines():
            try:
                entry = self._decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if entry.end > self._files.start or entry.offset >= self._files.start:
                yield entry

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """Return the parts of the samples that may have samples of this step."""
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
