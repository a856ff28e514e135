"""The store at which ranks meet: its operations, and that strangers can neither read nor write it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.errors import DeadlineExceeded
from kintsugi.transport import new_key_pair, store
from kintsugi.transport.store import StoreClient, StoreServer, StoreUnavailable, split_address
from tests.unit.transport.harness import free_descriptors

KEYS, OTHER = new_key_pair(), new_key_pair()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer(keys=KEYS)) as serving:
        yield serving


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    with closing(StoreClient(server.address, keys=KEYS, timeout_s=20.0)) as connected:
        yield connected


def test_values_are_set_added_compared_and_deleted(client: StoreClient) -> None:
    client.set("a", b"1")
    assert client.get("a") == b"1"
    assert client.check(["a"]) and not client.check(["a", "b"])
    assert [client.add("n", 1), client.add("n", 2)] == [1, 3]
    assert client.compare_and_set("a", expected=b"2", value=b"3") == b"1"
    assert client.compare_and_set("a", expected=b"1", value=b"3") == b"3"
    assert client.num_values() == 2
    assert client.delete("a") and not client.delete("a")


def test_a_value_that_is_not_set_yet_is_waited_for(server: StoreServer, client: StoreClient) -> None:
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(client.get("late")))
    reader.start()
    client.set("late", b"here")
    reader.join(20)
    client.await_keys(["late"])
    assert found == [b"here"]


def test_a_value_that_is_never_set_is_named(server: StoreServer) -> None:
    with (
        closing(StoreClient(server.address, keys=KEYS, timeout_s=0.1)) as hasty,
        pytest.raises(StoreUnavailable, match="missing was not set in time"),
    ):
        hasty.get("missing")


def test_a_listed_key_is_admitted_also_when_the_book_comes_later(server: StoreServer) -> None:
    with closing(StoreClient(server.address, keys=OTHER, timeout_s=20.0)) as early:
        asking = threading.Thread(target=lambda: early.set("by-a-rank", b"1"))
        asking.start()
        asking.join(0.1)
        assert asking.is_alive(), "the key is unknown"
        server.admit(lambda key: key == OTHER[0])
        asking.join(20)
        assert not asking.is_alive() and early.get("by-a-rank") == b"1"


def test_the_oldest_values_make_room_for_new_ones(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_VALUES", 3)
    for number in range(5):
        client.set(f"key-{number}", b"")
    assert [client.check([f"key-{number}"]) for number in range(5)] == [False, False, True, True, True]
    monkeypatch.setattr(store, "MAX_VALUE_BYTES", 1000)
    client.set("large", bytes(994))
    assert client.num_values() == 1


@pytest.mark.parametrize("request_bytes", [b"", b"\xc1", b"\x80", b"\x93\x01\xa3set\x01"])
def test_a_request_that_can_not_be_read_costs_only_itself(client: StoreClient, request_bytes: bytes) -> None:
    client.set("a", b"1")
    client._connection().socket.send(request_bytes)
    assert client.get("a") == b"1"


def test_a_client_for_which_no_descriptor_is_left_is_refused_as_torch_expects(server: StoreServer) -> None:
    with free_descriptors(0), pytest.raises(StoreUnavailable, match="Too many open files"):
        StoreClient(server.address, keys=KEYS, timeout_s=1.0)


def test_a_store_that_is_gone_is_waited_for_only_so_long(server: StoreServer) -> None:
    address = server.address
    with closing(StoreServer(keys=KEYS)) as gone:
        address = gone.address
    with (
        closing(StoreClient(address, keys=KEYS, timeout_s=0.1)) as client,
        pytest.raises(DeadlineExceeded, match="the store's reply to set a"),
    ):
        client.set("a", b"1")


def test_a_client_talks_to_no_other_process_than_the_one_that_the_address_names(server: StoreServer) -> None:
    host, port, _ = split_address(server.address)
    with closing(StoreServer(keys=OTHER)) as other:
        _, _, key = split_address(other.address)
        named = other.address.partition("#")[2]
        assert key == OTHER[0]
    with (
        closing(StoreClient(f"{host}:{port}#{named}", keys=KEYS, timeout_s=0.3)) as client,
        pytest.raises(DeadlineExceeded),
    ):
        client.set("a", b"1")


STRANGER = """
import os, sys
from kintsugi.errors import DeadlineExceeded
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreClient
address = sys.argv[1]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
client = StoreClient(address, keys=new_key_pair(), timeout_s=0.5)
for attempt in (lambda: client.get("generation-7/here-0"), lambda: client.set("generation-7/here-0", b"evil")):
    try:
        attempt()
        print("carried out")
    except DeadlineExceeded:
        print("refused")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_can_neither_read_nor_write_the_store(server: StoreServer, client: StoreClient) -> None:
    """The attack on torch's own store: read a rank's identity, replace it."""
    client.set("generation-7/here-0", b"GPU-a")
    server.admit(lambda key: key == OTHER[0])
    found = subprocess.run(
        [sys.executable, "-P", "-c", STRANGER, server.address],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "HOME": "/nonexistent"},
    )
    assert found.stdout.split() == ["refused"] * 2, found.stderr
    assert client.get("generation-7/here-0") == b"GPU-a"
