"""Differences between versions from host to host: whatever goes wrong, the bits are those of the version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kintsugi.cluster import weight_holder
from kintsugi.cluster.weight_deltas import Difference, HeldVersion, make_difference
from kintsugi.errors import WorldError
from kintsugi.protocol.weights import Publish, Published
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import BytesDamaged, Note
from kintsugi.weights.delta_choice import DeltaChoice
from kintsugi.weights.transports.shared_memory import segment_owner
from tests.unit.bulk.peers import processes
from tests.unit.cluster.test_weight_holder import META, SIZE, Hosts, assert_same, bytes_fetched, weights

CHAIN = ("agent-1", "agent-2")


class Always(DeltaChoice):
    """Takes every difference: versions of a test are too small to measure a rate."""

    def is_worth_asking(self, size: int) -> bool:
        return True

    def pays(self, size: int, num_bytes: int) -> bool:
        return True


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with processes() as made:
        opened = Hosts(made, 4, choice=Always)
        yield opened
        opened.close()


def trained(num_steps: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of which every step changes one element of twenty."""
    tensors = weights(seed)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for tensor in tensors.values():
            tensor[torch.rand(len(tensor), generator=generator) < 0.05] += 0.25
    return tensors


def published(hosts: Hosts, version: int, tensors: dict[str, torch.Tensor]) -> Published:
    rank = hosts.ranks.get("model-0") or hosts.rank("model-0")
    order = Publish(version, version, transports=("stream",), meta_server=META, chain=CHAIN)
    return Published(*rank.publish(tensors, order))


def fetch_all(hosts: Hosts, version: Published, tensors: dict[str, torch.Tensor], *agents: str) -> None:
    servers = [(f"server-{agent[-1]}", agent) for agent in agents]
    for fetched in hosts.fetch(version, *servers).values():
        assert fetched.failures == ()
        assert_same(fetched, tensors)


def num_deltas() -> int:
    return COUNTERS.snapshot().counters.get("weights.deltas", 0)


def test_hosts_that_hold_the_version_before_get_the_difference_and_the_same_bytes(hosts: Hosts) -> None:
    fetch_all(hosts, published(hosts, 3, trained(0)), trained(0), *CHAIN)
    for step in (1, 2, 3):
        before, deltas = bytes_fetched(), num_deltas()
        fetch_all(hosts, published(hosts, 3 + step, trained(step)), trained(step), *CHAIN)
        assert num_deltas() - deltas == 2
        assert bytes_fetched() - before < 0.4 * SIZE, "both hosts together"
    assert hosts.segments["agent-2"].num_created == 2, "its memory is used in turn"
    assert not hosts.said


def test_a_newcomer_gets_the_whole_version_beside_hosts_that_get_the_difference(hosts: Hosts) -> None:
    fetch_all(hosts, published(hosts, 3, trained(0)), trained(0), "agent-1")
    deltas = num_deltas()
    fetch_all(hosts, published(hosts, 4, trained(1)), trained(1), *CHAIN)
    assert num_deltas() - deltas == 1


def test_the_difference_to_another_version_of_the_same_number_is_refused(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_all(hosts, published(hosts, 3, trained(0)), trained(0), "agent-1")
    published(hosts, 3, trained(0, seed=7))  # A rollback repeated the step; agent-1 holds what it undid.
    before, deltas = bytes_fetched(), num_deltas()
    fetch_all(hosts, published(hosts, 4, trained(1, seed=7)), trained(1, seed=7), "agent-1")
    assert num_deltas() == deltas and bytes_fetched() - before == SIZE
    assert any("does not hold version 3 as it was named" in said.message for said in notes(hosts))


def notes(hosts: Hosts) -> list[Note]:
    return [said for said in hosts.said if isinstance(said, Note)]


def test_a_source_that_ends_in_the_middle_of_a_difference_is_gone_around_with_the_same_bits(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_all(hosts, published(hosts, 3, trained(0)), trained(0), *CHAIN)
    server, num_given = hosts.holders["agent-1"]._bulk.server, 0
    real = server._region

    def ends(export: Any, part: Any, name: str) -> Any:
        nonlocal num_given
        num_given += 1
        if num_given > 4:
            hosts.silent.add("agent-1")
            hosts.made.book.pop("agent-1", None)
            raise WorldError("killed")
        return real(export, part, name)

    version = published(hosts, 4, trained(1))
    fetch_all(hosts, version, trained(1), "agent-1")
    monkeypatch.setattr(server, "_region", ends)
    fetch_all(hosts, version, trained(1), "agent-2")
    assert num_given > 4
    assert any("version 4 comes whole" in said.message for said in notes(hosts))


def test_an_agent_that_was_replaced_gets_the_whole_and_then_differences(hosts: Hosts) -> None:
    fetch_all(hosts, published(hosts, 3, trained(0)), trained(0), *CHAIN)
    for number in tuple(hosts.holders["agent-1"].versions):
        hosts.holders["agent-1"]._drop_refused(number, "a new process holds none")
    deltas = num_deltas()
    fetch_all(hosts, published(hosts, 4, trained(1)), trained(1), *CHAIN)
    assert num_deltas() == deltas, "the host after it gets what it has"
    fetch_all(hosts, published(hosts, 5, trained(2)), trained(2), *CHAIN)
    assert num_deltas() - deltas == 2


def test_a_wrong_difference_is_found_named_and_replaced_by_the_whole(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_all(hosts, published(hosts, 3, trained(0)), trained(0), "agent-1")
    num_made = 0

    def wrong(new: HeldVersion, base: HeldVersion) -> Difference:
        """It leads from the new version to the old one."""
        nonlocal num_made
        num_made += 1
        back = make_difference(base, new)
        return Difference(base.number, base.digest, back.contents, back.described, back.made_s)

    monkeypatch.setattr(weight_holder, "make_difference", wrong)
    deltas = num_deltas()
    fetch_all(hosts, published(hosts, 4, trained(1)), trained(1), "agent-1")
    assert num_made == 1 and num_deltas() == deltas
    assert [said.origin for said in hosts.said if isinstance(said, BytesDamaged)] == [META]


def test_versions_that_have_little_in_common_come_whole(hosts: Hosts) -> None:
    fetch_all(hosts, published(hosts, 3, weights(0)), weights(0), "agent-1")
    before, deltas = bytes_fetched(), num_deltas()
    fetch_all(hosts, published(hosts, 4, weights(1)), weights(1), "agent-1")
    assert bytes_fetched() - before == SIZE and num_deltas() == deltas
    assert any("100% of version 4 differs from version 3" in said.message for said in notes(hosts))


def test_the_memory_of_a_rank_stays_though_its_version_is_dropped_while_it_is_compared(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_all(hosts, published(hosts, 3, trained(0)), trained(0), "agent-1")
    holder, dropped = hosts.holders[META], []

    def slow(new: HeldVersion, base: HeldVersion) -> Difference:
        found = make_difference(new, base)
        holder._calls.run(
            lambda: dropped.append(holder._drop(base.number, "a later version needs its place"))
        )
        return found

    monkeypatch.setattr(weight_holder, "make_difference", slow)
    names = {name for name in hosts.segments[META].descriptors if segment_owner(name) == "model-0"}
    fetch_all(hosts, published(hosts, 4, trained(1)), trained(1), "agent-1")
    assert dropped and names
    assert names <= set(hosts.segments[META].descriptors)
