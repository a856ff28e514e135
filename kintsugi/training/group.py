"""The ranks' process group as an object with a generation, destroyed and rebuilt while its process lives.

torch's global default group is not used: a group that hangs is abandoned here and the next generation starts beside
it. Nothing below blocks in the collective library's own waits, which nobody could interrupt; a collective is started
and then polled through `runtime.wait`, which declares the other ranks as the ones waited for.

Ranks that have an accelerator each exchange through NCCL. NCCL refuses two ranks on one device, so ranks that share
one, like those without any, exchange through gloo and host memory; which it is they tell from each other's devices
when they meet.

A group is *over* from the moment its generation is: `end` may be called from any thread, and whoever waits in a
collective raises `GroupBroken` at once.
"""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

import torch
import torch._C._distributed_c10d
from torch import Tensor

from kintsugi.errors import DeadlineExceeded, GroupBroken, Unfit
from kintsugi.model.device import CPU_IDENTITY, identity
from kintsugi.runtime import SYSTEM_CLOCK, wait

SHORTEST_POLL_S = 0.0002
LONGEST_POLL_S = 0.005
CLOSE_GRACE_S = 0.5
LONGEST_CONNECT_S = 1.0
STORE_ANSWERS_S = 1.0

T = TypeVar("T")

_distributed: Any = torch._C._distributed_c10d
"""What `torch.distributed` is made of, some of which it does not pass on; its annotations lack most of it."""


class _Work(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self) -> bool: ...


class _Backend(Protocol):
    """What torch's gloo and NCCL groups share. gloo's `abort` does nothing."""

    def abort(self) -> None: ...

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any) -> _Work: ...

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], options: Any
    ) -> _Work: ...


Interruption = Callable[[], str | None]
"""Asked while waiting; a reason means that the generation is over. May raise to end the wait its own way."""


class StoreServer:
    """Where a generation's ranks find each other, if this process is its first rank.

    It runs from the start of the process, so that the master can name it and nobody waits for it, and serves every
    generation under a prefix of its own. The socket is ours because the library would listen on all interfaces.
    """

    def __init__(self, host: str = "127.0.0.1", *, known_as: str = "") -> None:
        listener = socket.create_server((host, 0), backlog=128)
        port = listener.getsockname()[1]
        self.address = f"{known_as or host}:{port}"
        self._store: Any = _distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        self._store = None


def split_address(address: str) -> tuple[str, int]:
    """`split_address("127.0.0.1:4001") == ("127.0.0.1", 4001)`."""
    host, _, port = address.rpartition(":")
    return host, int(port)


class Route(StrEnum):
    """What collectives run on; the value is for people."""

    NCCL = "NCCL, one accelerator per rank"
    HOST = "gloo"
    STAGED = "gloo through host memory, because ranks share an accelerator"


def choose_route(identities: Sequence[str]) -> Route:
    """From every rank's device (`device.identity`), so that all choose alike.

    >>> choose_route(["GPU-a", "GPU-b"]).name, choose_route(["GPU-a", "GPU-a"]).name, choose_route(["cpu", "cpu"]).name
    ('NCCL', 'STAGED', 'HOST')
    """
    if CPU_IDENTITY in identities:
        return Route.HOST
    return Route.NCCL if len(set(identities)) == len(identities) else Route.STAGED


class ProcessGroup:
    """One generation of the data-parallel group. A group of one rank has no sockets and no collectives."""

    def __init__(
        self,
        *,
        generation: int,
        ranks: Sequence[str],
        rank: int,
        backend: _Backend | None,
        route: Route,
        interruption: Interruption,
    ) -> None:
        assert (backend is None) == (len(ranks) == 1)
        self.generation = generation
        self.ranks = tuple(ranks)
        self.rank = rank
        self.route = route
        self._backend = backend
        self._interruption = interruption
        self._over = threading.Event()
        self._why_over = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def others(self) -> str:
        """Whom a collective waits for."""
        return ", ".join(name for name in self.ranks if name != self.ranks[self.rank])

    def all_reduce(self, tensor: Tensor, *, timeout_s: float) -> None:
        """Sum in place."""
        options = _distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        staged = self._staged(tensor)
        self._run(
            lambda backend: backend.allreduce([staged], options), what="all-reduce", timeout_s=timeout_s
        )
        if staged is not tensor:
            tensor.copy_(staged)

    def all_gather(self, tensor: Tensor, *, timeout_s: float) -> Tensor:
        """Everybody's tensor, stacked in rank order; all must have the same shape."""
        options = _distributed.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        flat = self._staged(tensor.contiguous().flatten())
        gathered = flat.new_empty(self.size * flat.numel())
        self._run(
            lambda backend: backend._allgather_base(gathered, flat, options),
            what="all-gather",
            timeout_s=timeout_s,
        )
        return gathered.to(tensor.device).view(self.size, *tensor.shape)

    def all_to_all(
        self, tensor: Tensor, *, sent: Sequence[int], received: Sequence[int], timeout_s: float
    ) -> Tensor:
        """Consecutive parts of a flat tensor, one to each rank; gives what everybody sent here, in rank order."""
        options = _distributed.AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        staged = self._staged(tensor)
        incoming = staged.new_empty(sum(received))
        self._run(
            lambda backend: backend.alltoall_base(incoming, staged, list(received), list(sent), options),
            what="all-to-all",
            timeout_s=timeout_s,
        )
        return incoming.to(tensor.device)

    def _staged(self, tensor: Tensor) -> Tensor:
        """Where the route can reach it."""
        return tensor if self.route is Route.NCCL else tensor.cpu()

    def end(self, why: str) -> None:
        """The generation is over: a collective that is running or begins later raises. Thread-safe."""
        if not self._over.is_set():
            self._why_over = why
            self._over.set()

    def close(self) -> None:
        """End the group and let go of its sockets.

        The library's destructor waits for a collective that still hangs, so the last reference is dropped by a thread
        that is left behind if it takes long.
        """
        self.end("the group was closed")
        if self._backend is None:
            return
        backends, self._backend = [self._backend], None
        dropping = threading.Thread(
            target=_drop, args=(backends,), name=f"drop-group-{self.generation}", daemon=True
        )
        dropping.start()

        def attempt(remaining_s: float) -> bool | None:
            dropping.join(remaining_s)
            return None if dropping.is_alive() else True

        with suppress(DeadlineExceeded):
            wait(attempt, whom=self.others, what="the end of a collective", timeout_s=CLOSE_GRACE_S)

    def _run(
        self,
        start: Callable[[_Backend], _Work],
        *,
        what: str,
        timeout_s: float,
    ) -> None:
        """Start a collective and poll it to its end."""
        what = f"{what} of generation {self.generation}"
        self.check(what)
        assert self._backend is not None, "collectives need a group of several ranks"
        try:
            work = start(self._backend)
            wait(self._completion(work, what=what), whom=self.others, what=what, timeout_s=timeout_s)
            work.wait()
        except (RuntimeError, DeadlineExceeded) as error:
            self.end(str(error))
            raise GroupBroken(f"{what} with {self.others} failed: {_plain(error)}") from error

    def _completion(self, work: _Work, *, what: str) -> Callable[[float], bool | None]:
        """Polls seldom when it takes long, so that waiting costs no core."""
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

    def check(self, what: str) -> None:
        """Raise GroupBroken if the generation is over."""
        why = self._interruption()
        if why is not None:
            self.end(why)
        if self._over.is_set():
            raise GroupBroken(f"{what}: generation {self.generation} is over: {self._why_over}")


def join_group(
    *,
    generation: int,
    ranks: Sequence[str],
    me: str,
    store_address: str,
    device: torch.device,
    timeout_s: float,
    interruption: Interruption = lambda: None,
) -> ProcessGroup:
    """Meet the other ranks of a generation, within `timeout_s`."""
    backend, route = None, Route.HOST
    if len(ranks) > 1:
        meeting = _Meeting(
            generation=generation,
            ranks=ranks,
            me=me,
            store_address=store_address,
            timeout_s=timeout_s,
            interruption=interruption,
        )
        backend, route = meeting.connect(device)
    return ProcessGroup(
        generation=generation,
        ranks=ranks,
        rank=ranks.index(me),
        backend=backend,
        route=route,
        interruption=interruption,
    )


class _Meeting:
    """One rank's way into a generation.

    The library connects in one go that nobody can interrupt. So ranks first meet here: each reaches the store and
    announces itself there, and only when all have done so is the library called, which then has nobody to wait for.
    A store whose process is stopped answers nobody, and the library waits for it too: all of it happens in a thread
    that is left behind when the generation is over.
    """

    def __init__(
        self,
        *,
        generation: int,
        ranks: Sequence[str],
        me: str,
        store_address: str,
        timeout_s: float,
        interruption: Interruption,
    ) -> None:
        self._ranks = ranks
        self._rank = ranks.index(me)
        self._address = split_address(store_address)
        self._prefix = f"generation-{generation}"
        self._deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._interruption = interruption
        self._others = ", ".join(name for name in ranks if name != me)
        self._what = f"joining generation {generation} of the process group"
        self._over = threading.Event()
        """Set when nobody waits for the group any more."""

    def connect(self, device: torch.device) -> tuple[_Backend, Route]:
        joining = _in_background(lambda: self._join(device), name=self._prefix)

        def attempt(remaining_s: float) -> tuple[_Backend, Route] | None:
            why = self._interruption()
            if why is not None:
                raise GroupBroken(f"{self._what} with {self._others}: {why}")
            if not joining.done():
                self._over.wait(min(LONGEST_POLL_S, remaining_s))
                return None
            failure = joining.exception()
            if failure is not None:
                # Not raised itself: its trace would hold this frame, which holds the future, which holds the error.
                raise self._broken(failure) from failure
            return joining.result()

        try:
            return wait(attempt, whom=self._others, what=self._what, timeout_s=self._remaining_s())
        except DeadlineExceeded as error:
            if self._rank == 0 and not self._store_answers():
                raise Unfit("the store of this process, at which ranks meet, does not answer") from error
            raise self._broken(error) from error
        finally:
            self._over.set()

    def _store_answers(self) -> bool:
        """Of the first rank, whose store it is: nobody else's trouble keeps it from reaching itself."""
        answer = _in_background(lambda: self._store().set("question", ""), name="checking its store")

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

    def _join(self, device: torch.device) -> tuple[_Backend, Route]:
        """In the thread."""
        interface = self._poll(self._reach, whom=self._ranks[0])
        store = self._announce(identity(device))
        here = [f"here-{rank}" for rank in range(len(self._ranks))]
        self._poll(lambda: store.check(here) or None, whom=self._others)
        route = choose_route([store.get(key).decode() for key in here])
        return self._backend(store, interface=interface, route=route), route

    def _reach(self) -> str | None:
        """Whether somebody listens at the store's address; gives the address by which this rank got there."""
        try:
            with socket.create_connection(self._address, timeout=LONGEST_CONNECT_S) as connection:
                interface: str = connection.getsockname()[0]
                return interface
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise RuntimeError("no socket can be opened") from error
            return None

    def _announce(self, identity: str) -> Any:
        """Say in the store that this rank is here."""
        store = self._store()
        store.set(f"here-{self._rank}", identity)
        return store

    def _store(self) -> Any:
        client = _distributed.TCPStore(
            *self._address, is_master=False, wait_for_workers=False, timeout=self._timeout
        )
        return _distributed.PrefixStore(self._prefix, client)

    def _backend(self, store: Any, *, interface: str, route: Route) -> _Backend:
        if route is Route.NCCL:
            return cast(
                _Backend, _distributed.ProcessGroupNCCL(store, self._rank, len(self._ranks), self._timeout)
            )
        options = _distributed.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._threads = 1
        options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=interface)]
        return cast(_Backend, _distributed.ProcessGroupGloo(store, self._rank, len(self._ranks), options))

    def _poll(self, look: Callable[[], T | None], *, whom: str) -> T:
        """Look again and again until there is something, the time is over, or nobody waits for it any more."""

        def attempt(remaining_s: float) -> T | None:
            if self._over.is_set():
                raise RuntimeError("nobody waits for this generation any more")
            found = look()
            if found is None:
                self._over.wait(min(LONGEST_POLL_S, remaining_s))
            return found

        return wait(attempt, whom=whom, what=self._what, timeout_s=self._remaining_s())

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline - SYSTEM_CLOCK.monotonic())


def _drop(backends: list[_Backend]) -> None:
    """Give up what still runs, then the group itself."""
    for backend in backends:
        backend.abort()
    backends.clear()


def _in_background(function: Callable[[], T], *, name: str) -> Future[T]:
    """Run in a daemon thread: one that hangs must not keep the process alive, as an executor's would."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except (RuntimeError, DeadlineExceeded) as error:
            # Without its trace: this frame is in it, and would keep the future that keeps the error.
            future.set_exception(error.with_traceback(None))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _plain(error: BaseException) -> str:
    """What the library says, without its source file, advice and stack."""
    text = str(error).partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^\[\S+\] ", "", text)
