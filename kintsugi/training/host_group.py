"""A group of ranks that exchanges arrays in host memory through sockets of our own.

For frameworks whose collectives do not survive a lost rank. MindSpore 2.10 on CPUs: after a rank was killed, every
collective of the others fails after 30 seconds, and no later group works in the same process.

Every rank binds one socket and connects to those of all others. The keys of these sockets are made for this group
alone, and the ranks exchange them through the group's store, which only processes of the run can use: a process that
does not know a socket's key can not connect to it (CURVE). Sums are made in the order of ranks, so they have the same
bits everywhere.

`end` may be called from any thread; a collective that is running then raises `GroupBroken`.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from kintsugi.errors import DeadlineExceeded, GroupBroken, GroupFailed
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import wait
from kintsugi.training.group import GroupLife, Interruption
from kintsugi.transport import new_key_pair
from kintsugi.transport.sockets import milliseconds, open_dealer, open_router
from kintsugi.transport.store import StoreClient, StoreUnavailable, split_address
from kintsugi.types import Peer

ROUTE = "sockets of this program, through host memory"
POLL_S = 0.01
"""Interval of looks for an interruption while a collective waits."""
STORE_ANSWERS_S = 1.0
CONNECT_S = 1.0
FRAME_BYTES = 8 << 20
"""Arrays travel in frames of at most this size, which is below the limit of a socket (`LARGEST_FRAME_BYTES`)."""

T = TypeVar("T")


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a message."""

    sender: int
    number: int
    """Number of the collective within its group."""


class _Address(msgspec.Struct, frozen=True):
    """Address of a rank's socket and its public key (Z85), as left in the store."""

    address: str
    key: bytes


class HostGroup(GroupLife):
    """One group of ranks. A group of one rank has no sockets and no collectives."""

    route = ROUTE

    def __init__(
        self,
        *,
        group_id: int,
        ranks: Sequence[str],
        rank: int,
        interruption: Interruption,
        connections: _Connections | None,
    ) -> None:
        assert (connections is None) == (len(ranks) == 1)
        super().__init__(group_id=group_id, ranks=ranks, rank=rank, interruption=interruption)
        self._connections = connections
        self._number = 0

    def all_reduce(self, array: NDArray[Any], *, timeout_s: float) -> None:
        """Sum an array over all ranks, in place and in the order of ranks."""
        gathered = self._exchange([array] * self.size, what="all-reduce", timeout_s=timeout_s)
        total = gathered[0].reshape(array.shape).copy()
        for each in gathered[1:]:
            total += each.reshape(array.shape)
        array[...] = total

    def all_gather(self, array: NDArray[Any], *, timeout_s: float) -> NDArray[Any]:
        """Return the arrays of all ranks, stacked in rank order; all must have the same shape."""
        gathered = self._exchange([array] * self.size, what="all-gather", timeout_s=timeout_s)
        return np.stack([each.reshape(array.shape) for each in gathered])

    def all_to_all(
        self, array: NDArray[Any], *, sent: Sequence[int], received: Sequence[int], timeout_s: float
    ) -> NDArray[Any]:
        """Send consecutive parts of a flat array, one to each rank; return the parts received, in rank order."""
        parts = np.split(array, np.cumsum(sent)[:-1])
        incoming = self._exchange(parts, what="all-to-all", timeout_s=timeout_s)
        lengths = [len(each) for each in incoming]
        assert lengths == list(received), f"expected parts of {list(received)} elements, got {lengths}"
        return np.concatenate(incoming)

    def close(self) -> None:
        """End the group and close its sockets."""
        self.end("the group was closed")
        if self._connections is not None:
            self._connections.close()
            self._connections = None

    def _exchange(self, parts: Sequence[NDArray[Any]], *, what: str, timeout_s: float) -> list[NDArray[Any]]:
        """Send a part to each rank; return the parts that were sent to this one, flat and in rank order."""
        what = f"{what} of {self._title}"
        self.check(what)
        assert self._connections is not None, "collectives need a group of several ranks"
        connections, self._number = self._connections, self._number + 1
        expected = {rank for rank in range(self.size) if rank != self.rank}
        try:
            for rank in expected:
                connections.send(rank, _Header(self.rank, self._number), parts[rank])

            def attempt(remaining_s: float) -> bool | None:
                connections.receive(min(POLL_S, remaining_s))
                self.check(what)
                return True if connections.has(self._number, expected) else None

            wait(attempt, whom=self.others, what=what, timeout_s=timeout_s)
        except (zmq.ZMQError, DeadlineExceeded) as error:
            self.end(str(error))
            peers = tuple(name for name in self.ranks if name != self.ranks[self.rank])
            failed = GroupFailed(self.group_id, peers, str(error))
            raise GroupBroken(f"{what} with {self.others} failed: {failed.reason}", detail=failed) from error
        dtype = parts[0].dtype
        return [
            parts[rank].reshape(-1)
            if rank == self.rank
            else np.frombuffer(connections.take(self._number, rank), dtype=dtype)
            for rank in range(self.size)
        ]


class _Connections:
    """Sockets of one rank: one that all others connect to, and one to each of them. Used by one thread."""

    def __init__(self, interface: str, *, rank: int) -> None:
        self._rank = rank
        self._keys = new_key_pair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        public_key, secret_key = self._keys
        self._router = open_router(
            self._context,
            public_key=public_key,
            secret_key=secret_key,
            bind=f"tcp://{interface}:*",
            listener=-1,
        )
        self.own = _Address(self._router.getsockopt_string(zmq.LAST_ENDPOINT), public_key)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._arrived: dict[tuple[int, int], deque[bytes]] = {}
        """Number of a collective and sender → frames of its message."""

    def connect(self, addresses: Sequence[_Address]) -> None:
        public_key, secret_key = self._keys
        for rank, other in enumerate(addresses):
            if rank != self._rank:
                peer = Peer(f"rank-{rank}", "", "", other.address, other.key)
                self._dealers[rank] = open_dealer(
                    self._context, peer=peer, public_key=public_key, secret_key=secret_key
                )

    def send(self, rank: int, header: _Header, part: NDArray[Any]) -> None:
        """Send an array to a rank; it may change as soon as this returns."""
        content = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        frames = [msgspec.msgpack.encode(header), *_frames(content)]
        self._dealers[rank].send_multipart(frames, zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> None:
        """Take in the messages that have arrived, or arrive within this time."""
        if not self._router.poll(milliseconds(timeout_s)):
            return
        while self._router.poll(0):
            _, first, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            header = msgspec.msgpack.decode(first, type=_Header)
            self._arrived[header.number, header.sender] = deque(frames)

    def has(self, number: int, senders: set[int]) -> bool:
        return all((number, sender) in self._arrived for sender in senders)

    def take(self, number: int, sender: int) -> bytes:
        return b"".join(self._arrived.pop((number, sender)))

    def close(self) -> None:
        self._context.destroy(linger=0)


def _frames(content: memoryview) -> list[bytes]:
    return [bytes(content[start : start + FRAME_BYTES]) for start in range(0, len(content), FRAME_BYTES)]


def join_host_group(
    *,
    group_id: int,
    ranks: Sequence[str],
    me: str,
    store_address: str,
    keys: tuple[bytes, bytes],
    timeout_s: float,
    interruption: Interruption = lambda: None,
) -> HostGroup:
    """Create the group with the other ranks, within `timeout_s`; `keys` is the key pair of this process."""
    rank, connections = ranks.index(me), None
    if len(ranks) > 1:
        rendezvous = _Rendezvous(
            group_id=group_id,
            ranks=ranks,
            rank=rank,
            store_address=store_address,
            timeout_s=timeout_s,
            interruption=interruption,
        )
        connections = rendezvous.connect(keys)
    return HostGroup(
        group_id=group_id, ranks=ranks, rank=rank, interruption=interruption, connections=connections
    )


class _Rendezvous:
    """Rendezvous of one rank with the others of a new group, at the store of the first one.

    A store in a stopped process does not answer: every operation has a short limit and is repeated, so that an
    interruption is noticed in between.
    """

    def __init__(
        self,
        *,
        group_id: int,
        ranks: Sequence[str],
        rank: int,
        store_address: str,
        timeout_s: float,
        interruption: Interruption,
    ) -> None:
        self._ranks = ranks
        self._rank = rank
        self._store_address = store_address
        self._prefix = f"generation-{group_id}"
        self._deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        self._interruption = interruption
        self._others = ", ".join(name for index, name in enumerate(ranks) if index != rank)
        self._what = f"joining generation {group_id} of the group"
        self._idle = threading.Event()

    def connect(self, keys: tuple[bytes, bytes]) -> _Connections:
        connections = _Connections(self._poll(self._interface, whom=self._ranks[0]), rank=self._rank)
        try:
            with closing(StoreClient(self._store_address, keys=keys, timeout_s=STORE_ANSWERS_S)) as store:
                own = msgspec.msgpack.encode(connections.own)
                self._poll(lambda: self._leave(store, own), whom=self._ranks[0])
                connections.connect(self._poll(lambda: self._addresses(store), whom=self._others))
        except BaseException:
            connections.close()
            raise
        return connections

    def _interface(self) -> str | None:
        """Address of this rank on its way to the store; None if the store can not be reached."""
        host, port, _ = split_address(self._store_address)
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
                interface: str = connection.getsockname()[0]
                return interface
        except OSError:
            return None

    def _leave(self, store: StoreClient, own: bytes) -> bool | None:
        try:
            store.set(self._key(self._rank), own)
        except (StoreUnavailable, DeadlineExceeded):
            return None
        return True

    def _addresses(self, store: StoreClient) -> list[_Address] | None:
        """Addresses of all ranks, in rank order; None until all have left theirs."""
        names = [self._key(rank) for rank in range(len(self._ranks))]
        try:
            if not store.check(names):
                return None
            return [msgspec.msgpack.decode(store.get(name), type=_Address) for name in names]
        except (StoreUnavailable, DeadlineExceeded):
            return None

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/socket-{rank}"

    def _poll(self, look: Callable[[], T | None], *, whom: str) -> T:
        """Call `look` until it returns a value; raise GroupBroken at the deadline or when interrupted."""

        def attempt(remaining_s: float) -> T | None:
            why = self._interruption()
            if why is not None:
                raise GroupBroken(f"{self._what} with {self._others}: {why}")
            found = look()
            if found is None:
                self._idle.wait(min(POLL_S, remaining_s))
            return found

        try:
            remaining_s = max(0.0, self._deadline - SYSTEM_CLOCK.monotonic())
            return wait(attempt, whom=whom, what=self._what, timeout_s=remaining_s)
        except DeadlineExceeded as error:
            raise GroupBroken(f"{self._what} with {self._others} failed: {error}") from error
