from __future__ import annotations

import msgspec

from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    BatchFormed,
    Fact,
    IncidentClosed,
    IncidentOpened,
    RolledBack,
    RunEnded,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketFiltered,
    TicketsIssued,
)
from kintsugi.lab.soak.journal_audit import JournaledRollback, audit, first_difference
from kintsugi.types import FinishReason, SampleMeta, Ticket, sample_key, ticket_id


def ticket(position: int) -> str:
    return ticket_id("grpo", epoch=0, position=position)


def issued(*positions: int) -> TicketsIssued:
    return TicketsIssued(tuple(Ticket(ticket(p), "grpo", 0, p, 0, 2) for p in positions))


def scored(position: int, *, holder: str = "rollout-0", digest: str = "d") -> SamplesScored:
    name = ticket(position)
    metas = tuple(
        SampleMeta(sample_key(name, i), name, 8, 4, 0.5, {}, FinishReason.EOS, 0, holder, f"{digest}{i}")
        for i in range(2)
    )
    return SamplesScored(ticket(position), metas)


def step(number: int, *positions: int, state: str | None = None) -> list[Fact]:
    tickets = tuple(map(ticket, positions))
    return [BatchFormed(number, tickets), StepCommitted(number, state or f"state {number}")]


def undisturbed() -> list[Fact]:
    return [
        issued(0), scored(0), *step(1, 0), issued(1), scored(1), *step(2, 1), RunEnded("finished", weights_sha256="w")
    ]  # fmt: skip


def test_a_run_that_trained_everything_once_loses_and_repeats_nothing() -> None:
    made = audit(undisturbed())
    assert (made.samples_issued, made.samples_lost, made.samples_duplicated) == (4, 0, 0)
    assert (made.weights_sha256, list(made.steps)) == ("w", [1, 2])


def test_who_generated_a_sample_does_not_matter_but_what_was_generated_does() -> None:
    facts = undisturbed()
    elsewhere = [scored(1, holder="rollout-1") if fact == scored(1) else fact for fact in facts]
    otherwise = [scored(1, digest="x") if fact == scored(1) else fact for fact in facts]
    assert first_difference(audit(facts), audit(elsewhere)) is None
    assert first_difference(audit(facts), audit(otherwise)) == 2


def test_another_state_of_the_ranks_is_a_difference() -> None:
    facts = undisturbed()
    other = [
        msgspec.structs.replace(fact, state_digest="x")
        if isinstance(fact, StepCommitted) and fact.step == 2
        else fact
        for fact in facts
    ]
    assert first_difference(audit(facts), audit(other)) == 2


def test_another_place_of_the_cursor_is_a_difference() -> None:
    facts = undisturbed()
    ahead = [issued(0, 1), *facts[1:3], *(fact for fact in facts[3:] if fact != issued(1))]
    assert first_difference(audit(facts), audit(ahead)) == 1


def test_a_step_that_is_missing_is_a_difference() -> None:
    facts = undisturbed()
    whole, broken = audit(facts), audit(facts[:4])
    assert first_difference(whole, broken) == 2
    assert first_difference(whole, broken, common_steps_only=True) is None


def test_a_rollback_undoes_steps_and_is_counted_once() -> None:
    facts = undisturbed()
    again: list[Fact] = [*facts[:-1], RolledBack(1, "a rank was lost"), *step(2, 1), facts[-1]]
    made = audit(again)
    assert made.rollbacks == (JournaledRollback(2, 1),)
    assert (made.samples_lost, made.samples_duplicated) == (0, 0)
    assert first_difference(audit(facts), made) is None


def test_steps_that_are_made_again_are_equal_though_the_tickets_of_later_ones_were_issued_already() -> None:
    facts: list[Fact] = []
    for position in range(4):
        facts += [issued(position), scored(position), *step(position + 1, position)]
    again = [*facts, RolledBack(1, "two hosts were lost"), *step(2, 1), *step(3, 2), *step(4, 3)]
    assert first_difference(audit(facts), audit(again)) is None
    other = [*facts, RolledBack(1, "two hosts were lost"), *step(2, 1), *step(3, 3), *step(4, 2)]
    assert first_difference(audit(facts), audit(other)) == 3


def test_a_ticket_that_was_issued_and_never_trained_is_lost() -> None:
    assert audit([*undisturbed(), issued(2)]).samples_lost == 2


def test_what_was_set_aside_with_a_reason_is_not_lost() -> None:
    aside: list[Fact] = [
        issued(2, 3),
        TicketFiltered(ticket(2), "equal rewards"),
        SampleQuarantined(f"{ticket(3)}/0", "no reward"),
    ]
    assert audit([*undisturbed(), *aside]).samples_lost == 1


def test_a_ticket_in_two_steps_that_stand_is_a_duplicate() -> None:
    assert audit([*undisturbed(), *step(3, 1)]).samples_duplicated == 2


def test_an_incident_is_told_with_everybody_who_was_lost_and_its_parts() -> None:
    fault = Fault("f", "ProcessDied", "model-0", "killed", 12.5)
    opened = IncidentOpened(1, 3, "training", fault)
    closed = IncidentClosed(1, "recover", 4, ("server-0",), {"repair": 0.2})
    (incident,) = audit([*undisturbed(), opened, closed]).incidents
    assert incident.processes == {"model-0", "server-0"}
    assert (incident.step, incident.timing, incident.outcome) == (3, {"repair": 0.2}, "recover")
