"""A stop that somebody asked of the agent, and that it owes to the master: a judge without a clock."""

from __future__ import annotations

import signal


class OwedStop:
    """The first request is passed on to the master, once there is one that can hear it; the second ends everything.

    A master that was adopted or restarted hears signals from the moment that it speaks in an epoch of its own.
    """

    def __init__(self, *, requested: bool) -> None:
        """`requested`: an earlier agent was asked already."""
        self._owed = requested
        self._num_requests = int(requested)
        self._silent_before: int | None = None

    @property
    def was_requested(self) -> bool:
        return self._num_requests > 0

    def signalled(self, number: signal.Signals) -> bool:
        """Whether this one means: at once."""
        self._num_requests += 1
        at_once = number == signal.SIGINT or self._num_requests > 1
        self._owed = self._owed or not at_once
        return at_once

    def expect_master(self, *, after_epoch: int) -> None:
        """There is another master, or one that another agent began: it is heard of first in a later epoch."""
        self._silent_before = after_epoch
        self._owed = self._owed or self.was_requested

    def is_due(self, *, epoch: int, registered: bool) -> bool:
        """Whether the master is to be asked now; counts as done."""
        hears = self._silent_before is None or (registered and epoch > self._silent_before)
        due, self._owed = self._owed and hears, self._owed and not hears
        return due
