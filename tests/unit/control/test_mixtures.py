"""Faults of all kinds in any order and at any moment; the run ends with the same steps as if there had been none."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.control.phases.table import Phase
from kintsugi.protocol.rollout import RunEpisodes
from kintsugi.protocol.training import RunCall
from kintsugi.recovery.rank import Flow, Operation
from tests.unit.control.driven import Driven
from tests.unit.control.outcomes import begun, outcome, undisturbed

EXPECTED = undisturbed()


def lose(driven: Driven, choice: int) -> Driven:
    """Somebody dies; others may notice before the agent has said so."""
    living = driven.world.living()
    driven.lose(living[choice % len(living)][0], after=choice % 3)
    return driven


def fail(driven: Driven, choice: int) -> Driven:
    """Something that was asked fails at somebody who lives."""
    kinds = ("GroupBroken", "DeadlineExceeded", "RuntimeError", "DeviceError")
    open_requests = [driven.open[token] for token, *_ in driven.master.pending.open_requests()]
    candidates = [one for one in open_requests if isinstance(one.body, RunCall | RunEpisodes | Operation)]
    if candidates:
        driven.fail(candidates[choice % len(candidates)], "it failed", kind=kinds[choice % len(kinds)])
    return driven


def restart_agent(driven: Driven, choice: int) -> Driven:
    """What the agent was asked is done or not, and a child of its may be gone when it is back."""
    for request in [request for request in driven.open.values() if request.to == "agent-0"]:
        if choice % 2:
            driven.serve(request)
        driven.fail(request, "the agent is gone", kind="ProcessDied")
    if choice % 3 == 0:
        driven.world.kill(driven.world.living()[choice % len(driven.world.living())][0])
    driven.join("agent-0", f"restarted at {driven.now}", "host-0")
    for process, incarnation, host in driven.world.living():
        driven.join(process, incarnation, host)
    return driven


def replace_master(driven: Driven, choice: int) -> Driven:
    """Somebody may die with it."""
    successor = driven.succeed(carried_out=choice % 2 == 0)
    living = successor.world.living()
    if choice % 3 == 0 and living:
        successor.world.kill(living[choice % len(living)][0])
    successor.take_over(agents_first=choice % 5 > 0)
    return successor


FAULTS: list[Callable[[Driven, int], Driven]] = [lose, fail, restart_agent, replace_master]


@settings(max_examples=60, deadline=None)
@given(
    flow=st.sampled_from(Flow),
    faults=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(FAULTS), st.integers(0, 30)), min_size=1, max_size=4
    ),
)
def test_any_mixture_of_faults_changes_no_step(
    flow: Flow, faults: list[tuple[int, Callable[[Driven, int], Driven], int]]
) -> None:
    driven = begun(flow=flow)
    driven.until(Phase.PREPARING)
    for pause, fault, choice in faults:
        for _ in range(pause):
            driven.go_on()
        if driven.master.phase is Phase.ENDED:
            break
        driven = fault(driven, choice)
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED
