"""Which mechanisms each ability has, the best first."""

from __future__ import annotations

from kintsugi.lab.abilities import (
    cuda,
    damage,
    devices,
    memory,
    names,
    network,
    processor,
    shaping,
    signals,
    storage,
)
from kintsugi.lab.abilities.fault import Fault
from kintsugi.lab.injection import Ability

MECHANISMS: dict[Ability, tuple[type[Fault], ...]] = {
    Ability.CPU: (processor.CpuQuota, processor.Competitors),
    Ability.MEMORY: (memory.MemoryHog, memory.AllocationLimit),
    Ability.DISK_FILL: (storage.Filler, storage.Crumbs),
    Ability.DISK_LOAD: (storage.Writers, storage.WriteLimit),
    Ability.NETWORK_DELAY: (network.Delay, shaping.ShapedDelay),
    Ability.NETWORK_LOSS: (network.Loss, shaping.ShapedLoss, network.FilteredLoss),
    Ability.NETWORK_CUT: (network.Cut, network.FilteredCut),
    Ability.DNS: (names.LostQuestions, names.RefusedQuestions),
    Ability.DEVICE_MEMORY: (cuda.FullCard, devices.RefusedAllocations),
    Ability.DEVICE_SLOW: (cuda.BusyCard, devices.SlowedDown),
    Ability.CORRUPT: (damage.FlippedMemory, damage.FlippedFiles),
    Ability.NUMERIC: (damage.Rounds,),
    Ability.KILL: (signals.Kill,),
    Ability.STOP: (signals.Stop, signals.Frozen),
    Ability.DISK_ERROR: (storage.FailingCalls,),
}


def mechanism_named(ability: Ability, name: str) -> type[Fault]:
    return next(mechanism for mechanism in MECHANISMS[ability] if mechanism.name == name)
