from __future__ import annotations

import pytest

from kintsugi.dataplane.plan import TransferPlan
from kintsugi.dataplane.planner import TransferPlanner
from kintsugi.protocol.sample_transfer import Transfer
from tests.unit.dataplane.worlds import HOSTS, RANKS, batch

SPREAD = batch(["rollout-0"] * 8 + ["rollout-1"] * 8)


def measured(plan: TransferPlan, *, asking_s: float) -> dict[str, list[Transfer]]:
    """As ranks would: another host's holder takes so long for each request and answers them one by one."""
    transfers: dict[str, list[Transfer]] = {}
    asked = dict.fromkeys(HOSTS, 0)
    for rank, routes in zip(RANKS, plan.routes, strict=True):
        transfers[rank] = []
        for holder in ("rollout-0", "rollout-1"):
            if holder in routes.via:
                seconds = asking_s + 0.002
                transfers[rank].append(Transfer(routes.via[holder], 1, 5000, seconds, seconds))
                continue
            asked[holder] += HOSTS[rank] != HOSTS[holder]
            seconds = asking_s * asked[holder] if HOSTS[rank] != HOSTS[holder] else 0.001
            transfers[rank].append(Transfer(holder, 1, 10_000 if routes.relay else 5000, seconds, seconds))
    return transfers


def test_the_plan_changes_when_measurements_say_so_and_the_estimate_becomes_right() -> None:
    plane = TransferPlanner()
    names: list[str] = []
    errors: list[float] = []
    for _ in range(30):
        plan, changed = plane.plan(SPREAD, ranks=RANKS, hosts=HOSTS)
        assert changed == (not names or plan.name != names[-1])
        names.append(plan.name)
        figures = plane.learn(plan, measured(plan, asking_s=0.03))
        errors.append(figures["dataplane/estimated_seconds"] / figures["dataplane/seconds"])
    assert names[0] == "direct" and names[-1] == "relay on host-0, host-1"
    assert len(set(names[15:])) == 1
    assert errors[0] < 0.2 and errors[-1] == pytest.approx(1.0, abs=0.15)


def test_the_figures_of_a_step_say_what_went_where() -> None:
    plane = TransferPlanner()
    plan, _ = plane.plan(SPREAD, ranks=RANKS, hosts=HOSTS)
    figures = plane.learn(
        plan,
        {
            "model-0": [Transfer("rollout-0", 1, 100, 0.1, 0.1), Transfer("rollout-1", 2, 50, 0.1, 0.3, 1)],
            "model-2": [Transfer("model-0", 1, 30, 0.4, 0.4)],
        },
    )
    assert figures == {
        "dataplane/bytes": 150.0,
        "dataplane/bytes_between_hosts": 50.0,
        "dataplane/bytes_passed_on": 30.0,
        "dataplane/seconds": 0.4,
        "dataplane/estimated_seconds": plan.estimated_s,
        "dataplane/repeated": 1.0,
    }


def test_a_step_in_which_nothing_was_fetched_has_no_figures() -> None:
    plane = TransferPlanner()
    plan, _ = plane.plan(SPREAD, ranks=RANKS, hosts=HOSTS)
    assert plane.learn(plan, {rank: [] for rank in RANKS}) == {}
