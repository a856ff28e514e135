"""Order of the sources of a lost state: snapshots of the host, its agent, agents of other hosts, the checkpoint."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import ActorSection, ClusterSection
from kintsugi.control.phases.table import Phase
from kintsugi.protocol.recovery import Repair
from kintsugi.types import Role
from tests.unit.control.driven import CONFIG, Driven

FOUR_RANKS = msgspec.structs.replace(
    CONFIG, actor=ActorSection(workers=4, logical_shards=4), cluster=ClusterSection(hosts=2)
)


@pytest.mark.parametrize(("every", "path"), [(1, ("checkpoints/step-1",)), (3, ())])
def test_own_snapshot_then_those_of_the_host_then_its_agent_then_others_then_the_checkpoint_of_that_very_step(
    every: int, path: tuple[str, ...]
) -> None:
    config = msgspec.structs.replace(
        FOUR_RANKS, checkpoint=msgspec.structs.replace(CONFIG.checkpoint, every=every)
    )
    driven = Driven(config)
    driven.begin()
    driven.until(lambda: driven.state.step == 1)
    driven.until(Phase.TRAINING)
    hosts = {name: driven.world.hosts[name] for name in driven.state.members.live(Role.MODEL)}
    for rank in hosts:
        driven.lose(rank)
    driven.until(lambda: bool(driven.asked(Repair)))
    asked = {request.to: request.body for request in driven.asked(Repair)}
    assert set(asked) == set(hosts)
    assert len(set(hosts.values())) == 2
    for rank, body in asked.items():
        assert isinstance(body, Repair) and body.step == 1
        beside = [
            f"snapshot:{other}"
            for other in sorted(hosts)
            if hosts[other] == hosts[rank] != "" and other != rank
        ]
        agents = sorted(driven.world.agents, key=lambda agent: driven.world.hosts[agent] != hosts[rank])
        assert body.sources == (f"snapshot:{rank}", *beside, *agents, *path)
