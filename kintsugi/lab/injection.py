"""A fault as a value: what is done to whom, when it begins, how it grows and when it is over."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Ability(StrEnum):
    """What the laboratory can do to one process, link or disk. The first seven are the user's, the others are ours."""

    CPU = "cpu"
    MEMORY = "memory"
    DISK_FILL = "disk_fill"
    DISK_LOAD = "disk_load"
    NETWORK_DELAY = "network_delay"
    NETWORK_LOSS = "network_loss"
    DNS = "dns"
    NETWORK_CUT = "network_cut"
    DEVICE_MEMORY = "device_memory"
    DEVICE_SLOW = "device_slow"
    KILL = "kill"
    STOP = "stop"
    CORRUPT = "corrupt"
    NUMERIC = "numeric"
    DISK_ERROR = "disk_error"


class Trigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a fault begins: as soon as all that is said here holds. Nothing said: at once."""

    step: int | None = None
    """The step that is being worked on."""
    phase: str | None = None
    """Of the master: collecting, training, committing, publishing, evaluating, saving, recovering."""
    after_s: float = 0.0
    """Seconds after the rest holds."""
    event: str | None = None
    """A regular expression that a line of some event file matches."""
    timeout_s: float = 60.0
    """Then it is impossible, and said so."""


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Injection(ability=Ability.NETWORK_DELAY, target="model-1", peer="agent-0", amount={"delay_s": 1.0})`"""

    ability: Ability
    target: str
    """A process of the run: `rollout-1`."""
    peer: str | None = None
    """Of a network fault: only the link with this process."""
    port: int | None = None
    """Of a network fault: only this port of the other end."""
    interface: str | None = None
    """Of a network fault: only packets through this network device of the target's host, as `eth0`."""
    trigger: Trigger = Trigger()
    duration_s: float = 10.0
    """How long it lasts; also its lease: it is undone then, whoever has died meanwhile."""
    ramp_s: float = 0.0
    """Until it has its full strength."""
    amount: dict[str, float] = {}
    """Its strength, by ability: cpu `share` (0 to 1, what is taken away); memory `rate` (bytes/s), `limit` (bytes), or
    `room` (bytes, left to allocate); disk_fill `share` (0 to 1, full); disk_load `rate` (bytes/s), `block_size`, or
    `limit` (bytes/s); network_delay `delay_s`, `jitter_s` (± so much, evenly spread); network_loss `share`;
    device_memory `share`, `device` (N of /dev/nvidiaN); device_slow `factor`, `device`; corrupt `bytes`; disk_error
    `share`. A mechanism that knows all words is chosen; where none does, the fault is refused."""
    mechanism: str | None = None
    """Only this one (`kintsugi lab abilities` lists them); None: the first that works here."""
    expected_phase: str = ""
    """Where a fragile system would show it; written into the marker."""


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """What was really done: the marker."""

    injection: Injection
    process: str
    pid: int
    host: str
    mechanism: str
    """`cgroup v1 cpu quota with two competitors`."""
    start: float
    """Wall clock."""
    monotonic: float
    phase: str
    """Of the master, at the start."""
    step: int
    end: float | None = None
    """Wall clock of the undoing; None while it lasts."""
    number: int = 0
    """Of the marker."""
    target_ended: float | None = None
    """Wall clock at which the process was seen to be gone while the fault lasted; None: it outlived it."""
    measured: dict[str, float] = {}
    """What the mechanism itself counted: `packets`, `dropped`, `filled_bytes`."""
