"""Choice of a recovery strategy: the class of a fault, its consequences, and the options. Pure.

Strategies in their order; each is tried when the one before cannot help:

    continue   only the master was lost: its successor takes the group over, and the step under way goes on
    retry      no rank is lost: every rank returns to the agreed step and repeats it
    recover    lost ranks are replaced; their state comes from a snapshot or a replica
    elastic    no replacement starts: the live ranks continue, and the group grows back later; if a part of the state
               has no rank left, it is cut again over the live ones
    dump       nothing helps: the last good state is written as a checkpoint
    exit       the run ends with the first fault as its cause

A plan lists every strategy with its cost or why it is impossible, and the reason for the chosen one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kintsugi.errors import Fault, FaultClass, classify
from kintsugi.types import Role, role_of

MAX_ATTEMPTS = 6
"""Recoveries of one incident that may fail without a new fault; after that the same failure would repeat."""
MAX_FAULTS = 64
"""Faults before a step is committed again, without the first loss of each process: faults that come faster than
recovery are not repaired for ever."""

MAX_DEATHS = 6
"""Losses of one process before a step is committed again: its own work kills it."""


class Strategy(StrEnum):
    CONTINUE = "continue"
    """Not chosen by `plan`: a new master tries it before anything is interrupted."""
    RETRY = "retry"
    RECOVER = "recover"
    ELASTIC = "elastic"
    DUMP = "dump"
    EXIT = "exit"


_IMPACT: dict[Role, str] = {
    Role.MODEL: "training stops until it is replaced; its state is in a snapshot and in its replicas",
    Role.ROLLOUT: "the groups that it ran or kept are run again under the same tickets",
    Role.SERVER: "its requests go to the other servers until it is replaced",
    Role.MANAGER: "generation waits until it is restarted",
    Role.AGENT: "processes of its host continue; none can be started there until it is back",
    Role.MASTER: "all processes finish their requests and wait for the next master",
}


def impact(processes: Sequence[str]) -> str:
    """Return the consequence of losing these processes, one sentence per role."""
    roles = dict.fromkeys(role_of(process) for process in processes)
    return "; ".join(f"{role.value}: {_IMPACT[role]}" for role in roles if role in _IMPACT)


class FaultSituation(msgspec.Struct, frozen=True):
    """Knowledge about an incident when a strategy is chosen."""

    faults: tuple[Fault, ...]
    """Faults of the incident, in the order of their arrival."""
    num_faults: int
    """Number of faults since a step was last committed, without the first loss of each process."""
    unrecoverable: str
    """Reason why neither repeating nor replacing can help, where it is known."""
    lost: tuple[str, ...]
    """Ranks that were lost since a step was last committed, whether or not their replacements are live."""
    missing: tuple[str, ...]
    """Ranks that are lost and not back."""
    living: tuple[str, ...]
    """Live ranks."""
    attempts: int
    """Recoveries of this incident that failed without a new fault."""
    most_deaths: int
    """Most losses of one process in this incident."""
    replacements_fail: bool
    """Replacements were requested and do not start."""
    start_s: float
    """Duration of the last start of a replacement, or an estimate."""
    step_s: float
    """Duration of a step."""
    cut_over: tuple[str, ...] = ()
    """Ranks over which the state is cut again if they continue alone, because a part of it has no rank left; the other
    live ones are idle then."""
    does_not_fit: str = ""
    """Reason why they can not hold it, where it is known."""


class RecoveryOption(msgspec.Struct, frozen=True):
    """One strategy: its cost in seconds of training, or why it is impossible."""

    strategy: Strategy
    cost_s: float = 0.0
    impossible: str = ""
    lasting: str = ""
    """Cost beyond that, for as long as it lasts."""

    def __str__(self) -> str:
        if self.impossible:
            return f"{self.strategy}: not possible, {self.impossible}"
        ends = self.strategy in (Strategy.DUMP, Strategy.EXIT)
        price = f"about {self.cost_s:.1f} s" + (f", {self.lasting}" if self.lasting else "")
        return f"{self.strategy}: {'ends the run' if ends else price}"


class RecoveryPlan(msgspec.Struct, frozen=True):
    strategy: Strategy
    reason: str
    options: tuple[RecoveryOption, ...]


def plan(situation: FaultSituation) -> RecoveryPlan:
    """Return the first strategy of the list that is possible; the options describe the others."""
    exit_run = RecoveryOption(Strategy.EXIT)
    options = (_retry(situation), _recover(situation), _elastic(situation), _dump(situation), exit_run)
    chosen = next(option for option in options if not option.impossible)
    refused = [str(option) for option in options[: options.index(chosen)]]
    return RecoveryPlan(chosen.strategy, "; ".join([_why(situation, chosen), *refused]), options)


def unrecoverable_reason(situation: FaultSituation) -> str:
    """Return why neither repeating nor replacing can help; empty while one may."""
    if any(classify(fault) is FaultClass.USER for fault in situation.faults):
        return "it is the user's mistake and would be made again"
    if situation.unrecoverable:
        return situation.unrecoverable
    if situation.attempts >= MAX_ATTEMPTS:
        return f"{situation.attempts} recoveries of this incident failed"
    if situation.most_deaths >= MAX_DEATHS:
        return f"the same process was lost {situation.most_deaths} times"
    if situation.num_faults >= MAX_FAULTS:
        return f"{situation.num_faults} more faults came before a step was through"
    return ""


def _retry(situation: FaultSituation) -> RecoveryOption:
    why = unrecoverable_reason(situation)
    gone = dict.fromkeys((*situation.lost, *situation.missing))
    if not why and gone:
        why = f"{', '.join(gone)} lost"
    if not why and any(classify(fault) is FaultClass.DEVICE for fault in situation.faults):
        why = "a device fault stays with its process"
    return RecoveryOption(Strategy.RETRY, situation.step_s, why)


def _recover(situation: FaultSituation) -> RecoveryOption:
    why = unrecoverable_reason(situation)
    if not why and situation.replacements_fail:
        why = "no replacement comes"
    return RecoveryOption(Strategy.RECOVER, situation.start_s + situation.step_s, why)


def _elastic(situation: FaultSituation) -> RecoveryOption:
    why = unrecoverable_reason(situation)
    if not why and not situation.living:
        why = "no rank lives"
    if not why and situation.cut_over:
        why = situation.does_not_fit
    used = len(situation.cut_over) or len(situation.living)
    more = (len(situation.missing) + len(situation.living) - used) / max(1, used)
    lasting = f"then every step up to {more:.0%} longer" if situation.missing else ""
    return RecoveryOption(Strategy.ELASTIC, situation.step_s, why, lasting)


def _dump(situation: FaultSituation) -> RecoveryOption:
    return RecoveryOption(Strategy.DUMP, 0.0, "" if situation.living else "no rank lives")


def _why(situation: FaultSituation, chosen: RecoveryOption) -> str:
    match chosen.strategy:
        case Strategy.RETRY:
            return f"all {len(situation.living)} ranks live: they return to the agreed step"
        case Strategy.RECOVER:
            gone = dict.fromkeys((*situation.lost, *situation.missing))
            return f"{', '.join(gone) or 'the broken process'} replaced, the rest stays"
        case Strategy.ELASTIC:
            whole = len(situation.living) + len(situation.missing)
            used = len(situation.cut_over) or len(situation.living)
            again = ", over which the state is cut again" if situation.cut_over else ""
            return f"{used} of {whole} ranks continue without {', '.join(situation.missing)}{again}"
        case _:
            return unrecoverable_reason(situation) or "no rank lives and no replacement comes"
