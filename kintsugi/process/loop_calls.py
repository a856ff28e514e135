"""Requests and functions of background threads, carried out in the loop of an endpoint."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from kintsugi.process.membership import ShuttingDown
from kintsugi.process.shell import Future
from kintsugi.protocol.messages import Body
from kintsugi.transport import Endpoint, PendingReply, Reply


class LoopCalls:
    """`run` and `call` may be used by any thread; what they order happens in the endpoint's loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._orders: deque[Callable[[], object]] = deque()
        self._futures: set[Future] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        """Held while the descriptor is written to, so that it is not closed meanwhile."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        endpoint.watch(self._wake_fd, self._carry_out)

    def run(self, order: Callable[[], object]) -> None:
        """Call a function in the loop, soon; not at all once this is closed."""
        with self._lock:
            if not self._is_closed:
                self._orders.append(order)
                os.eventfd_write(self._wake_fd, 1)

    def call(self, process: str, body: Body, deadline_s: float) -> Reply:
        """Send a request and wait for its reply; not from the thread of the loop."""
        future = Future(process=process, what=type(body).__name__, deadline_s=deadline_s)
        self._futures.add(future)
        try:
            if self._is_closed:
                raise ShuttingDown("the loop has ended")
            self.run(lambda: self._request(future, process, body, deadline_s))
            return future.result()
        finally:
            self._futures.discard(future)

    def close(self) -> None:
        """End the calls that other threads wait for; in the thread of the loop."""
        with self._lock:
            self._is_closed = True
        for future in tuple(self._futures):
            future.settle(None, ShuttingDown("the loop has ended"))
        self._endpoint.unwatch(self._wake_fd)
        os.close(self._wake_fd)

    def _request(self, future: Future, process: str, body: Body, deadline_s: float) -> None:
        def settle(pending: PendingReply) -> None:
            future.settle(pending.reply, pending.error)

        self._endpoint.request(process, body, deadline_s=deadline_s, on_done=settle)

    def _carry_out(self) -> None:
        os.eventfd_read(self._wake_fd)
        while self._orders:
            self._orders.popleft()()
