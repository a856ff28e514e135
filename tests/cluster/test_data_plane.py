"""Trajectories between two (simulated) hosts: real processes, sockets and memory of two node agents on this machine.

Asking another host costs 80 ms a request here, one after the other (`programs/slow_links.py`). The planner is told
nothing of it: it measures, and has one rank of each host ask for both.
"""

from __future__ import annotations

import pytest

from kintsugi.telemetry.events import Transition, read_events
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, finished, play

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = "algorithm.steps=22"
LAST_STEP = 25
TWO_HOSTS = (STEPS, "cluster.hosts=2", "actor.workers=4", "actor.logical_shards=4", "eval.num_samples=0")


def on_two_hosts(run: Run, links: str) -> tuple[int, str]:
    run.environment["KINTSUGI_TEST_LINKS"] = links
    run.start(*TWO_HOSTS)
    return run.end()


def goes_on(run: Run, links: str) -> None:
    code, errors = on_two_hosts(run, links)
    assert code == 0, errors


def is_refused(run: Run) -> None:
    code, errors = on_two_hosts(run, "corrupt=3+")
    assert code == 1
    run.gates.joinpath("said").write_text(errors)


def on_one_host(run: Run) -> None:
    run.start(STEPS, "actor.logical_shards=4", "eval.num_samples=0")
    assert run.end()[0] == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run | BaseException]:
    scenarios = {
        "one host": on_one_host,
        "slow": lambda run: goes_on(run, "delay=0.08"),
        "dies": lambda run: goes_on(run, "delay=0.08,die=14"),
        "corrupted once": lambda run: goes_on(run, "corrupt=9"),
        "corrupted": is_refused,
    }
    return play(scenarios, tmp_path_factory.mktemp("planes"))


def steps_of(run: Run) -> list[dict[str, float]]:
    return [line for line in run.lines("metrics.jsonl") if "dataplane/bytes" in line]


def test_the_plan_follows_what_was_measured(runs: dict[str, Run | BaseException]) -> None:
    run = finished(runs["slow"])
    steps = steps_of(run)
    assert len(steps) == LAST_STEP
    passed_on = [step["dataplane/bytes_passed_on"] for step in steps]
    assert passed_on[0] == 0 and sum(size > 0 for size in passed_on[-10:]) >= 8
    assert steps[0]["dataplane/estimated_seconds"] < 0.2 * steps[0]["dataplane/seconds"]
    late = sorted(step["dataplane/estimated_seconds"] / step["dataplane/seconds"] for step in steps[-8:])
    assert 0.5 < late[len(late) // 2] < 2.0
    records = read_events(run.run_dir, process="master-0")
    reasons = [each.event.reason for each in records if isinstance(each.event, Transition)]
    assert any("samples go relay on host-" in reason for reason in reasons)


@pytest.mark.parametrize("name", ["slow", "dies", "corrupted once"])
def test_the_weights_are_those_of_a_run_on_one_host(runs: dict[str, Run | BaseException], name: str) -> None:
    run, alone = finished(runs[name]), finished(runs["one host"])
    assert run.summary.weights_sha256 == alone.summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST_STEP)
    run.assert_nothing_left()


def test_a_holder_that_dies_while_it_is_asked_is_replaced_and_nothing_is_lost(
    runs: dict[str, Run | BaseException],
) -> None:
    run = finished(runs["dies"])
    assert any(step["dataplane/bytes_passed_on"] > 0 for step in steps_of(run))
    pid = int((run.gates / "died").read_text())
    joined = run.pids_joined()
    (holder,) = [name for name, pids in joined.items() if pid in pids]
    assert holder.startswith("rollout-") and len(joined[holder]) == 2
    assert all(len(pids) == 1 for name, pids in joined.items() if name.startswith("model-"))


def test_a_sample_damaged_on_its_way_is_asked_for_again(runs: dict[str, Run | BaseException]) -> None:
    run = finished(runs["corrupted once"])
    assert (run.gates / "corrupted").exists()
    assert sum(step["dataplane/repeated"] for step in steps_of(run)) >= 1


def test_a_sample_that_stays_damaged_is_refused_by_name_and_never_trained(
    runs: dict[str, Run | BaseException],
) -> None:
    run = finished(runs["corrupted"])
    said = (run.gates / "said").read_text()
    assert "IntegrityError" in said and "expected xxh3" in said and "from rollout-" in said
