"""Kinds of faults by the class and the typed detail of the error that was recorded. Pure."""

from __future__ import annotations

from kintsugi.diagnosis.detectors.foreign_errors import kind_of
from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.errors import DataDamaged, EndedByError, Fault, Miscomputed, StatesDiverged

_K = FaultKind

BY_KIND: dict[str, FaultKind] = {
    "Stopped": _K.STOPPED,
    "Hung": _K.HUNG,
    "Unreachable": _K.NETWORK_CUT,
    "HostLost": _K.NETWORK_CUT,
    "ChipFault": _K.DEVICE,
    "DeviceError": _K.DEVICE,
    "DeviceOutOfMemory": _K.DEVICE_MEMORY,
    "StorageFull": _K.DISK_FULL,
    "StorageError": _K.DISK_ERROR,
    "IntegrityError": _K.CORRUPTION,
    "MemoryError": _K.MEMORY,
    "OutOfMemoryError": _K.DEVICE_MEMORY,
    "FloatingPointError": _K.NUMERIC,
    "gaierror": _K.DNS,
    "EpisodesFailed": _K.USER_CODE,
}
"""Class name of an error → kind of fault."""

CONSEQUENCES = frozenset(
    {"GroupBroken", "RemoteError", "DeadlineExceeded", "RefusedError", "EpochOver", "FencedError", "Retired"}
    | {"Diagnosed", "SourceSilent", "UnknownPeer"}
)
"""Errors of processes that noticed the failure of another one, and replacements that the diagnosis itself ordered."""


def kind_of_fault(fault: Fault) -> FaultKind | None:
    """Return what broke at the process that a fault names; None for a consequence of another fault."""
    if fault.kind in CONSEQUENCES:
        return None
    match fault.detail:
        case StatesDiverged() | Miscomputed():
            return _K.NUMERIC
        case DataDamaged():
            return _K.CORRUPTION
        case EndedByError(kind=kind):
            by_kind = BY_KIND.get(kind)
        case _:
            by_kind = BY_KIND.get(fault.kind)
    by_text = kind_of(fault.message)
    if by_kind is _K.DISK_ERROR and by_text in (_K.DISK_FULL, _K.CORRUPTION, _K.DESCRIPTORS):
        return by_text
    return by_kind or by_text
