"""The mesh that a run's ranks form, and where the parts of the one before are."""

from __future__ import annotations

import pytest

from kintsugi.config.schema import ActorSection, Config, LayoutSection
from kintsugi.control.mesh_choice import (
    box_copies,
    can_grow,
    change_to,
    mesh_in_force,
    mesh_of_step,
    wanted_mesh,
)
from kintsugi.control.state import MasterState
from kintsugi.journal.facts import (
    Fact,
    MeshChanged,
    ProcessJoined,
    RolledBack,
    RunStarted,
    TermStarted,
)
from kintsugi.model.seats import Mesh, fitting
from kintsugi.protocol.recovery import BoxCopy
from kintsugi.types import Peer, Role
from tests.unit.control.test_state import step_facts

RANKS = ["model-0", "model-1", "model-2", "model-3"]


def config(ranks: int = 4, *, shards: int = 1, stages: int = 1, tensors: int = 1, slices: int = 1) -> Config:
    layout = LayoutSection(shards=shards, stages=stages, tensors=tensors)
    return Config(name="t", actor=ActorSection(workers=ranks, layout=layout, logical_slices=slices))


@pytest.mark.parametrize(
    ("mesh", "living", "slices", "expected"),
    [
        (Mesh(4), (0, 1, 3), 1, Mesh(3, ranks=("model-0", "model-1", "model-3"))),
        (Mesh(4), (2,), 1, Mesh(1, ranks=("model-2",))),
        (Mesh(2), (0, 2), 1, Mesh(2, ranks=("model-0", "model-2"))),
        (Mesh(2, 2), (0, 1, 3), 1, Mesh(1, 2, ranks=("model-0", "model-1"))),
        (Mesh(1, 2, 2), (0, 1, 3), 2, Mesh(1, 2, 1, ranks=("model-0", "model-1"))),
        (Mesh(1, 1, 4), (0, 1, 3), 4, Mesh(1, 1, 2, ranks=("model-0", "model-1"))),
        (Mesh(1, 4), (1, 2, 3), 1, Mesh(1, 3, ranks=("model-1", "model-2", "model-3"))),
    ],
)
def test_the_largest_mesh_that_fits_keeps_layers_and_slices_while_there_are_ranks_for_them(
    mesh: Mesh, living: tuple[int, ...], slices: int, expected: Mesh
) -> None:
    assert fitting([RANKS[rank] for rank in living], mesh, slices=slices) == expected


def test_the_configured_mesh_stays_while_each_part_has_a_rank() -> None:
    assert wanted_mesh(config(shards=2), ["model-0", "model-3"]) == Mesh(2)
    assert wanted_mesh(config(), ["model-2"]) == Mesh()
    assert wanted_mesh(config(shards=2), ["model-0", "model-2"]).ranks == ("model-0", "model-2")
    assert wanted_mesh(config(shards=2, stages=2), RANKS) == Mesh(2, 2)


def test_a_mesh_grows_when_more_ranks_would_have_a_seat() -> None:
    pipelines, small = config(shards=2, stages=2), Mesh(1, 2, ranks=("model-0", "model-1"))
    idle = ["model-0", "model-1", "model-2"]
    assert not can_grow(pipelines, idle, ranks=small.ranks)
    assert can_grow(pipelines, RANKS, ranks=small.ranks)
    assert not can_grow(pipelines, ["model-0", "model-2", "model-3"], ranks=small.ranks)
    assert not can_grow(pipelines, [], ranks=())
    assert can_grow(config(), RANKS[:3], ranks=("model-0", "model-1"))


def joined(process: str, role: Role, host: str) -> ProcessJoined:
    return ProcessJoined(Peer(process, "1.1", host, "", b""), role, 1)


def state_of(*facts: Fact) -> MasterState:
    state = MasterState(min_valid=2, keep_checkpoints=2)
    begun: list[Fact] = [RunStarted("job", "digest"), TermStarted(1, "1")]
    hosts = {"agent-0": "host-0", "agent-1": "host-1"}
    agents: list[Fact] = [joined(name, Role.AGENT, host) for name, host in hosts.items()]
    ranks: list[Fact] = [joined(name, Role.MODEL, f"host-{index // 2}") for index, name in enumerate(RANKS)]
    for fact in (*begun, *agents, *ranks, *facts):
        state.apply(fact)
    return state


def test_each_step_has_the_mesh_in_which_it_was_committed_and_a_new_session_the_configured_one() -> None:
    mesh, run = Mesh(3, ranks=("model-0", "model-1", "model-2")), config(shards=4)
    state = state_of(*step_facts(1, digest="a.b.c.d"), change_to(mesh), *step_facts(2, digest="e.f.9"))
    assert mesh_in_force(run, state) == mesh_of_step(run, state, 2) == mesh
    assert mesh_of_step(run, state, 1) == Mesh(4)
    again = MasterState(min_valid=2, keep_checkpoints=2)
    again.apply(state.fold())
    assert (mesh_in_force(run, again), mesh_of_step(run, again, 1)) == (mesh, Mesh(4))
    state.apply(RolledBack(1, "lost"))
    assert mesh_in_force(run, state) == mesh and not state.meshes.of_steps
    state.apply(change_to(Mesh(4)))
    assert mesh_in_force(run, state) == Mesh(4)
    state.apply(MeshChanged(2, 1, 1, ("model-0", "model-1")))
    state.apply(TermStarted(2, "1"))
    assert mesh_in_force(run, state) == Mesh(4)


def test_step_0_is_cut_as_the_ranks_are_now_for_no_box_of_it_was_ever_committed() -> None:
    mesh, run = Mesh(3, ranks=("model-0", "model-1", "model-2")), config(shards=4)
    assert mesh_of_step(run, state_of(), 0) == Mesh(4)
    state = state_of(change_to(mesh))
    assert mesh_of_step(run, state, 0) == mesh
    for fact in (*step_facts(1, digest="a.b.c"), RolledBack(0, "lost"), change_to(Mesh(4))):
        state.apply(fact)
    assert mesh_of_step(run, state, 0) == Mesh(4)


def test_ranks_without_a_seat_are_at_home_where_they_had_one() -> None:
    state = state_of(*step_facts(1, digest="a.b.c.d"), change_to(Mesh(1, ranks=("model-3",))))
    assert state.homes == {name: f"host-{index // 2}" for index, name in enumerate(RANKS)}
    state.homes.clear()
    for fact in step_facts(2, digest="e"):
        state.apply(fact)
    assert state.homes == {"model-3": "host-1"}


def test_the_boxes_of_a_step_are_with_ranks_of_their_hosts_and_with_agents() -> None:
    state = state_of(*step_facts(1, digest="a.b.c.d"))
    boxes = box_copies(config(shards=4), state, rank="model-0", step=1)
    assert [(each.box, each.digest) for each in boxes] == [
        ("0/4", "a"),
        ("1/4", "b"),
        ("2/4", "c"),
        ("3/4", "d"),
    ]
    agents = ("agent-0", "agent-1")
    own, second, third, _ = boxes
    assert [copy.source for copy in own.copies] == ["snapshot:model-0", "model-1", *agents]
    assert [copy.source for copy in second.copies] == ["snapshot:model-1", "model-1", *agents]
    assert [copy.source for copy in third.copies] == ["model-2", "model-3", *agents]
    assert {copy.owner for copy in third.copies} == {"model-2"}


def test_boxes_of_a_smaller_mesh_have_snapshots_of_other_names() -> None:
    mesh = Mesh(2, ranks=("model-1", "model-3"))
    state = state_of(change_to(mesh), *step_facts(1, digest="a.b"))
    first, _ = box_copies(config(shards=4), state, rank="model-1", step=1)
    assert first.copies[0] == BoxCopy("snapshot:model-1@0-of-2x1x1", "model-1@0-of-2x1x1")
