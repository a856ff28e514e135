from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

import pytest

from kintsugi.lab.fragile.directory import Address
from kintsugi.lab.fragile.messages import JobSpec
from kintsugi.lab.fragile.rpc import (
    CONNECTIONS,
    CallTimedOut,
    EngineError,
    KeyNotFound,
    RpcServer,
    ServerError,
    WorkerGone,
    begin,
    call,
    request,
    wait_future_ordered,
)

SOON_S = 5.0


def served(**routes: object) -> Address:
    server = RpcServer({f"/{name}": route for name, route in routes.items()}, host="127.0.0.1")  # type: ignore[misc]
    server.serve_in_thread()
    return server.address


def test_an_answer_comes_back_as_what_it_was() -> None:
    address = served(job=lambda body: JobSpec("a"))
    assert request(address, "/job", JobSpec("b"), peer="it", kind=JobSpec, timeout_s=SOON_S) == JobSpec("a")


def test_connections_are_kept() -> None:
    address = served(job=lambda body: body)
    for _ in range(3):
        call(address, "/job", peer="it", timeout_s=SOON_S)
    kept = CONNECTIONS.take(address, timeout_s=SOON_S)
    assert kept.sock is not None
    assert CONNECTIONS.take(address, timeout_s=SOON_S).sock is None
    CONNECTIONS.give_back(address, kept)


def test_an_exception_is_a_500_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(body: bytes) -> None:
        raise RuntimeError("CUDA out of memory")

    with caplog.at_level(logging.ERROR), pytest.raises(ServerError) as caught:
        call(served(train_batch=breaks), "/train_batch", peer="model-1", timeout_s=SOON_S)
    assert str(caught.value) == "Non-retryable HTTP error: 500 (model-1/train_batch)"
    assert "CUDA out of memory" in caplog.text


def test_an_error_that_was_foreseen_reaches_the_caller() -> None:
    def breaks(body: bytes) -> None:
        raise EngineError("Invalid checkpoint format")

    with pytest.raises(ServerError, match="Invalid checkpoint format"):
        call(served(upload=breaks), "/upload", peer="model-0", timeout_s=SOON_S)


def test_what_nobody_serves_is_not_found() -> None:
    with pytest.raises(KeyNotFound):
        call(served(), "/nothing", peer="it", timeout_s=SOON_S)


def test_nobody_there_is_told_from_nobody_answering() -> None:
    release = threading.Event()
    slow = served(slow=lambda body: release.wait() and None)
    with pytest.raises(CallTimedOut, match="Read timed out"):
        call(slow, "/slow", peer="it", timeout_s=0.05)
    release.set()
    with pytest.raises(WorkerGone):
        call(Address("127.0.0.1", 1), "/slow", peer="it", timeout_s=SOON_S)


def test_requests_have_their_turns_and_one_whose_caller_hung_up_has_none() -> None:
    release, begun = threading.Event(), threading.Event()
    taken: list[bytes] = []

    def rollout(body: bytes) -> None:
        begun.set()
        release.wait()

    address = served(rollout=rollout, event=taken.append)
    first = begin(lambda: call(address, "/rollout", peer="it", timeout_s=SOON_S), name="first")
    assert begun.wait(SOON_S)
    with pytest.raises(CallTimedOut):
        call(address, "/event", b"late", peer="it", timeout_s=0.05)
    release.set()
    wait_future_ordered([first], whom="it", what="its end", timeout_s=SOON_S)
    call(address, "/event", b"in time", peer="it", timeout_s=SOON_S)
    assert taken == [b"in time"]


def test_the_first_failure_ends_the_wait_for_all() -> None:
    pending: list[Future[int]] = [Future(), Future()]
    pending[1].set_exception(WorkerGone("gone"))
    began = time.monotonic()
    with pytest.raises(WorkerGone):
        wait_future_ordered(pending, whom="all", what="results", timeout_s=SOON_S)
    assert time.monotonic() - began < SOON_S / 2


def test_results_come_in_the_order_of_the_questions() -> None:
    pending: list[Future[int]] = [Future(), Future()]
    pending[1].set_result(2)
    pending[0].set_result(1)
    assert wait_future_ordered(pending, whom="all", what="results", timeout_s=SOON_S) == [1, 2]
