"""What messages mean: from the kind of an error and its words to the kind of fault, as tables. Pure.

Only words that name what broke are here. That something took too long or is gone says that somebody waited, and is a
symptom: who waited is not who broke.
"""

from __future__ import annotations

import re

from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.errors import Fault

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
    "StateMismatch": _K.NUMERIC,
    "Disagreement": _K.NUMERIC,
    "EpisodesFailed": _K.USER_CODE,
}
"""Kind of an error → what broke."""

CONSEQUENCES = frozenset(
    {"GroupBroken", "RemoteError", "DeadlineExceeded", "RefusedError", "EpochOver", "FencedError", "Retired"}
    | {"Diagnosed"}
)
"""Kinds of errors of those who noticed that somebody else is gone, slow or new; and what we ourselves said before."""

_BY_WORDS: tuple[tuple[str, FaultKind], ...] = (
    (r"cuda out of memory|device.{0,30}out of memory|out of memory on device", _K.DEVICE_MEMORY),
    (r"cannot allocate memory|out of memory|oom[- ]kill|\bMemoryError\b", _K.MEMORY),
    (r"too many open files|no descriptor is left", _K.DESCRIPTORS),
    (r"no space left|disk (?:is )?full|disk quota exceeded", _K.DISK_FULL),
    (r"input/output error|read-only file system|stale file handle|structure needs cleaning", _K.DISK_ERROR),
    (r"file too large|cause disk", _K.DISK_ERROR),
    (r"name or service not known|name resolution|resolve (?:host|name)|no address associated", _K.DNS),
    (r"\bdifferent states after\b|digests? (?:differ|disagree)|states? differ", _K.NUMERIC),
    (r"\bnan\b|\binf\b|not finite|non-finite|does not compute any more what it did", _K.NUMERIC),
    (
        r"checksum|corrupt|does not match its digest|not the bytes|expected xxh3|damaged|is no event of its kind",
        _K.CORRUPTION,
    ),
    (r"has not answered (?:LeaseRecalled|LeaseGranted|LeaseFenced)", _K.HANDOVER),
    (r"\bxid\b|ecc error|device.{0,20}lost|illegal memory access", _K.DEVICE),
)
_USERS = re.compile(r"\b(?:quarantined|count as wrong; \S+): (?:reward '|`\w+` of the environment\b|agent `)")
_WORDS = tuple((re.compile(words, re.IGNORECASE), kind) for words, kind in _BY_WORDS)
_STATE = re.compile(r"\b(model-\d+) ([0-9a-f]{6,})\b")
_COMMITTED = re.compile(r"\bcommitted with state ([0-9a-f]{6,})\b")
_PROCESS = re.compile(r"\b(?:agent|master|model|rollout|manager|server)-\d+\b")


def kind_of(message: str) -> FaultKind | None:
    """What the words name; None where they name nothing that breaks.

    >>> kind_of("[Errno 28] No space left on device: 'checkpoints/step-10'").value
    'disk_full'
    """
    return next((kind for words, kind in _WORDS if words.search(message)), None)


def is_of_the_users_code(message: str) -> bool:
    """Whether samples were set aside because a reward, an environment or an agent program failed.

    >>> is_of_the_users_code("grpo:0:17 quarantined: reward 'brevity' raised KeyError: 'answer'")
    True
    """
    return _USERS.search(message) is not None


def kind_of_fault(fault: Fault) -> FaultKind | None:
    """What an error says broke, at the process that it names; None for those who only noticed."""
    if fault.kind in CONSEQUENCES:
        return None
    said = kind_of(fault.message)
    by_kind = BY_KIND.get(fault.kind)
    if by_kind is _K.DISK_ERROR and said in (_K.DISK_FULL, _K.CORRUPTION, _K.DESCRIPTORS):
        return said
    if by_kind in (_K.CORRUPTION, _K.DEVICE) and said is _K.NUMERIC:
        return said
    return by_kind or said


def states_in(message: str) -> dict[str, str]:
    """Rank → the state that it came to, of a message about states that differ.

    >>> states_in("different states after actor_train: model-0 a1b2c3, model-1 d4e5f6")
    {'model-0': 'a1b2c3', 'model-1': 'd4e5f6'}
    """
    return dict(_STATE.findall(message))


def committed_in(message: str) -> str | None:
    """The state with which a step was committed after ranks had differed."""
    found = _COMMITTED.search(message)
    return found[1] if found else None


_ORIGIN = re.compile(
    r"\b(?:segment \w+/|(?:stream|bytes|answer|piece) (?:of|from) |from )((?:agent|model|rollout|server)-\d+)\b"
)


def origin_of(message: str) -> str | None:
    """Whose bytes were wrong: the last that is named, since what is said first is where they came from in the end.

    >>> origin_of("came by stream of model-1, because lm_head from segment weights/model-0/0: expected xxh3 a, got b")
    'model-0'
    """
    found = _ORIGIN.findall(message)
    return found[-1] if found else None


def shortened(message: str, *, most: int = 240) -> str:
    """On one line, and not longer than a person wants to read."""
    line = " ".join(message.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def processes_in(message: str) -> list[str]:
    """Names of processes, in the order in which they stand there.

    >>> processes_in("model-1 waits for agent-0")
    ['model-1', 'agent-0']
    """
    return _PROCESS.findall(message)
