"""Groups of simulated ranks, formed and left as those of `training.group`.

With each generation a rank joins the group of all ranks, and where the model is cut over ranks one along each axis of
the mesh: data, tensors, stages. They are formed one after the other, in this order, and left together. The members of a
group have the same `SimulatedGroup`; in a call they exchange numbers in it, which is wrong if one of them has another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kintsugi.model.seats import Mesh

WORLD = ""
"""Axis of the group of all ranks."""


@dataclass(frozen=True, eq=False, slots=True)
class SimulatedGroup:
    """One group of one generation; a group that is formed again is another one."""

    axis: str
    generation: int
    ranks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.axis or 'group'} of {', '.join(self.ranks)} of generation {self.generation}"


Groups = Mapping[str, SimulatedGroup]
"""Axis → the group of one rank."""


def members_of(name: str, ranks: Sequence[str], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Axis → members of each group that a rank is in, in the order in which all ranks form them; `ranks` are in the
    order of their seats.

    >>> members_of("model-2", ["model-0", "model-1", "model-2", "model-3"], Mesh(stages=2, tensors=2))["stages"]
    ('model-0', 'model-2')
    """
    found = {WORLD: tuple(ranks)}
    if mesh.model_ranks > 1:
        mine = ranks.index(name)
        parts = {
            "data": mesh.data_column(mine, num_ranks=len(ranks)),
            "tensors": mesh.tensor_row(mine),
            "stages": mesh.pipeline(mine),
        }
        found |= {axis: tuple(ranks[number] for number in part) for axis, part in parts.items()}
    return {axis: members for axis, members in found.items() if axis == WORLD or len(members) > 1}


def disagreements(groups: Mapping[str, Groups], ranks: Sequence[str], mesh: Mesh) -> Iterator[str]:
    """Groups in which ranks would exchange numbers though they do not have the same one, or one of an older
    generation."""
    for name in ranks:
        generation = groups[name][WORLD].generation
        for axis, members in members_of(name, ranks, mesh).items():
            mine = groups[name].get(axis)
            if mine is None or mine.generation != generation:
                yield f"in generation {generation} {name} computes with {mine or 'no group'} of axis {axis!r}"
                continue
            for other in members:
                if groups[other].get(axis) is not mine:
                    yield f"{name} computes with {mine}, {other} with {groups[other].get(axis)}"
