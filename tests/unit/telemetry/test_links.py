from __future__ import annotations

import msgspec
import pytest

from kintsugi.diagnosis.evidence import EvidenceBundle
from kintsugi.telemetry.collect.links import (
    RARELY,
    RECORDED_A_SECOND,
    LinkTable,
    address_in,
    num_recorded,
)
from kintsugi.telemetry.collect.tcp import TcpInfo, TcpSocket
from kintsugi.telemetry.readings import LinkReading

INFO = TcpInfo(
    backoff=0,
    rto_s=0.2,
    unacked=0,
    lost=0,
    last_received_s=0.1,
    rtt_s=0.001,
    rtt_variance_s=0.0,
    min_rtt_s=0.0005,
    retransmits=2,
    needless=0,
    out_bytes=100,
    in_bytes=50,
    receiver_limited_s=0.0,
)
HERE, THERE = "10.0.0.1", "10.0.0.2"
MASTER, GLOO = (HERE, 5000), (HERE, 6000)
OWNERS = {1: "master-0", 2: "model-0", 3: "model-1", 4: "model-0", 5: "model-1"}


def end(
    inode: int,
    local: tuple[str, int],
    remote: tuple[str, int],
    *,
    state: str = "ESTABLISHED",
    cookie: int = 0,
    **info: float,
) -> TcpSocket:
    return TcpSocket(
        state, local, remote, inode, cookie or inode, 7, 3, msgspec.structs.replace(INFO, **info)
    )


def keys(*sockets: TcpSocket, links: LinkTable | None = None) -> set[tuple[str, str, int]]:
    book = {MASTER: "master-0"}
    samples = (links or LinkTable()).look(sockets, owners=OWNERS, book=book).now
    return {(sample.of, sample.peer, sample.port) for sample in samples}


def test_who_connected_and_who_was_connected_to_name_each_other_by_the_listeners_port() -> None:
    client, server = end(2, (HERE, 40000), MASTER), end(1, MASTER, (HERE, 40000))
    assert keys(client, server) == {("model-0", "master-0", 5000), ("master-0", "model-0", 5000)}


def test_a_listener_that_no_book_knows_is_found_among_those_of_the_host() -> None:
    listener = end(5, ("0.0.0.0", 6000), ("0.0.0.0", 0), state="LISTEN")
    client, server = end(4, (HERE, 40001), GLOO), end(3, GLOO, (HERE, 40001))
    assert keys(listener, client, server) == {("model-0", "model-1", 6000), ("model-1", "model-0", 6000)}


def test_who_connects_from_another_host_is_named_by_that_host() -> None:
    assert keys(end(1, MASTER, (THERE, 40002))) == {("master-0", THERE, 5000)}
    assert keys(end(2, (HERE, 40003), (THERE, 80))) == {("model-0", f"{THERE}:80", 80)}


def test_connections_of_strangers_are_left_out() -> None:
    assert keys(end(99, (HERE, 40004), MASTER)) == set()


def test_connections_of_one_link_are_one_sample_of_the_worst() -> None:
    first = end(2, (HERE, 40000), MASTER, rtt_s=0.3, retransmits=5)
    second = end(4, (HERE, 40001), MASTER, state="SYN_SENT", backoff=3)
    (sample,) = LinkTable().look([first, second], owners=OWNERS, book={MASTER: "master-0"}).now
    assert sample.state == "SYN_SENT"
    assert sample.values["connections"] == 2
    assert (sample.values["rtt_s"], sample.values["backoff"]) == (0.3, 3)
    assert (sample.values["retransmits"], sample.values["send_queue_bytes"]) == (7, 6)


def test_totals_go_on_when_a_connection_is_replaced() -> None:
    links, book = LinkTable(), {MASTER: "master-0"}

    def retransmits(*sockets: TcpSocket) -> list[float]:
        return [each.values["retransmits"] for each in links.look(sockets, owners=OWNERS, book=book).now]

    assert retransmits(end(2, (HERE, 40000), MASTER, cookie=10, retransmits=5)) == [5]
    assert retransmits(end(2, (HERE, 40000), MASTER, cookie=10, retransmits=6)) == [6]
    assert retransmits() == []
    assert retransmits(end(2, (HERE, 40009), MASTER, cookie=11, retransmits=1)) == [7]


def connection(second: int, *, out_bytes: float, queued: int = 0, **info: float) -> TcpSocket:
    """One that nothing is on its way on, unless it is said."""
    known = msgspec.structs.replace(INFO, out_bytes=out_bytes, last_received_s=float(second), **info)
    return TcpSocket("ESTABLISHED", (HERE, 40000), MASTER, 2, 2, 0, queued, known)


def looks(*connections: TcpSocket) -> list[tuple[int, LinkReading]]:
    """What is told of one link, each with the second that it is of: one look a second."""
    links, told = LinkTable(), list[tuple[int, LinkReading]]()
    for second, each in enumerate(connections):
        found = links.look([each], owners=OWNERS, book={MASTER: "master-0"})
        told += [(second - 1, sample) for sample in found.before]
        told += [(second, sample) for sample in found.now]
    return told


def test_a_link_on_which_nothing_happens_is_told_of_rarely() -> None:
    told = looks(*(connection(second, out_bytes=100) for second in range(2 * RARELY + 1)))
    assert [second for second, _ in told] == [0, RARELY, 2 * RARELY]


def test_a_link_that_is_used_is_told_of_in_every_look() -> None:
    told = looks(*(connection(second, out_bytes=100 * second) for second in range(9)))
    assert [second for second, _ in told] == list(range(9))


@pytest.mark.parametrize(
    "info", [{"queued": 1}, {"unacked": 1}, {"backoff": 2}], ids=["queued", "unacknowledged", "tried again"]
)
def test_a_link_on_which_something_is_on_its_way_is_told_of_in_every_look(info: dict[str, int]) -> None:
    told = looks(*(connection(second, out_bytes=100, **info) for second in range(9)))
    assert [second for second, _ in told] == list(range(9))


def test_when_something_happens_again_how_it_was_before_is_told_first() -> None:
    told = looks(*(connection(second, out_bytes=100 if second < 4 else 900) for second in range(6)))
    assert [(second, each.values["out_bytes"]) for second, each in told] == [(0, 100), (3, 100), (4, 900)]
    assert told[1][1].values["last_received_s"] == 3.0, "as of then"


def test_what_is_left_out_goes_on_being_counted_and_its_link_is_new_when_it_comes_back() -> None:
    idle = connection(0, out_bytes=100)
    links = LinkTable()
    for sockets, expected in (([idle], [100]), ([idle], []), ([], []), ([idle], [200])):
        found = links.look(sockets, owners=OWNERS, book={MASTER: "master-0"})
        assert [each.values["out_bytes"] for each in found.now] == expected
        assert found.before == []


def rates_of(told: list[tuple[int, LinkReading]]) -> dict[str, list[tuple[float, float]]]:
    bundle = EvidenceBundle()
    for second, sample in told:
        bundle.take(float(second), float(second), "agent-0", sample)
    tracks = bundle.links["model-0", "master-0", 5000]
    return {name: list(zip(track.times, track.values, strict=True)) for name, track in tracks.items()}


def test_the_diagnosis_sees_the_same_of_every_second_in_which_something_happened() -> None:
    used_at = (1, 2, 9, 17, 18, 30)
    seconds = [
        connection(
            second,
            out_bytes=1000.0 * sum(at <= second for at in used_at),
            retransmits=10 * sum(at <= second for at in used_at[2:]),
            rtt_s=0.4 if second >= 9 else 0.001,
        )
        for second in range(33)
    ]
    told = looks(*seconds)
    in_every_look = rates_of(
        [
            (second, sample)
            for second, each in enumerate(seconds)
            for sample in LinkTable().look([each], owners=OWNERS, book={MASTER: "master-0"}).now
        ]
    )
    assert len(told) < 0.6 * len(seconds)
    for name, points in rates_of(told).items():
        assert set(points) <= set(in_every_look[name]), "nothing is told that was not so"
        assert {(at, value) for at, value in in_every_look[name] if at in used_at} <= set(points)
    assert dict(rates_of(told)["out"])[9] == 1000.0, "of one second, and not of the pause before it"


def test_of_too_many_links_those_in_trouble_are_recorded_always_and_the_others_in_turn() -> None:
    links, most, num_links = LinkTable(), 100, 1000
    seen: dict[int, list[float]] = {}
    for second in range(1, 21):
        sockets = [
            end(2, (HERE, 20_000 + n), (THERE, 7_000 + n), cookie=n + 1, out_bytes=second * n, lost=n == 17)
            for n in range(num_links)
        ]
        found = links.look(sockets, owners=OWNERS, book={}, most=most)
        assert (len(found.now), found.before) == (most, [])
        for sample in found.now:
            seen.setdefault(sample.port - 7_000, []).append(sample.values["out_bytes"])
    assert len(seen) == num_links, "each of them within eleven samples"
    assert len(seen[17]) == 20
    assert all(values[-1] > values[0] for number, values in seen.items() if number and len(values) > 1)
    assert max(len(values) for number, values in seen.items() if number != 17) <= 3


def test_the_hosts_of_a_run_together_record_a_bounded_number_of_links() -> None:
    assert num_recorded(9, num_processes=9) == RECORDED_A_SECOND
    assert 64 * num_recorded(14, num_processes=64 * 14) <= RECORDED_A_SECOND


def test_an_address_is_read_from_an_endpoint() -> None:
    assert address_in("tcp://127.0.0.1:4001") == ("127.0.0.1", 4001)
    assert address_in("tcp://[::1]:4001") == ("::1", 4001)
    assert address_in("") is None
    assert address_in("tcp://127.0.0.1:*") is None
