"""A device that is full or slow. Without an accelerator, the processor and the host's memory are the device."""

from __future__ import annotations

from kintsugi.lab.abilities.grouped import GroupedFault
from kintsugi.lab.abilities.memory import ROOM_BYTES, AllocationLimit

PERIOD_S = 0.02
DEFAULT_FACTOR = 4.0
FREE_BYTES = 4 << 20


class RefusedAllocations(AllocationLimit):
    """The next tensor does not fit. The process lives on, as one does whose accelerator is full.

    The accelerator that it stands for has a few MiB that nobody uses yet, of which a `share` is taken.
    """

    stands_for = "memory of an accelerator that is full"
    words = frozenset({"share"})

    @property
    def room(self) -> int:
        return max(ROOM_BYTES, round((1 - self.amount("share", 1.0)) * FREE_BYTES))


class SlowedDown(GroupedFault):
    """Frozen for a part of every 20 ms: it wants no processor then, waits for nobody, and gets less done."""

    name = "frozen for a part of every 20 ms"
    stands_for = "an accelerator that computes more slowly"
    controller = "freezer"
    words = frozenset({"factor"})
    ramps = True

    def set_up(self) -> None:
        self._frozen = False

    def tick(self, strength: float) -> float:
        factor = 1 + strength * (max(1.0, self.amount("factor", DEFAULT_FACTOR)) - 1)
        frozen_s = PERIOD_S * (1 - 1 / factor)
        self._frozen = not self._frozen and frozen_s > 0
        if self.version == 2:
            self.say("cgroup.freeze", "1" if self._frozen else "0")
        else:
            self.say("freezer.state", "FROZEN" if self._frozen else "THAWED")
        self.measured["frozen_share"] = frozen_s / PERIOD_S
        return frozen_s if self._frozen else PERIOD_S - frozen_s
