"""Which of a rank's work needs the device, where that is shared, and what the rank leaves there between its turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from kintsugi.config import ShareDevice
from kintsugi.lease.client import UNSHARED, Lease, Memory, Speaker, open_lease
from kintsugi.lease.memory import Kept, Moved, check_policy
from kintsugi.messages import Body, EvaluatePairs, HashWeights, Publish, RunCall, Save, StartStage
from kintsugi.model.device import identity
from kintsugi.operations import DeviceClean, FetchState, Repair, Rollback
from kintsugi.training.state import TrainingState

CALLS_PER_STEP = 1 << 10
"""More than a graph has, so that the calls of all steps are in one order."""
WITH_OTHERS = 0
"""The order of what is no call: it is let in with any call of another rank, who may be waiting for it."""


class DeviceTurns:
    """Computing waits for the rank's turn; reading the state only keeps it where it is; the rest needs neither."""

    def __init__(self, lease: Lease = UNSHARED) -> None:
        self._lease = lease

    def around(self, body: Body, *, check: Callable[[], object]) -> AbstractContextManager[None]:
        """For a request, but for the call of a graph, which first gets what it computes with."""
        match body:
            case StartStage() | EvaluatePairs() | DeviceClean() | Repair() | Rollback():
                return self._lease.entered(order=WITH_OTHERS, check=check)
            case Publish() | Save() | HashWeights() | FetchState():
                return self._lease.still()
            case _:
                return nullcontext()

    def of_call(self, call: RunCall, *, check: Callable[[], object]) -> AbstractContextManager[None]:
        """Every rank works the calls off in this order, and may wait for the others within one."""
        order = call.step * CALLS_PER_STEP + len(call.after)
        return self._lease.entered(order=order, check=check)


def open_turns(
    shell: Speaker, state: TrainingState, *, policy: ShareDevice, device: torch.device
) -> DeviceTurns:
    """Of a rank whose device may be shared."""
    memory: Memory | None = None
    if device.type != "cpu" and policy == "keep":
        memory = Kept(device)
    elif policy == "offload":
        check_policy(policy, device=device)
        _ = state.committed_digest  # Taken while the state is on the device, for who asks when it is not.
        memory = Moved(device, tensors=state.resident, settle=state.await_copy)
    return DeviceTurns(open_lease(shell, policy=policy, device=identity(device), memory=memory))
