"""The groups of ranks, as the calls and the recovery of a rank use them.

Each group has a number (`group_id`; the field `generation` of the messages). Groups are numbered in the order in which
the master rebuilds them, and a number is never used twice. `process_group.py` implements it by torch's collectives,
`host_group.py` by sockets of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kintsugi.errors import GroupBroken, IntegrityError
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


class GroupLife:
    """Members and end of one group, as all implementations of `Group` have them."""

    def __init__(
        self, *, group_id: int, ranks: Sequence[str], rank: int, interruption: Interruption, name: str = ""
    ) -> None:
        """`name` tells the groups of one generation apart; empty for that of all ranks."""
        self.group_id = group_id
        self.ranks = tuple(ranks)
        self.rank = rank
        self._title = group_title(group_id, name)
        self._interruption = interruption
        self._over = threading.Event()
        self._why_over = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def others(self) -> str:
        """Names of the other ranks: a collective waits for these."""
        return ", ".join(name for name in self.ranks if name != self.ranks[self.rank])

    def end(self, why: str) -> None:
        """End the group: a collective that is running or is started later raises. Thread-safe."""
        if not self._over.is_set():
            self._why_over = why
            self._over.set()

    def check(self, what: str) -> None:
        """Raise GroupBroken if the group has ended."""
        why = self._interruption()
        if why is not None:
            self.end(why)
        if self._over.is_set():
            raise GroupBroken(f"{what}: {self._title} is over: {self._why_over}")


def group_title(group_id: int, name: str = "") -> str:
    """`group_title(3, "data-0") == "generation 3 (data-0)"`."""
    return f"generation {group_id}" + (f" ({name})" if name else "")


class Exchange(Protocol):
    """A collective that was started and runs in the background."""

    def received(self, *, timeout_s: float) -> Any:
        """Wait until it has ended, and return what was received. Called once."""
        ...


class Column(Group, Protocol):
    """A group of ranks that exchange weights and gradients of one layer while they compute another one."""

    def start_all_to_all(
        self,
        array: Any,
        *,
        sent: Sequence[int],
        received: Sequence[int],
        timeout_s: float,
        into: Any | None = None,
    ) -> Exchange:
        """Start an `all_to_all`, into this memory if it is given. All ranks start their collectives in one order; the
        array must not change before the result is there."""
        ...


class Channel(Group, Protocol):
    """A group of two ranks, in which the first one sends tensors to the second one."""

    def send(self, tensor: Any) -> None:
        """Start to send a tensor, which must not change any more."""
        ...

    def await_sent(self, *, timeout_s: float) -> None:
        """Wait until everything has been sent."""
        ...

    def receive(self, into: Any, *, timeout_s: float) -> None:
        """Fill a tensor, of the size and type of the one that was sent."""
        ...


class Row(Group, Protocol):
    """A group of ranks that compute slices of the same layers."""

    def gather_in_pass(self, array: Any, *, timeout_s: float) -> Any:
        """As `all_gather`, many times within one pass: only enqueued where the library can wait on the device."""
        ...


class Edge(NamedTuple):
    """Both directions between two pipeline stages. They never wait for each other."""

    forward: Channel
    """The earlier stage sends: activations, or the last stage's part of a tied embedding's gradient."""
    backward: Channel
    """The later stage sends: gradients of activations, or the weights of a tied embedding."""


@dataclass(frozen=True)
class Groups:
    """The groups of one generation that a rank is in: they are formed, verified and ended together.

    All ranks use their groups in one order, so that no two wait for each other in different ones.
    """

    world: Group
    """All ranks."""
    data: Group
    """The ranks with the same part of the model (`Mesh.data_column`): they add gradients and gather weights."""
    tensors: Row | None = None
    """The ranks with slices of the same layers, for the same samples; None if there is one slice."""
    stages: Group | None = None
    """The ranks with the stages of one model, in their order, for the same samples; None if there is one stage."""
    previous: Edge | None = None
    """To the stage before; None in the first one."""
    following: Edge | None = None
    """To the stage after; None in the last one."""
    embedding: Edge | None = None
    """Between the first and the last stage of a model with tied embeddings (`tied_embedding.py`); else None."""

    @classmethod
    def of(cls, world: Group) -> Groups:
        """Groups of a rank that holds all of the model."""
        return cls(world, world)

    def __iter__(self) -> Iterator[Group]:
        """Each group once, in the order in which all ranks form and verify them."""
        yield self.world
        if self.data is not self.world:
            yield self.data
        yield from (group for group in (self.tensors, self.stages) if group is not None)
        for edge in (self.previous, self.following, self.embedding):
            yield from edge or ()

    def end(self, why: str) -> None:
        """End all groups; thread-safe."""
        for group in self:
            group.end(why)

    def close(self) -> None:
        self.end("the group was closed")
        for group in self:
            group.close()


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
