"""Which end of the bad connections is the bad one, and what is bad about it."""

from __future__ import annotations

import pytest

from kintsugi.diagnosis.evidence import MASTER
from tests.unit.diagnosis.healthy import HOSTS, LINKS, Change, HealthyRun
from tests.unit.diagnosis.looking import diagnosis_of, named


def links_of(process: str) -> list[tuple[str, str]]:
    return [link for link in LINKS if process in link]


def now_and_then(offset: int) -> Change:
    def change(now: float, rates: dict[str, float]) -> None:
        rates["retransmits"] = float((now + offset) % 13 == 0)

    return change


def late(target_s: float, *, since: float) -> Change:
    """The kernel's average moves an eighth of the way with every answer."""

    def change(now: float, rates: dict[str, float]) -> None:
        share = 1 - (7 / 8) ** (4 * (now - since))
        rates["rtt_s"] = 0.002 + target_s * share

    return change


def test_the_process_that_all_late_connections_have_in_common_is_named() -> None:
    run = HealthyRun().play(30)
    run.changes.update(dict.fromkeys(links_of("model-1"), late(0.5, since=30)))
    assert named(run.play(3)) == [("model-1", "network_delay")]
    (cause,) = diagnosis_of(run).causes
    assert any("as usual" in other for other in cause.rules_out)


def test_of_one_late_connection_the_end_is_named_that_has_few_others() -> None:
    run = HealthyRun().play(30)
    run.changes["server-1", "manager-0"] = late(0.4, since=30)
    assert named(run.play(3)) == [("server-1", "network_delay")]


def test_a_single_late_answer_is_nothing() -> None:
    run = HealthyRun().play(30)
    run.changes["server-1", "manager-0"] = lambda now, rates: rates.update(rtt_s=0.07 if now == 31 else 0.002)
    assert named(run.play(4)) == []


def test_an_average_of_a_connection_that_is_not_used_tells_of_long_ago() -> None:
    run = HealthyRun().play(30)
    run.changes["server-1", "manager-0"] = lambda _, rates: rates.update(rtt_s=0.5, out_bytes=0.0)
    assert named(run.play(4)) == []


def test_segments_that_are_sent_again_second_after_second_are_a_loss() -> None:
    run = HealthyRun().play(30)
    for link in links_of("rollout-1"):
        run.changes[link] = lambda _, rates: rates.update(retransmits=3.0)
    assert named(run.play(4)) == [("rollout-1", "network_loss")]


def test_segments_that_had_arrived_after_all_are_no_loss() -> None:
    run = HealthyRun().play(30)
    for link in links_of("rollout-1"):
        run.changes[link] = lambda _, rates: rates.update(retransmits=3.0, needless=3.0)
    assert named(run.play(6)) == []


def test_that_segments_had_arrived_may_be_told_a_second_later() -> None:
    run = HealthyRun().play(30)
    for link in links_of("rollout-1"):
        run.changes[link] = lambda now, rates: rates.update(
            retransmits=3.0 * (now % 2 == 0), needless=3.0 * (now % 2 == 1)
        )
    assert named(run.play(7)) == []


def test_what_is_sent_again_in_one_second_is_the_end_of_something_and_no_loss() -> None:
    run = HealthyRun().play(30)
    for link in links_of("rollout-1"):
        run.changes[link] = lambda now, rates: rates.update(retransmits=6.0 * (now == 31))
    assert named(run.play(5)) == []


def test_a_few_segments_that_are_sent_again_are_how_busy_hosts_are() -> None:
    run = HealthyRun()
    for number, link in enumerate(LINKS):
        run.changes[link] = now_and_then(number)
    assert named(run.play(50)) == []


def test_what_one_host_says_is_half_of_it_until_the_other_has_spoken() -> None:
    run = HealthyRun().play(30)
    for link in links_of("model-0"):
        run.changes[link] = lambda now, rates: rates.update(backoff=min(6.0, now - 30), out_bytes=0.0)
    run.play(2)
    run.silent.add("agent-0")
    assert named(run.play(1)) == []
    run.silent.clear()
    run.play(1)
    assert named(run) == [("model-0", "network_cut")]


def test_connections_on_which_nothing_is_acknowledged_are_cut() -> None:
    run = HealthyRun().play(30)
    for link in links_of("server-0"):
        run.changes[link] = lambda now, rates: rates.update(
            backoff=min(6.0, now - 30), out_bytes=0.0, retransmits=1.0
        )
    assert named(run.play(4)) == [("server-0", "network_cut")]


def test_who_still_has_a_connection_that_loses_much_is_not_cut_off() -> None:
    run = HealthyRun().play(30)
    run.changes["model-1", MASTER] = lambda now, rates: rates.update(
        backoff=min(6.0, now - 30), out_bytes=0.0
    )
    run.changes["model-1", "model-0"] = lambda now, rates: rates.update(retransmits=3.0 * (now > 32))
    assert named(run.play(7)) == [("model-1", "network_loss")]


def test_a_connection_that_is_acknowledged_and_then_repeats_again_loses_and_is_not_cut() -> None:
    """Half of the packets are lost: one connection stalls for seconds, another passes a segment now and then."""
    run = HealthyRun().play(30)
    run.changes.update({link: cut(since=30) for link in links_of("model-1")})

    def passes_once(now: float, rates: dict[str, float]) -> None:
        rates.update(backoff=1.0, retransmits=1.0, out_bytes=1000.0 if now == 33 else 0.0)

    run.changes["model-1", "model-0"] = passes_once
    assert named(run.play(7)) == [("model-1", "network_loss")]


@pytest.mark.parametrize("kind", ["network_loss", "network_cut"])
def test_a_stalled_connection_beside_others_that_pass_is_named_when_it_is_clear_that_they_lose_nothing(
    kind: str,
) -> None:
    run = HealthyRun().play(30)
    run.changes["model-1", MASTER] = cut(since=30)
    run.play(4)
    assert named(run) == [], (
        "half of the packets may be lost: one connection stalls, and the others pass some"
    )
    if kind == "network_loss":
        run.changes["model-1", "model-0"] = lambda now, rates: rates.update(retransmits=3.0)
    assert named(run.play(3)) == [("model-1", kind)]


def test_a_connection_that_stalls_again_after_something_was_acknowledged_loses_and_is_not_cut() -> None:
    """A run that stands still sends so little that only one connection shows it."""
    run = HealthyRun().play(30)

    def stalls_twice(now: float, rates: dict[str, float]) -> None:
        since = 31 if now < 36 else 36
        rates.update(out_bytes=0.0, backoff=min(3.0, now - since))
        if now == 36:
            rates.update(out_bytes=1000.0, backoff=0.0)

    run.changes["model-1", MASTER] = stalls_twice
    assert named(run.play(8)) == [("model-1", "network_loss")]


def test_a_connection_that_stalls_after_losses_of_several_seconds_is_not_cut() -> None:
    run = HealthyRun().play(30)

    def stalls(now: float, rates: dict[str, float]) -> None:
        rates.update(retransmits=3.0 if now < 35 else 0.0)
        if now >= 35:
            # The pauses between retransmissions double.
            rates.update(out_bytes=0.0, backoff=min(4.0, now - 34))

    run.changes.update(dict.fromkeys(links_of("model-1"), stalls))
    assert named(run.play(11)) == [("model-1", "network_loss")]


def test_a_cut_that_has_ended_for_one_connection_does_not_become_a_loss() -> None:
    run = HealthyRun().play(30)
    run.changes.update({link: cut(since=30) for link in links_of("model-1")})

    def works_again(now: float, rates: dict[str, float]) -> None:
        if now < 36:
            cut(since=30)(now, rates)
        elif now == 36:
            rates.update(retransmits=1.0)

    run.changes["model-1", "model-0"] = works_again
    assert named(run.play(9)) == [("model-1", "network_cut")]


def test_that_others_wait_for_a_process_is_not_put_down_to_it_while_a_connection_is_unacknowledged() -> None:
    run = HealthyRun()
    for second in range(1, 41):
        run.waits["rollout-1"] = ("manager-0", "completions", float(second))
        run.play(1)
    run.stalled = True
    run.changes["rollout-1", "manager-0"] = lambda now, rates: rates.update(backoff=2.0, unacked=1.0)
    for _ in range(6):
        assert ("manager-0", "slow") not in named(run.play(1))
    assert ("manager-0", "slow") in named(run.play(3)), "it is named when nothing else explains it"


def test_who_is_found_silent_because_its_network_is_cut_does_not_hang() -> None:
    run = HealthyRun().play(30)
    for link in links_of("server-0"):
        run.changes[link] = lambda now, rates: rates.update(backoff=min(6.0, now - 30), out_bytes=0.0)
    run.play(5)
    run.fault("Hung", "server-0", "server-0: no heartbeat for 5 s")
    assert named(run.play(1)) == [("server-0", "network_cut")]


def test_two_ends_that_have_nothing_in_common_are_both_named() -> None:
    run = HealthyRun().play(30)
    run.changes["server-1", "manager-0"] = late(0.4, since=30)
    run.changes["model-1", "agent-0"] = late(0.9, since=30)
    assert {process for process, _ in named(run.play(4))} == {"server-1", "model-1"} or {
        process for process, _ in named(run)
    } == {"server-1", "agent-0"}


def cut(*, since: float) -> Change:
    def change(now: float, rates: dict[str, float]) -> None:
        rates.update(backoff=min(6.0, now - since), out_bytes=0.0, retransmits=1.0)

    return change


def between_hosts() -> list[tuple[str, str]]:
    return [(of, peer) for of, peer in LINKS if (of in HOSTS["host-1"]) != (peer in HOSTS["host-1"])]


def unused(_: float, rates: dict[str, float]) -> None:
    rates["out_bytes"] = 0.0


def test_a_host_that_nobody_reaches_any_more_is_named_and_not_the_master_that_calls_most() -> None:
    run = HealthyRun().play(30)
    for link in between_hosts():
        run.changes[link] = cut(since=30) if MASTER in link else unused
    assert named(run.play(4)) == [("agent-1", "network_cut")]
    (cause,) = diagnosis_of(run).causes
    assert "its host's 3 connections with host-0: nothing is acknowledged" in cause.summary


def test_a_host_that_was_not_reached_for_a_while_is_still_what_it_was_when_all_is_well_again() -> None:
    run = HealthyRun().play(30)
    run.changes.update(dict.fromkeys(between_hosts(), cut(since=30)))
    run.play(6).changes.clear()
    assert named(run.play(3)) == [("agent-1", "network_cut")]


def test_a_host_whose_every_connection_is_late_is_named_once_all_had_time_to_show_it() -> None:
    run = HealthyRun().play(30)
    run.changes.update(dict.fromkeys(between_hosts(), late(0.4, since=30)))
    assert named(run.play(2)) == []
    assert named(run.play(2)) == [("agent-1", "network_delay")]


def test_a_host_on_whose_ways_segments_are_lost_is_named() -> None:
    run = HealthyRun().play(30)
    for link in between_hosts():
        run.changes[link] = lambda _, rates: rates.update(retransmits=3.0)
    assert named(run.play(4)) == [("agent-1", "network_loss")]


def test_a_host_that_others_reach_as_usual_is_not_the_one() -> None:
    run = HealthyRun().play(30)
    for link in between_hosts():
        if MASTER in link:
            run.changes[link] = late(0.4, since=30)
    assert named(run.play(5)) == [(MASTER, "network_delay")]


def test_what_processes_of_a_cut_off_host_are_found_to_be_is_no_cause_of_its_own() -> None:
    run = HealthyRun().play(30)
    run.changes.update(dict.fromkeys(between_hosts(), cut(since=30)))
    run.play(2)
    run.fault("Hung", "model-1", "no heartbeat of model-1 for 2 s, three or more are missing")
    assert named(run.play(3)) == [("agent-1", "network_cut")]


def test_that_no_name_is_resolved_on_a_host_that_reaches_nobody_is_not_said_before_it_and_not_beside_it() -> (
    None
):
    run = HealthyRun().play(30)
    run.changes.update(dict.fromkeys(between_hosts(), cut(since=30)))
    run.changes["host-1"] = lambda now, values: values.update(resolve_errors=now - 30)
    for _ in range(3):
        assert named(run.play(1)) in ([], [("agent-1", "network_cut")])
    assert named(run.play(2)) == [("agent-1", "network_cut")]


def test_what_can_not_even_be_sent_again_is_a_cut_too() -> None:
    """A host without a route: the kernel has nothing to try, and doubles no time."""
    run = HealthyRun().play(40)

    def unsent(now: float, rates: dict[str, float]) -> None:
        rates.update(out_bytes=0.0, in_bytes=0.0, unacked=3.0)

    for of, peer in LINKS:
        if (of in HOSTS["host-0"]) != (peer in HOSTS["host-0"]):
            run.changes[of, peer] = unsent
    assert named(run.play(7))[:1] == [("agent-1", "network_cut")]


def narrow(now: float, rates: dict[str, float]) -> None:
    rates.update(rtt_s=0.4)


def test_two_bad_connections_of_one_process_with_one_host_may_be_that_host() -> None:
    """A way that becomes narrow shows first where most is sent."""
    run = HealthyRun().play(40)
    run.changes |= {("model-1", "model-0"): narrow, ("model-0", "rollout-1"): narrow}
    assert named(run.play(3)) == []
    run.changes |= {
        ("server-1", "manager-0"): narrow,
        ("rollout-1", "master-0"): narrow,
        ("agent-1", "master-0"): narrow,
    }
    found = named(run.play(3))
    assert found[:1] == [("agent-1", "network_delay")]
