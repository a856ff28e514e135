"""Which of several faults is the cause."""

from __future__ import annotations

from kintsugi.errors import Fault, root_first


def fault(id: str, kind: str, *, cause: Fault | None = None) -> Fault:
    return Fault(id, kind, "model-0", "", 0.0, cause)


def test_a_cause_stands_before_its_consequences_whatever_the_order_they_came_in() -> None:
    first = fault("a", "OSError")
    second = fault("b", "StorageError", cause=first)
    faults = [fault("c", "RemoteError", cause=second), second, first]
    assert [each.id for each in root_first(faults)] == ["a", "b", "c"]


def test_a_broken_group_stands_behind_the_death_that_broke_it_even_if_it_was_heard_of_first() -> None:
    faults = [fault("a", "GroupBroken"), fault("b", "ProcessDied")]
    assert [each.id for each in root_first(faults)] == ["b", "a"]


def test_a_broken_group_is_the_cause_when_nothing_else_is_known() -> None:
    broken = fault("a", "GroupBroken")
    faults = [fault("b", "RemoteError", cause=broken), broken]
    assert [each.id for each in root_first(faults)] == ["a", "b"]


def test_a_cause_that_nobody_reported_is_known_from_the_chain_of_its_consequence() -> None:
    refused = fault("a", "RefusedError")
    assert [each.id for each in root_first([fault("b", "RemoteError", cause=refused)])] == ["a", "b"]
