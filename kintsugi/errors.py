"""Every error of the system, and the record of one that crosses process borders.

The type says which boundary was crossed; our own mistakes are `assert`s and have no type here.

    KintsugiError
    ├── UserError (also a ValueError)      the user's mistake: exit code 2, one sentence, no traceback
    │   ├── ConfigError                    a field of the configuration
    │   ├── DataError                      a data set, a row, a column
    │   └── ModelError                     a model folder, a tokenizer
    └── WorldError                         the world's: something outside this process broke
        ├── DeadlineExceeded               a declared wait reached its deadline
        ├── RunFailed                      a run that Python started ended badly: what it said, the cause first
        ├── ProcessDied                    a process of ours ended when it should not have
        ├── StartFailed                    a process did not come up: which, in which phase, why
        │   └── StartKilled                it was killed from outside before it was up
        ├── CompileFailed                  a compiler of this host is missing, or could not do its work
        ├── StorageError                   I/O error, damaged file
        │   └── StorageFull                no space left: the same works again once there is room
        ├── DeviceOutOfMemory              the accelerator has no memory left; its process is replaced
        ├── Unfit                          this process can not do its work any more: it ends, and is replaced
        │   └── DeviceError                the accelerator failed, or computes something else
        ├── GroupBroken                    a collective failed: a rank is gone or the generation is over
        ├── IntegrityError                 bytes arrived that are not the bytes that were sent
        ├── RefusedError                   the peer refused: unknown sender, wrong state
        │   ├── EpochOver                  only because a new epoch has begun: to be said again in that one
        │   └── FencedError                a successor has taken over what this process owned
        └── RemoteError                    a peer answered with a fault of its own, which is the cause

A `Fault` is how an error is written down and sent. It names the fault that caused it, so that the first failure
stays the cause however many follow (`root_first` orders a set of faults by that chain).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from uuid import uuid4

import msgspec

LONGEST_MESSAGE = 16 << 10
"""Of a fault: user code may raise with all of its data, and a fault goes to many places."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failure as a value: `Fault(id="f3a…", kind="StorageError", process="model-0", message="disk full …")`."""

    id: str
    kind: str
    process: str
    message: str
    time: float
    """Wall clock of the process that saw it, for people; ordering uses `cause`, never this."""
    cause: Fault | None = None
    """The fault that led to this one, possibly of another process, with its own; None where it began."""


class KintsugiError(Exception):
    """The root of the tree. `cause` is the fault this error follows from, if it follows from one."""

    def __init__(self, message: str, *, cause: Fault | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class UserError(KintsugiError, ValueError):
    """The user's mistake: the message names the field or file, what was found and what is expected."""


class ConfigError(UserError):
    """A configuration field is unknown, of the wrong type, or impossible together with another."""


class DataError(UserError):
    """A data set is empty, a row malformed, a column missing."""


class ModelError(UserError):
    """A model folder or tokenizer is missing something, or its family is not supported."""


class WorldError(KintsugiError):
    """Something outside this process broke."""


class DeadlineExceeded(WorldError):
    """A declared wait reached its deadline; says for whom and what it waited, and how long."""

    def __init__(self, *, whom: str, what: str, waited_s: float, cause: Fault | None = None) -> None:
        super().__init__(f"waited {waited_s:.1f} s for {whom}: {what}", cause=cause)
        self.whom, self.what, self.waited_s = whom, what, waited_s


class RunFailed(WorldError):
    """A run that `kintsugi.train` started ended badly; the message is what the command would have printed."""


class ProcessDied(WorldError):
    """A process of ours ended when it should not have."""


class StartFailed(WorldError):
    """A process did not come up."""

    def __init__(self, *, process: str, phase: str, why: str, cause: Fault | None = None) -> None:
        super().__init__(f"{process} failed to start while {phase}: {why}", cause=cause)
        self.process, self.phase, self.why = process, phase, why


class StartKilled(StartFailed):
    """A process was killed before it was up: tried again, it may come up."""


class CompileFailed(WorldError):
    """Code that is compiled where it runs could not be: no compiler, its complaints, or nowhere to put the result."""


class StorageError(WorldError):
    """The disk failed, or a file is not what was written."""


class StorageFull(StorageError):
    """The disk is full. Nothing was changed, and the same operation works again once there is room."""


class DeviceOutOfMemory(WorldError):
    """The accelerator has no memory left for what was asked; what ran was given up, and its memory returned."""


class Unfit(WorldError):
    """This process can not do its work any more, and no other try would end otherwise: it has to be replaced."""


class DeviceError(Unfit):
    """The accelerator failed (an illegal access, a lost device). Its context is lost with all that was in it, so the
    process has to be replaced."""


class GroupBroken(WorldError):
    """A collective failed: a rank is gone, or the group's generation is over."""


class IntegrityError(WorldError):
    """Bytes arrived that are not the bytes that were sent."""


class RefusedError(WorldError):
    """A peer refused: unknown sender, wrong state."""


class EpochOver(RefusedError):
    """A peer refused what was said in an epoch that is over."""


class FencedError(RefusedError):
    """A successor has taken over what this process owned: it must end at once and touch nothing any more."""


class RemoteError(WorldError):
    """A peer answered with a fault; `cause` is that fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.process}: {fault.kind}: {fault.message}", cause=fault)


def fault_of(error: BaseException, *, process: str, time: float) -> Fault:
    """Write an error down as a fault of `process`, linked to the fault it follows from.

    >>> fault_of(StorageError("disk full"), process="model-0", time=0.0).kind
    'StorageError'
    """
    cause = error.cause if isinstance(error, KintsugiError) else None
    return Fault(
        id=uuid4().hex[:12],
        kind=type(error).__name__,
        process=process,
        message=_shortened(str(error) or type(error).__name__),
        time=time,
        cause=cause,
    )


def _shortened(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} …"


def root_first(faults: Iterable[Fault]) -> list[Fault]:
    """Order faults so that every cause stands before its consequences; the first one is the cause to report.

    A broken group is never where it began: some rank is gone, and who waits for it may see that before we know why.
    Nor is a fault of which anybody knows the cause, though others noted it before.
    """
    by_id: dict[str, Fault] = {}
    for each in (each for fault in faults for each in _chain(fault)):
        if each.id not in by_id or each.cause is not None:
            by_id[each.id] = each
    ordered: dict[str, Fault] = {}

    def place(fault: Fault) -> None:
        fault = by_id[fault.id]
        if fault.id in ordered:
            return
        if fault.cause is not None:
            place(fault.cause)
        ordered[fault.id] = fault

    for fault in by_id.values():
        if fault.cause is None and fault.kind != GroupBroken.__name__:
            place(fault)
    for fault in by_id.values():
        place(fault)
    return list(ordered.values())


def _chain(fault: Fault) -> Iterator[Fault]:
    """A fault and what led to it, the latest first."""
    link: Fault | None = fault
    while link is not None:
        yield link
        link = link.cause
