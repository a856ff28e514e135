"""What the ledger accepts, refuses and answers, case by case. Random histories: test_ledger_histories.py."""

from __future__ import annotations

import doctest

import pytest

from kintsugi.journal.facts import (
    BatchFormed,
    FilterReason,
    LedgerFact,
    RolledBack,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketReturned,
    TicketsIssued,
)
from kintsugi.samples import ledger as ledger_module
from kintsugi.samples.ledger import Ledger, LedgerError, SampleState, replay
from kintsugi.samples.lifecycle import LIVE
from kintsugi.types import FinishReason, SampleMeta, Ticket, sample_key, ticket_id


def ticket(
    position: int, *, round: int = 0, epoch: int = 0, stage: str = "g", num_samples: int = 2
) -> Ticket:
    id = ticket_id(stage, epoch=epoch, position=position, round=round)
    return Ticket(id, stage, epoch, position, round, num_samples)


def meta(id: str, index: int, *, holder: str = "rollout-0") -> SampleMeta:
    return SampleMeta(
        key=sample_key(id, index),
        ticket=id,
        num_tokens=4,
        num_loss_tokens=2,
        reward=float(index),
        reward_components={"exact": float(index)},
        finish=FinishReason.EOS,
        version=0,
        holder=holder,
        digest="d",
    )


def scored(id: str, *indices: int, holder: str = "rollout-0") -> SamplesScored:
    return SamplesScored(id, tuple(meta(id, index, holder=holder) for index in indices))


def issued(num_tickets: int, *, num_samples: int = 2) -> list[LedgerFact]:
    return [TicketsIssued(tuple(ticket(i, num_samples=num_samples) for i in range(num_tickets)))]


def made_ready(*positions: int) -> list[LedgerFact]:
    facts: list[LedgerFact] = []
    for position in positions:
        id = ticket(position).id
        facts += [TicketAssigned(id, "rollout-0", "a"), scored(id, 0, 1)]
    return facts


def num_live_samples(ledger: Ledger) -> int:
    """Those that have not ended."""
    return sum(count for state, count in ledger.counts().items() if state in LIVE)


def test_the_worked_example_holds() -> None:
    assert doctest.testmod(ledger_module).failed == 0


def test_a_group_is_ready_only_when_all_its_samples_are_settled() -> None:
    ledger = replay([*issued(1, num_samples=3), TicketAssigned("g:0:0:0", "rollout-0", "a")])
    ledger.apply(scored("g:0:0:0", 0, 2))
    assert ledger.oldest_ready(3) == []
    ledger.apply(SampleQuarantined("g:0:0:0/1", "the reward function raised"))
    assert ledger.oldest_ready(3) == ["g:0:0:0"]
    assert [m.key for m in ledger.metas("g:0:0:0")] == ["g:0:0:0/0", "g:0:0:0/2"]
    assert ledger.reason("g:0:0:0/1") == "the reward function raised"


def test_a_group_with_too_few_valid_samples_is_unusable_and_can_be_filtered() -> None:
    ledger = replay([*issued(1), TicketAssigned("g:0:0:0", "rollout-0", "a"), scored("g:0:0:0", 0)])
    ledger.apply(SampleQuarantined("g:0:0:0/1", "timeout"))
    assert ledger.oldest_ready(3) == [] and ledger.unusable_tickets() == ["g:0:0:0"]
    ledger.apply(TicketFiltered("g:0:0:0", "1 of 2 samples valid"))
    assert ledger.state("g:0:0:0/0") is SampleState.FILTERED
    assert ledger.state("g:0:0:0/1") is SampleState.QUARANTINED
    assert (num_live_samples(ledger), ledger.stage("g").num_dropped) == (0, 1)


def test_a_group_of_one_needs_one_valid_sample_whatever_min_valid_is() -> None:
    facts = [*issued(1, num_samples=1), TicketAssigned("g:0:0:0", "rollout-0", "a"), scored("g:0:0:0", 0)]
    assert replay(facts, min_valid=2).oldest_ready(3) == ["g:0:0:0"]


def test_a_fully_quarantined_group_has_ended() -> None:
    facts = [SampleQuarantined("g:0:0:0/0", "x"), SampleQuarantined("g:0:0:0/1", "x")]
    ledger = replay([*issued(1), *facts])
    assert (num_live_samples(ledger), ledger.stage("g").num_dropped) == (0, 1)
    assert (
        ledger.accepts(TicketAssigned("g:0:0:0", "rollout-0", "a"))
        == "every sample of g:0:0:0 is quarantined"
    )


def test_a_returned_group_waits_at_its_old_place_and_has_nothing() -> None:
    ledger = replay([*issued(3), *made_ready(0, 1)])
    ledger.apply(TicketReturned("g:0:0:0", "rollout-0 died"))
    assert [t.id for t in ledger.issued_unassigned()] == ["g:0:0:0", "g:0:2:0"]
    assert ledger.metas("g:0:0:0") == ()
    assert ledger.worker_of("g:0:0:0") == ("", "")


def test_a_worker_is_answerable_for_what_it_runs_and_for_what_it_keeps_until_that_is_trained() -> None:
    ledger = replay([*issued(3), *made_ready(1, 0), TicketAssigned("g:0:2:0", "rollout-0", "a")])
    assert ledger.assigned_to("rollout-0") == ["g:0:0:0", "g:0:1:0", "g:0:2:0"]
    assert ledger.running_on("rollout-0") == ["g:0:2:0"]
    ledger.apply(BatchFormed(1, ("g:0:0:0", "g:0:1:0")))
    ledger.apply(StepCommitted(1, "d"))
    assert ledger.assigned_to("rollout-0") == ["g:0:2:0"]


def test_scores_from_a_worker_that_no_longer_has_the_ticket_are_refused() -> None:
    ledger = replay([*issued(1), TicketAssigned("g:0:0:0", "rollout-0", "a")])
    ledger.apply(TicketReturned("g:0:0:0", "rollout-0 is slow"))
    assert (
        ledger.accepts(scored("g:0:0:0", 0, 1))
        == "g:0:0:0/0 is kept by rollout-0, but its ticket is with no worker"
    )
    ledger.apply(TicketAssigned("g:0:0:0", "rollout-1", "b"))
    assert ledger.accepts(scored("g:0:0:0", 0, 1)) is not None
    assert ledger.accepts(scored("g:0:0:0", 0, 1, holder="rollout-1")) is None


def test_a_batch_that_loses_a_member_is_dissolved_and_formed_again_with_the_same_members() -> None:
    ledger = replay([*issued(3), *made_ready(0, 1, 2)])
    ledger.apply(BatchFormed(1, ledger.next_batch(2)))
    ledger.apply(TicketReturned("g:0:0:0", "its holder died"))
    assert ledger.in_batch(1) == ()
    assert [ledger.state(f"g:0:{place}:0/0") for place in (1, 2)] == [SampleState.READY, SampleState.READY]
    assert ledger.next_batch(2) == ()
    for fact in made_ready(0):
        ledger.apply(fact)
    assert ledger.next_batch(2) == ("g:0:0:0", "g:0:1:0")


def test_the_next_batch_waits_for_the_oldest_groups_instead_of_taking_whoever_is_ready() -> None:
    ledger = replay([*issued(4), *made_ready(3, 1, 2)])
    assert ledger.next_batch(2) == ()
    for fact in made_ready(0):
        ledger.apply(fact)
    assert ledger.next_batch(2) == ("g:0:0:0", "g:0:1:0")
    ledger.apply(TicketFiltered("g:0:0:0", "equal rewards"))
    assert ledger.next_batch(2) == ("g:0:1:0", "g:0:2:0")


def test_a_rollback_issues_undone_and_live_groups_again_in_their_old_order() -> None:
    ledger = replay([*issued(4), *made_ready(0, 1, 2)])
    ledger.apply(BatchFormed(1, ("g:0:0:0",)))
    ledger.apply(StepCommitted(1, "d"))
    ledger.apply(BatchFormed(2, ("g:0:1:0",)))
    ledger.apply(StepCommitted(2, "d"))
    assert (ledger.stage("g").num_trained, ledger.trained_in(2)) == (2, ("g:0:1:0",))
    ledger.apply(RolledBack(1, "lost"))
    assert [t.id for t in ledger.issued_unassigned()] == ["g:0:1:0", "g:0:2:0", "g:0:3:0"]
    assert (ledger.step, ledger.stage("g").num_trained, ledger.trained_in(2)) == (1, 1, ())
    assert ledger.stage("g").cursor == (0, 4)


REFUSED: dict[str, LedgerFact] = {
    "a step out of order": StepCommitted(2, "d"),
    "a step without a batch": StepCommitted(1, "d"),
    "a batch of an unready group": BatchFormed(1, ("g:0:2:0",)),
    "an empty batch": BatchFormed(1, ()),
    "a group twice in a batch": BatchFormed(1, ("g:0:0:0", "g:0:0:0")),
    "a ticket that is not there": TicketAssigned("g:0:9:0", "rollout-0", "a"),
    "a malformed ticket name": TicketAssigned("nonsense", "rollout-0", "a"),
    "a second assignment": TicketAssigned("g:0:1:0", "rollout-1", "b"),
    "a second score": scored("g:0:0:0", 0),
    "a score before assignment": scored("g:0:2:0", 0),
    "a sample that the group does not have": scored("g:0:1:0", 5),
    "a sample of another group": SamplesScored("g:0:1:0", (meta("g:0:0:0", 0),)),
    "the same sample twice": scored("g:0:1:0", 0, 0),
    "no samples at all": SamplesScored("g:0:1:0", ()),
    "a malformed sample key": SampleQuarantined("g:0:1:0", "x"),
    "a quarantine of a ready sample": SampleQuarantined("g:0:0:0/0", "x"),
    "a filter before the group is complete": TicketFiltered("g:0:1:0", "x"),
    "a return of what is not out": TicketReturned("g:0:2:0", "x"),
    "a rollback into the future": RolledBack(1, "x"),
    "a repeated issue": TicketsIssued((ticket(0),)),
    "an issue that skips a prompt": TicketsIssued((ticket(4),)),
    "an issue of the same ticket twice": TicketsIssued((ticket(3), ticket(3))),
    "a resampling of a live ticket": TicketsIssued((ticket(2, round=1),)),
    "a resampling of a ticket that never was": TicketsIssued((ticket(7, round=1),)),
    "an id that does not fit its ticket": TicketsIssued((Ticket("g:0:8:0", "g", 0, 3, 0, 2),)),
    "a group of no samples": TicketsIssued((ticket(3, num_samples=0),)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_a_reason_and_changes_nothing(case: str) -> None:
    ledger = replay([*issued(3), *made_ready(0), TicketAssigned("g:0:1:0", "rollout-0", "a")])
    before = ledger.digest()
    reason = ledger.accepts(REFUSED[case])
    assert reason
    with pytest.raises(LedgerError, match=type(REFUSED[case]).__name__):
        ledger.apply(REFUSED[case])
    assert ledger.digest() == before


def test_a_filtered_prompt_can_be_sampled_again_in_a_new_round() -> None:
    ledger = replay([*issued(2), *made_ready(0)])
    ledger.apply(TicketFiltered("g:0:0:0", "equal rewards"))
    ledger.apply(TicketsIssued((ticket(0, round=1),)))
    assert [t.id for t in ledger.issued_unassigned()] == ["g:0:1:0", "g:0:0:1"]
    assert (ledger.stage("g").cursor, ledger.stage("g").num_issued) == ((0, 2), 3)


def test_the_cursor_moves_into_the_next_epoch() -> None:
    ledger = replay([TicketsIssued((ticket(0), ticket(1), ticket(0, epoch=1)))])
    assert ledger.stage("g").cursor == (1, 1)
    assert ledger.accepts(TicketsIssued((ticket(2),))) is not None


def test_stages_have_their_own_cursor_and_counters() -> None:
    ledger = replay([*issued(2), TicketsIssued((ticket(0, stage="warmup"),))])
    assert [ledger.stage(stage).num_issued for stage in ("g", "warmup", "other")] == [2, 1, 0]
    assert [ledger.stage(stage).cursor for stage in ("g", "warmup", "other")] == [(0, 2), (0, 1), (0, 0)]


def test_leftovers_of_a_stage_expire_from_any_live_state_but_a_batch() -> None:
    ledger = replay([*issued(4), *made_ready(0, 1), TicketAssigned("g:0:2:0", "rollout-0", "a")])
    ledger.apply(BatchFormed(1, ("g:0:0:0",)))
    assert ledger.accepts(TicketExpired("g:0:0:0", "the stage is over")) == "g:0:0:0/0 is in_batch"
    for position in (1, 2, 3):
        ledger.apply(TicketExpired(ticket(position).id, "the stage is over"))
    assert (num_live_samples(ledger), ledger.stage("g").num_dropped) == (2, 3)


def test_forgotten_tickets_leave_their_counters_and_stay_refused() -> None:
    ledger = replay([*issued(3), *made_ready(0, 1), BatchFormed(1, ("g:0:0:0",)), StepCommitted(1, "d")])
    ledger.apply(BatchFormed(2, ("g:0:1:0",)))
    ledger.apply(StepCommitted(2, "d"))
    counts = ledger.counts()
    ledger.forget_before(2)
    assert ledger.counts() == counts and ledger.stage("g").num_trained == 2
    with pytest.raises(KeyError):
        ledger.state("g:0:0:0/0")
    assert ledger.accepts(scored("g:0:0:0", 0)) == "ticket g:0:0:0 is finished and forgotten"
    assert ledger.accepts(TicketsIssued((ticket(0),))) is not None
    assert ledger.accepts(TicketsIssued((ticket(0, round=1),))) is not None
    assert ledger.accepts(RolledBack(0, "x")) is not None
    assert ledger.accepts(RolledBack(1, "x")) is None


def test_memory_stays_bounded_over_a_long_run() -> None:
    ledger = Ledger()
    for step in range(1, 200):
        ledger.apply(TicketsIssued((ticket(step - 1),)))
        for fact in made_ready(step - 1):
            ledger.apply(fact)
        ledger.apply(BatchFormed(step, ledger.next_batch(1)))
        ledger.apply(StepCommitted(step, "d"))
        ledger.forget_before(step - 2)
        assert len(ledger._groups) <= 4
    assert ledger.counts()[SampleState.TRAINED] == 2 * 199


def test_what_was_in_a_batch_that_was_dissolved_is_issued_again_by_a_rollback() -> None:
    """It waits with tokens of weights that are undone."""
    ledger = replay([*issued(3), *made_ready(0, 1, 2), BatchFormed(1, ("g:0:0:0",)), StepCommitted(1, "d")])
    ledger.apply(BatchFormed(2, ("g:0:1:0", "g:0:2:0")))
    ledger.apply(TicketReturned("g:0:1:0", "its holder died"))
    assert ledger.state("g:0:2:0/0") is SampleState.READY
    ledger.apply(RolledBack(0, "the state is lost"))
    assert [ticket.id for ticket in ledger.issued_unassigned()] == ["g:0:0:0", "g:0:1:0", "g:0:2:0"]


def test_the_oldest_ready_groups_end_before_the_first_that_is_not() -> None:
    ledger = replay([*issued(5), *made_ready(0, 1, 3, 4)])
    assert ledger.oldest_ready(5) == ["g:0:0:0", "g:0:1:0"]
    assert ledger.oldest_ready(1) == ["g:0:0:0"]
    for fact in made_ready(2):
        ledger.apply(fact)
    assert ledger.oldest_ready(5) == [ticket(position).id for position in range(5)]


def test_dropped_groups_belong_to_the_step_that_was_collected_also_when_it_is_undone() -> None:
    ledger = replay([*issued(4), *made_ready(0, 1)])
    ledger.apply(TicketFiltered("g:0:0:0", FilterReason.EQUAL_REWARDS))
    ledger.apply(BatchFormed(1, ("g:0:1:0",)))
    ledger.apply(StepCommitted(1, "d"))
    for fact in made_ready(2, 3):
        ledger.apply(fact)
    ledger.apply(TicketFiltered("g:0:2:0", FilterReason.TOO_FEW_VALID))
    for _ in range(2):
        assert ledger.dropped_in(1) == ("g:0:0:0",)
        assert ledger.dropped_in(2, reason=FilterReason.TOO_FEW_VALID) == ("g:0:2:0",)
        assert ledger.dropped_in(2, reason=FilterReason.EQUAL_REWARDS) == ()
        ledger.apply(RolledBack(0, "lost"))


def test_what_was_dropped_for_a_step_that_a_rollback_can_reach_is_not_forgotten() -> None:
    ledger = replay([*issued(3), *made_ready(0, 1, 2), BatchFormed(1, ("g:0:0:0",)), StepCommitted(1, "d")])
    ledger.apply(TicketFiltered("g:0:1:0", FilterReason.EQUAL_REWARDS))
    ledger.apply(BatchFormed(2, ("g:0:2:0",)))
    ledger.apply(StepCommitted(2, "d"))
    ledger.forget_before(2)
    assert ledger.accepts(RolledBack(1, "lost")) is None
    assert ledger.dropped_in(2, reason=FilterReason.EQUAL_REWARDS) == ("g:0:1:0",)
    ledger.forget_before(3)
    assert ledger.dropped_in(2) == ()


def test_a_group_that_was_not_wanted_is_no_failure() -> None:
    ledger = replay([*issued(3), *made_ready(0, 1)])
    ledger.apply(TicketFiltered("g:0:0:0", FilterReason.EQUAL_REWARDS))
    ledger.apply(TicketFiltered("g:0:1:0", FilterReason.TOO_FEW_VALID))
    for index in range(2):
        ledger.apply(SampleQuarantined(f"g:0:2:0/{index}", "no answer"))
    assert (ledger.stage("g").num_dropped, ledger.stage("g").num_failed) == (3, 2)


def test_samples_are_counted_by_why_they_ended() -> None:
    ledger = replay([*issued(3), *made_ready(0)])
    ledger.apply(TicketFiltered("g:0:0:0", FilterReason.EQUAL_REWARDS))
    ledger.apply(SampleQuarantined("g:0:1:0/0", "no answer"))
    ledger.apply(TicketAssigned("g:0:1:0", "rollout-0", "a"))
    ledger.apply(scored("g:0:1:0", 1))
    ledger.apply(TicketFiltered("g:0:1:0", FilterReason.TOO_FEW_VALID))
    ledger.apply(SampleQuarantined("g:0:2:0/1", "no answer"))
    assert ledger.reasons(SampleState.QUARANTINED) == {"no answer": 2}
    assert ledger.reasons(SampleState.FILTERED) == {
        FilterReason.EQUAL_REWARDS: 2,
        FilterReason.TOO_FEW_VALID: 1,
    }
    assert ledger.reasons(SampleState.EXPIRED) == {}


def test_the_digest_tells_why_groups_ended_that_are_forgotten() -> None:
    """What failed counts against its step, what was not wanted against another bound."""

    def digest(reason: FilterReason) -> str:
        facts = [*issued(2), *made_ready(0, 1), TicketFiltered("g:0:0:0", reason)]
        ledger = replay([*facts, BatchFormed(1, ("g:0:1:0",)), StepCommitted(1, "d")])
        ledger.forget_before(2)
        return ledger.digest()

    assert len({digest(reason) for reason in FilterReason}) == len(FilterReason)
