"""MindSpore as the training framework of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from kintsugi.checkpoint.snapshot import SnapshotSegments
from kintsugi.config.schema import Config, ShareDevice
from kintsugi.config.stages import Stage
from kintsugi.device_lease.client import DeviceMemory
from kintsugi.errors import RefusedError
from kintsugi.model.arrays import Array
from kintsugi.model.seats import Mesh
from kintsugi.protocol.training import RunCall
from kintsugi.recovery.rank import Flow
from kintsugi.telemetry.events import Event
from kintsugi.training.framework import Pair
from kintsugi.training.group import Groups, Interruption
from kintsugi.training.host_weights import fill_initial
from kintsugi.training.mindspore.adapter import MindSporeAdapter
from kintsugi.training.mindspore.calls import MindSporeCalls
from kintsugi.training.mindspore.device import CPU, CpuRuntime, DeviceRuntime
from kintsugi.training.mindspore.state import MindSporeState
from kintsugi.training.rank_adapter import LoadState, Seating
from kintsugi.training.rank_state import RankState
from kintsugi.weights.publish import DevicePublisher, PublishTransport


class MindSporeFramework:
    """MindSpore on one device."""

    flow: Flow = MindSporeAdapter.flow
    chip = CPU

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    @classmethod
    def open(cls) -> Self:
        runtime = CpuRuntime()
        runtime.set_device()
        return cls(runtime)

    @property
    def device(self) -> str:
        return self._runtime.name

    def open_state(
        self, config: Config, *, process: str, segments: SnapshotSegments | None, mesh: Mesh | None = None
    ) -> MindSporeState:
        assert mesh is None, "this framework does not cut its state"
        return MindSporeState(config, runtime=self._runtime, process=process, segments=segments)

    def fill_initial(self, state: RankState, config: Config) -> None:
        state.fill_initial(lambda weights: fill_initial(weights, config))

    def open_calls(
        self,
        state: RankState,
        *,
        deterministic: bool,
        check: Callable[[], None],
        store: Callable[[RunCall], None],
    ) -> MindSporeCalls:
        return MindSporeCalls(_own(state), deterministic=deterministic, check=check, store=store)

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
    ) -> MindSporeAdapter:
        return MindSporeAdapter(
            _own(state),
            runtime=self._runtime,
            process=process,
            keys=keys,
            stages=stages,
            load_state=load_state,
            forget=forget,
            interruption=interruption,
        )

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
        raise RefusedError("MindSpore ranks train no reward model")

    def joined_weights(self, state: RankState, groups: Groups) -> Mapping[str, Array]:
        weights: Mapping[str, Array] = state.weights()
        return weights

    def device_publisher(self, state: RankState, config: Config, *, host: str) -> DevicePublisher | None:
        return None

    def transports(
        self, *, process: str, store: str, keys: tuple[bytes, bytes], emit: Callable[[Event], None]
    ) -> Sequence[PublishTransport]:
        return ()

    def device_memory(self, state: RankState, *, policy: ShareDevice) -> DeviceMemory | None:
        return None

    def gauges(self) -> dict[str, float]:
        return {}

    def release_memory(self) -> None:
        """Nothing to do: MindSpore returns host memory by itself."""


def _own(state: RankState) -> MindSporeState:
    assert isinstance(state, MindSporeState), f"a state of MindSpore was opened, got {type(state).__name__}"
    return state
