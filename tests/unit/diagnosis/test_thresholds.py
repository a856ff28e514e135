"""Figures of one process or host that are far from its own past and from its peers; and those that only seem so."""

from __future__ import annotations

import pytest

from kintsugi.diagnosis.ranking import replaceable
from tests.unit.diagnosis.healthy import HOSTS, LINKS, PROCESSES, START, HealthyRun
from tests.unit.diagnosis.looking import diagnosis_of, named


def test_a_healthy_run_has_no_cause_at_any_second() -> None:
    run = HealthyRun().play(5)
    for _ in range(40):
        assert named(run.play(1)) == []
    assert "no reading is far" in diagnosis_of(run).abstained


def throttle(_: float, rates: dict[str, float]) -> None:
    rates.update(cpu_s=0.05, throttled_s=0.8, run_delay_s=0.1)


def test_a_process_that_its_quota_keeps_from_the_processor_is_named_within_three_seconds() -> None:
    run = HealthyRun().play(30)
    run.changes["model-1"] = throttle
    assert named(run.play(3)) == [("model-1", "cpu")]
    (cause,) = diagnosis_of(run).causes
    assert abs(cause.onset - (START + 30)) <= 1.0
    assert cause.host == "host-1"


def starve(_: float, rates: dict[str, float]) -> None:
    rates.update(cpu_s=0.03, run_delay_s=0.9)


def test_a_process_that_waits_for_the_processor_far_more_than_the_others_is_starved() -> None:
    run = HealthyRun().play(30)
    run.changes["rollout-0"] = starve
    assert named(run.play(4)) == [("rollout-0", "cpu")]


def test_the_only_busy_process_of_a_run_is_not_starved_where_other_programs_use_all_of_the_host() -> None:
    run = HealthyRun()
    quiet = {process for process in PROCESSES if process != "model-1"}
    run.changes.update(dict.fromkeys(quiet, lambda _, rates: rates.update(cpu_s=0.01, run_delay_s=0.0)))
    run.changes["host-1"] = lambda now, rates: rates.update(cpu_busy_s=1.99 if now > 30 else 1.0)
    run.play(30)
    run.changes["model-1"] = starve
    assert named(run.play(6)) == []
    del run.changes["host-1"]
    assert named(run.play(6)) == [("model-1", "cpu")]


def test_when_everybody_waits_for_the_processor_it_is_the_load_and_nobodys_fault() -> None:
    run = HealthyRun().play(30)
    run.changes.update(dict.fromkeys(PROCESSES, starve))
    assert named(run.play(6)) == []


def test_on_a_crowded_host_a_process_is_starved_only_after_several_seconds() -> None:
    run = HealthyRun()
    run.changes.update(dict.fromkeys(PROCESSES, lambda _, rates: rates.update(cpu_s=0.3, run_delay_s=0.4)))
    run.play(30)
    run.changes["rollout-0"] = lambda _, rates: rates.update(cpu_s=0.09, run_delay_s=0.9)
    assert named(run.play(5)) == [], "on a host with free CPUs this is named after four seconds"
    assert named(run.play(2)) == [("rollout-0", "cpu")]


def test_a_container_whose_quota_throttles_all_of_its_processes_is_no_fault_of_one() -> None:
    run = HealthyRun().play(30)
    run.changes.update(dict.fromkeys(PROCESSES, throttle))
    assert named(run.play(6)) == []


def test_memory_that_grows_second_after_second_is_named() -> None:
    run = HealthyRun().play(30)
    run.changes["server-1"] = lambda now, rates: rates.update(rss_bytes=2e8 + 1e8 * (now - 30))
    assert named(run.play(4)) == [("server-1", "memory")]


def test_a_process_close_to_its_memory_limit_is_named() -> None:
    run = HealthyRun()
    run.changes["server-1"] = lambda now, rates: rates.update(
        memory_limit_bytes=1e9, memory_used_bytes=4e8 if now < 30 else 9.9e8
    )
    assert named(run.play(33)) == [("server-1", "memory")]


def test_a_process_that_can_open_nothing_any_more_is_named_though_nobody_says_a_word() -> None:
    run = HealthyRun()
    run.changes["rollout-0"] = lambda now, rates: rates.update(
        descriptors=60.0 if now < 30 else 1024.0, descriptor_limit=1024.0
    )
    run.play(31)
    run.waits["model-0"] = ("rollout-0", "trajectories", 30.0)
    run.stalled = True
    assert named(run.play(3)) == [("rollout-0", "descriptors")]
    (cause,) = diagnosis_of(run).causes
    assert replaceable(cause)


def test_a_successor_that_is_born_larger_has_not_grown() -> None:
    run = HealthyRun().play(30)
    run.kill("rollout-1")
    run.changes["rollout-1"] = lambda _, rates: rates.update(rss_bytes=9e8)
    assert named(run.play(7)) == [("rollout-1", "killed")]


@pytest.mark.parametrize("free", [0.0, 3e6])
def test_a_full_disk_is_named_at_once(free: float) -> None:
    run = HealthyRun().play(30)
    run.changes["host-0"] = lambda _, rates: rates.update(disk_free_bytes=free)
    assert named(run.play(1)) == [("master-0", "disk_full")]


def test_a_disk_that_is_nearly_full_all_the_time_is_not_what_is_wrong() -> None:
    run = HealthyRun()
    run.changes["host-0"] = lambda _, rates: rates.update(disk_free_bytes=9e8)
    assert named(run.play(40)) == []


def test_writes_that_take_long_to_reach_the_disk_are_named_and_one_that_did_is_not() -> None:
    run = HealthyRun().play(30)
    run.changes["host-1"] = lambda now, rates: rates.update(fsync_s=0.8 if now == 31 else rates["fsync_s"])
    assert named(run.play(2)) == []
    run.changes["host-1"] = lambda _, rates: rates.update(fsync_s=0.8)
    assert named(run.play(3)) == [("agent-1", "disk_slow")]


def fails(run: HealthyRun, host: str, figure: str, *seconds: int) -> None:
    """A total that grows by one in each of these seconds, and is not there before the first."""

    def change(now: float, values: dict[str, float]) -> None:
        if count := sum(second <= now for second in seconds):
            values[figure] = float(count)

    run.changes[host] = change


@pytest.mark.parametrize(("figure", "kind"), [("resolve_errors", "dns"), ("fsync_errors", "disk_error")])
def test_a_probe_that_fails_again_and_again_is_named_and_one_that_failed_once_is_not(
    figure: str, kind: str
) -> None:
    run = HealthyRun().play(30)
    fails(run, "host-1", figure, 31)
    assert named(run.play(8)) == []
    fails(run, "host-1", figure, 31, *range(39, 45))
    assert named(run.play(6)) == [("agent-1", kind)]


def test_tries_of_seconds_each_that_fail_one_after_the_other_are_named() -> None:
    """As a resolver that asks a server which does not answer: two seconds, an error, a pause."""
    run = HealthyRun().play(30)
    fails(run, "host-1", "resolve_errors", 33, 37)
    assert named(run.play(6)) == []
    assert named(run.play(2)) == [("agent-1", "dns")]


def test_a_name_that_never_could_be_resolved_is_not_what_is_wrong_now() -> None:
    run = HealthyRun()
    fails(run, "host-1", "resolve_errors", *range(60))
    run.play(20)
    for _ in range(10):
        assert named(run.play(1)) == []


def test_a_name_that_is_not_resolved_for_seconds_is_named_also_when_that_lasts() -> None:
    run = HealthyRun().play(30)
    run.changes["host-1"] = lambda now, values: values.update(resolve_pending_s=(now - 30) % 6)
    assert named(run.play(3)) == []
    for _ in range(10):
        assert named(run.play(1)) == [("agent-1", "dns")]


@pytest.mark.parametrize("rates", [{"out_bytes": 0.0}, {"retransmits": 2.0}, {"backoff": 2.0}])
def test_a_name_that_is_not_resolved_is_named_later_where_the_network_may_be_the_reason(
    rates: dict[str, float],
) -> None:
    run = HealthyRun().play(30)
    of_host_1 = HOSTS["host-1"]
    for link in [link for link in LINKS if (link[0] in of_host_1) != (link[1] in of_host_1)]:
        run.changes[link] = lambda now, values: values.update(rates if now > 32 else {})
    run.changes["host-1"] = lambda now, values: values.update(resolve_pending_s=(now - 30) % 6)
    assert ("agent-1", "dns") not in named(run.play(4))


def test_an_accelerator_without_memory_is_named_when_it_goes_with_harm_and_grew() -> None:
    run = HealthyRun()
    run.changes["host-1"] = lambda now, values: values.update(
        device_0_memory_total_bytes=8e10, device_0_memory_bytes=4e10 if now < 31 else 7.9e10
    )
    assert named(run.play(36)) == []
    run.stalled = True
    assert [kind for _, kind in named(run.play(3))] == ["device_memory"]


def test_nothing_is_said_of_figures_while_the_run_warms_up() -> None:
    run = HealthyRun(stalled=True)
    run.changes["model-1"] = starve
    assert named(run.play(10)) == []
    assert diagnosis_of(run).abstained == "the run is warming up, and nothing has failed"


def test_what_is_over_for_ten_seconds_is_not_what_is_wrong_now() -> None:
    run = HealthyRun().play(30)
    run.changes["model-1"] = throttle
    assert named(run.play(4))
    del run.changes["model-1"]
    assert named(run.play(10)) == []


def test_a_disk_that_others_keep_busy_is_named_and_one_that_the_run_itself_writes_to_is_not() -> None:
    run = HealthyRun().play(30)
    run.changes["host-0"] = lambda _, rates: rates.update(disk_busy_s=0.7, disk_write_bytes=2e8)
    assert named(run.play(6)) == [("master-0", "disk_slow")]
    own = HealthyRun().play(30)
    own.changes["host-0"] = lambda _, rates: rates.update(disk_busy_s=0.7, disk_write_bytes=2e8)
    own.changes["model-0"] = lambda _, rates: rates.update(write_total=2e8)
    assert named(own.play(6)) == []


def test_a_rank_that_stands_still_again_and_again_is_held_up_by_its_device() -> None:
    run = HealthyRun().play(30)
    for second in range(8):
        run.states["model-1"] = "S" if second % 4 == 3 else "D"
        run.play(1)
    assert named(run) == [("model-1", "device")]


def test_a_group_that_several_share_says_nothing_of_one_of_them() -> None:
    """The files that somebody reads and writes are charged to all of a container."""
    run = HealthyRun().play(60)

    def fills(now: float, rates: dict[str, float]) -> None:
        rates["memory_used_bytes"] = 5e8 + 1e8 * max(0.0, now - 60)
        rates["memory_limit_bytes"] = 8e9

    run.changes |= dict.fromkeys(("agent-0", "master-0", "model-0", "rollout-0", "server-0"), fills)
    assert named(run.play(10)) == []


def test_a_limit_that_somebody_is_put_under_is_not_used_up_by_what_it_had_before() -> None:
    run = HealthyRun().play(60)
    run.changes["model-1"] = lambda now, rates: rates.update(memory_limit_bytes=2.1e8, memory_used_bytes=3e7)
    assert named(run.play(5)) == []
    run.changes["model-1"] = lambda now, rates: rates.update(
        memory_limit_bytes=2.1e8, memory_used_bytes=2.0e8
    )
    assert named(run.play(2)) == [("model-1", "memory")]


def test_a_process_of_the_users_code_that_does_not_answer_is_named_by_its_worker() -> None:
    run = HealthyRun().play(60)
    run.waits["rollout-1"] = ("reward process", "an outcome", run.now)
    assert named(run.play(1)) == []
    assert named(run.play(4)) == [("rollout-1", "user_code")]


def test_a_reward_that_always_takes_long_is_as_usual() -> None:
    class Slow(HealthyRun):
        def _one_second(self) -> None:
            for worker in ("rollout-0", "rollout-1"):
                self.waits[worker] = ("reward process", "an outcome", self.now - self.now % 8)
            super()._one_second()

    assert named(Slow().play(90)) == []


def test_one_that_only_wakes_now_and_then_waits_for_its_turns_on_a_busy_host() -> None:
    run = HealthyRun().play(40)
    for process in PROCESSES:
        run.changes[process] = lambda now, rates: rates.update(cpu_s=0.3, run_delay_s=0.2)
    run.changes["agent-0"] = lambda now, rates: rates.update(cpu_s=0.01, run_delay_s=0.4)
    assert named(run.play(8)) == []
    run.changes["agent-0"] = lambda now, rates: rates.update(cpu_s=0.01, run_delay_s=0.9)
    assert named(run.play(8)) == [("agent-0", "cpu")]
