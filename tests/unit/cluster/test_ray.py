"""The Ray back end without Ray: sealed tickets, choice of nodes, refusals, orders and events of its driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.cluster.backends import ray as backend_module
from kintsugi.cluster.backends.contract import HostCame, HostEvent, HostOrder, HostWent
from kintsugi.cluster.backends.ray import (
    TOKEN_REFUSED,
    RayBackend,
    choose_nodes,
    explain_output,
    why_not_reached,
)
from kintsugi.cluster.backends.ray_actor import HostActor
from kintsugi.cluster.backends.ray_protocol import RayJob, RayNode, TicketKey, seal, supervisor_environment
from kintsugi.config.schema import RaySection
from kintsugi.errors import ConfigError, IntegrityError
from tests.cluster.tiny_runs import until

NODES = (
    RayNode("1", "head", "10.0.0.1", cpus=0, gpus=0),
    RayNode("2", "a", "10.0.0.2", cpus=8, gpus=2),
    RayNode("3", "b", "10.0.0.3", cpus=8, gpus=0),
)


def test_a_sealed_ticket_is_opened_only_by_the_process_that_it_was_sealed_for() -> None:
    key, other = TicketKey(), TicketKey()
    sealed = seal(b"a secret key", public=key.public)
    assert key.open(sealed) == b"a secret key"
    assert b"secret" not in sealed
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for opened_by, content in ((other, sealed), (key, changed), (key, sealed[:20]), (key, b"")):
        with pytest.raises(IntegrityError, match="sealed for this process"):
            opened_by.open(content)


def test_a_supervisor_does_not_get_the_token_of_its_cluster() -> None:
    inherited = {"RAY_AUTH_TOKEN": "s3cret", "RAY_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "3", "PATH": "/bin"}
    assert supervisor_environment(inherited) == {"CUDA_VISIBLE_DEVICES": "3", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("section", "chosen"),
    [
        (RaySection(), ["a", "b"]),
        (RaySection(nodes=1), ["a"]),
        (RaySection(gpus=2), ["a"]),
        (RaySection(cpus=0), ["head", "a", "b"]),
    ],
)
def test_nodes_with_the_resources_are_chosen_and_a_head_without_cpus_is_not(
    section: RaySection, chosen: list[str]
) -> None:
    assert [node.name for node in choose_nodes(NODES, section)] == chosen


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            RaySection(nodes=3),
            "expected 3 nodes with 1 CPUs and 0 GPUs, found 2 of 3: head (10.0.0.1): 0 CPUs",
        ),
        (RaySection(gpus=3), "expected 1 node with 1 CPUs and 3 GPUs, found 0 of 3"),
    ],
)
def test_too_few_nodes_or_gpus_are_named_with_what_was_found(section: RaySection, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_nodes(NODES, section)
    assert said in str(raised.value)


def test_a_refused_token_is_recognised_in_the_messages_of_rays_core() -> None:
    line = "gcs_client.cc:210: Failed to get cluster ID from GCS server: Unauthenticated: RPC error: InvalidAuthToken"
    assert explain_output(f"[2026-11-18 20:31:55,776 W 302 302] {line}") == TOKEN_REFUSED
    assert explain_output("anything else") == ""


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:port", ":6379"])
def test_an_address_that_is_none_of_a_cluster_is_refused_without_asking_ray(address: str) -> None:
    assert "expected HOST:PORT" in why_not_reached(address)


def test_a_port_where_no_process_listens_is_named_and_an_empty_address_is_left_to_ray() -> None:
    assert "no process listens there" in why_not_reached("127.0.0.1:1")
    assert why_not_reached("") == ""


DRIVER = """
import json, os, sys
number = int(open(sys.argv[1]).read() or 0) + 1
open(sys.argv[1], "w").write(str(number))
{program}
"""


def driver_that(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> Path:
    """Put a program in the place of the process that imports Ray; returns the file that counts its starts."""
    starts = folder / "starts"
    starts.write_text("")
    script = folder / "fake_driver.py"
    text = DRIVER.replace("sys.argv[1]", repr(str(starts))).replace("{program}", program)
    script.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    monkeypatch.setattr(backend_module, "DRIVER", "fake_driver")
    monkeypatch.setattr(backend_module, "FIRST_PAUSE_S", 0.01)
    return starts


def events_until(backend: RayBackend, holds: Callable[[list[HostEvent]], bool]) -> list[HostEvent]:
    told: list[HostEvent] = []

    def is_told() -> bool:
        told.extend(backend.poll())
        return holds(told)

    until(is_told, "events", timeout_s=30.0)
    return told


def test_without_ray_the_extra_is_named_for_every_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver_that(
        monkeypatch,
        tmp_path,
        "sys.modules['ray'] = None\n"
        "from kintsugi.cluster.backends.ray_driver import main\n"
        "sys.exit(main(sys.argv[1:]))",
    )
    backend = RayBackend(RayJob("", "kintsugi-x", num_hosts=1))
    backend.start([HostOrder("host-1", b"ticket")])
    (event,) = events_until(backend, bool)
    assert isinstance(event, HostWent) and "pip install 'kintsugi[ray]'" in event.why
    backend.give_back(timeout_s=1.0)


def test_a_killed_driver_is_started_again_gets_the_orders_that_wait_and_told_hosts_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = driver_that(
        monkeypatch,
        tmp_path,
        """
print(json.dumps({"type": "Connected"}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if number == 1 and order["host"] == "host-2":
        os.kill(os.getpid(), 9)
    del order["ticket"]
    print(json.dumps(order | {"type": "Came", "place": f"driver {number}"}), flush=True)
""",
    )
    backend = RayBackend(RayJob("", "kintsugi-x", num_hosts=2))
    backend.start([HostOrder("host-1", b"ticket"), HostOrder("host-2", b"ticket")])
    told = events_until(backend, lambda told: len(told) == 2)
    assert told == [HostCame("host-1", "driver 1"), HostCame("host-2", "driver 2")]
    assert starts.read_text() == "2"
    backend.give_back(timeout_s=1.0)


def test_orders_for_many_hosts_are_taken_while_ray_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver_that(
        monkeypatch,
        tmp_path,
        "import time, types\n"
        "sys.modules['ray'] = types.SimpleNamespace(init=lambda **options: time.sleep(600))\n"
        "from kintsugi.cluster.backends.ray_driver import main\n"
        "sys.exit(main(sys.argv[1:]))",
    )
    monkeypatch.setattr(backend_module, "CONNECT_S", 0.5)
    backend = RayBackend(RayJob("", "kintsugi-x", num_hosts=400))
    backend.start([HostOrder(f"host-{number}", bytes(1000)) for number in range(1, 401)])
    told = events_until(backend, lambda told: len(told) == 400)
    assert "did not join the cluster within 0.5 s" in str(told[0])
    backend.give_back(timeout_s=1.0)


def test_what_is_told_of_an_order_that_was_replaced_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver_that(
        monkeypatch,
        tmp_path,
        """
print(json.dumps({"type": "Connected"}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["number"] == 2:
        for kind, more in (("Went", {"number": 1, "why": "late"}), ("Came", {"number": 2, "place": "b"})):
            print(json.dumps({"type": kind, "host": order["host"], **more}), flush=True)
""",
    )
    backend = RayBackend(RayJob("", "kintsugi-x", num_hosts=1))
    backend.start([HostOrder("host-1", b"first")])
    backend.replace(HostOrder("host-1", b"second"))
    assert events_until(backend, bool) == [HostCame("host-1", "b")]
    backend.give_back(timeout_s=1.0)


def test_an_actor_starts_a_supervisor_that_is_no_child_of_its_own_and_ends_it(tmp_path: Path) -> None:
    actor = HostActor(name="host-1", lease_s=60.0, supervisor=None, leave=lambda name: None)
    given = tmp_path / "given"
    command = ("sh", "-c", f'read ticket; echo "$ticket $PPID" > {given}; exec sleep 600')
    started = actor.start(seal(b"ticket\n", public=actor.key()), command)
    until(lambda: given.exists() and bool(given.read_text()), "the ticket", timeout_s=20.0)
    ticket, parent = given.read_text().split()
    assert ticket == "ticket" and int(parent) != os.getpid()
    assert actor.look() == (started, "")
    again = HostActor(name="host-1", lease_s=60.0, supervisor=started, leave=lambda name: None)
    assert again.look() == (started, ""), "a later actor of the same node goes on with it"
    again.end(0.1)
    assert again.look() == (None, "")
    running, why = actor.look()
    assert running is None and why


def test_the_last_line_of_a_supervisor_that_refused_is_the_reason() -> None:
    actor = HostActor(name="host-1", lease_s=60.0, supervisor=None, leave=lambda name: None)
    actor.start(seal(b"x", public=actor.key()), ("sh", "-c", "echo first; echo no torch here >&2; exit 2"))
    found = [""]

    def has_ended() -> bool:
        found.append(actor.look()[1])
        return bool(found[-1])

    until(has_ended, "its end", timeout_s=20.0)
    assert found[-1] == "no torch here"
    with pytest.raises(OSError, match="nowhere"):
        actor.start(seal(b"x", public=actor.key()), ("/nowhere/python",))


def test_a_node_leaves_when_no_driver_asks_any_more_and_its_supervisor_has_ended(tmp_path: Path) -> None:
    left: list[str] = []
    actor = HostActor(name="host-2", lease_s=0.1, supervisor=None, leave=left.append)
    actor.start(seal(b"x", public=actor.key()), ("sleep", "600"))
    until(actor.lease_is_over, "the end of the lease", timeout_s=20.0)
    assert left == [], "its supervisor runs"
    actor.end(0.1)
    until(lambda: bool(left), "its leave", timeout_s=20.0)
    assert set(left) == {"host-2"}


def test_a_node_is_given_back_when_ray_answers_again_and_the_reason_is_told_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def leave(name: str) -> None:
        asked.append(name)
        if len(asked) < 3:
            raise RuntimeError("the head of the cluster does not answer")

    monkeypatch.setattr("kintsugi.cluster.backends.ray_actor.LEASE_POLL_S", 0.05)
    HostActor(name="host-2", lease_s=0.0, supervisor=None, leave=leave)
    until(lambda: len(asked) > 2, "its third attempt", timeout_s=20.0)
    assert capfd.readouterr().err.count("host-2 can not be given back") == 1
