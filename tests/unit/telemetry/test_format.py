from __future__ import annotations

import pytest

from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    BatchFormed,
    Fact,
    IncidentOpened,
    SampleQuarantined,
    StepCommitted,
    TicketAssigned,
)
from kintsugi.telemetry.events import Alert, Event, FaultSeen, Note, ProcessGone, Span, Transition
from kintsugi.telemetry.format import format_event, format_fact, ids_in, ids_of, ids_of_fact

CHAIN = Fault(
    "f2", "RemoteError", "model-0", "no answer", 0.0, Fault("f1", "StorageError", "model-1", "full", 0.0)
)


@pytest.mark.parametrize(
    ("event", "text", "ids"),
    [
        (FaultSeen(CHAIN), "RemoteError of model-0: no answer [f2] ← StorageError of model-1: full [f1]", {"f1", "f2"}),
        (Span("train", 0.0, 0.25, {"step": "7"}), "train took 0.250 s (step=7)", {"step:7"}),
        (Span("ask", 0.0, 1.0, {"ticket": "grpo:0:1:0"}), "ask took 1.000 s (ticket=grpo:0:1:0)", {"grpo:0:1:0"}),
        (Alert("slow", {"x": 2.0}), "slow (x=2)", set()),
        (Note("grpo:0:1:0 quarantined"), "grpo:0:1:0 quarantined", {"grpo:0:1:0"}),
        (Transition("ticket", "grpo:0:1:0", "a", "b", ""), "ticket grpo:0:1:0: a → b", {"grpo:0:1:0"}),
        (
            ProcessGone("model-1", "1.2", 9, -9, "killed by SIGKILL", oom=True),
            "model-1 1.2 (pid 9) is gone: killed by SIGKILL, out of memory",
            set(),
        ),
    ],
)  # fmt: skip
def test_an_event_is_one_line_and_knows_what_it_is_about(event: Event, text: str, ids: set[str]) -> None:
    assert (format_event(event), ids_of(event)) == (text, ids)


@pytest.mark.parametrize(
    ("fact", "ids"),
    [
        (BatchFormed(3, ("grpo:0:1:0", "grpo:0:2:0")), {"step:3", "grpo:0:1:0", "grpo:0:2:0"}),
        (TicketAssigned("grpo:0:1:0", "rollout-0", "1.1", 2), {"grpo:0:1:0"}),
        (SampleQuarantined("grpo:0:1:0/3", "no reward"), {"grpo:0:1:0"}),
        (StepCommitted(4, "d"), {"step:4"}),
        (IncidentOpened(1, 4, "training", CHAIN), {"step:4", "f1", "f2"}),
    ],
)
def test_a_fact_knows_what_it_is_about(fact: Fact, ids: set[str]) -> None:
    assert ids_of_fact(fact) == ids


def test_a_long_fact_is_told_by_its_ends() -> None:
    text = format_fact(BatchFormed(1, tuple(f"grpo:0:{number}:0" for number in range(5000))))
    assert text == "step 1, tickets grpo:0:0:0, grpo:0:1:0, … 4997 more …, grpo:0:4999:0"


@pytest.mark.parametrize("text", ["12:30:45", "at 10:11:12:13", "tcp://127.0.0.1:80", "a:b:c:d", "no id"])
def test_what_only_looks_like_a_ticket_is_none(text: str) -> None:
    assert ids_in(text) == set()
