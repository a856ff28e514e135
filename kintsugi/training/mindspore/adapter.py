"""Recovery operations of a training rank on MindSpore: the flow without a rollback.

The device is reset while the group is formed again, so nothing in its memory counts afterwards, and every rank is
repaired from its snapshot in the memory of its host's agent.

    stop      abort device tasks, end the group      _stop_device
    clean     only reset the snapshot state          clean_tdt_channel, _reset_snapshot_state
    rebuild   finalise communication, reset the      _finalize_comm, _rebuild_group, set_is_arf
              device, create the group, set the device
    repair    state of the agreed step               from snapshots here; send_recv between replicas there
    notify    training goes on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kintsugi.config.stages import Stage
from kintsugi.errors import RefusedError
from kintsugi.protocol.recovery import RebuildGroup
from kintsugi.recovery.rank import Flow
from kintsugi.training.group import Groups, Interruption
from kintsugi.training.host_group import join_host_group
from kintsugi.training.mindspore.device import DeviceRuntime
from kintsugi.training.mindspore.state import MindSporeState
from kintsugi.training.rank_adapter import LoadState, RankAdapter


class MindSporeAdapter(RankAdapter):
    """A rank on MindSpore."""

    flow = Flow.RESTORE

    def __init__(
        self,
        state: MindSporeState,
        *,
        runtime: DeviceRuntime,
        process: str,
        keys: tuple[bytes, bytes],
        stages: Mapping[str, Stage],
        load_state: LoadState,
        forget: Callable[[], None],
        interruption: Interruption,
    ) -> None:
        super().__init__(
            state,
            process=process,
            keys=keys,
            stages=stages,
            load_state=load_state,
            forget=forget,
            interruption=interruption,
        )
        self._own_state = state
        self._runtime = runtime

    def clean(self) -> None:
        """Reset the snapshot state, and drop the data of the current step. Snapshots of finished steps stay: the repair
        reads them."""
        self._runtime.reset_snapshot_state()
        self._forget()

    def rollback(self, step: int) -> None:
        raise RefusedError("a rank on MindSpore does not roll back: it is repaired from its snapshot")

    def _join(self, request: RebuildGroup) -> Groups:
        self._runtime.finalize_communication()
        self._runtime.reset()
        self._own_state.lose_device_memory()
        group = join_host_group(
            group_id=request.generation,
            ranks=request.ranks,
            me=self._process,
            store_address=request.store,
            keys=self._keys,
            timeout_s=request.timeout_s,
            interruption=self._interruption,
        )
        self._runtime.set_device()
        return Groups.of(group)

    def _known_numbers(self, numbers: list[float]) -> NDArray[np.float64]:
        return np.array(numbers, dtype=np.float64)

    def _stop_device(self) -> None:
        self._runtime.stop()
