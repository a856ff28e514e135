"""The ZeroMQ sockets of an endpoint: their set-up, and the frame of a message in and out of them."""

from __future__ import annotations

import os
import socket

import zmq

from kintsugi.runtime.clock import Clock
from kintsugi.types import Peer

QUEUED_MESSAGES = 4096
"""Bound of each socket's queues, of an endpoint's inbox, and of one caller's unanswered requests."""
LARGEST_FRAME_BYTES = 32 << 20
"""Larger data goes over the bulk channel. The limit also bounds the memory that a stranger can occupy before its key is
checked: ZeroMQ applies it to the commands of the handshake."""
SOON_S = 3e-4
"""How long `is_readable_soon` polls; a call that takes longer sleeps."""
UNACKNOWLEDGED_S = 12.0
"""A connection on which the other host's kernel has acknowledged nothing for this long is made again: by then the
pauses between TCP's retransmissions are longer than a new connection takes. The kernel acknowledges also for a process
that is stopped."""
CONNECT_S = 3.0
"""A connection attempt that takes longer is repeated, for the same reason."""
SPARE_SOCKETS = 1024
"""Sockets of an endpoint beyond two for each peer: its own, and those of connections that are being replaced."""
NOBLOCK = int(zmq.NOBLOCK)
MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


def new_key_pair() -> tuple[bytes, bytes]:
    """Create a CURVE key pair, (public, secret), both in Z85."""
    return zmq.curve_keypair()


def open_context(*, num_peers: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Open the context of an endpoint that may have this many peers, and twice as many after the run has grown."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    limit = int(context.get(zmq.SOCKET_LIMIT))
    context.set(zmq.MAX_SOCKETS, min(limit, 2 * num_peers + SPARE_SOCKETS))
    return context


def most_peers() -> int:
    """Return how many peers ZeroMQ allows one process."""
    with zmq.Context() as context:
        return int(context.get(zmq.SOCKET_LIMIT)) - SPARE_SOCKETS


def open_zap(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Open the socket on which ZeroMQ asks whether a key may connect; a ROUTER can answer in any order."""
    zap = context.socket(zmq.ROUTER)
    zap.linger = 0
    zap.bind("inproc://zeromq.zap.01")
    return zap


def open_router(
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    public_key: bytes,
    secret_key: bytes,
    bind: str,
    listener: int,
    largest_bytes: int = LARGEST_FRAME_BYTES,
) -> zmq.Socket[bytes]:
    """Open an inbound socket of a process: bound to an address, or to a socket that is listening already."""
    router = context.socket(zmq.ROUTER)
    _configure(router)
    router.setsockopt(zmq.MAXMSGSIZE, largest_bytes)
    router.curve_server = True
    router.curve_publickey = public_key
    router.curve_secretkey = secret_key
    router.zap_domain = b"kintsugi"
    if listener >= 0:
        # ZeroMQ closes the descriptor that it is given; ours must outlive this endpoint.
        listening = socket.socket(fileno=os.dup(listener))
        host, port = listening.getsockname()[:2]
        router.setsockopt(zmq.USE_FD, listening.detach())
        bind = f"tcp://{host}:{port}"
    router.bind(bind)
    return router


def open_monitor(router: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Open the socket on which ZeroMQ tells of connections of an inbound socket that were closed."""
    monitor: zmq.Socket[bytes] = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    monitor.linger = 0
    return monitor


def take_events(monitor: zmq.Socket[bytes]) -> int:
    """Take all events of a monitor; return their number."""
    number = 0
    while is_readable(monitor):
        monitor.recv_multipart(NOBLOCK)
        number += 1
    return number


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], *, peer: Peer, public_key: bytes, secret_key: bytes
) -> zmq.Socket[bytes]:
    """Connect to one process, which must prove that it holds the peer's key."""
    dealer = context.socket(zmq.DEALER)
    try:
        _configure(dealer)
        dealer.curve_serverkey = peer.public_key
        dealer.curve_publickey = public_key
        dealer.curve_secretkey = secret_key
        dealer.connect(peer.address)
    except zmq.ZMQError:
        dealer.close(0)
        raise
    return dealer


def _configure(handle: zmq.Socket[bytes]) -> None:
    handle.linger = 0
    handle.sndhwm = handle.rcvhwm = QUEUED_MESSAGES
    handle.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME_BYTES)
    handle.setsockopt(zmq.RECONNECT_IVL, 20)
    handle.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    handle.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    handle.setsockopt(zmq.TCP_MAXRT, milliseconds(UNACKNOWLEDGED_S))
    handle.setsockopt(zmq.CONNECT_TIMEOUT, milliseconds(CONNECT_S))


def send_frame(handle: zmq.Socket[bytes], frame: bytes, *, route: bytes = b"") -> None:
    """Send a message, which is one frame. zmq.Again if the queue is full.

    `route` names the connection of a ROUTER. A frame beyond the limit would end the receiver's connection, again and
    again.
    """
    assert len(frame) <= LARGEST_FRAME_BYTES, (
        f"a frame of {len(frame):,} bytes; expected at most {LARGEST_FRAME_BYTES:,}"
    )
    if route:
        handle.send(route, MORE)
    handle.send(frame, NOBLOCK)


def drop_rest(handle: zmq.Socket[bytes], frame: zmq.Frame) -> None:
    """Drop further frames of a message: those of this program have one."""
    while frame.more:
        frame = handle.recv(NOBLOCK, copy=False)


def is_readable(handle: zmq.Socket[bytes]) -> bool:
    """Whether a whole message has arrived; much cheaper than a failing `recv`."""
    return bool(int(handle.getsockopt(_EVENTS)) & _READABLE)


def is_readable_soon(handle: zmq.Socket[bytes], *, clock: Clock) -> bool:
    """Poll for a short time whether a message arrives: most replies are faster than waking a sleeping thread."""
    until = clock.monotonic() + SOON_S
    while not is_readable(handle):
        if clock.monotonic() >= until:
            return False
    return True


def milliseconds(seconds: float) -> int:
    """Convert to milliseconds, rounded up, so that a timer is due when the poll ends."""
    return -int(-seconds * 1000 // 1)
