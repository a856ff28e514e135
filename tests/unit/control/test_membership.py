from kintsugi.control.membership import WorkerRegistry, WorkerStatus
from kintsugi.errors import Fault
from kintsugi.journal.facts import ProcessJoined, ProcessLost, ProcessRequested
from kintsugi.protocol.membership import Heartbeat
from kintsugi.types import Peer, Progress, Role

FAULT = Fault("f", "ProcessDied", "model-0", "gone", 0.0)


def peer(incarnation: str = "1") -> Peer:
    return Peer("model-0", incarnation, "host-0", "tcp://here", b"key")


def requested(incarnation: str = "1") -> ProcessRequested:
    return ProcessRequested("model-0", Role.MODEL, "host-0", incarnation)


def joined(incarnation: str = "1") -> ProcessJoined:
    return ProcessJoined(peer(incarnation), Role.MODEL, 42)


def test_a_process_is_requested_then_live_then_lost() -> None:
    members = WorkerRegistry()
    seen = []
    for fact in (requested(), joined(), ProcessLost("model-0", "1", FAULT)):
        members.apply(fact)
        seen.append(members.members["model-0"].status)
    assert seen == [WorkerStatus.REQUESTED, WorkerStatus.LIVE, WorkerStatus.LOST]


def test_an_old_incarnation_can_not_join_after_its_replacement_was_ordered() -> None:
    members = WorkerRegistry()
    for fact in (requested("1"), joined("1"), ProcessLost("model-0", "1", FAULT), requested("2")):
        members.apply(fact)
    assert members.accepts(joined("1")) == "model-0 is incarnation 2, not 1"
    assert members.accepts(joined("2")) is None


def test_a_second_registration_is_not_a_second_process() -> None:
    members = WorkerRegistry()
    members.apply(requested())
    members.apply(joined())
    assert members.accepts(joined()) == "model-0 is live"


def test_the_address_book_lists_the_living_and_grows_in_number() -> None:
    members = WorkerRegistry()
    master = Peer("master-0", "1", "host-0", "tcp://m", b"m")
    members.apply(requested())
    first = members.address_book(master)
    members.apply(joined())
    second = members.address_book(master)
    assert [p.process for p in first.peers] == ["master-0"]
    assert [p.process for p in second.peers] == ["master-0", "model-0"]
    assert second.number > first.number


def test_live_processes_are_listed_by_index_not_by_text() -> None:
    members = WorkerRegistry()
    for index in (10, 2):
        name = f"server-{index}"
        members.apply(ProcessRequested(name, Role.SERVER, "host-0", "1"))
        members.apply(ProcessJoined(Peer(name, "1", "host-0", "", b""), Role.SERVER, index))
    assert members.live(Role.SERVER) == ["server-2", "server-10"]
    assert members.pids() == {"server": [10, 2]}


def test_a_heartbeat_is_noted_without_a_fact() -> None:
    members = WorkerRegistry()
    members.apply(requested())
    members.apply(joined())
    members.on_heartbeat(
        "model-0", Heartbeat(Progress({"steps": 3}), 0.5, gauges={"pages_free": 7.0}), now=9.0
    )
    member = members.members["model-0"]
    assert (member.load, member.last_heartbeat, member.progress.counters) == (0.5, 9.0, {"steps": 3})
    assert member.gauges == {"pages_free": 7.0}


def test_a_lost_agent_may_come_back_under_a_new_incarnation_only() -> None:
    members = WorkerRegistry()

    def agent(incarnation: str) -> ProcessJoined:
        return ProcessJoined(Peer("agent-0", incarnation, "host-0", "", b""), Role.AGENT, 1)

    members.apply(agent("a"))
    members.apply(ProcessLost("agent-0", "a", FAULT))
    assert members.accepts(agent("a")) == "agent-0 a is lost"
    members.apply(agent("b"))
    assert members.is_live("agent-0", "b")
