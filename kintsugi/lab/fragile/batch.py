"""Samples of a step between rollout and training, and the model calls that train on them."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.data.columns import COMPLETION
from kintsugi.data.prefetch import PrefetchingReader
from kintsugi.errors import WorldError
from kintsugi.graph.advantages import batch_totals, initial_values, master_call
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.executor import CallDispatch, GraphExecution
from kintsugi.lab.fragile.messages import RolledOut
from kintsugi.protocol.training import RunCall
from kintsugi.rollout.trajectory import demonstrated_trajectory, describe
from kintsugi.types import Role, SampleMeta, ShardItem, Ticket, Trajectory


class BatchSizeMismatch(WorldError):
    """The number of samples differs from what the train workers expect."""


class DistributedBatchMemory:
    """Samples of all rollout workers, joined in the order of their names."""

    def __init__(self, parts: Sequence[RolledOut]) -> None:
        self.metas: tuple[SampleMeta, ...] = tuple(meta for part in parts for meta in part.metas)
        self.trajectories: dict[str, Trajectory] = {
            trajectory.key: trajectory for part in parts for trajectory in part.trajectories
        }

    def check(self, *, size: int) -> None:
        """Check the size before the batch is split: train workers expect equal shares of a complete batch."""
        if len(self.metas) != size:
            raise BatchSizeMismatch(
                "FrameworkError: DistributedBatchMemoryError: Batch size mismatch: "
                f"expected {size}, got {len(self.metas)}"
            )


def rows(
    feed: PrefetchingReader, stage: Stage, tickets: Sequence[Ticket], *, holder: str
) -> DistributedBatchMemory:
    """Read the demonstrations of a fine-tuning step from the data."""
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


def execution_of(
    stage: Stage, batch: DistributedBatchMemory, *, config: Config, ranks: Sequence[str], step: int
) -> GraphExecution:
    """Start the execution of the stage's model calls on a batch."""
    values = initial_values(
        stage, batch.metas, max_new_tokens=config.sampling.max_new_tokens, version=step - 1
    )
    items = [
        ShardItem(m.key, m.holder, m.digest, m.num_tokens, m.num_loss_tokens, values[m.key])
        for m in batch.metas
    ]
    return GraphExecution(
        build_graph(stage),
        items,
        workers={Role.MODEL: ranks},
        num_shards=stage.actor.num_shards,
        compute=lambda interface, items: master_call(stage, interface, items),
    )


def call_of(
    dispatch: CallDispatch, stage: Stage, batch: DistributedBatchMemory, *, config: Config, step: int
) -> RunCall:
    """Return one rank's part of a call."""
    return RunCall(
        call=dispatch.call.name,
        interface=dispatch.call.interface,
        step=step,
        shards=dispatch.shards,
        num_shards=stage.actor.num_shards,
        totals=batch_totals(stage, batch.metas, max_new_tokens=config.sampling.max_new_tokens),
        generation=1,
        arguments={"temperature": config.sampling.temperature},
        stage=stage.name,
        prepares=dispatch.prepares,
    )
