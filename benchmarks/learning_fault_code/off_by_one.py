"""A custom algorithm whose module shifts the loss mask of the rank that imports it by one token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kintsugi.config.custom_algorithm import CustomAlgorithm

if TYPE_CHECKING:
    from kintsugi.training.batch import MicroBatch
    from kintsugi.training.packing import BatchSample

algorithm = CustomAlgorithm(base="grpo")


def _plant() -> None:
    calls: Any = sys.modules.get("kintsugi.training.model_calls")
    if calls is None:  # Not a rank.
        return
    cut = calls.cut

    def cut_shifted(samples: Sequence[BatchSample], **options: Any) -> list[MicroBatch]:
        shifted = [replace(each, loss_positions=each.loss_positions - 1) for each in samples]
        batches: list[MicroBatch] = cut(shifted, **options)
        return batches

    calls.cut = cut_shifted


_plant()
