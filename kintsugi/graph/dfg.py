"""The dataflow graph: calls get their edges from the keys they read and write.

Built once, before any process starts. A graph that can not be walked is refused with the names involved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from kintsugi.errors import ConfigError
from kintsugi.graph.mfc import Call, Key


class Graph:
    """Calls in an order that respects their edges.

    `sources` are the keys that enter from data; `wanted` are the keys that leave the graph. A value that is neither
    read nor wanted is a mistake.
    """

    def __init__(self, calls: Iterable[Call], *, sources: Iterable[Key], wanted: Iterable[str]) -> None:
        self.calls: dict[str, Call] = {}
        for call in calls:
            if call.name in self.calls:
                raise ConfigError(f"graph: two calls are named '{call.name}'")
            self.calls[call.name] = call
        self.sources = {key.name: key for key in sources}
        self.wanted = tuple(wanted)
        self.producer = self._producers()
        self.parents = {name: self._parents_of(call) for name, call in self.calls.items()}
        self.order = self._topological_order()
        self._refuse_unread_outputs()

    def children(self, name: str) -> list[str]:
        return [other for other in self.order if name in self.parents[other]]

    def levels(self) -> list[list[str]]:
        """Calls that may run at the same time, level by level."""
        depth: dict[str, int] = {}
        for name in self.order:
            depth[name] = 1 + max((depth[parent] for parent in self.parents[name]), default=-1)
        return [
            [name for name in self.order if depth[name] == d]
            for d in range(max(depth.values(), default=-1) + 1)
        ]

    def describe(self) -> str:
        """The graph as text, one call a line."""
        lines = []
        for depth, level in enumerate(self.levels()):
            for name in level:
                call = self.calls[name]
                takes = ", ".join(key.name for key in call.inputs)
                gives = ", ".join(key.name for key in call.outputs)
                lines.append(
                    f"{depth}  {name:<16} on {call.role.value:<8} per {call.per.value:<6} {takes} → {gives}"
                )
        return "\n".join(lines)

    def _producers(self) -> Mapping[str, str]:
        producer: dict[str, str] = {}
        for call in self.calls.values():
            for key in call.outputs:
                other = "the data" if key.name in self.sources else producer.get(key.name)
                if other is not None:
                    raise ConfigError(
                        f"graph: key '{key.name}' of call '{call.name}' is already given by {other}"
                    )
                producer[key.name] = call.name
        for name in self.wanted:
            if name not in producer and name not in self.sources:
                raise ConfigError(f"graph: wanted key '{name}' is given by no call")
        return producer

    def _parents_of(self, call: Call) -> set[str]:
        parents = set()
        for key in call.inputs:
            given = self._given(call, key)
            if (given.dtype, given.shape) != (key.dtype, key.shape):
                origin = self.producer.get(key.name, "the data")
                raise ConfigError(f"graph: call '{call.name}' expects {key}, but {origin} gives {given}")
            if key.name in self.producer:
                parents.add(self.producer[key.name])
        return parents

    def _given(self, call: Call, key: Key) -> Key:
        if key.name in self.sources:
            return self.sources[key.name]
        if key.name in self.producer:
            outputs = self.calls[self.producer[key.name]].outputs
            return next(output for output in outputs if output.name == key.name)
        known = [*self.sources, *self.producer]
        close = get_close_matches(key.name, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; there are: {', '.join(known)}"
        raise ConfigError(f"graph: call '{call.name}' reads key '{key.name}', which nothing gives{hint}")

    def _topological_order(self) -> list[str]:
        order: list[str] = []
        left = dict(self.parents)
        while left:
            free = [name for name, parents in left.items() if not parents - set(order)]
            if not free:
                raise ConfigError(
                    f"graph: calls wait for each other in a circle: {' → '.join(self._circle(left))}"
                )
            for name in free:
                order.append(name)
                del left[name]
        return order

    def _circle(self, left: Mapping[str, set[str]]) -> list[str]:
        path = [next(iter(left))]
        while True:
            following = next(parent for parent in sorted(left[path[-1]]) if parent in left)
            if following in path:
                return [*path[path.index(following) :], following][::-1]
            path.append(following)

    def _refuse_unread_outputs(self) -> None:
        read = {key.name for call in self.calls.values() for key in call.inputs}
        for call in self.calls.values():
            useful = [key.name for key in call.outputs if key.name in read or key.name in self.wanted]
            if not useful:
                names = ", ".join(f"'{key.name}'" for key in call.outputs) or "nothing"
                raise ConfigError(
                    f"graph: call '{call.name}' gives {names}, which no call reads and the graph does not want"
                )
