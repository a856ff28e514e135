"""Which way weights go, and how what several ranks published becomes one version."""

from __future__ import annotations

import msgspec
import pytest
import torch

from kintsugi.config.schema import Transport
from kintsugi.errors import IntegrityError
from kintsugi.protocol.weights import Publish, Published
from kintsugi.types import SegmentSource, StreamSource
from kintsugi.weights.publish import Publisher
from kintsugi.weights.selection import ProcessLocation, choose, join, plan

RANKS = [
    ProcessLocation("model-0", "host-0", "GPU-a"),
    ProcessLocation("model-1", "host-0", "GPU-b"),
    ProcessLocation("model-2", "host-1"),
]
AGENTS = {"host-0": "agent-0", "host-1": "agent-1"}


@pytest.mark.parametrize(
    ("wanted", "server", "transport", "reason"),
    [
        ("auto", ProcessLocation("s", "host-0", "GPU-b"), "in_place", "model-1 is on the same accelerator"),
        ("auto", ProcessLocation("s", "host-0", "GPU-c"), "shared_memory", "model-0 is on the same host"),
        ("auto", ProcessLocation("s", "host-1"), "shared_memory", "model-2 is on the same host"),
        ("auto", ProcessLocation("s", "host-2"), "stream", "no rank is on host-2"),
        (
            "shared_memory",
            ProcessLocation("s", "host-0", "GPU-b"),
            "shared_memory",
            "model-0 is on the same host",
        ),
        ("shared_memory", ProcessLocation("s", "host-2"), "stream", "shared memory is not possible"),
        ("in_place", ProcessLocation("s", "host-0"), "shared_memory", "in place is not possible"),
        ("disk", ProcessLocation("s", "host-0", "GPU-a"), "disk", "`weights.transport` says so"),
        ("collective", ProcessLocation("s", "host-0"), "collective", "`weights.transport` says so"),
        ("stream", ProcessLocation("s", "host-0"), "stream", "`weights.transport` says so"),
    ],
)
def test_the_way_follows_from_where_both_are_and_has_a_reason(
    wanted: Transport, server: ProcessLocation, transport: Transport, reason: str
) -> None:
    choice = choose(wanted, ranks=RANKS, server=server)
    assert choice.transport == transport and reason in choice.reason


def test_on_one_host_its_first_rank_lays_out_what_all_servers_read() -> None:
    places = [ProcessLocation("model-0", "host-0"), ProcessLocation("model-1", "host-0")]
    found = plan(
        "auto",
        ranks=places,
        servers=[ProcessLocation("server-0", "host-0"), ProcessLocation("server-1", "host-0")],
        agents=AGENTS,
        version=3,
        step=3,
    )
    assert found.orders == {"model-0": Publish(3, 3, transports=("shared_memory",))}
    assert found.reason == "server-0, server-1 by shared_memory: model-0 is on the same host host-0"


def test_the_rank_on_a_servers_accelerator_publishes_in_place_and_the_first_of_each_host_the_rest() -> None:
    servers = [
        ProcessLocation("server-0", "host-0", "GPU-b"),
        ProcessLocation("server-1", "host-1"),
        ProcessLocation("server-2", "host-2"),
    ]
    found = plan("auto", ranks=RANKS, servers=servers, agents=AGENTS, version=3, step=3)
    assert {rank: order.transports for rank, order in found.orders.items()} == {
        "model-0": ("stream",),
        "model-1": ("in_place",),
        "model-2": ("shared_memory",),
    }
    assert found.orders["model-0"].meta_server == "agent-0" and not found.orders["model-2"].meta_server


def test_when_all_servers_are_elsewhere_every_rank_publishes_a_share() -> None:
    found = plan(
        "stream", ranks=RANKS, servers=[ProcessLocation("s", "host-2")], agents=AGENTS, version=3, step=3
    )
    assert [order.share for order in found.orders.values()] == [(0, 3), (1, 3), (2, 3)]
    assert {order.meta_server for order in found.orders.values()} == {"agent-0"}


def test_a_collective_is_told_who_takes_part() -> None:
    servers = [ProcessLocation("server-0", "host-0"), ProcessLocation("server-1", "host-1")]
    found = plan("collective", ranks=RANKS, servers=servers, agents=AGENTS, version=3, step=3)
    # Nothing that lies nearer may keep a server from coming.
    assert found.orders == {
        "model-0": Publish(3, 3, transports=("collective",), servers=("server-0", "server-1"))
    }


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(40 + index, generator=generator) for index in range(7)}


def shares(count: int) -> dict[str, Published]:
    """What so many ranks answer; their uploads go nowhere."""
    found = {}
    for index in range(count):
        publisher = Publisher(process=f"model-{index}", host="host-0", segments=None)
        order = Publish(3, 3, transports=("stream",), share=(index, count))
        manifest, _ = publisher.publish(weights(), order)
        sources = (StreamSource("agent-0", owners=(f"model-{index}",)), StreamSource(f"model-{index}"))
        found[f"model-{index}"] = Published(manifest, sources)
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_make_the_version_that_one_rank_would_have_published(count: int) -> None:
    whole, _ = Publisher(process="model-0", host="host-0", segments=None).publish(weights(), Publish(3, 3))
    joined = join(shares(count))
    assert joined.manifest.digest == whole.digest and joined.manifest.size == whole.size
    assert [piece.name for piece in joined.manifest.pieces] == [piece.name for piece in whole.pieces]
    if count > 1:
        owners = tuple(f"model-{index}" for index in range(count))
        assert joined.sources == (StreamSource("agent-0", owners=owners),)


def test_a_share_that_is_missing_or_there_twice_is_found() -> None:
    published = shares(3)
    with pytest.raises(IntegrityError, match="something before layer"):
        join({name: each for name, each in published.items() if name != "model-1"})
    with pytest.raises(IntegrityError, match="which another rank published as well"):
        join({**published, "model-3": published["model-1"]})


def test_ranks_that_published_different_weights_are_named() -> None:
    found = {}
    for index, seed in enumerate((0, 0, 1)):
        publisher = Publisher(process=f"model-{index}", host=f"host-{index}", segments=None)
        manifest, _ = publisher.publish(weights(seed), Publish(3, 3))
        found[f"model-{index}"] = Published(manifest, (SegmentSource(f"host-{index}", "s"),))
    with pytest.raises(IntegrityError, match=r"model-0 .*, model-2 "):
        join(found)
    del found["model-2"]
    assert join(found).sources == (SegmentSource("host-0", "s"), SegmentSource("host-1", "s"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(join(found)), type=Published) == join(found)
