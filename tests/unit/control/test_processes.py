"""Processes are ordered, taken in, and ordered again; agents come and go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from kintsugi.config.schema import ActorSection, ClusterSection, LayoutSection
from kintsugi.control.phases.table import Phase
from kintsugi.control.processes import LONGEST_RETRY_S, QUICK_RETRIES
from kintsugi.control.protocol import Admit, Exited, Joined, Suspected
from kintsugi.control.suspicion import HOST_LOST_S
from kintsugi.journal.facts import ProcessLost, ProcessRequested, RolledBack, RunEnded
from kintsugi.protocol.agents import StartProcess, StopProcess
from kintsugi.types import Peer, Role
from tests.unit.control.driven import Driven
from tests.unit.control.outcomes import TWO_STAGES, begun, outcome, undisturbed

EXPECTED = undisturbed()
TWO_HOSTS = msgspec.structs.replace(TWO_STAGES, cluster=ClusterSection(hosts=2))


def training() -> Driven:
    driven = begun()
    driven.until(Phase.TRAINING)
    return driven


def requested(driven: Driven, process: str) -> list[ProcessRequested]:
    facts = [fact for fact in driven.facts if isinstance(fact, ProcessRequested)]
    return [fact for fact in facts if fact.process == process]


def report(driven: Driven, incarnation: str, *, without: Sequence[str] = (), host: str = "host-0") -> None:
    """The agent of a host registers, with its children except some."""
    children = tuple(child for child in driven.world.reports(host) if child.process not in without)
    agent = f"agent-{host[-1]}"
    peer = Peer(agent, incarnation, host, f"tcp://{agent}", b"key")
    driven.feed(Joined(peer, Role.AGENT, 1, {}, children))


def test_a_replacement_has_an_incarnation_that_nobody_had_before() -> None:
    driven = training()
    for _ in range(3):
        driven.lose("model-1")
        driven.until(lambda: not driven.asked(StartProcess))
    incarnations = [fact.incarnation for fact in requested(driven, "model-1")]
    assert len(set(incarnations)) == len(incarnations) == 4


def test_a_rank_with_the_whole_state_is_started_where_it_is_planned_also_after_it_ran_elsewhere() -> None:
    driven = Driven(TWO_HOSTS)
    driven.begin()
    driven.until(lambda: driven.state.step == 1)
    driven.until(Phase.TRAINING)
    agent = driven.state.members.members["agent-1"]
    driven.feed(Suspected("agent-1", agent.incarnation, "no process of it answers", "host", HOST_LOST_S))
    driven.world.hosts.pop("agent-1")
    driven.until(lambda: driven.state.homes["model-1"] == "host-0")
    driven.world.hosts["agent-1"] = "host-1"
    report(driven, "1.9", host="host-1")
    driven.lose("model-1")
    assert requested(driven, "model-1")[-1].host == "host-1"


def test_a_rank_with_a_part_of_the_state_is_started_where_its_snapshot_is_though_its_planned_host_is_back() -> (
    None
):
    cut = ActorSection(logical_shards=2, layout=LayoutSection(shards=2))
    driven = Driven(msgspec.structs.replace(TWO_HOSTS, actor=cut))
    driven.begin()
    driven.until(lambda: driven.state.step == 1)
    driven.until(Phase.TRAINING)
    agent = driven.state.members.members["agent-1"]
    driven.feed(Suspected("agent-1", agent.incarnation, "no process of it answers", "host", HOST_LOST_S))
    driven.world.hosts.pop("agent-1")
    driven.until(lambda: driven.state.homes["model-1"] == "host-0")
    driven.world.hosts["agent-1"] = "host-1"
    report(driven, "1.9", host="host-1")
    driven.lose("model-1")
    assert requested(driven, "model-1")[-1].host == "host-0"


def test_a_rank_that_finds_its_part_nowhere_is_started_again_where_the_snapshot_of_it_is() -> None:
    cut = ActorSection(logical_shards=2, layout=LayoutSection(shards=2))
    rarely = msgspec.structs.replace(TWO_HOSTS.checkpoint, every=9)
    driven = Driven(msgspec.structs.replace(TWO_HOSTS, actor=cut, checkpoint=rarely))
    driven.begin()
    driven.until(lambda: driven.state.step == 1)
    driven.until(Phase.TRAINING)
    for process in list(driven.world.children["host-1"]):
        driven.world.kill(process)
    agent = driven.state.members.members["agent-1"]
    driven.feed(Suspected("agent-1", agent.incarnation, "no process of it answers", "host", HOST_LOST_S))
    assert requested(driven, "model-1")[-1].host == "host-0"
    report(driven, "1.9", host="host-1")
    step = driven.state.step
    driven.until(lambda: driven.state.step > step)
    assert requested(driven, "model-1")[-1].host == "host-1"
    assert not [fact for fact in driven.facts if isinstance(fact, RolledBack)]


def test_a_start_that_is_repeated_gives_one_process() -> None:
    driven = training()
    driven.lose("rollout-0")
    (start,) = driven.asked(StartProcess)
    driven.world.serve(start.to, start.body)
    living = driven.world.living()
    driven.answer(start)
    assert driven.world.living() == living
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED


def test_an_agent_that_reports_again_is_asked_for_what_it_had_not_started() -> None:
    driven = training()
    driven.lose("rollout-0")
    (start,) = driven.asked(StartProcess)
    driven.fail(start, "the agent is gone", kind="ProcessDied")
    assert driven.asked(StartProcess) == []
    report(driven, "2")
    (again,) = driven.asked(StartProcess)
    assert again.body == start.body
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED


def test_a_process_that_an_agent_started_before_it_could_say_so_is_admitted_and_not_started_twice() -> None:
    driven = training()
    driven.lose("rollout-0")
    (start,) = driven.asked(StartProcess)
    driven.world.serve(start.to, start.body)
    driven.fail(start, "the agent is gone", kind="ProcessDied")
    driven.effects.clear()
    report(driven, "2")
    assert [effect.peer.process for effect in driven.effects if isinstance(effect, Admit)] == ["rollout-0"]
    assert all(again.body == start.body for again in driven.asked(StartProcess))


def test_children_that_a_restarted_agent_does_not_list_are_lost_and_replaced() -> None:
    driven = training()
    for process in ("model-1", "rollout-0"):
        driven.world.kill(process)
    report(driven, "2")
    driven.until(Phase.ENDED)
    lost = {fact.process for fact in driven.facts if isinstance(fact, ProcessLost)}
    assert lost == {"agent-0", "model-1", "rollout-0"}
    assert outcome(driven.facts) == EXPECTED


def test_an_agent_that_comes_back_with_all_its_children_costs_nothing() -> None:
    driven = training()
    report(driven, "2")
    assert driven.master.phase is Phase.TRAINING and driven.asked(StartProcess) == []
    assert [fact.process for fact in driven.facts if isinstance(fact, ProcessLost)] == ["agent-0"]


def test_a_list_that_is_older_than_what_is_known_costs_nobody_anything() -> None:
    driven = training()
    report(driven, "2", without=["model-1", "rollout-0"])
    driven.until(Phase.ENDED)
    assert [fact.process for fact in driven.facts if isinstance(fact, ProcessLost)] == ["agent-0"]
    assert outcome(driven.facts) == EXPECTED


def test_children_that_were_replaced_elsewhere_are_ended_when_their_host_comes_back() -> None:
    driven = begun(TWO_HOSTS)
    driven.until(Phase.TRAINING)
    old = driven.world.reports("host-1")
    agent = driven.state.members.members["agent-1"]
    driven.feed(Suspected("agent-1", agent.incarnation, "no process of it answers", "host", HOST_LOST_S))
    report(driven, "2", host="host-1")
    stopped = {request.body for request in driven.asked(StopProcess) if request.to == "agent-1"}
    assert stopped == {StopProcess(child.process, child.incarnation, 0.0) for child in old}


def test_starts_that_fail_are_repeated_after_pauses_that_grow_up_to_a_limit() -> None:
    driven = training()
    driven.unstartable = {"rollout-0"}
    driven.lose("rollout-0")
    times: list[float] = []
    while driven.now < 60.0:
        if any(r.body.process == "rollout-0" for r in driven.asked(StartProcess)):  # type: ignore[union-attr]
            times.append(driven.now)
            driven.answer(driven.asked(StartProcess)[0])
        driven.pass_time(0.1)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert len(pauses) > 6 and max(pauses) < LONGEST_RETRY_S + 0.5
    assert all(later > earlier * 1.3 for earlier, later in pairwise(pauses[:5]))
    driven.unstartable = set()
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED


def test_a_role_of_which_nobody_lives_or_comes_ends_the_run_with_the_reason() -> None:
    driven = training()
    driven.unstartable = {"manager-0"}
    driven.lose("manager-0")
    driven.until(Phase.ENDED)
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.outcome == "failed" and ended.fault is not None
    assert "manager-0 does not start" in ended.fault.message
    assert len(requested(driven, "manager-0")) == 1 + QUICK_RETRIES


def test_a_process_that_never_comes_up_before_the_first_step_ends_the_run() -> None:
    driven = begun()
    start = driven.asked(StartProcess)[0]
    assert isinstance(start.body, StartProcess)
    driven.world.serve(start.to, start.body)
    driven.feed(Exited(start.body.process, start.body.incarnation, 1, "ImportError: torch"))
    driven.let_grace_pass()
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.fault is not None and "ImportError" in ended.fault.message


def test_when_a_host_is_lost_its_processes_are_ordered_from_another() -> None:
    driven = begun(TWO_HOSTS)
    driven.until(Phase.TRAINING)
    gone = list(driven.world.children["host-1"])
    for process in gone:
        driven.world.kill(process)
    agent = driven.state.members.members["agent-1"]
    silent = Suspected("agent-1", agent.incarnation, "no process of it answers", "host", HOST_LOST_S)
    driven.feed(msgspec.structs.replace(silent, lasting_s=HOST_LOST_S / 2))
    assert not any(isinstance(fact, ProcessLost) for fact in driven.facts), "it is given time to come back"
    driven.feed(silent)
    assert {fact.process for fact in driven.facts if isinstance(fact, ProcessLost)} == {"agent-1", *gone}
    assert {requested(driven, process)[-1].host for process in gone} == {"host-0"}
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == undisturbed(TWO_HOSTS)


def test_what_an_agent_had_not_started_when_its_host_was_lost_is_started_elsewhere() -> None:
    driven = begun(TWO_HOSTS)
    driven.until(Phase.TRAINING)
    process = next(iter(driven.world.children["host-1"]))
    driven.lose(process)
    assert requested(driven, process)[-1].host == "host-1"
    for other in list(driven.world.children["host-1"]):
        driven.world.kill(other)
    agent = driven.state.members.members["agent-1"]
    driven.feed(Suspected("agent-1", agent.incarnation, "no process of it answers", "host", HOST_LOST_S))
    driven.world.hosts.pop("agent-1")
    driven.until(Phase.ENDED)
    assert requested(driven, process)[-1].host == "host-0"
    assert outcome(driven.facts) == undisturbed(TWO_HOSTS)
