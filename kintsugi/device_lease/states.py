"""States of a device lease in the arbiter and in the holder, and all transitions.

holder                        arbiter
WAITING   ── requested ────►  WAITING
          ◄─── recalled ────  (holders of the other side: RECALLED)
          ──── released ───►  (IDLE again, or FENCED and ended: its fencing token is void from here on)
HOLDING   ◄──── granted ────  GRANTED
          ── acknowledged ─►  HOLDING
"""

from __future__ import annotations

from enum import StrEnum

from kintsugi.types import Role, role_of


class Side(StrEnum):
    """Side of a shared device: processes of one side may use it together; the two sides take turns."""

    TRAINING = "training"
    GENERATION = "generation"


def side_of(process: str) -> Side:
    """`side_of("server-1") is Side.GENERATION`."""
    return Side.GENERATION if role_of(process) is Role.SERVER else Side.TRAINING


class Claim(StrEnum):
    """State of one process in the arbiter."""

    IDLE = "idle"
    """Neither holds nor requests the device."""
    WAITING = "waiting"
    GRANTED = "granted"
    """It may have started to use the device, but has not acknowledged the grant."""
    HOLDING = "holding"
    RECALLED = "recalled"
    """The lease was recalled; the process has not acknowledged that."""
    YIELDING = "yielding"
    """It has acknowledged the recall and finishes its running work."""
    FENCED = "fenced"
    """Its lease expired without an answer: it is being killed, and no lease is granted before it has ended."""


class Hold(StrEnum):
    """State of a process's own lease."""

    IDLE = "idle"
    WAITING = "waiting"
    HOLDING = "holding"
    YIELDING = "yielding"
    """The lease has to be released once nothing runs on the device."""


OCCUPIED = frozenset({Claim.GRANTED, Claim.HOLDING, Claim.RECALLED, Claim.YIELDING, Claim.FENCED})
"""States in which the process may be using the device."""

CLAIM_MOVES: dict[tuple[Claim, str], Claim] = {
    (Claim.IDLE, "requested"): Claim.WAITING,
    (Claim.WAITING, "requested"): Claim.WAITING,
    (Claim.WAITING, "turn"): Claim.GRANTED,
    (Claim.GRANTED, "requested"): Claim.WAITING,
    (Claim.GRANTED, "acknowledged"): Claim.HOLDING,
    (Claim.GRANTED, "yields"): Claim.YIELDING,
    (Claim.GRANTED, "released"): Claim.IDLE,
    (Claim.GRANTED, "overdue"): Claim.FENCED,
    (Claim.HOLDING, "requested"): Claim.WAITING,
    (Claim.HOLDING, "rival"): Claim.RECALLED,
    (Claim.HOLDING, "yields"): Claim.YIELDING,
    (Claim.HOLDING, "released"): Claim.IDLE,
    (Claim.RECALLED, "requested"): Claim.WAITING,
    (Claim.RECALLED, "yields"): Claim.YIELDING,
    (Claim.RECALLED, "released"): Claim.IDLE,
    (Claim.RECALLED, "overdue"): Claim.FENCED,
    (Claim.YIELDING, "requested"): Claim.WAITING,
    (Claim.YIELDING, "released"): Claim.IDLE,
    (Claim.YIELDING, "overdue"): Claim.FENCED,
    (Claim.FENCED, "requested"): Claim.WAITING,
    (Claim.FENCED, "released"): Claim.IDLE,
}
"""A grant is recalled only after it was acknowledged, so that the two messages do not cross and every turn makes
progress. All other messages change nothing. The end of the process removes its claim from any state. "requested" is a
new request: its sender has released what it held."""

HOLD_MOVES: dict[tuple[Hold, str], Hold] = {
    (Hold.IDLE, "want"): Hold.WAITING,
    (Hold.WAITING, "granted"): Hold.HOLDING,
    (Hold.WAITING, "withdraw"): Hold.IDLE,
    (Hold.HOLDING, "recalled"): Hold.YIELDING,
    (Hold.HOLDING, "expired"): Hold.YIELDING,
    (Hold.YIELDING, "yielded"): Hold.IDLE,
}
