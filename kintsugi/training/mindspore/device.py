"""The device runtime of a MindSpore rank: what a recovery does to a device, and how arrays reach it.

`CpuRuntime` is what is tested. `AscendRuntime` names the calls of MindSpore's own fault tolerance
(`mindspore.train.callback._train_fault_tolerance`) in the same places; it has not been run, because that takes an NPU,
and `actor.framework: mindspore` is refused where there is no CPU wheel (`config.frameworks`).
"""

from __future__ import annotations

from typing import Any, Protocol

import mindspore
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

CPU = "cpu"


class DeviceRuntime(Protocol):
    """Operations on one device, in the order of a recovery."""

    @property
    def name(self) -> str: ...

    def set_device(self) -> None:
        """Select the device for this process; before anything is computed, and again after `reset`."""
        ...

    def stop(self) -> None:
        """Abort or await all work of this process on the device."""
        ...

    def reset_snapshot_state(self) -> None:
        """Forget a copy of parameters to the host that an aborted step has begun."""
        ...

    def finalize_communication(self) -> None:
        """Destroy all communication groups of the process."""
        ...

    def reset(self) -> None:
        """Reset the device: nothing in its memory counts afterwards."""
        ...

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Array in the memory of the device."""
        ...


class CpuRuntime:
    """MindSpore on CPUs. The device's memory is the host's, so a tensor may share that of an array."""

    name = CPU

    def set_device(self) -> None:
        mindspore.set_device("CPU")
        # Without its pipeline of threads: on a host with few cores they spin against each other.
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE, pynative_synchronize=True)

    def stop(self) -> None:
        """Do nothing: without the pipeline, work has ended when its call returns."""

    def reset_snapshot_state(self) -> None:
        """Do nothing: a CPU has no copy to the host under way."""

    def finalize_communication(self) -> None:
        """Do nothing: gradients go through `HostGroup`, because MindSpore's CPU groups can not be rebuilt."""

    def reset(self) -> None:
        """Do nothing to the CPU; the rank drops its tensors (`MindSporeState.lose_device_memory`)."""

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        return Tensor.from_numpy(array)


class AscendRuntime:
    """MindSpore on an Ascend NPU: the calls of its own fault tolerance, in their order. Not run; see the module."""

    name = "ascend"

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id

    def set_device(self) -> None:
        mindspore.set_device("Ascend", self._device_id)

    def stop(self) -> None:
        _expression()._stop_device(self._device_id)

    def reset_snapshot_state(self) -> None:
        expression = _expression()
        expression.clean_tdt_channel()
        expression._reset_snapshot_state()

    def finalize_communication(self) -> None:
        _expression()._finalize_comm()

    def reset(self) -> None:
        expression = _expression()
        expression._rebuild_group()
        expression.set_is_arf(True)

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        return Tensor(array)


def _expression() -> Any:
    from mindspore import _c_expression

    return _c_expression
