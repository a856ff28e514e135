"""How the master lets ranks get their samples, and what it makes of the times that they tell."""

from __future__ import annotations

import msgspec

from kintsugi.config.schema import ActorSection, AlgorithmSection, ClusterSection, Config, RolloutSection
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import RecordStep
from kintsugi.journal.facts import StepCommitted
from kintsugi.protocol.sample_transfer import Transfer
from kintsugi.protocol.training import CallDone, RunCall
from tests.unit.control.driven import CONFIG, Driven


def two_hosts(*, group_size: int) -> Config:
    """Groups of two end up in shards of one holder each, groups of three are spread over all shards."""
    return msgspec.structs.replace(
        CONFIG,
        algorithm=AlgorithmSection(steps=16, batch_size=8, group_size=group_size),
        actor=ActorSection(workers=4, logical_shards=4),
        rollout=RolloutSection(workers=2),
        cluster=ClusterSection(hosts=2),
    )


ASKING_S = 0.05
"""What a request to another host takes; a holder answers one by one."""


class Run:
    """A run whose ranks say how long it took them to fetch their samples."""

    def __init__(self, *, group_size: int) -> None:
        self.driven = Driven(two_hosts(group_size=group_size))
        self.calls: list[RunCall] = []

    def step(self) -> None:
        driven = self.driven
        driven.until(Phase.TRAINING)
        asked: dict[tuple[str, str], int] = {}
        for request in driven.asked(RunCall):
            call, done = request.body, driven.serve(request)
            assert isinstance(call, RunCall) and isinstance(done, CallDone)
            self.calls.append(call)
            transfers = self._transfers(request.to, call, asked)
            driven.answer(request, msgspec.structs.replace(done, transfers=tuple(transfers)))
        driven.until(Phase.COLLECTING)

    def _transfers(self, rank: str, call: RunCall, asked: dict[tuple[str, str], int]) -> list[Transfer]:
        hosts, found = self.driven.world.hosts, []
        items = [item for shard in call.shards for item in shard.items] + list(call.routes.relay)
        for holder in sorted({item.holder for item in items}):
            if leader := call.routes.via.get(holder):
                found.append(Transfer(leader, 1, 300, ASKING_S + 0.001, ASKING_S + 0.001))
                continue
            link = holder, hosts[rank]
            asked[link] = asked.get(link, 0) + 1
            seconds = ASKING_S * asked[link] if hosts[holder] != hosts[rank] else 0.001
            found.append(Transfer(holder, 1, 500, seconds, seconds))
        return found


def test_a_dear_link_is_noticed_and_the_ranks_of_a_host_then_ask_together() -> None:
    run = Run(group_size=3)
    run.driven.begin()
    for _ in range(14):
        run.step()
    first, last = run.calls[:4], run.calls[-4:]
    assert not any(call.routes.relay for call in first)
    assert any(call.routes.relay for call in last) and any(call.routes.via for call in last)
    for call in last:
        assert all(leader.startswith("model-") for leader in call.routes.via.values())


def test_shards_are_computed_on_the_host_that_has_their_samples() -> None:
    run = Run(group_size=2)
    run.driven.begin()
    run.step()
    for rank, call in enumerate(run.calls):
        holders = {item.holder for shard in call.shards for item in shard.items}
        assert holders == {f"rollout-{rank % 2}"}
        assert sorted(call.blocks) == [0, 1, 2, 3]


def test_the_figures_of_a_step_are_recorded_for_people_and_are_no_fact() -> None:
    run = Run(group_size=2)
    run.driven.begin()
    run.step()
    (record,) = [effect for effect in run.driven.effects if isinstance(effect, RecordStep)]
    assert record.call_metrics["dataplane/bytes"] > 0 and record.call_metrics["dataplane/seconds"] > 0
    (commit,) = [fact for fact in run.driven.facts if isinstance(fact, StepCommitted)]
    assert not [name for name in commit.metrics if name.startswith("dataplane/")]
