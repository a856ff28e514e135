"""The diagnosis at the size of a real model: what is normal for a process that starts, loads, saves, evaluates or is
repaired is no symptom; what is wrong is named, whatever follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kintsugi.diagnosis import diagnose
from kintsugi.telemetry.events import OperationFailed
from tests.unit.diagnosis.large_run import (
    CARD_BYTES,
    DEVICE,
    GB,
    HOST,
    MANAGER,
    MASTER,
    RANK,
    SERVER,
    WORKERS,
    LargeRun,
)

STEPS_BEFORE = 6
"""Healthy steps before a fault."""


NewRun = Callable[..., LargeRun]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[NewRun]:
    """Makes runs with the arguments of `LargeRun`; their files are closed after the test."""
    with ExitStack() as runs:
        yield lambda **arguments: runs.enter_context(closing(LargeRun(tmp_path, **arguments)))


@pytest.fixture(params=[6.0, 18.0], ids=["steps of 6 s", "steps of 18 s"])
def run(request: pytest.FixtureRequest, new_run: NewRun) -> LargeRun:
    return new_run(step_s=request.param, save_every=5, evaluate_every=5)


@pytest.mark.slow
def test_a_healthy_run_of_100_steps_with_saves_and_evaluations_has_no_cause(new_run: NewRun) -> None:
    run = new_run(step_s=6.0, save_every=10, evaluate_every=10).play_steps(100)
    assert run.verdicts == []


def test_a_start_of_half_a_minute_and_slow_steps_have_no_cause(new_run: NewRun) -> None:
    run = new_run(step_s=18.0, save_every=4, evaluate_every=3).play_steps(14)
    assert run.verdicts == []


def test_a_killed_rank_is_named_and_its_replacement_that_loads_its_state_is_not(run: LargeRun) -> None:
    run.play_steps(STEPS_BEFORE)
    run.kill(RANK, late_s=1.5)
    run.play_steps(4)
    assert run.named() == [(RANK, "killed")]


def test_a_killed_rank_that_was_missed_before_its_end_was_reported_is_killed_and_not_hung(
    run: LargeRun,
) -> None:
    run.play_steps(STEPS_BEFORE)
    killed_at = run.now
    run.kill(RANK, late_s=2.5, missed=True)
    assert run.named(since=killed_at + 3.0) == [(RANK, "killed")]
    run.play_steps(2)
    assert run.named(since=killed_at + 3.0) == [(RANK, "killed")]


def test_the_kill_of_a_rank_is_the_cause_until_the_step_is_there_again(run: LargeRun) -> None:
    run.play_steps(STEPS_BEFORE)
    run.kill(RANK, late_s=1.5)
    run.play(2.0)
    assert run.verdicts[-1][0] >= run.now - 1.0
    run.play_steps(1)
    run.play(15.0)
    assert run.verdicts[-1][0] < run.now - 3.0


def test_a_run_that_is_read_later_has_the_kill_as_its_cause(run: LargeRun) -> None:
    run.play_steps(STEPS_BEFORE)
    run.kill(RANK, late_s=1.5)
    run.play_steps(2)
    found = diagnose(run.run_dir, at=run.clock.wall(), since=run.clock.wall() - 120.0, clock=run.clock)
    assert [(cause.process, cause.kind.value) for cause in found.causes] == [(RANK, "killed")]


Begin = Callable[[LargeRun], None]


def full_card(run: LargeRun) -> None:
    def take(of: str, values: dict[str, float]) -> None:
        if of == HOST:
            values["device_0_memory_bytes"] = 0.995 * CARD_BYTES

    run.changes.append(take)
    run.play(8.0)


def slow_card(run: LargeRun) -> None:
    run.slowness = 4.0
    run.play(40.0)


def growing_server(run: LargeRun) -> None:
    run.leak(SERVER, "device_memory_bytes", per_step=3.6 * GB)
    run.play_steps(10)


def growing_worker(run: LargeRun) -> None:
    run.leak(WORKERS[0], "rss_bytes", per_step=0.5 * GB)
    run.play_steps(7)


def no_host_memory(run: LargeRun) -> None:
    run.kill(WORKERS[1], oom=True)
    run.play(5.0)


def full_disk_in_a_save(run: LargeRun) -> None:
    while run.phase != "saving":
        run.play(0.5)
    run.changes.append(lambda of, values: values.update(disk_free_bytes=0.0) if of == HOST else None)
    error = "[Errno 28] No space left on device"
    run.say(RANK, OperationFailed("the checkpoint was not saved", operation="save", error=error))
    run.play(5.0)


def hanging_reward(run: LargeRun) -> None:
    run.user_code_since[WORKERS[1]] = run.now
    run.stalled = True
    run.play(20.0)


def starved_worker(run: LargeRun) -> None:
    part = run.parts[WORKERS[0]]

    def starve(of: str, values: dict[str, float]) -> None:
        if of == WORKERS[0]:
            part.totals["run_delay_s"] += 0.9
            part.totals["cpu_s"] -= 0.9 if run.phase in ("collecting", "evaluating") else 0.0

    run.changes.append(starve)
    run.play(30.0)


def mute_manager(run: LargeRun) -> None:
    run.parts[MANAGER].is_mute = True
    run.stalled = True
    run.play(10.0)


FAULTS: dict[str, tuple[Begin, set[tuple[str, str]]]] = {
    "rank killed": (lambda run: run.kill(RANK, late_s=1.5), {(RANK, "killed")}),
    "server killed": (lambda run: run.kill(SERVER, late_s=1.0), {(SERVER, "killed")}),
    "master killed": (lambda run: run.kill(MASTER), {(MASTER, "killed")}),
    "rollout worker killed": (lambda run: run.kill(WORKERS[0]), {(WORKERS[0], "killed")}),
    "manager killed": (lambda run: run.kill(MANAGER), {(MANAGER, "killed")}),
    "rank stopped": (lambda run: run.stop(RANK), {(RANK, "stopped")}),
    "server stopped": (lambda run: run.stop(SERVER), {(SERVER, "stopped")}),
    "rollout worker stopped": (lambda run: run.stop(WORKERS[1]), {(WORKERS[1], "stopped")}),
    "manager stopped": (lambda run: run.stop(MANAGER), {(MANAGER, "stopped")}),
    "device memory taken": (full_card, {(process, "device_memory") for process in DEVICE}),
    "slow device": (slow_card, {(process, "device") for process in DEVICE}),
    "growing server": (growing_server, {(SERVER, "device_memory")}),
    "growing rollout worker": (growing_worker, {(WORKERS[0], "memory")}),
    "no memory left": (no_host_memory, {(WORKERS[1], "memory")}),
    "disk full during a save": (full_disk_in_a_save, {(RANK, "disk_full"), (MASTER, "disk_full")}),
    "reward that hangs": (hanging_reward, {(WORKERS[1], "user_code")}),
    "rollout worker without a CPU": (starved_worker, {(WORKERS[0], "cpu")}),
    "manager that hangs": (mute_manager, {(MANAGER, "hung")}),
}


SLOW_STEPS = (
    "rank killed",
    "server killed",
    "rank stopped",
    "slow device",
    "growing server",
    "reward that hangs",
)
"""Faults that are tried with steps of 18 s too."""


@pytest.mark.parametrize(
    ("fault", "step_s"), [*((fault, 6.0) for fault in FAULTS), *((fault, 18.0) for fault in SLOW_STEPS)]
)
def test_each_fault_is_named_first_and_nothing_else_is(fault: str, step_s: float, new_run: NewRun) -> None:
    begin, right = FAULTS[fault]
    run = new_run(step_s=step_s, save_every=5).play_steps(STEPS_BEFORE)
    assert run.named() == []
    begin(run)
    run.play(3.0)
    assert run.named()
    assert set(run.named()) <= right


def test_a_card_that_a_growing_server_fills_is_no_fault_of_the_rank(new_run: NewRun) -> None:
    run = new_run(step_s=6.0).play_steps(STEPS_BEFORE)
    run.leak(SERVER, "device_memory_bytes", per_step=3.6 * GB)
    run.play_steps(13)
    run.fault("DeviceOutOfMemory", RANK, "CUDA out of memory")
    run.play(5.0)
    assert run.named() == [(SERVER, "device_memory")]


def test_a_size_that_a_process_keeps_after_its_first_save_is_no_growth(new_run: NewRun) -> None:
    run = new_run(step_s=6.0, save_every=7)

    def keep(of: str, values: dict[str, float]) -> None:
        if of == RANK and run.step >= 7 and run.phase != "saving":
            values["rss_bytes"] += 21 * GB

    run.changes.append(keep)
    run.play_steps(16)
    assert run.verdicts == []


def test_a_disk_that_a_save_makes_slow_is_no_fault_where_the_kernel_counts_no_writes(new_run: NewRun) -> None:
    run = new_run(step_s=6.0, save_every=4)

    def uncounted(of: str, values: dict[str, float]) -> None:
        values.pop("write_bytes", None)
        if of == HOST and run.phase == "saving":
            values["fsync_s"] = 3.4

    run.changes.append(uncounted)
    run.play_steps(18)
    assert run.verdicts == []


def test_caches_that_fill_more_and_more_slowly_are_no_growth(new_run: NewRun) -> None:
    run = new_run(step_s=6.0)

    def fill(of: str, values: dict[str, float]) -> None:
        if of == SERVER:
            values["device_memory_bytes"] += 20 * GB * (1 - 0.5**run.step)

    run.changes.append(fill)
    run.play_steps(16)
    assert run.verdicts == []
