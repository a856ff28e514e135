from __future__ import annotations

import threading

import pytest

from kintsugi.lab.fragile.metaserver import MetaClient, TransferTimedOut, WeightMetaServer
from kintsugi.lab.fragile.rpc import begin, wait_future_ordered

SOON_S = 5.0


@pytest.fixture
def server() -> WeightMetaServer:
    return WeightMetaServer(host="127.0.0.1")


def test_a_value_is_found_under_its_name(server: WeightMetaServer) -> None:
    client = MetaClient(server.address, timeout_s=SOON_S)
    client.put("3/model.layers.0 weight", b"bytes\nand more")
    assert client.get("3/model.layers.0 weight") == b"bytes\nand more"
    assert server.size == 14


def test_who_comes_first_waits_for_the_value(server: WeightMetaServer) -> None:
    getting = begin(lambda: MetaClient(server.address, timeout_s=SOON_S).get("a"), name="get")
    MetaClient(server.address, timeout_s=SOON_S).put("a", b"1")
    assert wait_future_ordered([getting], whom="meta", what="a", timeout_s=SOON_S) == [b"1"]


def test_one_missing_value_makes_everybody_time_out_who_waits_for_it(server: WeightMetaServer) -> None:
    MetaClient(server.address, timeout_s=SOON_S).put("there", b"1")
    for _ in range(2):
        client = MetaClient(server.address, timeout_s=0.1)
        assert client.get("there") == b"1"
        with pytest.raises(TransferTimedOut, match="the key does not exist"):
            client.get("missing")


def test_the_time_is_for_all_values_together(server: WeightMetaServer) -> None:
    client = MetaClient(server.address, timeout_s=0.0)
    threading.Event().wait(0.001)
    with pytest.raises(TransferTimedOut, match="request timeout"):
        client.put("a", b"1")


def test_what_was_fetched_is_forgotten(server: WeightMetaServer) -> None:
    MetaClient(server.address, timeout_s=SOON_S).put("a", b"1")
    server.forget()
    assert server.size == 0
