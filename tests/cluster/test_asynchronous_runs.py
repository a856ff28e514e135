"""Asynchronous runs with their real processes: what overlaps, what is kept when processes die, what they sum up to."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from kintsugi.journal.facts import BatchFormed, Fact, SamplesScored, StepCommitted
from kintsugi.run_folder.reader import read_journal
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, finished, play, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BOUND = 2
SETTINGS = ("algorithm.steps=14", f"asynchrony.max_staleness={BOUND}", "deterministic=false")
GATES = (5, 8)
LAST = 17
"""Three steps of SFT before."""


def ages(facts: Sequence[Fact]) -> list[int]:
    """Staleness of every group in every batch."""
    versions: dict[str, int] = {}
    found = []
    for fact in facts:
        if isinstance(fact, SamplesScored):
            versions[fact.ticket] = min(meta.version for meta in fact.samples)
        elif isinstance(fact, BatchFormed):
            found += [fact.step - 1 - versions[ticket] for ticket in fact.tickets if versions[ticket] >= 0]
    return found


def undisturbed(run: Run) -> None:
    run.start(*SETTINGS)
    run.finish()


def swapped(run: Run) -> None:
    """Every server is replaced, one after the other."""
    run.start(*SETTINGS, gates=GATES)
    for gate, server in zip(GATES, ("server-0", "server-1"), strict=True):
        run.wait_at(gate)
        before = read_journal(run.run_dir).processes[server]
        run.kill(server)

        def is_back(server: str = server, before: object = before) -> bool:
            return read_journal(run.run_dir).processes.get(server) not in (None, before)

        until(is_back, f"another {server}")
        run.let_through(gate)
    run.finish()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run | BaseException]:
    return play({"undisturbed": undisturbed, "swapped": swapped}, tmp_path_factory.mktemp("asynchronous"))


@pytest.mark.parametrize("name", ["undisturbed", "swapped"])
def test_an_asynchronous_run_trains_every_sample_once_and_within_the_bound(
    runs: dict[str, Run | BaseException], name: str
) -> None:
    run = finished(runs[name])
    assert_trained_exactly_once(run, last_step=LAST)
    found = ages(run.facts)
    assert max(found) <= BOUND and min(found) >= 0 and max(found) > 0
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["outcome"] == "finished" and summary["staleness"]["max"] == max(found)
    assert sum(summary["staleness"]["histogram"].values()) == 4 * len(found)
    samples = summary["samples"]
    assert (samples["lost"], samples["duplicated"], samples["unfinished"]) == (0, 0, 0)
    assert set(summary["idle_share"]) == {"model", "rollout", "server"}
    assert summary["weight_update_pause_ms"]["count"] > 0
    assert isinstance(summary["tokens_discarded"], int)


def test_groups_come_in_while_the_ranks_train(runs: dict[str, Run | BaseException]) -> None:
    assert any(
        isinstance(fact, SamplesScored) for fact in _during_training(finished(runs["undisturbed"]).facts)
    )


def test_every_server_was_replaced(runs: dict[str, Run | BaseException]) -> None:
    joined = finished(runs["swapped"]).pids_joined()
    assert [len(joined[server]) for server in ("server-0", "server-1")] == [2, 2]


def _during_training(facts: Sequence[Fact]) -> list[Fact]:
    """What became known between the forming of a batch and its commit."""
    found: list[Fact] = []
    training = False
    for fact in facts:
        if isinstance(fact, BatchFormed):
            training = True
        elif isinstance(fact, StepCommitted):
            training = False
        elif training:
            found.append(fact)
    return found
