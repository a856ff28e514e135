from __future__ import annotations

import msgspec
import pytest

from kintsugi.protocol.training import CommitStep
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.transport.directory import Directory
from kintsugi.types import Peer


@pytest.mark.parametrize(
    ("process", "accepted"), [("master-0", True), ("model-0", False), ("agent-0", False)]
)
def test_only_a_master_may_show_up_as_another_incarnation_in_a_newer_term(
    process: str, accepted: bool
) -> None:
    directory = Directory(job="job", process="server-0")
    directory.add(Peer(process, "a", "host-0", "", b"key"))
    newer = Envelope("job", 7, process, "b", 1, MessageKind.REQUEST)
    assert (directory.why_refused("key", newer, term=1) == "") is accepted
    assert directory.peers[process].incarnation == ("b" if accepted else "a")


def test_a_master_of_the_same_term_is_no_other_incarnation() -> None:
    directory = Directory(job="job", process="server-0")
    directory.add(Peer("master-0", "a", "host-0", "", b"key"))
    same_term = Envelope("job", 1, "master-0", "b", 1, MessageKind.REQUEST)
    assert directory.why_refused("key", same_term, term=1) == "master-0 b is not a"


@pytest.mark.parametrize(
    ("process", "known", "shown", "accepted"),
    [
        ("agent-0", "0", "1", True),
        ("agent-0", "9", "10", True),
        ("agent-0", "1", "0", False),
        ("agent-0", "1", "x", False),
        ("model-0", "0", "1", False),
    ],
)
def test_an_agent_that_was_started_later_takes_over_under_its_old_key(
    process: str, known: str, shown: str, accepted: bool
) -> None:
    directory = Directory(job="job", process="master-0")
    directory.add(Peer(process, known, "host-0", "", b"key"))
    message = Envelope("job", 1, process, shown, 1, MessageKind.REQUEST)
    assert (directory.why_refused("key", message, term=1) == "") is accepted
    assert directory.peers[process].incarnation == (shown if accepted else known)


def test_a_newer_term_is_the_masters_word_alone_and_names_the_master() -> None:
    directory = Directory(job="job", process="server-0")
    directory.add(Peer("master-0", "a", "host-0", "", b"key"))
    directory.add(Peer("model-0", "a", "host-0", "", b"another key"))

    def newest(process: str, *, term: int) -> int:
        envelope = Envelope("job", term, process, "b", 1, MessageKind.REPLY)
        return directory.newest_term(1, by=process, of=envelope)

    assert newest("model-0", term=7) == 1
    assert newest("master-0", term=1) == 1
    assert directory.peers["master-0"].incarnation == "a"
    assert newest("master-0", term=2) == 2
    assert directory.peers["master-0"].incarnation == "b"
    assert directory.peers["model-0"].incarnation == "a"


def test_who_only_moves_keeps_the_requests_that_are_being_worked_on() -> None:
    directory = Directory(job="job", process="server-0")
    peer = Peer("agent-0", "1", "host-0", "", b"key")
    directory.add(peer)
    running = directory.callers["key"].running
    directory.add(msgspec.structs.replace(peer, address="tcp://127.0.0.1:4001"))
    assert directory.callers["key"].running is running
    directory.add(msgspec.structs.replace(peer, incarnation="2"))
    assert directory.callers["key"].running is not running, "a successor counts its requests anew"


@pytest.mark.parametrize(("process", "accepted"), [("master-0", True), ("server-0", False)])
def test_an_order_is_refused_from_who_may_not_give_it(process: str, accepted: bool) -> None:
    directory = Directory(job="job", process="model-0")
    directory.add(Peer(process, "a", "host-0", "", b"key"))
    order = Envelope("job", 1, process, "a", 1, MessageKind.REQUEST)
    why = directory.why_refused("key", order, term=1, body=CommitStep(1))
    assert why == ("" if accepted else f"{process} may not send CommitStep")
