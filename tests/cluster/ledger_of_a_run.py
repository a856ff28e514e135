"""What a run trained on, told by its journal alone and compared with what it wrote for people."""

from __future__ import annotations

from kintsugi.journal.facts import BatchFormed, RolledBack, StepCommitted, TicketFiltered, TicketsIssued
from tests.cluster.real_runs import LAST_STEP, Run


def assert_trained_exactly_once(run: Run, *, last_step: int = LAST_STEP) -> None:
    """Every issued ticket that was not filtered is in one committed batch and no other; every sample of it stands once
    in samples.jsonl."""
    formed: dict[int, tuple[str, ...]] = {}
    committed: dict[int, tuple[str, ...]] = {}
    num_samples: dict[str, int] = {}
    for fact in run.facts:
        match fact:
            case TicketsIssued(tickets=tickets):
                num_samples |= {ticket.id: ticket.num_samples for ticket in tickets}
            case TicketFiltered(ticket=ticket_name):
                del num_samples[ticket_name]
            case BatchFormed(step=step, tickets=batch):
                formed[step] = batch
            case StepCommitted(step=step):
                assert step not in committed
                committed[step] = formed[step]
            case RolledBack(step=last):
                committed = {step: batch for step, batch in committed.items() if step <= last}
            case _:
                pass
    assert list(committed) == list(range(1, last_step + 1))
    trained = [ticket for batch in committed.values() for ticket in batch]
    assert sorted(trained) == sorted(num_samples)
    written = [(line["step"], line["ticket"], line["sample"]) for line in run.lines("samples.jsonl")]
    expected = [
        (step, ticket, sample)
        for step, batch in committed.items()
        for ticket in batch
        for sample in range(num_samples[ticket])
    ]
    assert written == expected
    steps = [line["step"] for line in run.lines("metrics.jsonl") if "eval/accuracy" not in line]
    assert steps == list(range(1, last_step + 1))
