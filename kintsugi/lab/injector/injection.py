"""A fault as a value: type, target, trigger, strength and duration."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.control.phases.table import Phase

INJECTABLE_PHASES = (
    Phase.COLLECTING,
    Phase.TRAINING,
    Phase.COMMITTING,
    Phase.PUBLISHING,
    Phase.EVALUATING,
    Phase.SAVING,
    Phase.RECOVERING,
)
"""Phases of the master in which a fault can begin; `RECOVERING` needs an earlier fault."""


class Ability(StrEnum):
    """Fault type that the laboratory can inject into one process, link or disk."""

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
    GROW = "grow"
    USER_CODE = "user_code"
    HOST_LOSS = "host_loss"
    """Everything of the host of the target, an agent, in one instant; on another machine its supervisor too."""


class Trigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions under which a fault begins: all fields that are set must hold. Without any, it begins immediately."""

    step: int | None = None
    """Step that the run is working on."""
    phase: str | None = None
    """Phase of the master: collecting, training, committing, publishing, evaluating, saving or recovering."""
    after_s: float = 0.0
    """Delay after the other conditions hold."""
    event: str | None = None
    """Regular expression that a line of an event file must match."""
    timeout_s: float = 60.0
    """When the conditions do not hold in time, the injection fails with an error."""


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Injection(ability=Ability.NETWORK_DELAY, target="model-1", peer="agent-0", amount={"delay_s": 1.0})`"""

    ability: Ability
    target: str
    """Process of the run: `rollout-1`."""
    peer: str | None = None
    """Network faults only: restricts the fault to the link with this process."""
    port: int | None = None
    """Network faults only: restricts the fault to this port of the other end."""
    interface: str | None = None
    """Network faults only: restricts the fault to packets through this network device of the target's host, such as
    `eth0`."""
    trigger: Trigger = Trigger()
    duration_s: float = 10.0
    """Duration of the fault, and its lease: it is undone after this time even if the laboratory has been killed."""
    ramp_s: float = 0.0
    """Time until the fault reaches its full strength."""
    amount: dict[str, float] = {}
    """Parameters of the fault, by type: cpu `share` (0 to 1, the part taken away); memory `rate` (bytes/s), `limit`
    (bytes) or `room` (bytes left to allocate); disk_fill `share` (0 to 1); disk_load `rate` (bytes/s), `block_size`, or
    `limit` (bytes/s); network_delay `delay_s`, `jitter_s` (± this much, uniformly distributed); network_loss `share`;
    device_memory `share`, `device` (N of /dev/nvidiaN); device_slow `factor`, `device`; corrupt `bytes`; disk_error
    `share`; grow `rate` (bytes/s), `limit` (bytes). The first mechanism that supports all given parameters is used;
    where none does, the injection fails."""
    mechanism: str | None = None
    """Name of the mechanism to use (`kintsugi lab abilities` lists them); None selects the first that works here."""
    expected_phase: str = ""
    """Phase in which the fragile system is expected to fail; copied into the marker."""


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """Marker of a fault that was injected."""

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
    """Phase of the master when the fault began."""
    step: int
    end: float | None = None
    """Wall clock at which the fault was undone; None while it is active."""
    number: int = 0
    """Number of the marker file."""
    target_ended: float | None = None
    """Wall clock at which the target was found to have ended during the fault; None when it survived."""
    measured: dict[str, float] = {}
    """Counters of the mechanism itself: `packets`, `dropped`, `filled_bytes`."""
