"""The states of a lease, as the arbiter and as the holder see it, and every move between them.

holder                        arbiter
WAITING   ── requested ────►  WAITING
          ◄─── recalled ────  (whoever of the other side holds it: RECALLED)
          ──── released ───►  (IDLE again, or FENCED and ended: from here on its token is worth nothing)
HOLDING   ◄──── granted ────  GRANTED
          ── acknowledged ─►  HOLDING
"""

from __future__ import annotations

from enum import StrEnum

from kintsugi.types import Role, role_of


class Side(StrEnum):
    """Those of one side may use the device together; the two sides take turns."""

    TRAINING = "training"
    GENERATION = "generation"


def side_of(process: str) -> Side:
    """`side_of("server-1") is Side.GENERATION`."""
    return Side.GENERATION if role_of(process) is Role.SERVER else Side.TRAINING


class Claim(StrEnum):
    """What the arbiter knows of one process."""

    IDLE = "idle"
    """Holds nothing and wants nothing."""
    WAITING = "waiting"
    GRANTED = "granted"
    """It may have begun; it has not said so."""
    HOLDING = "holding"
    RECALLED = "recalled"
    """Asked to give it back; it has not said that it knows."""
    YIELDING = "yielding"
    """It knows, and finishes what it is doing."""
    FENCED = "fenced"
    """Its time is over and it did not answer: it is being ended, and nobody is let in before it has."""


class Hold(StrEnum):
    """What a process knows of its own lease."""

    IDLE = "idle"
    WAITING = "waiting"
    HOLDING = "holding"
    YIELDING = "yielding"
    """It has to be given back, once nothing runs on the device."""


OCCUPIED = frozenset({Claim.GRANTED, Claim.HOLDING, Claim.RECALLED, Claim.YIELDING, Claim.FENCED})
"""In these the process may be using the device."""

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
"""A grant is recalled only once it is acknowledged, so that the two do not cross and work gets done in every turn.
Whatever else is said changes nothing. The end of the process removes its claim from any state. "requested" is a new
request: who makes one has given back what it held."""

HOLD_MOVES: dict[tuple[Hold, str], Hold] = {
    (Hold.IDLE, "want"): Hold.WAITING,
    (Hold.WAITING, "granted"): Hold.HOLDING,
    (Hold.WAITING, "withdraw"): Hold.IDLE,
    (Hold.HOLDING, "recalled"): Hold.YIELDING,
    (Hold.HOLDING, "expired"): Hold.YIELDING,
    (Hold.YIELDING, "yielded"): Hold.IDLE,
}
