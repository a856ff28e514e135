"""The first process of a pod: waits for a ticket in a mounted file, and is then the supervisor of its host.

A controller makes a new pod as soon as one is lost, often before there is a new ticket, and the file of a Secret may
show an old one for a while. So a ticket that the run does not take is no error: the file is read again until it
changes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

import msgspec

from kintsugi.cluster.host_supervisor import supervise_host
from kintsugi.cluster.joining import MOST_TICKET_BYTES, Ticket
from kintsugi.errors import DeadlineExceeded, WorldError
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import wait

WAIT_S = 600.0
"""Time without a ticket, after which this pod ends without an error: the run is over, or gone."""
ANOTHER_S = 30.0
"""Time for another ticket after one that the run did not take."""
STALE_S = 900.0
"""Age of a ticket that tells a launcher that is gone from one that does not answer: it makes a new one every minute."""
LOOK_S = 0.1
MOST_TRIED = 8
"""Tickets that are remembered because the run did not take them; a file does not show older ones again."""


def supervise_with_file(
    path: Path,
    *,
    scratch: Path,
    supervise: Callable[[Ticket, Path], int] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    wait_s: float = WAIT_S,
    another_s: float = ANOTHER_S,
) -> int:
    """Redeem the ticket of a file and supervise this host; return the exit code. Main thread only.

    0 if the run is over: no ticket, or only an old one. UserError or WorldError if the run does not take this host.
    """
    # The first process of a container gets no signal that it has not asked for.
    signal.signal(signal.SIGTERM, _end)
    supervise = supervise or _supervise
    tried: deque[bytes] = deque(maxlen=MOST_TRIED)
    problem: WorldError | None = None
    while True:
        timeout_s = wait_s if problem is None else another_s
        try:
            ticket, content = _next_ticket(path, tried, timeout_s=timeout_s, clock=clock)
        except DeadlineExceeded as error:
            if problem is not None:
                raise problem from error
            sys.stderr.write(f"{error}; this host is not needed\n")
            return 0
        try:
            return supervise(ticket, scratch)
        except WorldError as error:
            # The ticket of a run that is gone, or of this host's predecessor.
            sys.stderr.write(f"{error}\n")
            if clock.wall() - ticket.made_at > STALE_S:
                return 0
            problem = error
            tried.append(content)


def _supervise(ticket: Ticket, scratch: Path) -> int:
    return supervise_host(ticket, scratch=scratch)


def _end(number: int, frame: FrameType | None) -> None:
    """Leave at once: there is nothing to be ended before this host has joined."""
    os._exit(128 + number)


def _next_ticket(
    path: Path, tried: Collection[bytes], *, timeout_s: float, clock: Clock
) -> tuple[Ticket, bytes]:
    """Wait until the file holds a ticket that was not tried."""

    def attempt(remaining_s: float) -> tuple[Ticket, bytes] | None:
        try:
            content = path.read_bytes()[:MOST_TICKET_BYTES]
            if content not in tried:
                return msgspec.json.decode(content, type=Ticket), content
        except (FileNotFoundError, msgspec.DecodeError):
            pass
        time.sleep(min(LOOK_S, remaining_s))
        return None

    return wait(
        attempt, whom="the launcher", what=f"a new ticket in {path}", timeout_s=timeout_s, clock=clock
    )
