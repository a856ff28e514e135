"""Runs in which no rank has whole weights: the ranks gather them together, whichever publishes them."""

from __future__ import annotations

import msgspec

from kintsugi.config.schema import ActorSection, AlgorithmSection, LayoutSection
from kintsugi.control.phases.table import Phase
from kintsugi.journal.facts import RunEnded
from kintsugi.protocol.training import EvaluatePairs, HashWeights
from kintsugi.protocol.weights import Publish
from tests.unit.control.driven import CONFIG
from tests.unit.control.outcomes import begun

BY_LAYER = msgspec.structs.replace(
    CONFIG,
    actor=ActorSection(logical_shards=2, layout=LayoutSection(shards=2, gather="layer")),
)
RANKS = ["model-0", "model-1"]


def test_all_ranks_take_part_where_one_publishes() -> None:
    driven = begun(BY_LAYER)
    driven.until(lambda: bool(driven.asked(Publish)))
    orders = {request.to: request.body for request in driven.asked(Publish)}
    assert list(orders) == RANKS
    assert [len(order.transports) for order in orders.values() if isinstance(order, Publish)] == [1, 0]


def test_all_ranks_hash_the_weights() -> None:
    driven = begun(BY_LAYER)
    driven.until(lambda: bool(driven.asked(HashWeights)))
    assert [request.to for request in driven.asked(HashWeights)] == RANKS
    driven.until(Phase.ENDED)
    (ended,) = (fact for fact in driven.facts if isinstance(fact, RunEnded))
    assert (ended.outcome, len(ended.weights_sha256) > 0) == ("finished", True)


def test_a_rank_without_held_out_pairs_takes_part_in_ranking() -> None:
    config = msgspec.structs.replace(
        BY_LAYER, algorithm=AlgorithmSection(name="reward_model", steps=3, batch_size=2)
    )
    driven = begun(config, num_eval_rows=1)
    driven.until(lambda: bool(driven.asked(EvaluatePairs)))
    asked = [request.body for request in driven.asked(EvaluatePairs)]
    assert sorted(body.count for body in asked if isinstance(body, EvaluatePairs)) == [0, 1]
