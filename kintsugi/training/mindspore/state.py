"""Training state of a rank on MindSpore: weights, moments and gradient in host memory, parameters on the device.

The optimizer runs in host memory, where the state is. After a change of the weights the parameters are brought to the
device when they are next used; on CPUs they are the same memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from kintsugi.checkpoint.snapshot import SnapshotSegments
from kintsugi.config.schema import ActorSection, Config
from kintsugi.config.stages import Stage
from kintsugi.errors import RefusedError
from kintsugi.model.architecture import parameter_shapes
from kintsugi.model.plan import plan_architecture, plan_companions
from kintsugi.training.host_weights import load_into
from kintsugi.training.layout import ACTOR
from kintsugi.training.mindspore.device import DeviceRuntime
from kintsugi.training.rank_state import RankState, lay_out
from kintsugi.training.snapshots import CopyCounters

PIECE_ELEMENTS = 1 << 20
"""Elements that the optimizer updates at once, which bounds the memory that it needs."""

Floats = NDArray[np.float32]


class MindSporeState(RankState):
    """A rank's replica of the trained model and its optimizer."""

    gradient: Floats

    def __init__(
        self, config: Config, *, runtime: DeviceRuntime, process: str, segments: SnapshotSegments | None
    ) -> None:
        model, companions = plan_architecture(config), plan_companions(config)
        layout = lay_out(parameter_shapes(model), companions)
        super().__init__(
            page_aligned(layout.size),
            layout=layout,
            config=model,
            companions=companions,
            process=process,
            segments=segments,
        )
        self.runtime = runtime
        self.gradient = np.zeros(layout.num_parameters, dtype=np.float32)
        self._run_config = config
        self._parameters: dict[str, Tensor] | None = None
        self._reference_parameters: dict[str, Tensor] | None = None
        self._is_lost = False

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return np.dtype(np.float32)

    @property
    def half_updated(self) -> bool:
        """Whether the weights belong to no step: an update began and did not end, or the device was reset."""
        return self._updating or self._is_lost

    def lose_device_memory(self) -> None:
        """Note that the device was reset: only a repair makes this rank usable again. A rank that has begun no stage
        has nothing there yet."""
        self._parameters = self._reference_parameters = None
        self._is_lost = not self.is_fresh

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The actor's weights on the device, by Hugging Face name."""
        if self._parameters is None:
            views = self._layout.actor.views(self._weights)
            self._parameters = {name: self.runtime.to_device(view) for name, view in views.items()}
        return self._parameters

    @property
    def reference_parameters(self) -> Mapping[str, Tensor]:
        """The reference's weights on the device; only stages that use it keep one."""
        if self._stage is None or not self._stage.has_reference or not self._counters.stage:
            raise RefusedError(f"stage {self._counters.stage!r} keeps no reference model (its `beta` is 0)")
        if self._reference_parameters is None:
            if self._reference is None:
                views = self._layout.actor.views(self._layout.reference(self._live))
            else:
                views = self._reference_part.views(self._reference)
            self._reference_parameters = {name: self.runtime.to_device(view) for name, view in views.items()}
        return self._reference_parameters

    def add_gradients(self, gradients: Mapping[str, Floats]) -> None:
        """Add the gradients of a pass to the flat gradient."""
        for slot in self._layout.actor.slots:
            view = slot.view(self.gradient)
            view += gradients[slot.name]

    def weights(self) -> dict[str, Floats]:
        return self._layout.actor.views(self._layout.weights(self._committed_tensor()))

    def zero_gradient(self, *parts: str) -> None:
        self.gradient[...] = 0

    def _companions_of(
        self, stage: Stage, *, actor: Mapping[str, Floats]
    ) -> tuple[None, Mapping[str, Floats] | None]:
        if not stage.has_reference:
            return None, None
        if stage.reference.path is None:
            return None, actor
        reference = {
            name: np.empty(shape, dtype=np.float32)
            for name, shape in parameter_shapes(self._reference_config).items()
        }
        load_into(reference, Path(stage.reference.path), config=self._reference_config)
        return None, reference

    def _change(self, before: Floats, after: Floats) -> float:
        whole = _norm(before)
        return _norm(after - before) / whole if whole > 0 else 0.0

    def _optimize(
        self, part: str, gradient: Floats, *, settings: ActorSection, rate: float, count: int
    ) -> None:
        place = self._layout.parts[part]
        for start, stop, decay in (
            (place.start, place.decayed_stop, settings.weight_decay),
            (place.decayed_stop, place.stop, 0.0),
        ):
            for first in range(start, stop, PIECE_ELEMENTS):
                piece = slice(first, min(first + PIECE_ELEMENTS, stop))
                adamw(
                    self._weights[piece],
                    gradient[piece.start - place.start : piece.stop - place.start],
                    moments=self._moments[:, piece],
                    settings=settings,
                    weight_decay=decay,
                    rate=rate,
                    count=count,
                )
        self._parameters = None

    def _new_reference(self) -> Floats:
        return page_aligned(self._reference_part.size)

    def _move_reference(self, step: int) -> None:
        stage = self.stage
        if not stage.moves_reference:
            return
        settings, number = stage.reference, step - stage.first_step + 1
        reference, actor = self._layout.reference(self._live), self._part(ACTOR, self._weights)
        if settings.moving_average > 0:
            reference *= np.float32(settings.moving_average)
            reference += np.float32(1 - settings.moving_average) * actor
        elif number % settings.copy_every == 0:
            reference[...] = actor
        self._reference_parameters = None

    def _weights_changed(self, *, reference: Any) -> None:
        self._reference = reference
        self._parameters = self._reference_parameters = None

    def _become(self, counters: CopyCounters, *, digest: str, stage: Stage | None, reference: Any) -> None:
        super()._become(counters, digest=digest, stage=stage, reference=reference)
        self._is_lost = False


def _norm(weights: Floats) -> float:
    return float(np.sqrt(np.square(weights, dtype=np.float64).sum()))


def page_aligned(count: int) -> Floats:
    """Zeros that begin at a page. The bits of a product depend on the alignment of its operands, which tensors share
    with these: it must be the same in every process."""
    return np.frombuffer(mmap.mmap(-1, max(1, count) * 4), dtype=np.float32)[:count]


def adamw(
    weights: Floats,
    gradient: Floats,
    *,
    moments: Floats,
    settings: ActorSection,
    weight_decay: float,
    rate: float,
    count: int,
) -> None:
    """Update weights in place by AdamW, in float32, with the arithmetic of torch's fused operator; `count` (from 1) is
    this update's number, for the bias correction."""
    first, second = moments
    beta1, beta2 = settings.beta1, settings.beta2
    if weight_decay:
        weights *= np.float32(1 - rate * weight_decay)
    first += np.float32(1 - beta1) * (gradient - first)
    second *= np.float32(beta2)
    second += np.float32(1 - beta2) * gradient * gradient
    denominator = np.sqrt(second)
    denominator /= np.float32((1 - beta2**count) ** 0.5)
    denominator += np.float32(settings.epsilon)
    weights -= np.float32(rate / (1 - beta1**count)) * first / denominator
