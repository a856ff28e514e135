"""The samples of a step between rollout and training, and the calls that they are trained by."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.config import Config
from kintsugi.data.columns import COMPLETION
from kintsugi.data.feed import Feed
from kintsugi.errors import WorldError
from kintsugi.graph.advantages import MASTER_CALLS, batch_totals, initial_values
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.executor import Dispatch, Walk
from kintsugi.lab.fragile.orders import RolledOut
from kintsugi.messages import RunCall
from kintsugi.rollout.episode import demonstrated_trajectory, describe
from kintsugi.stages import Stage
from kintsugi.types import Role, SampleMeta, ShardItem, Ticket, Trajectory


class BatchSizeMismatch(WorldError):
    """There are not as many samples as the train workers are to have."""


class DistributedBatchMemory:
    """What the rollout workers gave, joined in the order of their names."""

    def __init__(self, parts: Sequence[RolledOut]) -> None:
        self.metas: tuple[SampleMeta, ...] = tuple(meta for part in parts for meta in part.metas)
        self.trajectories: dict[str, Trajectory] = {
            trajectory.key: trajectory for part in parts for trajectory in part.trajectories
        }

    def check(self, *, size: int) -> None:
        """Before it is split among the train workers, which expect equal shares of a whole batch."""
        if len(self.metas) != size:
            raise BatchSizeMismatch(
                "FrameworkError: DistributedBatchMemoryError: Batch size mismatch: "
                f"expected {size}, got {len(self.metas)}"
            )


def rows(feed: Feed, stage: Stage, tickets: Sequence[Ticket], *, holder: str) -> DistributedBatchMemory:
    """What is to be imitated, read from the data."""
    metas: list[SampleMeta] = []
    trajectories: list[Trajectory] = []
    for ticket in tickets:
        _, fed = feed.training(
            stage=stage.name, seed=stage.seed, epoch=ticket.epoch, position=ticket.position
        )
        trajectory = demonstrated_trajectory(ticket.id, fed.prompt, fed.answers[COMPLETION])
        trajectories.append(trajectory)
        metas.append(describe(trajectory, ticket=ticket.id, holder=holder, components={}, reward=0.0))
    return DistributedBatchMemory([RolledOut(tuple(metas), tuple(trajectories))])


def walk_of(
    stage: Stage, batch: DistributedBatchMemory, *, config: Config, ranks: Sequence[str], step: int
) -> Walk:
    """The batch on its way through the model calls of the stage."""
    values = initial_values(
        stage, batch.metas, max_new_tokens=config.sampling.max_new_tokens, version=step - 1
    )
    items = [
        ShardItem(m.key, m.holder, m.digest, m.num_tokens, m.num_loss_tokens, values[m.key])
        for m in batch.metas
    ]
    return Walk(
        build_graph(stage),
        items,
        workers={Role.MODEL: ranks},
        num_shards=stage.actor.logical_shards,
        compute=lambda interface, items: MASTER_CALLS[interface](stage, items),
    )


def call_of(
    dispatch: Dispatch, stage: Stage, batch: DistributedBatchMemory, *, config: Config, step: int
) -> RunCall:
    """One rank's part of a call."""
    return RunCall(
        call=dispatch.call.name,
        interface=dispatch.call.interface,
        step=step,
        shards=dispatch.shards,
        num_shards=stage.actor.logical_shards,
        totals=batch_totals(stage, batch.metas, max_new_tokens=config.sampling.max_new_tokens),
        generation=1,
        arguments={"temperature": config.sampling.temperature},
        stage=stage.name,
        prepares=dispatch.prepares,
    )
