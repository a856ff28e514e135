"""Mechanisms of each fault type, the best first."""

from __future__ import annotations

from kintsugi.lab.faults import (
    accelerator,
    corruption,
    cpu,
    cuda,
    dns,
    memory,
    netem,
    network,
    signals,
    storage,
)
from kintsugi.lab.faults.mechanism import FaultMechanism
from kintsugi.lab.injector.injection import Ability

MECHANISMS: dict[Ability, tuple[type[FaultMechanism], ...]] = {
    Ability.CPU: (cpu.CpuQuota, cpu.Competitors),
    Ability.MEMORY: (memory.MemoryHog, memory.AllocationLimit),
    Ability.DISK_FILL: (storage.DiskFiller, storage.SmallFiles),
    Ability.DISK_LOAD: (storage.ContendingWriters, storage.WriteLimit),
    Ability.NETWORK_DELAY: (network.PacketDelay, netem.ShapedDelay),
    Ability.NETWORK_LOSS: (network.PacketLoss, netem.ShapedLoss, network.FilteredLoss),
    Ability.NETWORK_CUT: (network.NetworkCut, network.FilteredCut),
    Ability.DNS: (dns.DroppedDnsQueries, dns.RefusedDnsQueries),
    Ability.DEVICE_MEMORY: (cuda.FullGpuMemory, accelerator.RefusedAllocations),
    Ability.DEVICE_SLOW: (cuda.BusyGpu, accelerator.SlowedDown),
    Ability.CORRUPT: (corruption.FlippedMemory, corruption.FlippedFiles),
    Ability.NUMERIC: (corruption.ChangedRounding,),
    Ability.KILL: (signals.KillSignal,),
    Ability.STOP: (signals.StopSignal, signals.FreezeGroup),
    Ability.DISK_ERROR: (storage.FailingCalls,),
    Ability.GROW: (memory.GrowingProcess,),
    Ability.USER_CODE: (signals.StoppedUserCode,),
    Ability.HOST_LOSS: (signals.LostHost,),
}


def mechanism_named(ability: Ability, name: str) -> type[FaultMechanism]:
    return next(mechanism for mechanism in MECHANISMS[ability] if mechanism.name == name)


def shares_memory(ability: Ability, name: str) -> bool:
    """Return whether a mechanism changes memory that other processes of the host have mapped too."""
    return any(mechanism.name == name and mechanism.shares_memory for mechanism in MECHANISMS[ability])


def shares_device(ability: Ability, name: str) -> bool:
    """Return whether a mechanism affects every process on the accelerator of its target."""
    return any(mechanism.name == name and mechanism.shares_device for mechanism in MECHANISMS[ability])
