"""Recovery operations of a training rank on PyTorch: the flow with a rollback.

A rank keeps its state in the memory of its device through a recovery, and returns to the committed step by itself.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from kintsugi.protocol.recovery import RebuildGroup
from kintsugi.recovery.rank import Flow
from kintsugi.runtime.waits import wait
from kintsugi.training.group import Groups
from kintsugi.training.process_group import join_groups
from kintsugi.training.rank_adapter import RankAdapter

DEVICE_STOP_TIMEOUT_S = 30.0
DEVICE_POLL_S = 0.001


class TorchAdapter(RankAdapter):
    """A rank on PyTorch."""

    flow = Flow.ROLLBACK

    def clean(self) -> None:
        """Drop the data of the current step and the gradient; `rollback` restores the state itself."""
        self._forget()
        self._state.zero_gradient()

    def rollback(self, step: int) -> None:
        if not (self._state.is_fresh and step == 0):  # A state that never changed is not verified.
            self._state.rollback(step)
        self._forget()
        self.gather()

    def _join(self, request: RebuildGroup) -> Groups:
        return join_groups(
            self._state.seat.mesh,
            group_id=request.generation,
            ranks=request.ranks,
            me=self._process,
            store_address=request.store,
            keys=self._keys,
            device=self._state.gradient.device,
            timeout_s=request.timeout_s,
            interruption=self._interruption,
            is_tied=self._state.model_part.is_tied,
        )

    def _known_numbers(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self._state.gradient.device)

    def _stop_device(self) -> None:
        if self._state.gradient.is_cuda:
            _wait_for_device(self._state.gradient.device)


def _wait_for_device(device: torch.device) -> None:
    """Wait until all work started on the device has completed; raises DeadlineExceeded if the device hangs."""
    event = torch.cuda.current_stream(device).record_event()
    idle = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        if event.query():
            return True
        idle.wait(min(DEVICE_POLL_S, remaining_s))
        return None

    wait(attempt, whom=str(device), what="the end of its work", timeout_s=DEVICE_STOP_TIMEOUT_S)
