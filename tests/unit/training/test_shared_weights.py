"""A rank publishes the weights with which it computes, without a copy: readers never get others than were published.

The memory is the host's here; `tests/gpu/test_shared_weights.py` has a device and two processes.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from kintsugi.config.schema import ActorSection
from kintsugi.errors import IntegrityError, is_overwritten
from kintsugi.protocol.recovery import DeviceClean, DeviceStop, RankReady, Rollback
from kintsugi.protocol.training import CallDone, CommitStep, StartStage
from kintsugi.protocol.weights import FetchWeights, Publish, Published, WeightsFetched
from kintsugi.training.rank_state import RankState
from kintsugi.types import DeviceSource, WeightManifest
from kintsugi.weights.device_digests import piece_digests
from kintsugi.weights.transports import device as module
from kintsugi.weights.transports.device import DeviceSlots, MappedSlots
from tests.unit.training.fakes import PPO_CONFIG, Rank, grpo_call, rebuild
from tests.unit.training.world import CPU, StoredTensors, new_stage, new_state
from tests.unit.weights.shared_memories import SharedMemories

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def memories(monkeypatch: pytest.MonkeyPatch) -> SharedMemories:
    return SharedMemories.in_place_of_the_device(monkeypatch)


def published(rank: Rank, version: int) -> tuple[WeightManifest, DeviceSource]:
    answer = rank.ask(Publish(version, version, transports=("in_place",)))
    assert isinstance(answer, Published), answer
    source = answer.sources[0]
    assert isinstance(source, DeviceSource)
    return answer.manifest, source


def taken(manifest: WeightManifest, source: DeviceSource) -> dict[str, torch.Tensor]:
    """A version as a server has it after its copy."""
    found, check = MappedSlots(CPU).take(manifest, source)
    copies = {name: tensor.clone() for name, tensor in found.items()}
    check()
    return copies


def refused(manifest: WeightManifest, source: DeviceSource, *, when: str) -> None:
    with pytest.raises(IntegrityError, match=f"was overwritten {when}") as caught:
        taken(manifest, source)
    assert is_overwritten(caught.value)


def half_updated(rank: Rank) -> None:
    """Begin the update of a step, as if the call went on."""
    rank.state.begin_update()
    rank.state.update(torch.ones_like(rank.state.gradient))
    assert rank.state.half_updated


def rolled_back(rank: Rank, step: int, *, generation: int = 2) -> None:
    rank.ask(DeviceStop(generation - 1, 2), DeviceClean(3))
    assert isinstance(rank.ask(msgspec.structs.replace(rebuild(generation), sequence=4)), RankReady)
    assert isinstance(rank.ask(Rollback(step, 5)), RankReady)
    assert rank.state.committed_step == step and not rank.state.half_updated


def test_a_version_is_the_memory_with_which_the_rank_computes(memories: SharedMemories) -> None:
    rank = Rank(shares_weights=True).start()
    for step in (3, 4):
        rank.ask(grpo_call(step), CommitStep(step))
        found = taken(*published(rank, step))
        expected = rank.state.weights()
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    (memory,) = memories.exported
    storages = {each.untyped_storage().data_ptr() for each in rank.state.model.parameters()}
    assert storages == {memory.untyped_storage().data_ptr()}, "nothing was copied"


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_shared_weights_have_the_same_bits_as_others(name: str) -> None:
    stage = new_stage(name=name, actor=ActorSection(learning_rate=0.1))
    alone, sharing = (
        new_state(stage, dtype=BF16, shares_weights=shares_weights) for shares_weights in (False, True)
    )
    assert alone.shared_weights is None and sharing.shared_weights is not None
    for step in (1, 2):
        for state in (alone, sharing):
            state.begin_update()
            state.update(torch.ones_like(state.gradient))
            state.end_update(step)
            state.commit(step)
        assert alone.digest() == sharing.digest()
        for name, tensor in alone.weights().items():
            assert torch.equal(tensor, sharing.weights()[name])


def test_from_the_first_update_until_the_next_version_no_reader_is_served() -> None:
    rank = Rank(shares_weights=True).start()
    old = published(rank, 2)
    taken(*old)
    half_updated(rank)
    refused(*old, when="before it was read: expected number 1, got 0")
    rank.state.end_update(3)
    refused(*old, when="before it was read: expected number 1, got 0")
    rank.state.commit(3)
    refused(*old, when="before it was read: expected number 1, got 0")
    new = published(rank, 3)
    taken(*new)
    refused(*old, when="before it was read: expected number 1, got 2")


def test_a_copy_during_which_an_update_began_is_not_accepted() -> None:
    rank = Rank(shares_weights=True).start()
    _, check = MappedSlots(CPU).take(*published(rank, 2))
    check()
    half_updated(rank)
    with pytest.raises(IntegrityError, match="was overwritten while it was copied: expected number 1, got 0"):
        check()


def test_after_a_rollback_the_same_version_is_published_again_with_the_same_bytes() -> None:
    rank = Rank(shares_weights=True).start()
    manifest, source = published(rank, 2)
    before = taken(manifest, source)
    half_updated(rank)
    rolled_back(rank, 2)
    refused(manifest, source, when="before it was read")
    again, new_source = published(rank, 2)
    assert again == manifest
    found = taken(again, new_source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.items())


def test_a_reader_that_slept_through_an_update_and_its_rollback_is_told_so() -> None:
    rank = Rank(shares_weights=True).start()
    manifest, source = published(rank, 2)
    _, check = MappedSlots(CPU).take(manifest, source)
    half_updated(rank)
    rolled_back(rank, 2)
    assert published(rank, 2)[0] == manifest, "its bytes are there again"
    with pytest.raises(IntegrityError, match="expected number 1, got 2"):
        check()


def test_a_prepared_step_that_is_not_committed_leaves_the_version_before() -> None:
    rank = Rank(shares_weights=True).start()
    manifest, source = published(rank, 2)
    assert isinstance(rank.ask(grpo_call(3)), CallDone)
    refused(manifest, source, when="before it was read")
    rolled_back(rank, 2)
    assert published(rank, 2)[0] == manifest


def test_a_recovery_in_which_nothing_changed_takes_no_version_away() -> None:
    rank = Rank(shares_weights=True).start()
    manifest, source = published(rank, 2)
    _, check = MappedSlots(CPU).take(manifest, source)
    rolled_back(rank, 2)
    check()
    assert published(rank, 2) == (manifest, source)
    check()


def test_a_stage_begins_without_taking_the_version_away() -> None:
    rank = Rank(config=PPO_CONFIG, shares_weights=True)
    rank.ask(rebuild(1), StartStage("warmup", 0))
    for call in (1, 2):
        half_updated(rank)
        rank.state.end_update(call)
        rank.state.commit(call)
    version = published(rank, 2)
    expected = taken(*version)
    rank.ask(StartStage("ppo", 2))
    assert rank.state.stage.name == "ppo", "the stage has begun"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in taken(*version).items())


def test_a_state_that_is_replaced_takes_the_version_away() -> None:
    rank = Rank(shares_weights=True).start()
    version = published(rank, 2)
    state: RankState = rank.state
    stored = StoredTensors(state.tensors())
    rank.ask(grpo_call(3), CommitStep(3))
    published(rank, 3)
    state.restore(
        stored, counters=msgspec.structs.replace(state.committed_counters, step=2), stage=rank.stage
    )
    refused(*version, when="before it was read")
    assert published(rank, 2)[0] == version[0]


def test_the_offer_of_a_version_ends_before_its_memory_changes() -> None:
    rank = Rank(shares_weights=True).start()
    published(rank, 2)
    assert isinstance(rank.ask(FetchWeights(2)), WeightsFetched)
    half_updated(rank)
    assert "has no weights of version 2, only []" in rank.refusal(FetchWeights(2))


def test_a_version_that_other_servers_read_in_host_memory_stays_until_the_next() -> None:
    rank = Rank(shares_weights=True).start()
    answer = rank.ask(Publish(2, 2, transports=("in_place", "stream")))
    assert isinstance(answer, Published)
    half_updated(rank)
    assert isinstance(rank.ask(FetchWeights(2)), WeightsFetched)


def test_a_version_that_changes_while_it_is_verified_does_not_count_as_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(shares_weights=True).start()
    version = published(rank, 2)

    def meanwhile(tensors: list[torch.Tensor]) -> list[str]:
        half_updated(rank)
        return piece_digests(tensors)

    monkeypatch.setattr(module, "piece_digests", meanwhile)
    refused(*version, when="while it was copied: expected number 1, got 0")


def test_bytes_that_changed_without_an_update_are_damaged(memories: SharedMemories) -> None:
    rank = Rank(shares_weights=True).start()
    manifest, source = published(rank, 2)
    memories.exported[0][source.offsets[0]] ^= 1
    with pytest.raises(
        IntegrityError, match=f"{manifest.pieces[0].name} of version 2 from the memory"
    ) as caught:
        taken(manifest, source)
    assert not is_overwritten(caught.value)


def test_offsets_that_do_not_fit_the_manifest_or_the_memory_are_refused() -> None:
    rank = Rank(shares_weights=True).start()
    manifest, source = published(rank, 2)
    fewer = msgspec.structs.replace(source, offsets=source.offsets[1:])
    with pytest.raises(IntegrityError, match=f"expected offsets of {len(manifest.pieces)} pieces"):
        MappedSlots(CPU).take(manifest, fewer)
    beyond = msgspec.structs.replace(source, offsets=(source.size, *source.offsets[1:]))
    with pytest.raises(IntegrityError, match=f"expected {source.size + manifest.pieces[0].size} bytes"):
        MappedSlots(CPU).take(manifest, beyond)


def test_weights_that_are_elsewhere_are_copied(memories: SharedMemories) -> None:
    state = new_state(new_stage(name="sft"), dtype=BF16, shares_weights=True)
    shared = state.shared_weights
    assert shared is not None
    slots = DeviceSlots(CPU, host="host-0", versions_kept=1, shared=shared)
    others = {name: tensor + 1 for name, tensor in state.weights().items()}
    held, source = slots.hold(others, version=1)
    assert not source.offsets
    (memory,) = memories.exported
    assert {tensor.untyped_storage().data_ptr() for tensor in held.values()} == {
        memory.untyped_storage().data_ptr()
    }
    assert all(torch.equal(tensor, others[name]) for name, tensor in held.items())
