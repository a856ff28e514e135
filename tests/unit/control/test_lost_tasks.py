"""A task whose worker is lost waits again and runs nowhere."""

from __future__ import annotations

from kintsugi.control.task_queue import TaskScheduler, TaskStatus


def with_a_lost_worker() -> TaskScheduler:
    scheduler = TaskScheduler(capacity=2)
    for task in ("a", "b", "c"):
        scheduler.submit(task)
    assert scheduler.assign(["rollout-0"]) == [("a", "rollout-0"), ("b", "rollout-0")]
    assert scheduler.lost("rollout-0") == ["a", "b"]
    return scheduler


def test_an_answer_of_the_lost_worker_completes_nothing() -> None:
    scheduler = with_a_lost_worker()
    assert not scheduler.complete("a")
    assert scheduler.status("a") is TaskStatus.PENDING
    assert scheduler.load("rollout-0") == 0


def test_a_task_that_waits_again_can_be_cancelled_and_submitted_anew() -> None:
    scheduler = with_a_lost_worker()
    assert scheduler.cancel("a")
    assert scheduler.status("a") is TaskStatus.UNKNOWN
    assert not scheduler.cancel("a")
    scheduler.submit("a")
    assert scheduler.assign(["rollout-1"]) == [("b", "rollout-1"), ("c", "rollout-1")]


def test_when_everything_is_cleared_nothing_waits_and_nothing_runs() -> None:
    scheduler = with_a_lost_worker()
    scheduler.assign(["rollout-1"])
    scheduler.clear()
    assert {scheduler.status(task) for task in ("a", "b", "c")} == {TaskStatus.UNKNOWN}
    assert scheduler.load("rollout-1") == 0
    assert scheduler.assign(["rollout-1"]) == []
