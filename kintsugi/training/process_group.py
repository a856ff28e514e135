"""The process groups of the ranks: they can be abandoned and rebuilt while the processes stay alive.

Each group has a number (`group_id`; the field `generation` of the messages). Groups are numbered in the order in which
the master rebuilds them, and a number is never used twice.

torch's global default group is not used: a group that hangs is abandoned, and the next one is created alongside it.
Nothing below blocks inside the collective library, because its waits cannot be interrupted. A collective is started and
then polled through `runtime.wait`, which declares the other ranks as the processes waited for.

Ranks with an accelerator each communicate through NCCL. NCCL refuses two ranks on one device, so ranks that share a
device, like those without any, communicate through gloo and host memory. The ranks derive the route from each other's
device identities when they meet.

The ranks meet at the store of the first one (`transport.store`), which only processes of the run can use. Neither gloo
nor NCCL authenticates connections by itself. The first rank therefore leaves a secret in the store; gloo's ranks prove
to each other that they have it (`torch_internals.gloo_group`), and NCCL's ranks find each other by an identifier with a
random number of its own, which they receive through the store too.

A rank is in one group with all ranks and, if the model is cut over ranks, in further ones with some of them
(`group.Groups`). All of a generation meet at the same store, under names of their own.

`end` may be called from any thread; every collective of the group that is running then raises `GroupBroken`.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kintsugi.errors import DeadlineExceeded, GroupBroken, GroupFailed, Unfit
from kintsugi.model.device import CPU_IDENTITY, identity
from kintsugi.model.seats import Mesh
from kintsugi.model.torch_internals import (
    Backend,
    GroupStore,
    Store,
    Work,
    gloo_group,
    nccl_group,
    prefix_store,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
)
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import join, wait
from kintsugi.training.group import Edge, GroupLife, Groups, Interruption, group_title
from kintsugi.transport.store import StoreClient, split_address

SHORTEST_POLL_S = 0.0002
LONGEST_POLL_S = 0.005
CLOSE_GRACE_S = 0.5
LONGEST_CONNECT_S = 1.0
STORE_ANSWERS_S = 1.0
SEND_TIMEOUT_S = 1800.0
"""Limit of the library for a tensor to be taken by the next stage; the waits of the ranks have shorter ones."""
SECRET_KEY = "secret"
SECRET_BYTES = 32

T = TypeVar("T")


class Route(StrEnum):
    """Library and path that collectives use; the value is the text shown to operators."""

    NCCL = "NCCL, one accelerator per rank"
    HOST = "gloo"
    STAGED = "gloo through host memory, because ranks share an accelerator"


def choose_route(identities: Sequence[str]) -> Route:
    """Choose the route from the devices of all ranks (`device.identity`), so that all ranks choose the same one.

    >>> choose_route(["GPU-a", "GPU-b"]).name, choose_route(["GPU-a", "GPU-a"]).name, choose_route(["cpu", "cpu"]).name
    ('NCCL', 'STAGED', 'HOST')
    """
    if CPU_IDENTITY in identities:
        return Route.HOST
    return Route.NCCL if len(set(identities)) == len(identities) else Route.STAGED


class StartedExchange:
    """An all-to-all that runs in the background."""

    def __init__(
        self, group: ProcessGroup, work: Work, *, outgoing: Tensor, incoming: Tensor, into: Tensor
    ) -> None:
        self.work = work
        self._group, self._outgoing, self._incoming, self._into = group, outgoing, incoming, into

    def received(self, *, timeout_s: float) -> Tensor:
        """Wait until it has ended, and return what was received."""
        self._group.await_exchange(self, timeout_s=timeout_s)
        if self._incoming is not self._into:
            self._into.copy_(self._incoming)
        return self._into


class ProcessGroup(GroupLife):
    """One group of ranks. A group of one rank has no sockets and no collectives."""

    def __init__(
        self,
        *,
        group_id: int,
        ranks: Sequence[str],
        rank: int,
        backend: Backend | None,
        route: Route,
        interruption: Interruption,
        store: OpenStore | None = None,
        name: str = "",
    ) -> None:
        """`store` is closed with the group: NCCL uses it as long as the group lives. `name` tells the groups of one
        generation apart; empty for that of all ranks."""
        assert (backend is None) == (len(ranks) == 1)
        super().__init__(group_id=group_id, ranks=ranks, rank=rank, interruption=interruption, name=name)
        self._sent: deque[tuple[Work, Tensor]] = deque()
        """Tensors that are being sent, in their order."""
        self._started: deque[StartedExchange] = deque()
        """Exchanges that run in the background, in their order."""
        self.route = route
        self._backend = backend
        self._store = store

    def all_reduce(self, tensor: Tensor, *, timeout_s: float) -> None:
        """Sum a tensor over all ranks, in place."""
        timeout = timedelta(seconds=timeout_s)
        staged = self._staged(tensor)
        self._run(
            lambda backend: start_all_reduce(backend, staged, timeout=timeout),
            what="all-reduce",
            timeout_s=timeout_s,
        )
        if staged is not tensor:
            tensor.copy_(staged)

    def all_gather(self, tensor: Tensor, *, timeout_s: float) -> Tensor:
        """Return the tensors of all ranks, stacked in rank order; all must have the same shape."""
        timeout = timedelta(seconds=timeout_s)
        flat = self._staged(tensor.contiguous().flatten())
        gathered = flat.new_empty(self.size * flat.numel())
        self._run(
            lambda backend: start_all_gather(backend, flat, into=gathered, timeout=timeout),
            what="all-gather",
            timeout_s=timeout_s,
        )
        return gathered.to(tensor.device).view(self.size, *tensor.shape)

    def gather_in_pass(self, tensor: Tensor, *, timeout_s: float) -> Tensor:
        """As `all_gather`. With NCCL it is enqueued on the device, which waits for it; the host does not poll."""
        if self.route is not Route.NCCL:
            return self.all_gather(tensor, timeout_s=timeout_s)
        what = f"all-gather within a pass of {self._title}"
        self.check(what)
        assert self._backend is not None, "collectives need a group of several ranks"
        flat = tensor.contiguous().flatten()
        gathered = flat.new_empty(self.size * flat.numel())
        try:
            work = start_all_gather(self._backend, flat, into=gathered, timeout=timedelta(seconds=timeout_s))
            work.wait()  # With NCCL the stream of the device waits, not the host.
        except RuntimeError as error:
            raise self._broken(what, error) from error
        return gathered.view(self.size, *tensor.shape)

    def all_to_all(
        self, tensor: Tensor, *, sent: Sequence[int], received: Sequence[int], timeout_s: float
    ) -> Tensor:
        """Send consecutive parts of a flat tensor, one to each rank; return the parts received, in rank order."""
        timeout = timedelta(seconds=timeout_s)
        staged = self._staged(tensor)
        incoming = staged.new_empty(sum(received))
        self._run(
            lambda backend: start_all_to_all(
                backend, staged, into=incoming, sent=sent, received=received, timeout=timeout
            ),
            what="all-to-all",
            timeout_s=timeout_s,
        )
        return incoming.to(tensor.device)

    def start_all_to_all(
        self,
        tensor: Tensor,
        *,
        sent: Sequence[int],
        received: Sequence[int],
        timeout_s: float,
        into: Tensor | None = None,
    ) -> StartedExchange:
        """Start an `all_to_all`, into this memory if it is given; the tensor must not change before its result is
        there. Results are taken in the order in which exchanges were started."""
        what = f"all-to-all of {self._title}"
        self.check(what)
        assert self._backend is not None, "collectives need a group of several ranks"
        staged = self._staged(tensor)
        into = tensor.new_empty(sum(received)) if into is None else into
        incoming = into if into.device == staged.device else staged.new_empty(sum(received))
        try:
            work = start_all_to_all(
                self._backend,
                staged,
                into=incoming,
                sent=sent,
                received=received,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise self._broken(what, error) from error
        exchange = StartedExchange(self, work, outgoing=staged, incoming=incoming, into=into)
        self._started.append(exchange)
        return exchange

    def await_exchange(self, exchange: StartedExchange, *, timeout_s: float) -> None:
        """Wait until an exchange has ended; with NCCL the device waits, not the host."""
        self.check("exchange")
        assert self._started and self._started[0] is exchange, (
            "results are taken in the order of the exchanges"
        )
        if self.route is Route.NCCL:
            try:
                work = exchange.work
                work.wait()  # With NCCL the stream of the device waits, not the host.
            except RuntimeError as error:
                raise self._broken("exchange", error) from error
        else:
            self._run(lambda backend: exchange.work, what="exchange", timeout_s=timeout_s)
        self._started.popleft()

    def send(self, tensor: Tensor) -> None:
        """Start to send a tensor from the first rank to the other one; it must not change any more."""
        assert self.rank == 0, "the first rank sends"
        self.check("sending")
        assert self._backend is not None, "collectives need a group of several ranks"
        staged = self._staged(_bytes_of(tensor.contiguous()))
        try:
            work = start_broadcast(self._backend, staged, timeout=timedelta(seconds=SEND_TIMEOUT_S))
        except RuntimeError as error:
            raise self._broken("sending", error) from error
        self._sent.append((work, staged))
        while self._sent and self._sent[0][0].is_completed():
            self._run(lambda backend: self._sent.popleft()[0], what="sending", timeout_s=SEND_TIMEOUT_S)

    def await_sent(self, *, timeout_s: float) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            self._run(lambda backend: self._sent.popleft()[0], what="sending", timeout_s=timeout_s)

    def receive(self, into: Tensor, *, timeout_s: float) -> None:
        """Fill a tensor with the one that the first rank sends."""
        assert self.rank == 1, "the second rank receives"
        timeout = timedelta(seconds=timeout_s)
        target = _bytes_of(into)
        is_direct = self.route is Route.NCCL or not into.is_cuda
        staged = target if is_direct else torch.empty_like(target, device="cpu")
        self._run(
            lambda backend: start_broadcast(backend, staged, timeout=timeout),
            what="receiving",
            timeout_s=timeout_s,
        )
        if not is_direct:
            target.copy_(staged)

    def _staged(self, tensor: Tensor) -> Tensor:
        """Return the tensor in memory that the route can access: on the device for NCCL, else on the host."""
        return tensor if self.route is Route.NCCL else tensor.cpu()

    def close(self) -> None:
        """End the group and release its sockets.

        The library's destructor waits for a collective that still hangs. The last reference is therefore dropped by a
        daemon thread, for which this method waits only `CLOSE_GRACE_S`.
        """
        self.end("the group was closed")
        if self._backend is None:
            return
        backends, self._backend = [self._backend], None
        under_way: list[deque[Any]] = [self._sent, self._started]
        self._sent, self._started = deque(), deque()
        dropping = threading.Thread(
            target=_drop,
            args=(backends, self._store, under_way),
            name=f"drop-group-{self.group_id}",
            daemon=True,
        )
        del under_way
        dropping.start()
        with suppress(DeadlineExceeded):
            join(dropping, whom=self.others, what="the end of a collective", timeout_s=CLOSE_GRACE_S)

    def _run(
        self,
        start: Callable[[Backend], Work],
        *,
        what: str,
        timeout_s: float,
    ) -> None:
        """Start a collective and poll it until it completes."""
        what = f"{what} of {self._title}"
        self.check(what)
        assert self._backend is not None, "collectives need a group of several ranks"
        try:
            work = start(self._backend)
            wait(self._completion(work, what=what), whom=self.others, what=what, timeout_s=timeout_s)
            work.wait()
        except (RuntimeError, DeadlineExceeded) as error:
            raise self._broken(what, error) from error

    def _broken(self, what: str, error: Exception) -> GroupBroken:
        self.end(str(error))
        peers = tuple(name for name in self.ranks if name != self.ranks[self.rank])
        failed = GroupFailed(self.group_id, peers, _plain(error))
        return GroupBroken(f"{what} with {self.others} failed: {failed.reason}", detail=failed)

    def _completion(self, work: Work, *, what: str) -> Callable[[float], bool | None]:
        """Return a poll function with a growing interval, so that a long wait uses little CPU."""
        interval_s = SHORTEST_POLL_S

        def attempt(remaining_s: float) -> bool | None:
            nonlocal interval_s
            if work.is_completed():
                return True
            self._over.wait(min(interval_s, remaining_s))
            self.check(what)
            interval_s = min(interval_s * 1.2, LONGEST_POLL_S)
            return None

        return attempt


def join_group(
    *,
    group_id: int,
    ranks: Sequence[str],
    me: str,
    store_address: str,
    keys: tuple[bytes, bytes],
    device: torch.device,
    timeout_s: float,
    interruption: Interruption = lambda: None,
    name: str = "",
    serves_store: bool | None = None,
) -> ProcessGroup:
    """Create the group with the other ranks, within `timeout_s`; `keys` is the key pair of this process. `name` tells
    the groups of one generation apart. `serves_store`: whether the store is this process's, by default that of the
    first rank."""
    backend, route, store = None, Route.HOST, None
    if len(ranks) > 1:
        rendezvous = _Rendezvous(
            group_id=group_id,
            ranks=ranks,
            me=me,
            store_address=store_address,
            keys=keys,
            timeout_s=timeout_s,
            interruption=interruption,
            name=name,
            serves_store=me == ranks[0] if serves_store is None else serves_store,
        )
        backend, route, store = rendezvous.connect(device)
    return ProcessGroup(
        group_id=group_id,
        ranks=ranks,
        rank=ranks.index(me),
        backend=backend,
        route=route,
        interruption=interruption,
        store=store,
        name=name,
    )


def join_groups(
    mesh: Mesh,
    *,
    group_id: int,
    ranks: Sequence[str],
    me: str,
    store_address: str,
    keys: tuple[bytes, bytes],
    device: torch.device,
    timeout_s: float,
    interruption: Interruption = lambda: None,
    is_tied: bool = False,
) -> Groups:
    """Create all groups of a generation that this rank is in, within `timeout_s`. Every rank creates its groups in one
    order: that of all ranks, then those of the data, tensor and stage axes, then the edges from the first stage on, and
    the one between the ends of a model with tied embeddings (`is_tied`)."""
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    opened = ExitStack()

    def join(name: str, members: Sequence[int]) -> ProcessGroup:
        group = join_group(
            group_id=group_id,
            ranks=[ranks[number] for number in members],
            me=me,
            store_address=store_address,
            keys=keys,
            device=device,
            timeout_s=max(0.0, deadline - SYSTEM_CLOCK.monotonic()),
            interruption=interruption,
            name=name,
            serves_store=me == ranks[0],
        )
        opened.callback(group.close)
        return group

    with opened:
        world = join("", range(len(ranks)))
        groups = Groups.of(world)
        if mesh.model_ranks > 1:
            assert ranks.index(me) == mesh.number_of(me), "a model that is cut over ranks needs all of them"
            groups = _join_parts(mesh, mesh.number_of(me), world=world, is_tied=is_tied, join=join)
        opened.pop_all()
    return groups


def _join_parts(
    mesh: Mesh,
    mine: int,
    *,
    world: ProcessGroup,
    is_tied: bool,
    join: Callable[[str, Sequence[int]], ProcessGroup],
) -> Groups:
    """Join the groups with some of the ranks. A name has the first member's number: groups of one kind are disjoint."""
    seat, column = mesh.seat(mine), mesh.data_column(mine, num_ranks=world.size)
    data = join(f"data-{column[0]}", column)
    tensors = stages = previous = following = embedding = None
    if mesh.tensors > 1:
        row = mesh.tensor_row(mine)
        tensors = join(f"tensors-{row[0]}", row)
    if mesh.stages > 1:
        pipeline = mesh.pipeline(mine)
        stages = join(f"stages-{pipeline[0]}", pipeline)

        def edge(first: int, second: int, of: str = "") -> Edge:
            forward = join(f"{of}forward-{first}", (first, second))
            return Edge(forward, join(f"{of}backward-{first}", (second, first)))

        if not seat.is_first:
            previous = edge(pipeline[seat.stage - 1], mine)
        if not seat.is_last:
            following = edge(mine, pipeline[seat.stage + 1])
        if is_tied and (seat.is_first or seat.is_last):
            embedding = edge(pipeline[0], pipeline[-1], of="embedding-")
    return Groups(world, data, tensors, stages, previous, following, embedding)


class OpenStore:
    """Connection to a group's store, and the objects by which torch uses it."""

    def __init__(self, address: str, *, prefix: str, keys: tuple[bytes, bytes], timeout_s: float) -> None:
        self._client = StoreClient(address, keys=keys, timeout_s=timeout_s)
        self._store = GroupStore(self._client)
        self.view: Store = prefix_store(prefix, self._store)
        """The store as torch sees it; every key has the group's prefix."""

    def close(self) -> None:
        self._client.close()


class Connected(NamedTuple):
    """Result of a rendezvous. The store stays open where the library uses it later."""

    backend: Backend
    route: Route
    store: OpenStore | None


class _Rendezvous:
    """Rendezvous of one rank with the others of a new group.

    The library connects all ranks in one call that cannot be interrupted. Each rank therefore first announces itself
    in the store; the library is called only when all ranks have done so, and then has no rank to wait for. A store in
    a stopped process does not answer, and the library waits for that as well. All of it runs in a daemon thread, which
    is abandoned when the group has ended.
    """

    def __init__(
        self,
        *,
        group_id: int,
        ranks: Sequence[str],
        me: str,
        store_address: str,
        keys: tuple[bytes, bytes],
        timeout_s: float,
        interruption: Interruption,
        name: str = "",
        serves_store: bool = False,
    ) -> None:
        self._ranks = ranks
        self._rank = ranks.index(me)
        self._store_address = store_address
        self._address = split_address(store_address)[:2]
        self._keys = keys
        self._prefix = f"generation-{group_id}" + (f"/{name}" if name else "")
        self._serves_store = serves_store
        self._deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._interruption = interruption
        self._others = ", ".join(name for name in ranks if name != me)
        self._what = f"joining {group_title(group_id, name)} of the process group"
        self._over = threading.Event()
        """Set when `connect` has returned or raised: the background thread gives up."""

    def connect(self, device: torch.device) -> Connected:
        joining = _in_background(lambda: self._join(device), name=self._prefix)

        def attempt(remaining_s: float) -> Connected | None:
            why = self._interruption()
            if why is not None:
                raise GroupBroken(f"{self._what} with {self._others}: {why}")
            if not joining.done():
                self._over.wait(min(LONGEST_POLL_S, remaining_s))
                return None
            failure = joining.exception()
            if failure is not None:
                # Not raised itself: its traceback would reference this frame, and through it the future and the error.
                raise self._broken(failure) from failure
            return joining.result()

        try:
            return wait(attempt, whom=self._others, what=self._what, timeout_s=self._remaining_s())
        except DeadlineExceeded as error:
            if self._serves_store and not self._store_answers():
                raise Unfit("the store of this process, at which ranks meet, does not answer") from error
            raise self._broken(error) from error
        finally:
            self._over.set()

    def _store_answers(self) -> bool:
        """Whether the store of this process answers. Only the rank that serves it asks."""

        def ask() -> None:
            with closing(self._open_store(STORE_ANSWERS_S)) as store:
                store.view.set("question", "")

        answer = _in_background(ask, name="checking its store")

        def attempt(remaining_s: float) -> bool | None:
            if not answer.done():
                self._over.wait(min(LONGEST_POLL_S, remaining_s))
                return None
            return answer.exception() is None

        try:
            return wait(attempt, whom="its own store", what="an answer", timeout_s=STORE_ANSWERS_S)
        except DeadlineExceeded:
            return False

    def _broken(self, error: BaseException) -> GroupBroken:
        host, port = self._address
        return GroupBroken(f"{self._what} with {self._others} at {host}:{port} failed: {_plain(error)}")

    def _join(self, device: torch.device) -> Connected:
        """Announce this rank, wait for the others and connect; runs in the background thread."""
        interface = self._poll(self._reach, whom=self._ranks[0])
        with ExitStack() as opened:
            store = opened.enter_context(closing(self._open_store(self._timeout.total_seconds())))
            if self._rank == 0:
                store.view.set(SECRET_KEY, secrets.token_hex(SECRET_BYTES))
            store.view.set(f"here-{self._rank}", identity(device))
            here = [f"here-{rank}" for rank in range(len(self._ranks))]
            self._poll(lambda: store.view.check([SECRET_KEY, *here]) or None, whom=self._others)
            route = choose_route([store.view.get(key).decode() for key in here])
            backend = self._backend(store.view, interface=interface, route=route)
            if route is Route.NCCL:
                opened.pop_all()
                return Connected(backend, route, store)
            return Connected(backend, route, None)

    def _reach(self) -> str | None:
        """Connect to the store's address; return this rank's own address on that connection, None if it failed."""
        try:
            with socket.create_connection(self._address, timeout=LONGEST_CONNECT_S) as connection:
                interface: str = connection.getsockname()[0]
                return interface
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise RuntimeError("no socket can be opened") from error
            return None

    def _open_store(self, timeout_s: float) -> OpenStore:
        return OpenStore(self._store_address, prefix=self._prefix, keys=self._keys, timeout_s=timeout_s)

    def _backend(self, store: Store, *, interface: str, route: Route) -> Backend:
        size = len(self._ranks)
        if route is Route.NCCL:
            return nccl_group(store, rank=self._rank, size=size, timeout=self._timeout)
        return gloo_group(
            store,
            rank=self._rank,
            size=size,
            interface=interface,
            timeout=self._timeout,
            secret=store.get(SECRET_KEY),
        )

    def _poll(self, look: Callable[[], T | None], *, whom: str) -> T:
        """Call `look` until it returns a value; stop at the deadline or when `connect` has ended."""

        def attempt(remaining_s: float) -> T | None:
            if self._over.is_set():
                raise RuntimeError("joining this generation was given up")
            found = look()
            if found is None:
                self._over.wait(min(LONGEST_POLL_S, remaining_s))
            return found

        return wait(attempt, whom=whom, what=self._what, timeout_s=self._remaining_s())

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline - SYSTEM_CLOCK.monotonic())


def _bytes_of(tensor: Tensor) -> Tensor:
    """View of a contiguous tensor: the libraries do not send every type."""
    return tensor.view(-1).view(torch.uint8)


def _drop(backends: list[Backend], store: OpenStore | None, under_way: list[deque[Any]]) -> None:
    """Abort the collectives that still run, then drop the group with their memory, and close its store."""
    for backend in backends:
        backend.abort()
    backends.clear()
    under_way.clear()
    if store is not None:
        store.close()


def _in_background(function: Callable[[], T], *, name: str) -> Future[T]:
    """Run a function in a daemon thread: unlike an executor's, a hanging thread does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except (RuntimeError, DeadlineExceeded) as error:
            # Without its traceback, which references this frame, and through it the future that holds the error.
            future.set_exception(error.with_traceback(None))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _plain(error: BaseException) -> str:
    """Message of a library error without its source file, advice and stack."""
    text = str(error).partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^\[\S+\] ", "", text)
