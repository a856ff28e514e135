"""Every mechanism bites, is undone, and leaves nothing: also when injector, target or laboratory are killed.

The processes that it is tried on measure what happens to them (`kintsugi/lab/residue/probe_workload.py`).
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

import pytest

from kintsugi.errors import ProcessDied, UserError
from kintsugi.lab import probing
from kintsugi.lab.faults.network import queue_rule
from kintsugi.lab.injector.injection import Ability, Injected, Injection, Trigger
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.injector.undo_log import RemoveRules, iptables_is_nft, network_of, queue_rules
from kintsugi.lab.residue.host_diff import difference, host_snapshot, placement
from kintsugi.lab.residue.probe_workload import ProbeRun
from kintsugi.lab.testbed import hosts, tools
from kintsugi.lab.testbed.testbed import RunTestbed
from tests.cluster.tiny_runs import until

TARGET, PEER, BYSTANDER = "probe-1", "probe-0", "probe-3"
"""The bystander is on the same host as the target."""

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or hosts.missing() is not None,
    reason="hosts of their own need root and the kernel's network namespaces: see `kintsugi lab abilities`",
)
pytestmark = needs_hosts


class Bench:
    """A testbed with probes, and an injector."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.testbed = RunTestbed(folder / "place", num_hosts=2, named=True, disk_bytes=64 << 20)
        self.run = ProbeRun(self.testbed.run_dir(), testbed=self.testbed, count=4)
        self.injector = Injector(self.run, folder / "lab")

    def close(self) -> None:
        self.injector.close()
        self.run.close()
        self.testbed.close()

    def seen(self, what: str, *, since: float, of: str = TARGET) -> list[float]:
        return self.run.measured(of, what, since=since)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        self.run.until(condition, what=what, timeout_s=10.0)

    def begin(self, ability: Ability, mechanism: str | None = None, **amount: float) -> Injected:
        chosen = probing.choose(Injection(ability=ability, target=TARGET, mechanism=mechanism))
        return self.injector.begin(
            Injection(ability=ability, target=TARGET, mechanism=chosen.name, amount=amount, duration_s=8.0)
        )

    def placements(self) -> dict[str, str]:
        return {name: placement(Path(f"/proc/{self.run.pid(name)}")) for name in (TARGET, BYSTANDER)}


def is_end_of_another_group(line: str) -> bool:
    """Whether a control group is gone that stands beside this process's own: other jobs of the machine come and go."""
    found = re.fullmatch(r"control group /sys/fs/cgroup/(\w+)(/.+): is gone", line)
    own = dict(each.split(":", 2)[1:] for each in Path("/proc/self/cgroup").read_text().splitlines())
    if found is None or found[1] not in own:
        return False
    path = PurePath(found[2])
    return path.parent == PurePath(own[found[1]]).parent and path != PurePath(own[found[1]])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    before = host_snapshot()
    bench = Bench(tmp_path_factory.mktemp("bench"))
    try:
        yield bench
    finally:
        bench.close()
    ours = str(bench.folder)
    left = [line for line in difference(before, host_snapshot()) if ours in line or "control group" in line]
    assert [line for line in left if not is_end_of_another_group(line)] == []


@pytest.fixture(autouse=True)
def living_target(request: pytest.FixtureRequest) -> None:
    """Tests may kill it; each begins with a living one."""
    if "bench" in request.fixturenames:
        bench: Bench = request.getfixturevalue("bench")
        if not bench.run.alive(TARGET):
            restart(bench)


def lacking(ability: Ability, mechanism: str) -> str | None:
    (found,) = [
        each.missing
        for each in probing.abilities()
        if each.ability is ability and each.mechanism == mechanism
    ]
    return found


SLOWER = {
    "cpu quota": (Ability.CPU, "cpu quota of a control group", {"share": 0.97}, "work"),
    "competitors": (Ability.CPU, "busy loops on the same processor", {"share": 0.95}, "work"),
    "slow device": (Ability.DEVICE_SLOW, "frozen for a part of every 20 ms", {"factor": 20.0}, "work"),
    "write limit": (Ability.DISK_LOAD, "write limit of a control group", {"limit": 400e3}, "fsync"),
    "delay": (
        Ability.NETWORK_DELAY,
        "packets held back by a program (NFQUEUE)",
        {"delay_s": 0.2},
        "round_trip",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOWER)
def test_what_slows_a_process_down_makes_it_get_less_done_until_it_ends(bench: Bench, case: str) -> None:
    ability, mechanism, amount, what = SLOWER[case]
    if why := lacking(ability, mechanism):
        pytest.skip(why)
    was = bench.placements()

    def rate(of: str, seconds: float) -> float:
        since = time.monotonic()
        time.sleep(seconds)
        return len(bench.seen(what, since=since, of=of)) / seconds

    before = rate(TARGET, 0.5)
    injected = bench.begin(ability, mechanism, **amount)
    time.sleep(0.1)
    during = rate(TARGET, 0.8)
    bench.injector.end(injected)
    assert during < 0.6 * before, (before, during)
    bench.until(lambda: rate(TARGET, 0.3) > 0.6 * before, "the target to be itself again")
    assert bench.placements() == was


@pytest.mark.slow
def test_a_delay_is_as_long_as_was_asked_and_hits_only_the_target(bench: Bench) -> None:
    injected = bench.begin(Ability.NETWORK_DELAY, delay_s=0.15)
    bench.until(lambda: len(bench.seen("round_trip", since=injected.monotonic + 0.2)) > 2, "round trips")
    since = injected.monotonic + 0.2
    own, other = bench.seen("round_trip", since=since), bench.seen("round_trip", since=since, of=BYSTANDER)
    injected = bench.injector.end(injected)
    assert 0.14 < statistics.median(own) < 0.4
    # The bystander asks the target too, whose answers come late; its other peers' do not.
    assert min(other) < 0.1
    assert injected.measured["packets"] > 0


@pytest.mark.slow
def test_a_delay_of_one_link_spares_the_others(bench: Bench) -> None:
    injected = bench.injector.begin(
        Injection(ability=Ability.NETWORK_DELAY, target=TARGET, peer=PEER, amount={"delay_s": 0.5})
    )
    time.sleep(0.8)
    trips = bench.seen("round_trip", since=injected.monotonic + 0.1)
    bench.injector.end(injected)
    assert min(trips) < 0.2
    bench.until(
        lambda: max(bench.seen("round_trip", since=injected.monotonic + 0.1)) > 0.4, "a trip that was late"
    )


@pytest.mark.slow
@pytest.mark.parametrize("interface", ["eth0", "lo"])
def test_a_cut_of_one_network_device_spares_the_others(bench: Bench, interface: str) -> None:
    """Who is on the target's host meets it on the loopback device, who is on the other host does not."""
    injected = bench.injector.begin(
        Injection(ability=Ability.NETWORK_CUT, target=TARGET, interface=interface, duration_s=8.0)
    )
    since = time.monotonic() + 0.2
    bench.until(lambda: len(bench.seen("round_trip", since=since)) > 5, "trips through the other device")
    assert bench.injector.end(injected).measured["dropped"] > 0


@pytest.mark.slow
def test_a_port_that_the_peer_has_not_is_no_link_with_it(bench: Bench) -> None:
    injected = bench.injector.begin(
        Injection(ability=Ability.NETWORK_CUT, target=TARGET, peer=PEER, port=9, duration_s=8.0)
    )
    since = time.monotonic() + 0.1
    bench.until(lambda: len(bench.seen("round_trip", since=since)) > 2, "round trips as ever")
    assert bench.injector.end(injected).measured["dropped"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism", ["packets dropped by a program (NFQUEUE)", "arriving packets dropped at random (nftables)"]
)
def test_lost_packets_make_some_round_trips_long(bench: Bench, mechanism: str) -> None:
    if why := lacking(Ability.NETWORK_LOSS, mechanism):
        pytest.skip(why)
    injected = bench.begin(Ability.NETWORK_LOSS, mechanism, share=0.3)
    # A lost packet is sent again after 200 ms at the earliest.
    bench.until(
        lambda: any(trip > 0.19 for trip in bench.seen("round_trip", since=injected.monotonic)),
        "a packet to be lost",
    )
    bench.injector.end(injected)


@pytest.mark.parametrize(
    "mechanism", ["all packets dropped by a program (NFQUEUE)", "arriving packets dropped (nftables)"]
)
def test_a_cut_lets_nothing_through_until_it_ends(bench: Bench, mechanism: str) -> None:
    if why := lacking(Ability.NETWORK_CUT, mechanism):
        pytest.skip(why)
    injected = bench.begin(Ability.NETWORK_CUT, mechanism)
    since = time.monotonic() + 0.2
    time.sleep(0.7)
    assert bench.seen("round_trip", since=since) == []
    bench.injector.end(injected)
    bench.until(lambda: bool(bench.seen("round_trip", since=since)), "the link to work again")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mechanism",
    [
        "questions to the name server dropped by a program (NFQUEUE)",
        "questions to the name server refused (nftables)",
    ],
)
def test_names_can_not_be_resolved_until_it_ends(bench: Bench, mechanism: str) -> None:
    if why := lacking(Ability.DNS, mechanism):
        pytest.skip(why)
    injected = bench.begin(Ability.DNS, mechanism)
    since = time.monotonic() + 0.05
    bench.until(lambda: bool(bench.seen("look_up_failed", since=since)), "a look-up to fail")
    assert bench.seen("look_up", since=since) == []
    bench.injector.end(injected)
    since = time.monotonic()
    bench.until(lambda: bool(bench.seen("look_up", since=since)), "names to be found again")


FAILING = {
    "full disk": (Ability.DISK_FILL, "a file that takes the room", "write_failed", "fsync"),
    "no inodes": (Ability.DISK_FILL, "empty files that take the inodes", "write_failed", "fsync"),
    "failing syncs": (Ability.DISK_ERROR, "failing system calls (strace)", "write_failed", "fsync"),
    "full device": (Ability.DEVICE_MEMORY, "limit of its data", "refused", "allocated"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILING)
def test_what_fails_works_again_when_it_ends(bench: Bench, case: str) -> None:
    ability, mechanism, failure, success = FAILING[case]
    if why := lacking(ability, mechanism):
        pytest.skip(why)
    was = bench.placements()
    injected = bench.begin(ability, mechanism)
    bench.until(lambda: len(bench.seen(failure, since=injected.monotonic)) > 2, failure)
    bench.injector.end(injected)
    since = time.monotonic()
    bench.until(lambda: bool(bench.seen(success, since=since)), success)
    assert bench.placements() == was


@pytest.mark.slow
def test_competing_writes_make_syncs_take_longer(bench: Bench) -> None:
    since = time.monotonic()
    bench.until(lambda: len(bench.seen("fsync", since=since)) >= 20, "syncs without a fault")
    usual_s = statistics.median(bench.seen("fsync", since=since))
    injected = bench.begin(Ability.DISK_LOAD, "competing writes, synced")

    def is_slower() -> bool:
        during = bench.seen("fsync", since=injected.monotonic)
        return len(during) >= 5 and statistics.mean(during) > 1.2 * usual_s

    # A disk that other work keeps busy anyway shows the difference only after a while.
    bench.until(is_slower, "syncs that take longer")
    injected = bench.injector.end(injected)
    assert injected.measured["written_bytes"] > 10e6


@pytest.mark.slow
def test_another_rounding_gives_another_sum_until_it_ends(bench: Bench) -> None:
    if why := lacking(Ability.NUMERIC, "another rounding of every thread (ptrace)"):
        pytest.skip(why)
    (right,) = set(bench.seen("sum", since=0.0, of=BYSTANDER))
    injected = bench.begin(Ability.NUMERIC)
    bench.until(lambda: bool(set(bench.seen("sum", since=injected.monotonic)) - {right}), "a wrong sum")
    bench.injector.end(injected)
    since = time.monotonic() + 0.1
    bench.until(lambda: set(bench.seen("sum", since=since)) == {right}, "the right sum again")


def test_shared_memory_is_corrupted(bench: Bench) -> None:
    injected = bench.begin(Ability.CORRUPT, "inverted bytes in its shared memory")
    injected = bench.injector.end(injected)
    assert injected.measured["inverted_bytes"] >= 64
    descriptors = Path(f"/proc/{bench.run.pid(TARGET)}/fd").iterdir()
    (shared,) = [each for each in descriptors if os.readlink(each).startswith("/memfd:shared")]
    assert any(shared.read_bytes())


@pytest.mark.parametrize("mechanism", ["SIGSTOP", "frozen in a control group"])
def test_a_stopped_process_does_nothing_and_then_goes_on(bench: Bench, mechanism: str) -> None:
    if why := lacking(Ability.STOP, mechanism):
        pytest.skip(why)
    was = bench.placements()
    injected = bench.begin(Ability.STOP, mechanism)
    since = time.monotonic() + 0.05
    time.sleep(0.4)
    assert bench.seen("work", since=since) == []
    bench.injector.end(injected)
    bench.until(lambda: bool(bench.seen("work", since=since)), "the target to go on")
    assert bench.placements() == was


@pytest.mark.slow
def test_memory_grows_until_the_kernel_kills_the_target_and_nobody_else(bench: Bench) -> None:
    if why := lacking(Ability.MEMORY, "growing neighbour in a memory control group"):
        pytest.skip(why)
    injected = bench.begin(Ability.MEMORY, rate=200e6, limit=60e6)
    bench.until(lambda: not bench.run.alive(TARGET), "the target to be killed")
    injected = bench.injector.end(injected)
    assert injected.target_ended is not None
    assert injected.measured["grown_bytes"] > 10e6
    assert bench.run.alive(BYSTANDER)


def test_a_killed_process_is_gone(bench: Bench) -> None:
    injected = bench.begin(Ability.KILL)
    bench.until(lambda: not bench.run.alive(TARGET), "the target to be gone")
    assert bench.injector.end(injected).end is not None
    with pytest.raises(ProcessDied, match="has ended and"):
        bench.begin(Ability.STOP)


def restart(bench: Bench) -> None:
    bench.run.start(TARGET)
    events = bench.run.run_dir / "events" / f"{TARGET}.jsonl"
    bench.until(lambda: f'"pid":{bench.run.pid(TARGET)}' in events.read_text(), "a new target")


def test_a_fault_ends_by_itself_after_its_time(bench: Bench) -> None:
    was = bench.placements()
    injected = bench.injector.begin(Injection(ability=Ability.CPU, target=TARGET, duration_s=0.2))
    assert bench.placements() != was
    bench.until(lambda: bench.placements() == was, "the target to be let go")
    injected = bench.injector.end(injected)
    assert injected.end is not None
    assert 0.15 < injected.end - injected.start < 1.0


@pytest.mark.parametrize("ability", [Ability.STOP, Ability.CPU, Ability.NETWORK_CUT, Ability.DISK_FILL])
def test_a_killed_injector_leaves_nothing(bench: Bench, ability: Ability) -> None:
    was, files = bench.placements(), set(os.listdir(bench.testbed.run_dir().parent))
    injected = bench.begin(ability)
    (culprit,) = [pid for pid in children() if "kintsugi.lab.injector.injector_process" in command_of(pid)]
    os.kill(culprit, signal.SIGKILL)
    since = time.monotonic()
    bench.until(lambda: bench.placements() == was, "the target to be let go")
    bench.until(lambda: bool(bench.seen("round_trip", since=since)), "the network to work")
    bench.until(lambda: set(os.listdir(bench.testbed.run_dir().parent)) == files, "files to be gone")
    assert bench.injector.end(injected).end is not None


def children() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == os.getpid() and stat[0] != "Z":
                found.append(int(entry))
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_a_killed_laboratory_leaves_nothing(tmp_path: Path) -> None:
    """Hosts, disk, faults, and the processes that were broken all end with it."""
    before = host_snapshot(mark=str(tmp_path))
    program = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from tests.cluster.test_injection import *\n"
        "bench = Bench(Path(sys.argv[1]))\n"
        "for ability in (Ability.CPU, Ability.NETWORK_DELAY, Ability.DISK_FILL, Ability.STOP):\n"
        "    bench.begin(ability)\n"
        "print('broken', flush=True); time.sleep(60)\n"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", program, str(tmp_path / "bench"), root]
    environment = {**os.environ, "KINTSUGI_TEST_MARK": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as lab:
        assert lab.stdout is not None
        assert lab.stdout.readline() == "broken\n"
        lab.kill()
    deadline = time.monotonic() + 15.0
    while left := [
        line for line in difference(before, host_snapshot(mark=str(tmp_path))) if _is_ours(line, tmp_path)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _is_ours(line: str, folder: Path) -> bool:
    return str(folder) in line or line.startswith(("process of the experiment", "control group"))


IMPOSSIBLE = {
    "no process 'probe-9'": Injection(ability=Ability.KILL, target="probe-9"),
    "expected one of collecting": Injection(
        ability=Ability.KILL, target=TARGET, trigger=Trigger(phase="sleeping")
    ),
    "did not come within": Injection(
        ability=Ability.KILL, target=TARGET, trigger=Trigger(step=7, timeout_s=0.2)
    ),
    "none named 'magic'": Injection(ability=Ability.KILL, target=TARGET, mechanism="magic"),
    "expected a number from 0 to 1, got 7": Injection(
        ability=Ability.CPU, target=TARGET, amount={"share": 7.0}
    ),
    "expected a network device of the target's host .lo, eth0., got 'eth7'": Injection(
        ability=Ability.NETWORK_CUT, target=TARGET, interface="eth7"
    ),
    "seconds above 0, at most 3600, got inf": Injection(
        ability=Ability.STOP, target=TARGET, duration_s=float("inf")
    ),
    "no checkpoint yet": Injection(
        ability=Ability.CORRUPT, target=TARGET, mechanism="inverted bytes in its newest checkpoint"
    ),
}


@pytest.mark.parametrize("words", IMPOSSIBLE)
def test_what_can_not_be_done_is_refused_with_the_reason(bench: Bench, words: str) -> None:
    was, markers = bench.placements(), len(list((bench.folder / "lab" / "markers").iterdir()))
    with pytest.raises(UserError, match=words):
        bench.injector.begin(IMPOSSIBLE[words])
    assert bench.placements() == was
    assert len(list((bench.folder / "lab" / "markers").iterdir())) == markers


@pytest.mark.parametrize("others", [[], ["-p", "tcp", "--dport", "81", "-j", "ACCEPT"]])
def test_the_table_that_iptables_made_for_a_fault_is_removed_with_it_unless_it_has_other_rules(
    others: list[str],
) -> None:
    if queue_rule() != "iptables" or not iptables_is_nft():
        pytest.skip("this kernel queues packets by nftables, or this iptables shows no table to nft")
    with subprocess.Popen(["unshare", "--net", "sleep", "60"]) as holder:
        own = network_of("self")
        until(lambda: network_of(holder.pid) != own, "a network of its own")
        there = ("nsenter", "--target", str(holder.pid), "--net")
        (rule,) = queue_rules(("OUTPUT",), mark=0x6B000001, queue=7)
        tools.call(*there, "iptables", "-A", *rule)
        if others:
            tools.call(*there, "iptables", "-A", "INPUT", *others)
        undo = RemoveRules(
            network_of(holder.pid),
            "k00000001",
            chains=("OUTPUT",),
            mark=0x6B000001,
            queue=7,
            is_table_made=True,
        )
        undo.carry_out()
        left = tools.call(*there, "nft", "list", "ruleset")
        holder.kill()
    assert "queue" not in left and ("dport 81" in left) == bool(others) == ("table" in left)
