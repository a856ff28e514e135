from __future__ import annotations

import random

import pytest

from kintsugi.control.book_sharing import RESEND_S, SHARE_S, BookSharing
from kintsugi.control.membership import WorkerRegistry
from kintsugi.errors import Fault
from kintsugi.journal.facts import ProcessJoined, ProcessLost, ProcessRequested
from kintsugi.protocol import wire
from kintsugi.protocol.membership import AddressBook
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.transport.directory import Directory
from kintsugi.types import Peer, Role

NUM_PROCESSES = 900
NUM_COMPLETE = 20
FAULT = Fault("f", "ProcessDied", "model-0", "killed", 0.0)
MASTER = Peer("master-0", "a", "host-0", "tcp://10.0.0.1:40000", b"m" * 40)


class Cluster:
    """A master that sends its book to directories of workers, in order and at once, except to those in `deaf`.

    Of many workers, only the first ones keep their books; the others keep the number.
    """

    def __init__(self) -> None:
        self.members = WorkerRegistry()
        self.members.begin_term(1)
        self.sharing = BookSharing(self.members, master=MASTER)
        self.books: dict[str, Directory] = {}
        self.deaf: set[str] = set()
        self.numbers_only: set[str] = set()
        self.now = 0.0
        self.num_bytes = 0
        self.num_messages = 0
        self._num_started = 0

    def join(self, process: str) -> None:
        self._num_started += 1
        key = f"{self._num_started:040}".encode()
        incarnation = f"1.{self._num_started}"
        address = f"tcp://10.0.{self._num_started % 256}.2:{30_000 + self._num_started % 9_000}"
        self.members.apply(ProcessRequested(process, Role.MODEL, "host-0", incarnation))
        peer = Peer(process, incarnation, "host-0", address, key)
        self.members.apply(ProcessJoined(peer, Role.MODEL, self._num_started))
        self.books[process] = Directory(job="j", process=process)
        self.books[process].add(MASTER)
        if len(self.books) > NUM_COMPLETE:
            self.numbers_only.add(process)
        self.sharing.changed()

    def lose(self, process: str) -> None:
        self.members.apply(ProcessLost(process, self.members.members[process].incarnation, FAULT))
        del self.books[process]
        self.sharing.changed()

    def turn(self, seconds: float = SHARE_S) -> None:
        self.now += seconds
        for book, processes in self.sharing.due(self.now):
            for process in processes:
                self.send(process, book)

    def heartbeats(self) -> None:
        for process, directory in self.books.items():
            book = self.sharing.after_heartbeat(process, directory.number, self.now)
            if book is not None:
                self.send(process, book)

    def send(self, process: str, book: AddressBook) -> None:
        envelope = Envelope("job", 1, "master-0", "a1b2c3d4", 1, MessageKind.ONE_WAY)
        self.num_bytes += len(wire.encode(envelope, wire.encode_body(book)))
        self.num_messages += 1
        directory = self.books.get(process)
        if directory is None or process in self.deaf or not directory.accepts(book):
            return
        directory.number = book.number
        if process in self.numbers_only:
            return
        for gone in directory.removed_by(book):
            directory.remove(gone, FAULT)
        for peer in book.peers:
            if peer.process != process:
                known = directory.peers.get(peer.process)
                if known is not None and known.public_key != peer.public_key:
                    directory.remove(peer.process, FAULT)
                directory.add(peer)

    def assert_all_know_all(self) -> None:
        listed = {peer.process: peer for peer in self.members.address_book(MASTER).peers}
        for process, directory in self.books.items():
            assert directory.number == self.members.book_number
            if process in self.numbers_only:
                continue
            expected = {name: peer for name, peer in listed.items() if name != process}
            assert directory.peers == expected, process
            assert set(directory.callers) == {peer.public_key.decode() for peer in expected.values()}


@pytest.fixture(name="large", scope="module")
def fixture_large() -> Cluster:
    cluster = Cluster()
    for number in range(NUM_PROCESSES):
        cluster.join(f"model-{number}")
    cluster.turn()
    cluster.heartbeats()
    cluster.assert_all_know_all()
    return cluster


def test_a_loss_and_a_join_among_900_processes_cost_less_than_a_megabyte(large: Cluster) -> None:
    large.num_bytes = 0
    large.lose("model-7")
    large.turn()
    large.join("model-7")
    large.turn()
    large.heartbeats()
    large.assert_all_know_all()
    assert 100_000 < large.num_bytes < 1_000_000


def test_the_start_of_900_processes_costs_little_more_than_one_whole_book_for_each() -> None:
    cluster = Cluster()
    for number in range(NUM_PROCESSES):
        cluster.join(f"model-{number}")
        if number % 30 == 29:
            cluster.turn()
            cluster.heartbeats()
    cluster.assert_all_know_all()
    whole = len(wire.encode_body(cluster.members.address_book(MASTER)))
    assert cluster.num_bytes < 1.05 * NUM_PROCESSES * whole


def test_a_single_change_is_sent_at_once_and_changes_of_one_tick_together() -> None:
    cluster = Cluster()
    cluster.join("model-0")
    cluster.turn(0.0)
    assert cluster.num_messages == 1
    cluster.join("model-1")
    cluster.turn(SHARE_S / 4)
    cluster.join("model-2")
    cluster.turn(SHARE_S / 4)
    assert cluster.num_messages == 1
    cluster.turn()
    assert cluster.num_messages == 4
    cluster.assert_all_know_all()


def test_a_request_does_not_overtake_the_book() -> None:
    cluster = Cluster()
    cluster.join("model-0")
    cluster.turn()
    cluster.join("model-1")
    book = cluster.sharing.before_request("model-0", cluster.now)
    assert book is not None and [peer.process for peer in book.peers] == ["model-1"]
    assert cluster.sharing.before_request("model-0", cluster.now) is None
    assert cluster.sharing.before_request("model-9", cluster.now) is None


def test_a_lost_book_is_sent_again_after_a_while_and_not_with_every_heartbeat() -> None:
    cluster = Cluster()
    for number in range(3):
        cluster.join(f"model-{number}")
    cluster.turn()
    cluster.heartbeats()
    cluster.deaf = {"model-0"}
    cluster.join("model-3")
    cluster.turn()
    cluster.deaf = set()
    sent = cluster.num_messages
    cluster.heartbeats()
    assert cluster.num_messages == sent
    cluster.now += RESEND_S
    cluster.heartbeats()
    assert cluster.num_messages == sent + 1
    cluster.assert_all_know_all()


def test_a_process_that_is_known_to_lack_an_address_is_sent_the_whole_book_at_once() -> None:
    cluster = Cluster()
    cluster.deaf = {"model-0"}
    for number in range(3):
        cluster.join(f"model-{number}")
    cluster.turn()
    cluster.deaf = set()
    cluster.join("model-3")
    cluster.turn()
    assert cluster.books["model-0"].number == -1, "a difference from a book that was lost is not accepted"
    cluster.sharing.changed(lacking=["model-0", "model-9"])
    book = cluster.sharing.before_request("model-0", cluster.now)
    assert book is not None and book.since is None
    cluster.send("model-0", book)
    cluster.assert_all_know_all()
    assert cluster.sharing.before_request("model-0", cluster.now) is None


def test_a_process_that_joins_gets_nothing_when_nothing_changed_since() -> None:
    cluster = Cluster()
    cluster.join("model-0")
    cluster.turn()
    cluster.heartbeats()
    sent = cluster.num_messages
    cluster.members.apply(ProcessRequested("model-1", Role.MODEL, "host-0", "1.9"))
    for _ in range(10):
        cluster.turn()
        cluster.heartbeats()
    assert cluster.num_messages == sent


@pytest.mark.parametrize("seed", range(20))
def test_all_processes_come_to_have_the_same_book_whatever_was_lost(seed: int) -> None:
    draw, cluster = random.Random(seed), Cluster()
    for _ in range(200):
        process = f"model-{draw.randrange(12)}"
        if process in cluster.books:
            cluster.lose(process)
        else:
            cluster.join(process)
        cluster.deaf = {name for name in cluster.books if draw.random() < 0.3}
        if draw.random() < 0.5:
            cluster.turn(draw.random())
        if draw.random() < 0.5:
            cluster.heartbeats()
    cluster.deaf = set()
    for _ in range(3):
        cluster.turn(RESEND_S)
        cluster.heartbeats()
    cluster.assert_all_know_all()


def test_a_new_master_sends_a_difference_to_processes_that_have_the_last_book_of_its_predecessor(
    large: Cluster,
) -> None:
    large.members.begin_term(2)
    large.sharing = BookSharing(large.members, master=MASTER)
    large.num_bytes = large.num_messages = 0
    large.sharing.changed()
    large.turn()
    large.heartbeats()
    assert large.num_messages == NUM_PROCESSES
    assert large.num_bytes < 300_000
    large.assert_all_know_all()


def test_a_new_master_sends_a_whole_book_where_the_journal_may_have_lost_the_last_changes() -> None:
    cluster = Cluster()
    for number in range(3):
        cluster.join(f"model-{number}")
    cluster.turn()
    cluster.heartbeats()
    known = cluster.members.fold()
    cluster.join("model-3")
    cluster.turn()  # A power cut takes this change with it; the processes have it.
    del cluster.books["model-3"]
    cluster.members = WorkerRegistry()
    cluster.members.restore(known)
    cluster.members.begin_term(2)
    cluster.sharing = BookSharing(cluster.members, master=MASTER)
    cluster.sharing.changed()
    cluster.turn()
    cluster.now += RESEND_S
    cluster.heartbeats()
    cluster.assert_all_know_all()
