"""Result of a diagnosis: ranked causes, each with process, kind, onset, path to the symptom and evidence."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    """Kind of a fault. Kinds differ where the remedy differs."""

    KILLED = "killed"
    """Ended by a signal from outside."""
    CRASHED = "crashed"
    """Ended by an error of its own."""
    STOPPED = "stopped"
    """Exists and does not run at all: stopped or frozen."""
    HUNG = "hung"
    """Runs, makes no progress, and waits for no other process."""
    CPU = "cpu"
    """Runnable without getting a CPU."""
    MEMORY = "memory"
    """The host's memory: growing to the limit, or killed for it."""
    DESCRIPTORS = "descriptors"
    """No file and no connection can be opened any more."""
    DEVICE_MEMORY = "device_memory"
    DEVICE = "device"
    """The accelerator is slow or broken."""
    DISK_FULL = "disk_full"
    DISK_SLOW = "disk_slow"
    DISK_ERROR = "disk_error"
    """Reads, writes or syncs fail for another reason than space."""
    NETWORK_DELAY = "network_delay"
    NETWORK_LOSS = "network_loss"
    NETWORK_CUT = "network_cut"
    """No data arrives."""
    DNS = "dns"
    CORRUPTION = "corruption"
    """Bytes that are not those that were sent or written."""
    NUMERIC = "numeric"
    """Computes other results than its peers, or results that are not finite."""
    HANDOVER = "handover"
    """A notification about a shared device did not arrive in time."""
    SLOW = "slow"
    """Far slower than its peers and its own past, and nothing local explains it."""
    HOST_LOST = "host_lost"
    """A machine is gone, with everything of the run on it."""
    USER_CODE = "user_code"
    """A reward, environment or agent program of the user."""


class Hop(msgspec.Struct, frozen=True):
    """One step on the path from the cause to the visible symptom, the cause first."""

    process: str
    what: str
    """Description: `its uploads to agent-0 take 1.4 s instead of 2 ms`."""
    time: float
    """Wall clock (the master's) at which it showed."""


class Evidence(msgspec.Struct, frozen=True):
    """A quoted record, with the file that contains it."""

    source: str
    """A file of the run folder: `events/model-1.jsonl`, `figures/agent-0.jsonl`, `logs/server-0.log`, `journal`."""
    time: float
    quote: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    process: str
    host: str
    kind: FaultKind
    onset: float
    """Wall clock (the master's) at which it began."""
    confidence: float
    """0 to 1."""
    summary: str
    """One sentence: process, fault, time."""
    path: tuple[Hop, ...]
    """From the cause to the visible symptom."""
    evidence: tuple[Evidence, ...]
    rules_out: tuple[str, ...] = ()
    """Excluded explanations, with the reason."""
    advice: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    at: float
    """Wall-clock time of the diagnosis; later records were not read."""
    since: float
    """Begin of the diagnosed time; earlier records only contribute to the usual ranges."""
    causes: tuple[Cause, ...]
    """Causes, the most likely first; empty: no fault, or none that can be named."""
    abstained: str = ""
    """Why no cause is named; empty where one is."""
    took_s: float = 0.0
    """Time that the diagnosis took."""
