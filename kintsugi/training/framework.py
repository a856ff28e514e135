"""The seam between the process of a rank and its training framework.

`worker.py` and everything that it imports know no framework: it opens the one that `actor.framework` names and takes
the state, the calls, the callbacks of recovery and the device from it. A process of one framework never imports
another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kintsugi.checkpoint.snapshot import SnapshotSegments
from kintsugi.config.schema import Config, ShareDevice
from kintsugi.config.stages import Stage
from kintsugi.device_lease.client import DeviceMemory
from kintsugi.model.arrays import Array
from kintsugi.model.seats import Mesh
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.training import RunCall
from kintsugi.recovery.rank import Flow
from kintsugi.telemetry.events import Event
from kintsugi.training.calls import TrainingCalls
from kintsugi.training.group import Groups, Interruption
from kintsugi.training.rank_adapter import LoadState, RankAdapter, Seating
from kintsugi.training.rank_state import RankState
from kintsugi.weights.publish import DevicePublisher, PublishTransport

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a prompt with its chosen completion, and with the rejected one."""


class Framework(Protocol):
    """Parts that a rank takes from its training framework. Opened once per process, before its state."""

    @property
    def flow(self) -> Flow:
        """Sequence of operations that recovers a rank of this framework."""
        ...

    @property
    def device(self) -> str:
        """Device of this process, as shown to operators: "cpu", "cuda:0"."""
        ...

    @property
    def chip(self) -> str:
        """Identity of the accelerator; equal for two processes if they share it."""
        ...

    def open_state(
        self, config: Config, *, process: str, segments: SnapshotSegments | None, mesh: Mesh | None = None
    ) -> RankState:
        """Open the state of a rank, which is fresh. `mesh`: in place of the configured one."""
        ...

    def fill_initial(self, state: RankState, config: Config) -> None:
        """Fill a fresh state with the weights with which the run begins."""
        ...

    def open_calls(
        self,
        state: RankState,
        *,
        deterministic: bool,
        check: Callable[[], None],
        store: Callable[[RunCall], None],
    ) -> TrainingCalls: ...

    def open_adapter(
        self,
        state: RankState,
        *,
        process: str,
        keys: tuple[bytes, bytes],
        stages: Mapping[str, Stage],
        load_state: LoadState,
        forget: Callable[[], None],
        interruption: Interruption,
        seating: Seating | None = None,
    ) -> RankAdapter:
        """`seating`: gives the rank another box of the state, where the framework cuts it."""
        ...

    def score_pairs(
        self,
        state: RankState,
        block: Callable[[int], Sequence[Pair]],
        *,
        first: int,
        count: int,
        groups: Groups | None,
        check: Callable[[], None],
    ) -> list[bool]:
        """For pairs `first` to `first + count - 1`, whether the model scores the chosen completion higher. Nothing
        from the ranks before the last stage of `groups`. `check` raises if the evaluation has to be given up."""
        ...

    def joined_weights(self, state: RankState, groups: Groups) -> Mapping[str, Array]:
        """Whole weights of this rank's layers, of which it may hold slices or nothing. A collective of the tensor
        ranks; where weights are gathered layer by layer, of all ranks, which read them in one order."""
        ...

    def device_publisher(self, state: RankState, config: Config, *, host: str) -> DevicePublisher | None:
        """Memory of the accelerator that servers can map; None without one."""
        ...

    def transports(
        self, *, process: str, store: str, keys: tuple[bytes, bytes], emit: Callable[[Event], None]
    ) -> Sequence[PublishTransport]:
        """Transports of weights by the framework's own collectives."""
        ...

    def device_memory(self, state: RankState, *, policy: ShareDevice) -> DeviceMemory | None:
        """Memory that moves when the device is lent to another process; None if nothing has to."""
        ...

    def gauges(self) -> dict[str, float]:
        """Readings of the device for the next heartbeat."""
        ...

    def release_memory(self) -> None:
        """Give unused memory back to the device after an allocation has failed."""
        ...


def open_framework(config: Config, bootstrap: Bootstrap) -> Framework:
    """Open the framework of this run's ranks. Only its own modules, and those of its library, are imported."""
    if config.actor.framework == "mindspore":
        from kintsugi.training.mindspore.framework import MindSporeFramework

        return MindSporeFramework.open()
    from kintsugi.training.torch_framework import TorchFramework

    return TorchFramework.open(config, process=bootstrap.process, broken=bootstrap.broken_chips)
