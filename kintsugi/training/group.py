"""The group of data-parallel ranks, as the calls and the recovery of a rank use it.

Each group has a number (`group_id`; the field `generation` of the messages). Groups are numbered in the order in which
the master rebuilds them, and a number is never used twice. `process_group.py` implements it by torch's collectives,
`host_group.py` by sockets of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kintsugi.errors import IntegrityError
from kintsugi.model.arrays import Array

Interruption = Callable[[], str | None]
"""Called while waiting. A returned reason ends the group; the function may also raise to end the wait."""


class Group(Protocol):
    """One group of ranks. A group of one rank has no sockets and no collectives."""

    @property
    def group_id(self) -> int: ...

    @property
    def ranks(self) -> tuple[str, ...]:
        """Processes in rank order."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def route(self) -> str:
        """Library and path of its collectives, as shown to operators."""
        ...

    def all_reduce(self, array: Any, *, timeout_s: float) -> None:
        """Sum an array over all ranks, in place."""
        ...

    def all_gather(self, array: Any, *, timeout_s: float) -> Any:
        """Return the arrays of all ranks, stacked in rank order; all must have the same shape."""
        ...

    def all_to_all(
        self, array: Any, *, sent: Sequence[int], received: Sequence[int], timeout_s: float
    ) -> Any:
        """Send consecutive parts of a flat array, one to each rank; return the parts received, in rank order."""
        ...

    def end(self, why: str) -> None:
        """End the group: a collective that is running or is started later raises GroupBroken. Thread-safe."""
        ...

    def close(self) -> None:
        """End the group and release its sockets."""
        ...


def known_numbers(group: Group) -> list[float]:
    """This rank's part of the sum by which a new group is verified: its rank and the group number."""
    return [float(group.rank + 1), float(group.group_id)]


def check_sum(group: Group, numbers: Array, *, timeout_s: float) -> None:
    """Verify a new group by one all-reduce of its `known_numbers`."""
    expected = [group.size * (group.size + 1) / 2, float(group.size * group.group_id)]
    group.all_reduce(numbers, timeout_s=timeout_s)
    found = [float(number) for number in numbers]
    if found != expected:
        raise IntegrityError(
            f"generation {group.group_id} of {', '.join(group.ranks)} does not add up: "
            f"expected {expected}, got {found}"
        )
