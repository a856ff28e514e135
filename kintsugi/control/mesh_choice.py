"""The mesh that the ranks of a run form: the configured one, or a smaller one that fits those that live. Pure.

    all ranks live, or hold all parts of the state between them      the configured mesh
    a part has no rank, and nothing can be started in its place       the largest mesh that fits (`model.seats.fitting`)

Ranks without a seat in it are idle: they keep their process, and are given a seat by the next change. A mesh grows when
more ranks could have one. The boxes of a smaller mesh are assembled from copies of those of the mesh before, which each
step names (`box_copies`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.config.schema import Config
from kintsugi.control.membership import WorkerRegistry
from kintsugi.control.state import MasterState
from kintsugi.journal.facts import MeshChanged
from kintsugi.model.seats import (
    Mesh,
    digest_of_box,
    fitting,
    mesh_of,
    seat_of,
    snapshots_of,
    without_holder,
)
from kintsugi.protocol.recovery import BoxCopies, BoxCopy
from kintsugi.types import Role, process_id


def mesh_in_force(config: Config, state: MasterState) -> Mesh:
    """The mesh of the current group of ranks."""
    return _mesh(config, state.meshes.current)


def mesh_of_step(config: Config, state: MasterState, step: int) -> Mesh:
    """The mesh in whose boxes the state of a step was committed. Step 0 has no committed state: the configuration
    defines it, and a rank that is given another box begins there with the initial weights of that box."""
    if step == 0:
        return mesh_in_force(config, state)
    return _mesh(config, state.meshes.of_steps.get(step))


def _mesh(config: Config, changed: MeshChanged | None) -> Mesh:
    if changed is None:
        return mesh_of(config.actor.layout)
    return Mesh(changed.shards, changed.stages, changed.tensors, changed.ranks)


def change_to(mesh: Mesh) -> MeshChanged:
    return MeshChanged(mesh.shards, mesh.stages, mesh.tensors, mesh.ranks)


def uncovered(mesh: Mesh, living: Sequence[str], *, num_ranks: int) -> tuple[str, ...]:
    """The boxes that none of the live ranks is there to hold. Of a model that is cut into stages or tensors every rank
    has to be there: others would compute other samples."""
    if mesh.model_ranks > 1:
        missing = [name for name in rank_names(num_ranks) if name not in living]
        return tuple(dict.fromkeys(seat_of(name, mesh).box for name in missing))
    return without_holder(living, mesh) if mesh.boxes > 1 else ()


def wanted_mesh(config: Config, living: Sequence[str]) -> Mesh:
    """The mesh for these ranks, if no others come."""
    actor = config.actor
    mesh = mesh_of(actor.layout)
    if not uncovered(mesh, living, num_ranks=actor.workers):
        return mesh
    return fitting(living, mesh, slices=actor.logical_slices)


def can_grow(config: Config, living: Sequence[str], *, ranks: Sequence[str]) -> bool:
    """Whether live ranks that are not in the group could have a seat, and all of the group still could."""
    if not living or not set(ranks) <= set(living):
        return False
    return len(wanted_mesh(config, living).seated(living)) > len(ranks)


def rank_names(num_ranks: int) -> list[str]:
    return [process_id(Role.MODEL, index) for index in range(num_ranks)]


def box_copies(config: Config, state: MasterState, *, rank: str, step: int) -> tuple[BoxCopies, ...]:
    """The boxes of a step's state, and where a rank may find each: snapshots on its own host, live ranks that held it
    or whose host has the snapshots, agents with a copy."""
    members, configured = state.members, mesh_of(config.actor.layout)
    mesh, digest = mesh_of_step(config, state, step), state.digests.get(step, "")
    holders = mesh.ranks or tuple(rank_names(config.actor.workers))
    found = []
    for number in range(mesh.boxes):
        seat = mesh.seat(number)
        copies: list[BoxCopy] = []
        for holder in (name for name in holders if seat_of(name, mesh) == seat):
            owner = snapshots_of(holder, seat, configured)
            copies += _copies(members, state.homes.get(holder, ""), owner=owner, holder=holder, rank=rank)
        copies.sort(key=lambda copy: not copy.source.startswith("snapshot:"))
        found.append(BoxCopies(seat.box, digest_of_box(digest, seat), tuple(dict.fromkeys(copies))))
    return tuple(found)


def _copies(members: WorkerRegistry, home: str, *, owner: str, holder: str, rank: str) -> list[BoxCopy]:
    living, host = members.live(Role.MODEL), members.members[rank].host
    near = [BoxCopy(f"snapshot:{owner}", owner)] if home == host or rank == holder else []
    there = [name for name in living if members.members[name].host == home and name not in (rank, holder)]
    ranks = [holder] if holder in living and holder != rank else []
    # A rank of the holder's host can read the snapshots that a lost one has left there.
    return near + [BoxCopy(name, owner) for name in (*ranks, *there, *members.live(Role.AGENT))]
