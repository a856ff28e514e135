"""Endpoints in one process, driven by hand: a test decides who works when."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from kintsugi.protocol import wire
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.runtime.waits import wait
from kintsugi.transport import Delivery, Endpoint, Reply, new_key_pair

TIMEOUT_S = 10.0


def make_endpoint(process: str, *, incarnation: str = "a", job: str = "job", **options: Any) -> Endpoint:
    public_key, secret_key = options.pop("keys", None) or new_key_pair()
    return Endpoint(
        job=job,
        process=process,
        incarnation=incarnation,
        public_key=public_key,
        secret_key=secret_key,
        **options,
    )


@contextmanager
def free_descriptors(number: int) -> Iterator[None]:
    """Let this process open no more than `number` descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probes = [os.dup(0) for _ in range(number + 1)]
    for probe in probes:
        os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probes[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def introduce(*endpoints: Endpoint) -> None:
    """Let all of them know all others."""
    for endpoint in endpoints:
        for other in endpoints:
            if other is not endpoint:
                endpoint.admit(other.peer(host="here"))


def pump(*endpoints: Endpoint, until: Callable[[], bool]) -> list[Delivery]:
    """Let the endpoints work until something is true; gives what was delivered meanwhile."""
    delivered: list[Delivery] = []

    def attempt(_: float) -> bool | None:
        for endpoint in endpoints:
            delivered.extend(endpoint.poll(0.005))
        return until() or None

    wait(attempt, whom="the endpoints", what="the expected state", timeout_s=TIMEOUT_S)
    return delivered


def receive(receiver: Endpoint, *others: Endpoint, count: int = 1) -> list[Delivery]:
    """Let them work until the receiver got so many messages."""
    received: list[Delivery] = []

    def attempt(_: float) -> bool | None:
        received.extend(receiver.poll(0.005))
        for other in others:
            other.turn(0.005)
        return len(received) >= count or None

    wait(attempt, whom="the sender", what="a message", timeout_s=TIMEOUT_S)
    return received


def ask(sender: Endpoint, receiver: Endpoint, body: Body, *, answer: Body | None = None) -> Reply:
    """A whole exchange; raises what the sender would see."""
    pending = sender.request(receiver.process, body, deadline_s=TIMEOUT_S)

    def attempt(_: float) -> bool | None:
        for delivery in receiver.poll(0.005):
            receiver.reply(delivery, answer or Ok())
        sender.turn(0.005)
        return pending.done or None

    wait(attempt, whom=receiver.process, what="an answer", timeout_s=TIMEOUT_S)
    return pending.result()


def raw_dealer(
    to: Endpoint, keys: tuple[bytes, bytes]
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A connection that can send whatever it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.curve_publickey, dealer.curve_secretkey = keys
    dealer.curve_serverkey = to.peer(host="here").public_key
    dealer.connect(to.address)
    return context, dealer


def frame_of(body: Body, **changes: object) -> bytes:
    return wire.encode(envelope(**changes), body)


def envelope(**changes: object) -> Envelope:
    plain = Envelope("job", 0, "model-0", "a", 1, MessageKind.REQUEST)
    return msgspec.structs.replace(plain, **changes)
