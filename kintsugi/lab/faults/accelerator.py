"""Simulated accelerator faults for hosts without an accelerator: CPU and host memory stand for the device."""

from __future__ import annotations

from kintsugi.lab.faults.cgroup import GroupedFault
from kintsugi.lab.faults.memory import ROOM_BYTES, AllocationLimit

PERIOD_S = 0.02
DEFAULT_FACTOR = 4.0
FREE_BYTES = 4 << 20


class RefusedAllocations(AllocationLimit):
    """Makes the next large allocation fail, as on an accelerator that is full; the process stays alive.

    The simulated accelerator has a few MiB of free memory, of which `share` is taken.
    """

    stands_for = "memory of an accelerator that is full"
    supported_parameters = frozenset({"share"})

    @property
    def room(self) -> int:
        return max(ROOM_BYTES, round((1 - self.parameter("share", 1.0)) * FREE_BYTES))


class SlowedDown(GroupedFault):
    """Freezes the process for a part of every 20 ms: it makes less progress without waiting for CPU or for another
    process."""

    name = "frozen for a part of every 20 ms"
    stands_for = "an accelerator that computes more slowly"
    controller = "freezer"
    supported_parameters = frozenset({"factor"})
    ramps = True

    def set_up(self) -> None:
        self._frozen = False

    def tick(self, strength: float) -> float:
        factor = 1 + strength * (max(1.0, self.parameter("factor", DEFAULT_FACTOR)) - 1)
        frozen_s = PERIOD_S * (1 - 1 / factor)
        self._frozen = not self._frozen and frozen_s > 0
        if self.version == 2:
            self.write_control("cgroup.freeze", "1" if self._frozen else "0")
        else:
            self.write_control("freezer.state", "FROZEN" if self._frozen else "THAWED")
        self.measured["frozen_share"] = frozen_s / PERIOD_S
        return frozen_s if self._frozen else PERIOD_S - frozen_s
