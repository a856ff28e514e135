from kintsugi.control.task_queue import TaskScheduler, TaskStatus


def scheduler(*tasks: str, capacity: int = 2) -> TaskScheduler:
    queue = TaskScheduler(capacity=capacity)
    for task in tasks:
        queue.submit(task)
    return queue


def test_tasks_go_to_the_least_loaded_worker_in_order() -> None:
    assert scheduler("a", "b", "c").assign(["w1", "w2"]) == [("a", "w1"), ("b", "w2"), ("c", "w1")]


def test_a_worker_takes_no_more_than_its_capacity() -> None:
    queue = scheduler("a", "b", "c", "d", "e")
    assert len(queue.assign(["w1", "w2"])) == 4
    assert queue.status("e") is TaskStatus.PENDING
    queue.complete("a")
    assert queue.assign(["w1", "w2"]) == [("e", "w1")]


def test_a_lost_workers_tasks_come_first_in_their_old_order() -> None:
    queue = scheduler("a", "b", "c", "d", "e", "f")
    queue.assign(["w1", "w2"])
    assert queue.lost("w1") == ["a", "c"]
    assert [task for task, _ in queue.assign(["w3"])] == ["a", "c"]


def test_a_cancelled_task_is_unknown_wherever_it_was() -> None:
    queue = scheduler("a", "b", capacity=1)
    queue.assign(["w1"])
    assert queue.cancel("a") and queue.cancel("b") and not queue.cancel("a")
    assert {queue.status("a"), queue.status("b")} == {TaskStatus.UNKNOWN}


def test_rebalancing_moves_tasks_until_loads_differ_by_one_at_most() -> None:
    queue = scheduler(*"abcdef", capacity=6)
    queue.assign(["w1"])
    moves = queue.rebalance(["w1", "w2", "w3"], may_move=lambda task: True)
    assert [queue.load(name) for name in ("w1", "w2", "w3")] == [2, 2, 2]
    assert {move.source for move in moves} == {"w1"}
    for worker in ("w2", "w3"):
        assert queue.lost(worker) == [move.task for move in moves if move.target == worker]


def test_a_failed_task_is_tried_before_younger_ones() -> None:
    queue = scheduler("a", "b", "c", capacity=1)
    queue.assign(["w1"])
    queue.put_back("a")
    assert queue.assign(["w1"]) == [("a", "w1")]
