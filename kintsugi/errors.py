"""All error types, and `Fault`, the record of an error that crosses process boundaries.

The type names the boundary that was crossed. Bugs are `assert`s and have no type here.

    KintsugiError
    ├── UserError (also a ValueError)      user error: exit code 2, one sentence, no traceback
    │   ├── ConfigError                    a field of the configuration
    │   ├── DataError                      a data set, a row, a column
    │   ├── ModelError                     a model folder, a tokenizer
    │   └── UntrustedFile                  a file that another user could have written or read
    └── WorldError                         failure outside this process
        ├── DeadlineExceeded               a declared wait reached its deadline
        ├── RunFailed                      a run that `kintsugi.train` started failed; first cause first
        ├── ProcessDied                    a process of the run ended unexpectedly
        ├── StartFailed                    a process failed to start: which, in which phase, why
        │   └── StartKilled                it was killed from outside during its start
        ├── CompileFailed                  no working compiler on this host
        ├── StorageError                   I/O error, damaged file
        │   └── StorageFull                no space left: a retry succeeds once there is space
        ├── DeviceOutOfMemory              out of accelerator memory; the process is replaced
        ├── Unfit                          this process can not continue: it exits and is replaced
        │   └── DeviceError                the accelerator failed or computes wrong results
        ├── GroupBroken                    a collective failed: a rank is lost or the group was replaced
        ├── IntegrityError                 received bytes differ from the sent bytes
        ├── RefusedError                   the peer refused: unknown sender, wrong state
        │   ├── UnknownPeer                no address of the peer is known here, or not yet
        │   ├── EpochOver                  message of an earlier term of the master; to be sent again
        │   └── FencedError                a successor has taken over from this process
        └── RemoteError                    a peer replied with a fault, which is the cause

A `Fault` records an error for the journal and for messages. It refers to the fault that caused it, so the first failure
remains the cause when others follow (`root_first` orders a set of faults by these links).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import ClassVar, TypeVar
from uuid import uuid4

import msgspec

LONGEST_MESSAGE = 16 << 10
"""Maximum length of a fault's message: user code may raise errors with large data, and faults are copied often."""


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
    """Another process failed, and this one noticed."""


class StatesDiverged(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Detail of an `IntegrityError`: ranks computed different states from the same samples."""

    call: str
    states: dict[str, str]
    """Rank → digest of its state."""
    expected: str = ""
    """Digest of the state that all should have, where it is known."""


class GroupFailed(msgspec.Struct, frozen=True, tag=True):
    """Detail of a `GroupBroken`: a collective of a process group failed."""

    group: int
    """Generation of the process group."""
    peers: tuple[str, ...]
    """The other ranks of the group."""
    reason: str
    """Text of the library's error."""


class DataDamaged(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Detail of an `IntegrityError` or a `StorageError`: bytes are not those that were sent or written."""

    origin: str = ""
    """Process that the bytes came from, where it is known."""
    path: str = ""
    """File that the bytes were read from."""


class Overwritten(msgspec.Struct, frozen=True, tag=True):
    """Detail of an `IntegrityError`: memory that held a version of the weights has another one, or is about to get it.
    The bytes are not damaged, and a later version, or the same one again, follows."""

    version: int


class Miscomputed(msgspec.Struct, frozen=True, tag=True):
    """Detail of an error about a computation whose result is wrong: not finite, or not the known answer."""

    what: str
    """The result: `logits`, `known answer`."""


class EndedByError(msgspec.Struct, frozen=True, tag=True):
    """Detail of a `ProcessDied` or a `StartFailed`: the process ended by an error of its own, or could not be made."""

    kind: str
    """Class name of that error; empty if it could not record it."""
    shortage: str = ""
    """Thing that the host did not give it, if that was the reason: memory, a descriptor, a thread."""


FaultDetail = StatesDiverged | GroupFailed | DataDamaged | Overwritten | Miscomputed | EndedByError


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Record of one failure: `Fault(id="f3a…", kind="StorageError", process="model-0", message="disk full …")`."""

    id: str
    kind: str
    process: str
    message: str
    time: float
    """Wall clock of the process that saw it, for display only; ordering uses `cause`."""
    cause: Fault | None = None
    """Fault that led to this one, possibly in another process; None for the first of a chain."""
    detail: FaultDetail | None = None
    """Typed content of the message, for the parts of the program that decide by it; the message is for people."""


class KintsugiError(Exception):
    """Base class of all errors. `cause` is the fault that led to this error, if any."""

    fault_class: ClassVar[FaultClass] = FaultClass.SOFTWARE

    def __init__(
        self, message: str, *, cause: Fault | None = None, detail: FaultDetail | None = None
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.detail = detail


class UserError(KintsugiError, ValueError):
    """User error. The message names the field or file, what was found and what is expected."""

    fault_class = FaultClass.USER


class ConfigError(UserError):
    """A configuration field is unknown, of the wrong type, or impossible together with another."""


class DataError(UserError):
    """A data set is empty, a row malformed, a column missing."""


class ModelError(UserError):
    """A model folder or tokenizer is missing something, or its family is not supported."""


class UntrustedFile(UserError):
    """A file that is acted upon or secret belongs to another user, or others may write or read it."""


class WorldError(KintsugiError):
    """Failure outside this process."""


class DeadlineExceeded(WorldError):
    """A declared wait reached its deadline; the message says for which peer and event, and how long."""

    fault_class = FaultClass.LINK

    def __init__(self, *, whom: str, what: str, waited_s: float, cause: Fault | None = None) -> None:
        super().__init__(f"waited {waited_s:.1f} s for " + whom + f": {what}", cause=cause)
        self.whom, self.what, self.waited_s = whom, what, waited_s


class RunFailed(WorldError):
    """A run that `kintsugi.train` started has failed; the message is what `kintsugi train` would have printed."""


class ProcessDied(WorldError):
    """A process of the run ended unexpectedly."""


class StartFailed(WorldError):
    """A process failed to start."""

    def __init__(
        self,
        *,
        process: str,
        phase: str,
        why: str,
        cause: Fault | None = None,
        detail: FaultDetail | None = None,
    ) -> None:
        super().__init__(f"{process} failed to start while {phase}: {why}", cause=cause, detail=detail)
        self.process, self.phase, self.why = process, phase, why


class StartKilled(StartFailed):
    """A process was killed during its start; a retry may succeed."""


class CompileFailed(WorldError):
    """Native code could not be compiled: no compiler, a compiler error, or no place for the result."""


class StorageError(WorldError):
    """A disk failed, or a file is damaged."""

    fault_class = FaultClass.STORAGE


class StorageFull(StorageError):
    """The disk is full. Nothing was changed; the operation can be retried once there is space."""


class DeviceOutOfMemory(WorldError):
    """The accelerator is out of memory. The computation was aborted and its memory released."""

    fault_class = FaultClass.DEVICE


class Unfit(WorldError):
    """This process can not continue, and a retry would not help: it must be replaced."""


class DeviceError(Unfit):
    """The accelerator failed (an illegal access, a lost device). Its context and all data in it are lost, so the
    process must be replaced."""

    fault_class = FaultClass.DEVICE


class GroupBroken(WorldError):
    """A collective failed: a rank is lost, or the process group was replaced."""

    fault_class = FaultClass.CONSEQUENCE


class IntegrityError(WorldError):
    """Received bytes differ from the sent bytes."""


class RefusedError(WorldError):
    """A peer refused: unknown sender, wrong state."""


class DoesNotFit(RefusedError):
    """A part of the state does not fit the memory of this process. Nothing was changed; smaller parts may fit."""


class UnknownPeer(RefusedError):
    """This process has no address of a peer: the part of the address book that lists it may still be under way."""


class SourceSilent(RefusedError):
    """No source gave what was asked for, and one of them did not answer: another process may be able to reach it."""


class EpochOver(RefusedError):
    """A peer refused a message of an earlier term of the master."""


class FencedError(RefusedError):
    """A successor has taken over from this process, which must exit immediately without further writes."""


class RemoteError(WorldError):
    """A peer replied with a fault; `cause` is that fault."""

    fault_class = FaultClass.CONSEQUENCE

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.process}: {fault.kind}: {fault.message}", cause=fault)


_E = TypeVar("_E", bound=KintsugiError)


def _by_name(root: type[_E]) -> dict[str, type[_E]]:
    """Return an error class and all classes below it, by name."""
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _by_name(child)
    return found


USER_ERRORS: dict[str, type[UserError]] = _by_name(UserError)
"""Kinds of faults that are the user's mistake, with their classes."""
_CLASSES: dict[str, FaultClass] = {
    **{name: error.fault_class for name, error in _by_name(KintsugiError).items()},
    # Kinds that the master gives to faults it infers; no error of these names is ever raised.
    "Unreachable": FaultClass.LINK,
    "HostLost": FaultClass.NODE,
    "ChipFault": FaultClass.DEVICE,
}


def classify(fault: Fault) -> FaultClass:
    """Return the class of a fault's kind; of a kind that is not known, SOFTWARE.

    >>> classify(Fault("f", "GroupBroken", "model-0", "a rank is gone", 0.0)).value
    'consequence'
    """
    return _CLASSES.get(fault.kind, FaultClass.SOFTWARE)


def chain(fault: Fault) -> Iterator[Fault]:
    """Yield a fault and the faults that led to it, the latest first."""
    link: Fault | None = fault
    while link is not None:
        yield link
        link = link.cause


def is_shortage(fault: Fault) -> bool:
    """Return whether a process ended because the host did not give it what it needs."""
    return isinstance(fault.detail, EndedByError) and bool(fault.detail.shortage)


_SILENT = {error.__name__ for error in (DeadlineExceeded, ProcessDied, SourceSilent)}


def no_source(message: str, failures: Sequence[KintsugiError]) -> RefusedError:
    """Return the error of an operation that failed with all of its sources. An UnknownPeer if this process had no
    address of one of them: with that address it might have succeeded. A SourceSilent if one did not answer, and a plain
    RefusedError if each of them said that it does not have it.

    >>> type(no_source("nowhere", [StorageError("disk full"), UnknownPeer("no agent-1")])).__name__
    'UnknownPeer'
    """
    kinds = {type(error).__name__ for error in failures}
    kinds |= {fault.kind for error in failures if error.cause for fault in chain(error.cause)}
    if UnknownPeer.__name__ in kinds:
        return UnknownPeer(message)
    return (SourceSilent if kinds & _SILENT else RefusedError)(message)


def damage_of(error: BaseException) -> DataDamaged | None:
    """Return where the damaged bytes came from, of an error that is about such bytes or follows from one."""
    if not isinstance(error, KintsugiError):
        return None
    details = [error.detail, *(fault.detail for fault in (chain(error.cause) if error.cause else ()))]
    return next((detail for detail in reversed(details) if isinstance(detail, DataDamaged)), None)


def is_overwritten(error: BaseException) -> bool:
    """Return whether a version of the weights could not be read because its memory gets another one."""
    if not isinstance(error, KintsugiError):
        return False
    details = [error.detail, *(fault.detail for fault in (chain(error.cause) if error.cause else ()))]
    return any(isinstance(detail, Overwritten) for detail in details)


def fault_of(error: BaseException, *, process: str, time: float) -> Fault:
    """Record an error as a fault of `process`, linked to the fault that caused it.

    >>> fault_of(StorageError("disk full"), process="model-0", time=0.0).kind
    'StorageError'
    """
    cause = error.cause if isinstance(error, KintsugiError) else None
    detail = error.detail if isinstance(error, KintsugiError) else None
    return Fault(
        id=uuid4().hex[:12],
        kind=type(error).__name__,
        process=process,
        message=_shortened(str(error) or type(error).__name__),
        time=time,
        cause=cause,
        detail=detail,
    )


def _shortened(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} …"


def root_first(faults: Iterable[Fault]) -> list[Fault]:
    """Order faults so that every cause comes before its consequences; the first one is the cause to report.

    `GroupBroken` is never first: it follows from the loss of a rank, which may be reported later. If a fault was
    recorded both with and without its cause, the record with the cause is used.
    """
    by_id: dict[str, Fault] = {}
    for each in (each for fault in faults for each in chain(fault)):
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
