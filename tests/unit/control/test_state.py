from __future__ import annotations

import pytest

from kintsugi.control.phases.table import Phase
from kintsugi.control.state import MasterState, Tally
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    BatchFormed,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    Fact,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    ProcessLost,
    ProcessRequested,
    RolledBack,
    RunEnded,
    RunStarted,
    SamplesScored,
    StageStarted,
    StepCommitted,
    StopAccepted,
    TermStarted,
    TicketAssigned,
    TicketsIssued,
    VersionCurrent,
)
from kintsugi.types import Peer, Role, Ticket, ticket_id
from tests.unit.control.driven import Driven, new_state, scored


def step_facts(step: int, *, digest: str = "") -> list[Fact]:
    """A step of one group, from the prompt to the commit."""
    position = step - 1
    ticket = Ticket(ticket_id("grpo", epoch=0, position=position), "grpo", 0, position, 0, 2)
    return [
        TicketsIssued((ticket,)),
        TicketAssigned(ticket.id, "rollout-0", "1"),
        SamplesScored(ticket.id, scored(ticket, version=step - 1).samples),
        BatchFormed(step, (ticket.id,)),
        StepCommitted(step, digest or f"state {step}", {"reward_mean": float(step), "samples": 2.0}),
        VersionCurrent(step, f"weights {step}", (), ()),
    ]


def fold(*facts: Fact, keep_checkpoints: int = 2) -> MasterState:
    state = MasterState(min_valid=2, keep_checkpoints=keep_checkpoints)
    for fact in facts:
        state.apply(fact)
    return state


def run_to(last: int) -> list[Fact]:
    begun: list[Fact] = [RunStarted("job", "digest"), TermStarted(1, "1"), StageStarted("grpo", 1)]
    return [*begun, *(fact for step in range(1, last + 1) for fact in step_facts(step))]


def test_the_facts_of_a_run_lead_to_where_its_master_stands() -> None:
    driven = Driven(num_eval_rows=2)
    driven.begin()
    driven.until(Phase.ENDED)
    again = new_state()
    for fact in driven.facts:
        again.apply(fact)
    there = driven.state
    assert (again.step, again.version, again.stage, again.outcome) == (3, 3, "grpo", "finished")
    assert again.ledger.digest() == there.ledger.digest()
    for name in ("job", "term", "weights_sha256", "wall_s", "evaluations", "saved_steps"):
        assert getattr(again, name) == getattr(there, name), name
    assert again.members.pids() == there.members.pids()
    assert {name: tally.totals() for name, tally in again.tallies.items()} == {
        name: tally.totals() for name, tally in there.tallies.items()
    }


def test_a_rollback_undoes_steps_evaluations_and_checkpoints_after_it() -> None:
    facts = run_to(3)
    state = fold(
        *facts,
        *(EvaluationDone(step, step, "grpo", {"eval/accuracy": 0.5}) for step in (0, 2, 3)),
        *(CheckpointSaved(step, f"step-{step}", "digest") for step in (2, 3)),
        RolledBack(2, "resumed"),
    )
    assert (state.step, state.ledger.step, state.saved_steps) == (2, 2, [2])
    assert [done.step for done in state.evaluations] == [0, 2]
    assert state.tallies["grpo"].totals()[0] == {"reward_mean": 3.0, "samples": 4.0}


def test_a_rollback_takes_back_what_the_undone_steps_came_to() -> None:
    last = fold(*run_to(3), RolledBack(2, "resumed")).tallies["grpo"].last
    assert last is not None and last["reward_mean"] == 2.0


def test_a_rollback_forgets_a_failed_save_after_it() -> None:
    fault = Fault("a", "StorageError", "model-0", "disk full", 0.0)
    assert fold(*run_to(3), CheckpointFailed(3, fault), RolledBack(2, "resumed")).failed_save_step != 3


def test_a_new_term_opens_a_run_that_had_ended_and_no_version_is_current_in_it() -> None:
    state = fold(
        *run_to(1), RunEnded("stopped", None, "sha", 5.0), TermStarted(2, "2"), RolledBack(1, "resumed")
    )
    assert (state.outcome, state.term, state.version, state.step) == (None, 2, -1, 1)
    state.apply(RunEnded("finished", None, "sha", 7.0))
    assert state.wall_s == 12.0


FAULT = Fault("a", "ProcessDied", "model-0", "it died", 0.0)


def test_digests_of_another_definition_are_not_compared_with_those_of_this_one() -> None:
    before = fold(*run_to(2))
    assert set(before.digests) == {1, 2}
    assert fold(*run_to(2), TermStarted(2, "2", state_format=1)).digests == before.digests
    after = fold(*run_to(2), TermStarted(2, "2", state_format=2), *step_facts(3))
    assert after.digests == {3: "state 3"}
    restored = fold(after.fold(), TermStarted(3, "3", state_format=2))
    assert (restored.digests, restored.state_format) == ({3: "state 3"}, 2)


def test_a_rank_is_at_home_where_it_has_committed_a_step_last() -> None:
    def joined(host: str, incarnation: str) -> list[Fact]:
        peer = Peer("model-0", incarnation, host, "", b"")
        requested = ProcessRequested("model-0", Role.MODEL, host, incarnation)
        return [requested, ProcessJoined(peer, Role.MODEL, 1)]

    lost = ProcessLost("model-0", "1.1", Fault("f", "ProcessDied", "model-0", "killed", 0.0))
    first = [*run_to(0), *joined("host-1", "1.1"), *step_facts(1)]
    assert fold(*first).homes == {"model-0": "host-1"}
    elsewhere = [*first, lost, *joined("host-0", "1.2")]
    assert fold(*elsewhere).homes == {"model-0": "host-1"}
    assert fold(*elsewhere, *step_facts(2)).homes == {"model-0": "host-0"}
    assert fold(fold(*elsewhere).fold()).homes == {"model-0": "host-1"}


def test_a_master_that_adopts_a_run_still_knows_that_it_is_to_stop_and_what_is_being_mended() -> None:
    before = (*run_to(1), StopAccepted("SIGTERM"), IncidentOpened(3, 1, "training", FAULT))
    adopted = fold(*before, TermStarted(2, "2", adopting=True))
    assert (adopted.stop_reason, adopted.open_incident, adopted.version) == ("SIGTERM", 3, -1)
    resumed = fold(*before, TermStarted(2, "2"))
    assert (resumed.stop_reason, resumed.open_incident) == (None, 0)


def test_incidents_are_numbered_through_and_one_is_open_until_it_is_closed() -> None:
    state = fold(*run_to(1), IncidentOpened(1, 1, "training", FAULT))
    assert (state.num_incidents, state.open_incident) == (1, 1)
    state.apply(IncidentClosed(1, "recover", 2, ("model-0",)))
    assert (state.num_incidents, state.open_incident) == (1, 0)


def test_the_states_and_checkpoints_that_a_rollback_can_reach_are_known_and_no_others() -> None:
    saved = [CheckpointSaved(step, f"step-{step}", "digest") for step in (1, 3)]
    state = fold(*run_to(4), *saved)
    assert state.digests == {step: f"state {step}" for step in (1, 2, 3, 4)}
    assert state.checkpoint_paths == {1: "step-1", 3: "step-3"}
    state.apply(CheckpointSaved(4, "step-4", "digest"))
    assert (sorted(state.digests), sorted(state.checkpoint_paths)) == ([3, 4], [3, 4])
    state.apply(RolledBack(3, "lost"))
    assert (sorted(state.digests), sorted(state.checkpoint_paths)) == ([3], [3])


def test_old_steps_are_forgotten_but_for_their_totals_so_memory_is_bounded() -> None:
    state, sizes = fold(*run_to(0)), set()
    for step in range(1, 41):
        for fact in step_facts(step):
            state.apply(fact)
        if step % 4 == 0:
            state.apply(CheckpointSaved(step, f"step-{step}", "digest"))
        if step > 8:
            sizes.add(len(state.tallies["grpo"].reachable))
    assert max(sizes) <= 8 and len(state.saved_steps) == 2
    sums, counts = state.tallies["grpo"].totals()
    assert (sums["reward_mean"], sums["samples"], counts["samples"]) == (820.0, 80.0, 40)


@pytest.mark.parametrize("settled", range(6))
def test_totals_are_the_same_however_much_is_settled(settled: int) -> None:
    tally = Tally()
    for step in range(1, 6):
        tally.add(step, {"loss": 0.5 * step, **({"skipped": 1.0} if step % 2 else {})})
    tally.settle(settled)
    assert tally.totals() == ({"loss": 7.5, "skipped": 3.0}, {"loss": 5, "skipped": 3})
    assert tally.first == {"loss": 0.5, "skipped": 1.0}
    assert sorted(tally.reachable) == list(range(settled + 1, 6))


def test_a_rolled_back_tally_is_as_if_the_undone_steps_had_never_been() -> None:
    tally, undisturbed = Tally(), Tally()
    for step in range(1, 4):
        tally.add(step, {"loss": float(step)})
        undisturbed.add(step, {"loss": float(step)})
    tally.settle(1)
    tally.add(4, {"loss": 100.0})
    tally.roll_back(3)
    assert tally.totals() == undisturbed.totals()
    tally.roll_back(1)
    assert (tally.totals(), tally.first) == (({"loss": 1.0}, {"loss": 1}), {"loss": 1.0})


def test_a_stage_that_is_undone_from_its_first_step_has_another_first_step_next_time() -> None:
    tally = Tally()
    tally.add(3, {"loss": 1.0})
    tally.roll_back(2)
    assert (tally.first, tally.totals()) == (None, ({}, {}))
    tally.add(3, {"loss": 2.0})
    assert tally.first == {"loss": 2.0}


def test_a_run_that_failed_is_known_with_its_fault_and_one_that_did_not_has_none() -> None:
    failed = fold(*run_to(1), RunEnded("failed", FAULT, "", 1.0))
    assert (failed.outcome, failed.faults) == ("failed", (FAULT,))
    failed.apply(TermStarted(2, "2"))
    failed.apply(RunEnded("finished", None, "sha", 1.0))
    assert (failed.outcome, failed.faults, failed.weights_sha256) == ("finished", (), "sha")


def test_a_run_that_has_ended_is_not_about_to_stop_any_more() -> None:
    state = fold(*run_to(1), StopAccepted("asked to"), RunEnded("stopped", None, "", 1.0))
    assert state.stop_reason is None
