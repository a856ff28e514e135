"""The watch on virtual time: what is suspected and when, and above all what is not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.protocol.membership import Heartbeat
from kintsugi.recovery.liveness import (
    ALL_SILENT_GRACE_S,
    FIRST_ANSWER_S,
    SAVE_S,
    LivenessMonitor,
    OpenRequest,
    Suspicion,
    SuspicionKind,
)
from kintsugi.types import Progress, Wait

CHECK_S = 0.2
BEAT_S = 0.5
HOSTS = {
    "agent-0": "host-0",
    "model-0": "host-0",
    "rollout-0": "host-0",
    "manager-0": "host-0",
    "agent-1": "host-1",
    "model-1": "host-1",
    "server-0": "host-1",
}


def beat(*waits: Wait, **counters: int) -> Heartbeat:
    return Heartbeat(Progress(counters), 0.0, waits)


def waiting_for(whom: str, since: float = 0.0) -> Wait:
    return Wait(whom, "an answer", since, since + 100)


class Drive:
    """A cluster that speaks every half second and is checked every 0.2 s."""

    def __init__(self, hosts: Mapping[str, str] = HOSTS) -> None:
        self.watch = LivenessMonitor()
        self.hosts = dict(hosts)
        self.now = 100.0
        self.says: dict[str, Heartbeat] = dict.fromkeys(hosts, beat())
        self.asked: dict[str, Sequence[OpenRequest]] = {}
        self.told: list[tuple[float, Suspicion]] = []
        self._turn = 0
        for process, host in hosts.items():
            self.watch.joined(process, "1", self.now, host=host)

    def run(self, seconds: float, *, silent: Iterable[str] = (), moving: Iterable[str] = ()) -> None:
        """`moving` processes count a step with every heartbeat."""
        silent, moving = set(silent), set(moving)
        for _ in range(round(seconds / 0.1)):
            self._turn += 1
            self.now += 0.1
            if self._turn % 5 == 0:
                for process in self.hosts.keys() - silent:
                    said = self.says[process]
                    if process in moving:
                        said = Heartbeat(Progress({"steps": self._turn}), 0.0, said.waits)
                    self.watch.on_heartbeat(process, "1", said, self.now)
            if self._turn % 2 == 0:
                self.told += [(self.now, each) for each in self.watch.check(self.now, asked=self.asked)]

    def ask(self, process: str, kind: str = "RunCall", usual_s: float | None = 0.5) -> None:
        self.asked[process] = [OpenRequest("token", kind, self.now, usual_s)]

    @property
    def suspected(self) -> set[tuple[str, SuspicionKind]]:
        return {(each.process, each.kind) for _, each in self.told}


@pytest.fixture
def drive() -> Drive:
    return Drive()


def test_a_healthy_cluster_is_not_suspected(drive: Drive) -> None:
    drive.run(60)
    assert drive.told == []


def test_a_silent_process_is_suspected_after_three_missed_heartbeats(drive: Drive) -> None:
    drive.run(1)
    stopped = drive.now
    drive.run(2.5, silent=["model-1"])
    when, suspicion = drive.told[0]
    assert (suspicion.process, suspicion.incarnation, suspicion.kind) == (
        "model-1",
        "1",
        SuspicionKind.SILENT,
    )
    assert 1.5 <= when - stopped <= 1.8
    assert suspicion.first_seen == when


def test_a_suspicion_is_repeated_every_second_with_growing_evidence(drive: Drive) -> None:
    drive.run(6, silent=["model-1"])
    times = [when for when, _ in drive.told]
    lasting = [each.lasting_s for _, each in drive.told]
    assert len(times) >= 4
    assert all(1.0 <= later - earlier < 1.0 + 1.1 * CHECK_S for earlier, later in pairwise(times))
    assert lasting == sorted(set(lasting))
    assert len({each.first_seen for _, each in drive.told}) == 1
    assert len({each.evidence for _, each in drive.told}) == len(times)


def test_a_heartbeat_ends_the_suspicion(drive: Drive) -> None:
    drive.run(3, silent=["model-1"])
    drive.told.clear()
    drive.run(5)
    assert drive.told == []


def test_a_forgotten_process_is_not_suspected(drive: Drive) -> None:
    drive.watch.forget("model-1")
    drive.run(5, silent=["model-1"])
    assert drive.told == []


def test_a_heartbeat_of_an_earlier_incarnation_says_nothing(drive: Drive) -> None:
    drive.watch.joined("model-1", "2", drive.now, host="host-1")
    drive.run(2)
    assert drive.suspected == {("model-1", SuspicionKind.SILENT)}


def test_a_registration_counts_as_a_sign_of_life(drive: Drive) -> None:
    drive.run(1.2, silent=["model-1"])
    drive.watch.joined("model-1", "1", drive.now, host="host-1")
    drive.run(1.2, silent=["model-1"])
    assert drive.told == []


def test_after_a_pause_of_the_master_nobody_is_suspected(drive: Drive) -> None:
    drive.run(1)
    drive.now += 30
    assert drive.watch.check(drive.now, asked={}) == []
    drive.run(5)
    assert drive.told == []


def test_a_process_that_stopped_before_a_pause_of_the_master_is_suspected_after_it(drive: Drive) -> None:
    drive.run(1)
    drive.now += 30
    resumed = drive.now
    drive.run(2.5, silent=["server-0"])
    assert drive.told[0][1].process == "server-0"
    assert drive.told[0][0] - resumed <= 2


def test_when_everybody_falls_silent_nobody_is_suspected_for_a_grace(drive: Drive) -> None:
    drive.run(ALL_SILENT_GRACE_S - 0.2, silent=HOSTS)
    assert drive.told == []


@pytest.mark.parametrize("outage_s", [1.0, 1.4, 2.0, 4.4])
def test_after_an_outage_of_the_network_everybody_may_speak_first(drive: Drive, outage_s: float) -> None:
    drive.run(outage_s, silent=HOSTS)
    drive.run(0.5, silent=HOSTS.keys() - {"agent-0"})
    drive.run(5)
    assert drive.told == []


@pytest.mark.parametrize("outage_s", [2.0, 4.0])
def test_after_a_long_outage_everybody_has_the_usual_time_to_come_back(drive: Drive, outage_s: float) -> None:
    drive.run(outage_s, silent=HOSTS)
    drive.run(1.0, silent=HOSTS.keys() - {"agent-0"})
    drive.run(5)
    assert drive.told == []


def test_when_everybody_stays_silent_the_hosts_are_suspected_one_by_one(drive: Drive) -> None:
    drive.run(ALL_SILENT_GRACE_S + 1, silent=HOSTS)
    assert drive.suspected == {("agent-0", SuspicionKind.HOST), ("agent-1", SuspicionKind.HOST)}


def test_a_cluster_that_is_always_slow_does_not_hide_a_process_that_never_speaks(drive: Drive) -> None:
    for _ in range(10):
        drive.run(1.5, silent=HOSTS)
        drive.run(0.5, silent=["model-1"])
    assert ("model-1", SuspicionKind.SILENT) in drive.suspected


def test_a_lost_host_is_one_suspicion(drive: Drive) -> None:
    lost = [process for process, host in HOSTS.items() if host == "host-1"]
    drive.run(2.4, silent=lost)
    assert [(each.process, each.kind) for _, each in drive.told] == [("agent-1", SuspicionKind.HOST)]
    assert "2 other processes" in drive.told[0][1].evidence


def test_a_host_whose_processes_fall_silent_one_after_another_is_still_one_suspicion(drive: Drive) -> None:
    drive.run(0.5, silent=["server-0"])
    drive.run(2.4, silent=["server-0", "model-1", "agent-1"])
    assert drive.suspected == {("agent-1", SuspicionKind.HOST)}


def test_a_suspicion_outlasts_a_moment_in_which_the_rest_of_the_host_is_quiet(drive: Drive) -> None:
    drive.run(3, silent=["server-0"])
    drive.run(1.3, silent=["server-0", "model-1", "agent-1"])
    drive.run(1.5, silent=["server-0"])
    assert drive.suspected == {("server-0", SuspicionKind.SILENT)}
    assert len({each.first_seen for _, each in drive.told}) == 1


def test_a_host_with_a_process_that_has_just_registered_is_not_lost(drive: Drive) -> None:
    lost = ["server-0", "model-1", "agent-1"]
    drive.run(1.2, silent=lost)
    drive.watch.joined("model-1", "2", drive.now, host="host-1")
    drive.run(0.8, silent=lost)
    assert drive.suspected == {("server-0", SuspicionKind.SILENT), ("agent-1", SuspicionKind.SILENT)}


def test_a_silent_agent_whose_processes_speak_is_suspected_alone(drive: Drive) -> None:
    drive.run(2.4, silent=["agent-1"])
    assert drive.suspected == {("agent-1", SuspicionKind.SILENT)}


def test_without_its_agent_every_process_of_a_host_is_suspected_for_itself(drive: Drive) -> None:
    drive.watch.forget("agent-1")
    drive.run(3, silent=["agent-1", "model-1", "server-0"])
    assert drive.suspected == {("model-1", SuspicionKind.SILENT), ("server-0", SuspicionKind.SILENT)}


def test_a_rank_that_speaks_but_does_not_move_is_stuck(drive: Drive) -> None:
    drive.ask("model-0")
    asked = drive.now
    drive.run(4.5)
    when, suspicion = drive.told[0]
    assert (suspicion.process, suspicion.kind) == ("model-0", SuspicionKind.STUCK)
    assert 3.0 <= when - asked <= 3.8
    assert "RunCall" in suspicion.evidence


def test_a_standstill_is_repeated_while_it_lasts_and_ends_with_the_answer(drive: Drive) -> None:
    drive.ask("model-0")
    drive.run(6)
    assert len(drive.told) == 3
    drive.asked.clear()
    drive.run(3)
    assert len(drive.told) == 3


@pytest.mark.parametrize(
    ("kind", "usual_s", "allowed_s"),
    [("RunCall", 4.0, 12.0), ("RunCall", None, FIRST_ANSWER_S), ("Save", 0.5, SAVE_S), ("Save", 30.0, 90.0)],
)
def test_an_answer_is_given_the_time_it_usually_takes(
    drive: Drive, kind: str, usual_s: float | None, allowed_s: float
) -> None:
    drive.ask("model-0", kind, usual_s)
    drive.run(allowed_s)
    assert drive.told == []
    drive.run(1.5)
    assert drive.suspected == {("model-0", SuspicionKind.STUCK)}


def test_a_long_call_whose_counters_move_is_not_stuck(drive: Drive) -> None:
    drive.ask("model-0")
    drive.run(60, moving=["model-0"])
    assert drive.told == []


def test_counters_of_the_control_thread_are_no_progress(drive: Drive) -> None:
    drive.ask("model-0")
    for count in range(10):
        drive.says["model-0"] = Heartbeat(Progress({"steps": 3, "transport.resent": count}), 0.0)
        drive.run(0.5)
    assert drive.suspected == {("model-0", SuspicionKind.STUCK)}


def test_an_idle_process_is_not_stuck(drive: Drive) -> None:
    drive.ask("model-0")
    drive.says["model-0"] = beat(waiting_for("anyone"))
    drive.run(30)
    assert drive.told == []


def test_a_process_that_was_idle_until_now_has_not_stood_still_before(drive: Drive) -> None:
    drive.asked["manager-0"] = [OpenRequest("t", "LoadWeights", drive.now, 0.5)]
    drive.says["manager-0"] = beat(waiting_for("server-0"))
    drive.says["server-0"] = beat(waiting_for("anyone"))
    drive.run(10)
    drive.says["server-0"] = beat()
    drive.run(2.5)
    assert drive.told == []
    drive.run(2)
    assert drive.suspected == {("server-0", SuspicionKind.STUCK)}


@pytest.mark.parametrize("process", ["rollout-0", "manager-0"])
def test_who_speaks_from_the_loop_that_works_is_never_stuck(drive: Drive, process: str) -> None:
    drive.ask(process, "RunEpisodes")
    drive.run(30)
    assert drive.told == []


def test_the_one_that_the_others_wait_for_is_the_culprit() -> None:
    ranks = [f"model-{index}" for index in range(4)]
    drive = Drive({"agent-0": "host-0", **dict.fromkeys(ranks, "host-0")})
    for rank in ranks:
        others = ", ".join(other for other in ranks if other != rank)
        drive.says[rank] = beat(waiting_for(others))
        drive.ask(rank)
    drive.says["model-2"] = beat()
    drive.run(5)
    assert drive.suspected == {("model-2", SuspicionKind.STUCK)}


def test_a_standstill_is_followed_over_several_processes(drive: Drive) -> None:
    drive.ask("rollout-0", "RunEpisodes")
    drive.says["rollout-0"] = beat(waiting_for("manager-0"))
    drive.says["manager-0"] = beat(waiting_for("server-0"))
    drive.run(5)
    assert drive.suspected == {("server-0", SuspicionKind.STUCK)}
    assert "which rollout-0 waits for" in drive.told[0][1].evidence


def test_a_long_rollout_whose_server_counts_tokens_is_not_a_hang(drive: Drive) -> None:
    drive.ask("rollout-0", "RunEpisodes")
    drive.says["rollout-0"] = beat(waiting_for("manager-0"))
    drive.says["manager-0"] = beat(waiting_for("server-0"))
    drive.run(60, moving=["server-0"])
    assert drive.told == []


def test_who_waits_for_somebody_unknown_is_not_the_culprit(drive: Drive) -> None:
    drive.ask("model-0")
    drive.says["model-0"] = beat(waiting_for("agent"))
    drive.run(30)
    assert drive.told == []


def test_waits_in_a_circle_blame_nobody(drive: Drive) -> None:
    drive.ask("model-0")
    drive.says["model-0"] = beat(waiting_for("model-1"))
    drive.says["model-1"] = beat(waiting_for("model-0"))
    drive.run(30)
    assert drive.told == []


def test_who_waits_for_a_silent_process_is_not_stuck(drive: Drive) -> None:
    drive.ask("model-0")
    drive.says["model-0"] = beat(waiting_for("model-1"))
    drive.run(6, silent=["model-1"])
    assert drive.suspected == {("model-1", SuspicionKind.SILENT)}


def test_a_stuck_process_that_falls_silent_is_suspected_of_its_silence(drive: Drive) -> None:
    drive.ask("model-0")
    drive.run(5)
    assert drive.suspected == {("model-0", SuspicionKind.STUCK)}
    drive.run(1.6, silent=["model-0"])
    drive.told.clear()
    drive.run(3, silent=["model-0"])
    assert drive.suspected == {("model-0", SuspicionKind.SILENT)}


def test_a_process_that_one_call_kept_silent_has_not_stood_still_meanwhile(drive: Drive) -> None:
    drive.ask("model-0", usual_s=0.5)
    drive.run(1.0)
    drive.run(30.0, silent=["model-0"])
    drive.run(0.5)
    drive.told.clear()
    drive.run(1.0)
    assert drive.told == [], "its time begins when it is heard again"
    drive.run(3.0)
    assert drive.suspected == {("model-0", SuspicionKind.STUCK)}


def test_of_several_overdue_requests_the_one_with_least_time_counts(drive: Drive) -> None:
    patient, impatient = (OpenRequest("t", "RunCall", drive.now, usual_s) for usual_s in (4.0, 0.5))
    drive.asked = {"model-0": [patient], "model-1": [impatient]}
    for process in drive.asked:
        drive.says[process] = beat(waiting_for("server-0"))
    drive.run(15, moving=["server-0"])
    drive.run(5)
    assert drive.suspected == {("server-0", SuspicionKind.STUCK)}


def test_a_pause_of_the_master_is_no_standstill_of_the_others(drive: Drive) -> None:
    drive.run(0.5, moving=["model-0"])
    drive.ask("model-0")
    drive.now += 20
    drive.run(1.5)
    assert drive.told == []


def name_of(index: int) -> str:
    """Two hosts, each with an agent and then ranks."""
    return f"agent-{index}" if index < 2 else f"model-{index - 2}"


class Timeline:
    """Heartbeats of every process with given gaps, pauses of the master, and checks in between."""

    def __init__(self, gaps: Sequence[Sequence[float]], pauses: Sequence[tuple[float, float]]) -> None:
        self._gaps, self._pauses = gaps, pauses

    def run(
        self, seconds: float, *, stopping: int | None = None, at: float = 0.0
    ) -> list[tuple[float, Suspicion]]:
        watch, told = LivenessMonitor(), []
        beats: list[tuple[float, int]] = []
        for index, gaps in enumerate(self._gaps):
            watch.joined(name_of(index), "1", 0.0, host=f"host-{index % 2}")
            time_s, number = 0.0, 0
            while time_s < seconds:
                time_s += gaps[number % len(gaps)]
                number += 1
                if index != stopping or time_s < at:
                    beats.append((time_s, index))
        beats.sort(reverse=True)
        asked = {name_of(index): [OpenRequest("t", "RunCall", 0.0, 0.1)] for index in range(len(self._gaps))}
        pauses = sorted(self._pauses, reverse=True)
        now, next_check = 0.0, 0.0
        while now < seconds:
            # The master runs when something comes or a check is due; what comes in a pause is heard after it.
            now = max(now, min(next_check, beats[-1][0] if beats else seconds))
            while pauses and pauses[-1][0] <= now:
                start, length = pauses.pop()
                now = max(now, start + length)
            while beats and beats[-1][0] <= now:
                time_s, index = beats.pop()
                watch.on_heartbeat(name_of(index), "1", beat(steps=round(time_s * 1000)), now)
            if now >= next_check:
                next_check = now + CHECK_S
                told += [(now, each) for each in watch.check(now, asked=asked)]
        return told


late_gaps = st.lists(st.floats(0.3, 1.2), min_size=1, max_size=12)
clusters = st.lists(late_gaps, min_size=1, max_size=6)
pauses_of_the_master = st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5)), max_size=4)


@settings(max_examples=200, deadline=None)
@given(gaps=clusters, pauses=pauses_of_the_master)
def test_late_heartbeats_pauses_of_the_master_and_long_requests_are_no_alarm(
    gaps: list[list[float]], pauses: list[tuple[float, float]]
) -> None:
    assert Timeline(gaps, pauses).run(40) == []


@settings(max_examples=200, deadline=None)
@given(gaps=clusters, at=st.floats(1, 10), data=st.data())
def test_a_process_that_stops_is_suspected_within_two_and_a_half_seconds(
    gaps: list[list[float]], at: float, data: st.DataObject
) -> None:
    stopping = data.draw(st.integers(0, len(gaps) - 1))
    told = Timeline(gaps, []).run(at + 2.5 + CHECK_S, stopping=stopping, at=at)
    assert {each.process for _, each in told} == {name_of(stopping)}
    assert told[0][0] <= at + 2.5


def test_a_check_of_ten_thousand_healthy_processes_takes_milliseconds() -> None:
    watch = LivenessMonitor()
    names = [f"rollout-{index}" for index in range(10_000)]
    for name in names:
        watch.joined(name, "1", 0.0, host=f"host-{hash(name) % 100}")
    asked = {name: [OpenRequest("t", "RunEpisodes", 0.0, 30.0)] for name in names}
    for name in names:
        watch.on_heartbeat(name, "1", beat(completions=3), 10.0)
    watch.check(10.1, asked=asked)
    start = time.process_time()
    for _ in range(5):
        assert watch.check(10.1, asked=asked) == []
    assert (time.process_time() - start) / 5 < 0.05
