"""Patterns of error texts that others write: the kernel, CUDA, NCCL and Gloo, name resolvers, Python. Pure.

The processes of a run report to each other by typed events and fault details; no pattern here matches a sentence of
ours. Only texts that name what broke have a pattern. A timeout or a lost peer is a symptom: the process that waited is
not the one that broke.
"""

from __future__ import annotations

import re

from kintsugi.diagnosis.verdict import FaultKind

_K = FaultKind

_BY_TEXT: tuple[tuple[str, FaultKind], ...] = (
    (r"cuda out of memory|device.{0,30}out of memory|out of memory on device", _K.DEVICE_MEMORY),
    (r"cannot allocate memory|out of memory|oom[- ]kill|\bMemoryError\b", _K.MEMORY),
    (r"too many open files", _K.DESCRIPTORS),
    (r"no space left|disk (?:is )?full|disk quota exceeded", _K.DISK_FULL),
    (r"input/output error|read-only file system|stale file handle|structure needs cleaning", _K.DISK_ERROR),
    (r"file too large", _K.DISK_ERROR),
    (r"name or service not known|name resolution|resolve (?:host|name)|no address associated", _K.DNS),
    (r"\bnan\b|\binf\b|not finite|non-finite", _K.NUMERIC),
    (r"checksum|corrupt", _K.CORRUPTION),
    (r"\bxid\b|ecc error|device.{0,20}lost|illegal memory access", _K.DEVICE),
)
_PATTERNS = tuple((re.compile(text, re.IGNORECASE), kind) for text, kind in _BY_TEXT)
_BY_PEER = re.compile(r"reset by peer|closed by peer", re.IGNORECASE)


def kind_of(text: str) -> FaultKind | None:
    """Return the kind of fault that a text names; None where it names none.

    >>> kind_of("[Errno 28] No space left on device: 'checkpoints/step-10'").value
    'disk_full'
    """
    return next((kind for pattern, kind in _PATTERNS if pattern.search(text)), None)


def is_closed_by_peer(text: str) -> bool:
    """Return whether an error of a connection names the other end as the one that closed it.

    >>> is_closed_by_peer("Read error [10.0.0.2]:4117: Connection reset by peer")
    True
    """
    return _BY_PEER.search(text) is not None
