"""PyTorch as the training framework of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch

from kintsugi.checkpoint.snapshot import SnapshotSegments
from kintsugi.config.schema import Config, ShareDevice
from kintsugi.config.stages import Stage, stages
from kintsugi.device_lease.client import DeviceMemory
from kintsugi.device_lease.memory import KeptMemory, MovedMemory, check_policy
from kintsugi.model.arrays import Array
from kintsugi.model.device import choose_device, identity, use_deterministic_kernels
from kintsugi.model.device_usage import device_gauges
from kintsugi.model.memory import published_versions, shares_weights
from kintsugi.model.plan import plan_companions
from kintsugi.model.seats import Mesh, mesh_of, seat_of, snapshots_of
from kintsugi.protocol.training import RunCall
from kintsugi.recovery.rank import Flow
from kintsugi.telemetry.events import Event
from kintsugi.training.framework import Pair
from kintsugi.training.group import Groups, Interruption
from kintsugi.training.initial_weights import empty_model, fill_initial
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.pairwise_eval import score_pairs
from kintsugi.training.rank_adapter import LoadState, Seating
from kintsugi.training.rank_state import RankState
from kintsugi.training.recovery_adapter import TorchAdapter
from kintsugi.training.state import TrainingState
from kintsugi.training.tensor_row import joined_weights, tensor_group
from kintsugi.weights.publish import DevicePublisher, PublishTransport
from kintsugi.weights.transports.collective import CollectiveTransport
from kintsugi.weights.transports.device import DeviceSlots


class TorchFramework:
    """PyTorch on one device."""

    flow: Flow = TorchAdapter.flow

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def open(cls, config: Config, *, process: str, broken: tuple[str, ...] = ()) -> Self:
        torch.set_num_threads(1)
        device = choose_device(process, broken=broken)
        if device.type == "cuda" and config.deterministic:
            use_deterministic_kernels()
        return cls(device)

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def chip(self) -> str:
        return identity(self._device)

    def open_state(
        self, config: Config, *, process: str, segments: SnapshotSegments | None, mesh: Mesh | None = None
    ) -> TrainingState:
        configured = mesh_of(config.actor.layout)
        seat = seat_of(process, mesh or configured)
        tensors = tensor_group(seat, num_slices=config.actor.logical_slices)
        return TrainingState(
            empty_model(config, device=self._device, seat=seat, tensors=tensors, has_memory=False),
            companions=plan_companions(config),
            compute_dtype=getattr(torch, config.actor.dtype),
            recompute=config.actor.recompute,
            process=snapshots_of(process, seat, configured),
            segments=segments,
            seat=seat,
            mesh=mesh,
            tensors=tensors,
            gathers_layers=config.actor.layout.gathers_layers and seat.shards > 1,
            shares_weights=shares_weights(config) and self._device.type == "cuda",
            keeps_initial=stages(config)[0].begins_as_actor,
        )

    def fill_initial(self, state: RankState, config: Config) -> None:
        state.fill_initial(lambda weights: fill_initial(weights, config))

    def open_calls(
        self,
        state: RankState,
        *,
        deterministic: bool,
        check: Callable[[], None],
        store: Callable[[RunCall], None],
    ) -> ModelCalls:
        return ModelCalls(_own(state), deterministic=deterministic, check=check, store=store)

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
    ) -> TorchAdapter:
        return TorchAdapter(
            state,
            process=process,
            keys=keys,
            stages=stages,
            load_state=load_state,
            forget=forget,
            interruption=interruption,
            seating=seating,
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
        own = _own(state)
        if groups is not None:
            own.enter(groups)
        return score_pairs(
            own.model,
            block,
            first=first,
            count=count,
            groups=groups,
            unit_pass=own.unit_pass(own.model),
            check=check,
        )

    def joined_weights(self, state: RankState, groups: Groups) -> Mapping[str, Array]:
        if state.gathers_layers:
            return _own(state).gathered_weights(groups.data)
        weights = _own(state).weights()
        if groups.tensors is None:
            return weights
        return joined_weights(weights, shapes=state.weight_shapes, slices=state.slices, group=groups.tensors)

    def device_publisher(self, state: RankState, config: Config, *, host: str) -> DevicePublisher | None:
        if self._device.type != "cuda":
            return None
        return DeviceSlots(
            self._device,
            host=host,
            versions_kept=published_versions(config),
            shared=_own(state).shared_weights,
        )

    def transports(
        self, *, process: str, store: str, keys: tuple[bytes, bytes], emit: Callable[[Event], None]
    ) -> Sequence[PublishTransport]:
        return (CollectiveTransport(process=process, store=store, keys=keys, emit=emit),)

    def device_memory(self, state: RankState, *, policy: ShareDevice) -> DeviceMemory | None:
        if self._device.type != "cpu" and policy == "keep":
            return KeptMemory(self._device)
        if policy != "offload":
            return None
        check_policy(policy, device=self._device)
        own = _own(state)
        _ = (
            own.committed_digest
        )  # Computed while the state is on the device; requests may come when it is not.
        return MovedMemory(self._device, tensors=own.resident, settle=own.await_copy)

    def gauges(self) -> dict[str, float]:
        return device_gauges()

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def _own(state: RankState) -> TrainingState:
    assert isinstance(state, TrainingState), f"a state of PyTorch was opened, got {type(state).__name__}"
    return state
