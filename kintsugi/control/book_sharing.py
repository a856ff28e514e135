"""Distribution of the address book: to each process what changed since the book that it has, once per tick.

With n processes a whole book per change and process would be n² bytes, and n³ while a run starts. Here a change costs
one short message per process, and a new process gets the book once. A message may be lost: heartbeats show which book
a process has, and it is sent what it lacks again. A rank that has failed for want of an address is not left to its next
heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kintsugi.control.membership import WorkerRegistry
from kintsugi.protocol.membership import AddressBook
from kintsugi.types import Peer

SHARE_S = 0.2
"""Changes within this time are sent together. A change after a longer time without any is sent immediately."""
RESEND_S = 1.0
"""Time for a book to arrive and be shown by a heartbeat, before it is sent again."""


class _Recipient(msgspec.Struct):
    """Books of one incarnation of a process."""

    incarnation: str
    shown: int | None
    """Number of the book that its last heartbeat showed; before that, the one that it is assumed to have."""
    sent: int | None = None
    """Number of the last book that was sent to it."""
    sent_at: float = -math.inf
    """When it was last sent what it lacks by its last heartbeat; later changes build on that."""


class BookSharing:
    """Decides which process is sent which part of the book, and when; the caller sends.

    sharing.changed()                                   # the effect `ShareBook`
    for book, processes in sharing.due(now): …          # every turn
    book = sharing.before_request("model-0", now)       # so that a request never overtakes the book
    book = sharing.after_heartbeat("model-0", number, now)
    """

    def __init__(self, members: WorkerRegistry, *, master: Peer) -> None:
        self._members, self._master = members, master
        self._recipients: dict[str, _Recipient] = {}
        self._is_due = False
        self._next_share = -math.inf

    def changed(self, *, lacking: Sequence[str] = ()) -> None:
        """Send what changed, with the next turn or tick. Processes that are known to be `lacking` some of it are sent
        the whole book again: what they were sent was lost."""
        self._is_due = True
        for process in lacking:
            if self._members.is_listed(process):
                incarnation = self._members.members[process].incarnation
                self._recipients[process] = _Recipient(incarnation, None)

    def due(self, now: float) -> list[tuple[AddressBook, list[str]]]:
        """Return books to send, each with its receivers: those that have the same book need the same difference."""
        if not self._is_due or now < self._next_share:
            return []
        self._is_due, self._next_share = False, now + SHARE_S
        receivers: dict[int | None, list[str]] = {}
        for process in self._members.listed():
            recipient = self._recipient(process)
            if self._lacks(recipient, now):
                receivers.setdefault(self._note(recipient, now), []).append(process)
        return [(self._book(number), processes) for number, processes in receivers.items()]

    def before_request(self, process: str, now: float) -> AddressBook | None:
        """Return a book to send before a request to this process, if one is waiting to be sent."""
        if not self._is_due or not self._members.is_listed(process):
            return None
        recipient = self._recipient(process)
        return self._take(recipient, now) if self._lacks(recipient, now) else None

    def after_heartbeat(self, process: str, number: int, now: float) -> AddressBook | None:
        """Note which book a process has; return what it lacks, unless that may still be under way."""
        if not self._members.is_listed(process):
            return None
        recipient = self._recipient(process)
        recipient.shown = number if number >= 0 else None
        if self._is_due or not self._lacks(recipient, now):
            return None
        return self._take(recipient, now)

    def _recipient(self, process: str) -> _Recipient:
        member = self._members.members[process]
        known = self._recipients.get(process)
        if known is None or known.incarnation != member.incarnation:
            # A process of an earlier master probably has that master's last book; if not, its heartbeat will show it.
            is_old = member.changed <= self._members.previous_number
            shown = self._members.previous_number if is_old else None
            known = self._recipients[process] = _Recipient(member.incarnation, shown)
        return known

    def _lacks(self, recipient: _Recipient, now: float) -> bool:
        number = self._members.book_number
        if recipient.shown is not None and recipient.shown >= number:
            return False
        return recipient.sent != number or now - recipient.sent_at >= RESEND_S

    def _take(self, recipient: _Recipient, now: float) -> AddressBook:
        return self._book(self._note(recipient, now))

    def _note(self, recipient: _Recipient, now: float) -> int | None:
        """Note that the process is sent what it lacks; return the number of the book that it has, or will have by then.

        What was sent earlier arrives earlier, or is lost, which its heartbeats show.
        """
        is_under_way = recipient.sent is not None and now - recipient.sent_at < RESEND_S
        has = recipient.sent if is_under_way else recipient.shown
        if not is_under_way:
            recipient.sent_at = now
        recipient.sent = self._members.book_number
        return has

    def _book(self, since: int | None) -> AddressBook:
        return self._members.address_book(self._master, since=since)
