"""What a diagnosis says: ranked causes, each with where, what, since when, how it travelled, and how we know."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    """What broke. One word per thing that a person would do something else about."""

    KILLED = "killed"
    """Ended by a signal from outside."""
    CRASHED = "crashed"
    """Ended by an error of its own."""
    STOPPED = "stopped"
    """Exists and is not run at all: stopped or frozen."""
    HUNG = "hung"
    """Is run, makes no progress, and waits for nobody."""
    CPU = "cpu"
    """Wants to run and is not given the processor."""
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
    """Nothing comes through."""
    DNS = "dns"
    CORRUPTION = "corruption"
    """Bytes that are not those that were sent or written."""
    NUMERIC = "numeric"
    """Computes something else than its peers, or no numbers at all."""
    HANDOVER = "handover"
    """A notification about a shared device did not arrive in time."""
    SLOW = "slow"
    """Far slower than its peers and its own past, and nothing local explains it."""
    USER_CODE = "user_code"
    """A reward, environment or agent program of the user."""


class Hop(msgspec.Struct, frozen=True):
    """One station of the way from the cause to what people saw, the cause first."""

    process: str
    what: str
    """For people: `its uploads to agent-0 take 1.4 s instead of 2 ms`."""
    time: float
    """Wall clock (the master's) at which it showed."""


class Evidence(msgspec.Struct, frozen=True):
    """Something that was recorded, quoted with where it stands."""

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
    """One sentence: who, what, since when."""
    path: tuple[Hop, ...]
    """From the cause to the visible symptom."""
    evidence: tuple[Evidence, ...]
    rules_out: tuple[str, ...] = ()
    """What it was not, and why not."""
    advice: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    at: float
    """Wall clock of the moment that was looked at: nothing later was."""
    since: float
    """Nothing earlier was looked at, but for the baseline."""
    causes: tuple[Cause, ...]
    """The most likely first; empty: nothing is wrong, or nothing can be said."""
    abstained: str = ""
    """Why no cause is named; empty where one is."""
    took_s: float = 0.0
    """How long the diagnosis took to compute."""
