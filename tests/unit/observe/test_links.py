from __future__ import annotations

import msgspec

from kintsugi.observe.links import Links, address_in
from kintsugi.observe.tcp import TcpInfo, TcpSocket

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


def keys(*sockets: TcpSocket, links: Links | None = None) -> set[tuple[str, str, int]]:
    book = {MASTER: "master-0"}
    samples = (links or Links()).samples(sockets, owners=OWNERS, book=book)
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
    (sample,) = Links().samples([first, second], owners=OWNERS, book={MASTER: "master-0"})
    assert sample.state == "SYN_SENT"
    assert sample.values["connections"] == 2
    assert (sample.values["rtt_s"], sample.values["backoff"]) == (0.3, 3)
    assert (sample.values["retransmits"], sample.values["send_queue_bytes"]) == (7, 6)


def test_totals_go_on_when_a_connection_is_replaced() -> None:
    links, book = Links(), {MASTER: "master-0"}

    def retransmits(*sockets: TcpSocket) -> list[float]:
        return [each.values["retransmits"] for each in links.samples(sockets, owners=OWNERS, book=book)]

    assert retransmits(end(2, (HERE, 40000), MASTER, cookie=10, retransmits=5)) == [5]
    assert retransmits(end(2, (HERE, 40000), MASTER, cookie=10, retransmits=6)) == [6]
    assert retransmits() == []
    assert retransmits(end(2, (HERE, 40009), MASTER, cookie=11, retransmits=1)) == [7]


def test_an_address_is_read_from_an_endpoint() -> None:
    assert address_in("tcp://127.0.0.1:4001") == ("127.0.0.1", 4001)
    assert address_in("tcp://[::1]:4001") == ("::1", 4001)
    assert address_in("") is None
    assert address_in("tcp://127.0.0.1:*") is None
