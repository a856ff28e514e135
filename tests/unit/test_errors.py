"""What a fault says, and which of several is the cause."""

from __future__ import annotations

from kintsugi.errors import (
    LONGEST_MESSAGE,
    DeadlineExceeded,
    Fault,
    RefusedError,
    RemoteError,
    SourceSilent,
    StorageError,
    UnknownPeer,
    fault_of,
    no_source,
    root_first,
)


def fault(id: str, kind: str, *, cause: Fault | None = None) -> Fault:
    return Fault(id, kind, "model-0", "", 0.0, cause)


def test_a_fault_of_an_endless_message_says_how_it_begins() -> None:
    endless = fault_of(ValueError("x" * (1 << 20)), process="rollout-0", time=0.0)
    assert endless.message == "x" * LONGEST_MESSAGE + " …"


def test_an_operation_that_lacked_an_address_says_so_also_when_only_a_cause_tells() -> None:
    unknown = fault("a", "UnknownPeer")
    failures = [StorageError("disk full"), RefusedError("box 0/2 is nowhere", cause=unknown)]
    assert type(no_source("nowhere", failures)) is UnknownPeer
    assert type(no_source("nowhere", failures[:1])) is RefusedError


def test_an_operation_that_got_no_answer_of_a_source_differs_from_one_that_was_refused_by_all() -> None:
    late = DeadlineExceeded(whom="agent-1", what="StateFetched", waited_s=10.0)
    gone = RefusedError("model-1 was replaced", cause=fault("a", "ProcessDied"))
    said = RemoteError(fault("b", "RefusedError"))
    assert type(no_source("nowhere", [said, said])) is RefusedError
    assert [type(no_source("nowhere", [said, each])) for each in (late, gone)] == [SourceSilent] * 2
    within = no_source("box 1/2 is nowhere", [late])
    assert type(no_source("nowhere", [said, within])) is SourceSilent
    assert type(no_source("nowhere", [late, UnknownPeer("no agent-1")])) is UnknownPeer


def test_a_cause_stands_before_its_consequences_whatever_the_order_they_came_in() -> None:
    first = fault("a", "OSError")
    second = fault("b", "StorageError", cause=first)
    third = fault("c", "RemoteError", cause=second)
    assert root_first([third, second, first]) == [first, second, third]


def test_a_cause_that_only_its_consequence_tells_of_is_named() -> None:
    first = fault("a", "OSError")
    second = fault("b", "StorageError", cause=first)
    assert root_first([second]) == [first, second]


def test_a_broken_group_stands_behind_the_death_that_broke_it_even_if_it_was_heard_of_first() -> None:
    broken, died = fault("a", "GroupBroken"), fault("b", "ProcessDied")
    assert root_first([broken, died]) == [died, broken]


def test_a_broken_group_is_the_cause_when_nothing_else_is_known() -> None:
    broken = fault("a", "GroupBroken")
    refused = fault("b", "RemoteError", cause=broken)
    assert root_first([refused, broken]) == [broken, refused]


def test_a_cause_that_was_found_later_stands_before_what_others_noted_without_it() -> None:
    noted = Fault("device", "DeviceError", "model-0", "CUDA error", 0.0)
    loss = Fault("loss", "ProcessDied", "model-0", "it exited with code 1", 0.0, noted)
    chip = Fault("chip", "ChipFault", "agent-0", "GPU 0 is broken", 0.0)
    explained = Fault("device", "DeviceError", "model-0", "CUDA error", 0.0, chip)
    for told in ([noted, explained, loss], [noted, loss, explained]):
        assert [fault.id for fault in root_first(told)] == ["chip", "device", "loss"]
