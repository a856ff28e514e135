"""The fault centre's judgement: what kind of fault it is, what it touches, what can be done, and what is done. Pure.

Strategies in their order, each cheaper or less complete than the next, each tried when the one before can not help:

    retry      nobody is lost: every rank returns to the agreed step and repeats it
    recover    what is lost is replaced, its state comes from a snapshot or a replica
    elastic    no replacement comes: the ranks that live go on, and grow back when one does
    dump       nothing helps: the last good state is written as a checkpoint
    exit       the run ends with the first fault as its cause

A plan names every strategy with whether it is possible, what it would cost, and why the chosen one was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kintsugi.errors import Fault
from kintsugi.types import Role, role_of

MAX_ATTEMPTS = 6
"""Recoveries of one incident that may fail by themselves; after that the same thing fails again and again."""
MAX_FAULTS = 64
"""Faults before a step is committed again, the first loss of each process aside: whoever breaks faster than it is
mended is not mended for ever."""

MAX_DEATHS = 6
"""Losses of one and the same process before a step is committed again: it dies of what it does."""


class Strategy(StrEnum):
    RETRY = "retry"
    RECOVER = "recover"
    ELASTIC = "elastic"
    DUMP = "dump"
    EXIT = "exit"


class FaultClass(StrEnum):
    """Where a fault lies; decides whether repeating, replacing or neither can help."""

    USER = "user"
    """The user's mistake: it would be made again."""
    SOFTWARE = "software"
    DEVICE = "device"
    NODE = "node"
    LINK = "link"
    STORAGE = "storage"
    CONSEQUENCE = "consequence"
    """Somebody else broke and this one noticed."""


_CLASSES: dict[str, FaultClass] = {
    "UserError": FaultClass.USER,
    "ConfigError": FaultClass.USER,
    "DataError": FaultClass.USER,
    "ModelError": FaultClass.USER,
    "GroupBroken": FaultClass.CONSEQUENCE,
    "RemoteError": FaultClass.CONSEQUENCE,
    "DeadlineExceeded": FaultClass.LINK,
    "Unreachable": FaultClass.LINK,
    "HostLost": FaultClass.NODE,
    "DeviceOutOfMemory": FaultClass.DEVICE,
    "DeviceError": FaultClass.DEVICE,
    "ChipFault": FaultClass.DEVICE,
    "StorageError": FaultClass.STORAGE,
    "StorageFull": FaultClass.STORAGE,
}


def classify(fault: Fault) -> FaultClass:
    """By its kind; a death is the software's unless something else is known.

    >>> classify(Fault("f", "GroupBroken", "model-0", "a rank is gone", 0.0)).value
    'consequence'
    """
    return _CLASSES.get(fault.kind, FaultClass.SOFTWARE)


_IMPACT: dict[Role, str] = {
    Role.MODEL: "training stops until it is replaced; its state is in a snapshot and in its replicas",
    Role.ROLLOUT: "the groups that it ran or kept are run again under the same tickets",
    Role.SERVER: "its requests go to the other servers until it is replaced",
    Role.MANAGER: "generation waits until it is restarted",
    Role.AGENT: "processes of its host go on; none can be started there until it is back",
    Role.MASTER: "everybody finishes what was asked and waits for the next master",
}


def impact(processes: Sequence[str]) -> str:
    """What the loss of these processes means, one sentence per role."""
    roles = dict.fromkeys(role_of(process) for process in processes)
    return "; ".join(f"{role.value}: {_IMPACT[role]}" for role in roles if role in _IMPACT)


class Situation(msgspec.Struct, frozen=True):
    """What the fault centre knows when it has to choose."""

    faults: tuple[Fault, ...]
    """Of this incident, in the order of their arrival."""
    num_faults: int
    """Since a step was last committed, without the first loss of each process."""
    beyond_help: str
    """Why nothing can help, where that is known already."""
    lost: tuple[str, ...]
    """Ranks that were lost since a step was last committed, whether or not their replacements are there."""
    missing: tuple[str, ...]
    """Ranks that are lost and not back."""
    living: tuple[str, ...]
    """Ranks that live."""
    attempts: int
    """Recoveries of this incident that failed by themselves, without a new fault."""
    most_deaths: int
    """How often one and the same process was lost in this incident."""
    replacements_fail: bool
    """Replacements were ordered and do not come."""
    start_s: float
    """What the start of a replacement took so far, or a guess."""
    step_s: float
    """What a step takes."""


class Option(msgspec.Struct, frozen=True):
    """One thing that could be done: its price in seconds of training, or why it can not."""

    strategy: Strategy
    cost_s: float = 0.0
    impossible: str = ""
    lasting: str = ""
    """What it would cost beyond that, for as long as it lasts."""

    def __str__(self) -> str:
        if self.impossible:
            return f"{self.strategy}: not possible, {self.impossible}"
        ends = self.strategy in (Strategy.DUMP, Strategy.EXIT)
        price = f"about {self.cost_s:.1f} s" + (f", {self.lasting}" if self.lasting else "")
        return f"{self.strategy}: {'ends the run' if ends else price}"


class Plan(msgspec.Struct, frozen=True):
    strategy: Strategy
    reason: str
    options: tuple[Option, ...]


def plan(situation: Situation) -> Plan:
    """The first strategy of the ladder that is possible; the options say what the others would have meant."""
    exit_run = Option(Strategy.EXIT)
    options = (_retry(situation), _recover(situation), _elastic(situation), _dump(situation), exit_run)
    chosen = next(option for option in options if not option.impossible)
    refused = [str(option) for option in options[: options.index(chosen)]]
    return Plan(chosen.strategy, "; ".join([_why(situation, chosen), *refused]), options)


def hopeless(situation: Situation) -> str:
    """Why nothing that repeats or replaces can help; empty while something may."""
    if any(classify(fault) is FaultClass.USER for fault in situation.faults):
        return "it is the user's mistake and would be made again"
    if situation.beyond_help:
        return situation.beyond_help
    if situation.attempts >= MAX_ATTEMPTS:
        return f"{situation.attempts} recoveries of this incident failed"
    if situation.most_deaths >= MAX_DEATHS:
        return f"the same process was lost {situation.most_deaths} times"
    if situation.num_faults >= MAX_FAULTS:
        return f"{situation.num_faults} more faults came before a step was through"
    return ""


def _retry(situation: Situation) -> Option:
    why = hopeless(situation)
    gone = dict.fromkeys((*situation.lost, *situation.missing))
    if not why and gone:
        why = f"{', '.join(gone)} lost"
    if not why and any(classify(fault) is FaultClass.DEVICE for fault in situation.faults):
        why = "a device fault stays with its process"
    return Option(Strategy.RETRY, situation.step_s, why)


def _recover(situation: Situation) -> Option:
    why = hopeless(situation)
    if not why and situation.replacements_fail:
        why = "no replacement comes"
    return Option(Strategy.RECOVER, situation.start_s + situation.step_s, why)


def _elastic(situation: Situation) -> Option:
    why = hopeless(situation)
    if not why and not situation.living:
        why = "no rank lives"
    more = len(situation.missing) / max(1, len(situation.living))
    lasting = f"then every step up to {more:.0%} longer" if situation.missing else ""
    return Option(Strategy.ELASTIC, situation.step_s, why, lasting)


def _dump(situation: Situation) -> Option:
    return Option(Strategy.DUMP, 0.0, "" if situation.living else "no rank lives")


def _why(situation: Situation, chosen: Option) -> str:
    match chosen.strategy:
        case Strategy.RETRY:
            return f"all {len(situation.living)} ranks live: they return to the agreed step"
        case Strategy.RECOVER:
            gone = dict.fromkeys((*situation.lost, *situation.missing))
            return f"{', '.join(gone) or 'the broken process'} replaced, the rest stays"
        case Strategy.ELASTIC:
            whole = len(situation.living) + len(situation.missing)
            return f"{len(situation.living)} of {whole} ranks go on without {', '.join(situation.missing)}"
        case _:
            return hopeless(situation) or "no rank lives and no replacement comes"
