"""Program of the other interpreter: the loss, gradient and log-probabilities that MindSpore finds on a saved batch.

python mindspore_program.py INPUT.msgpack WEIGHTS.npz OUTPUT.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.protocol.training import RunCall
from kintsugi.training.mindspore.calls import MindSporeCalls
from kintsugi.training.mindspore.framework import MindSporeFramework
from kintsugi.training.mindspore.passes import MicroBatch, PolicyGradient, Supervised, logprobs_of
from kintsugi.training.packing import sample_of
from kintsugi.training.step_cache import StepCache
from kintsugi.types import Trajectory


class SavedBatch(msgspec.Struct):
    """One call with its trajectories."""

    config: Config
    call: RunCall
    trajectories: dict[str, Trajectory]


def main(given: Path, weights: Path, output: Path) -> None:
    saved = msgspec.msgpack.decode(given.read_bytes(), type=SavedBatch)
    framework = MindSporeFramework.open()
    state = framework.open_state(saved.config, process="model-0", segments=None)
    values = np.load(weights)

    def fill(parameters: dict[str, np.ndarray]) -> None:
        for name, view in parameters.items():
            view[...] = values[name]

    state.fill_initial(fill)  # type: ignore[arg-type]
    stage = stages(saved.config)[-1]
    state.start_stage(stage, step=stage.first_step - 1)
    items = [item for shard in saved.call.shards for item in shard.items]
    samples = [sample_of(item, saved.trajectories[item.key]) for item in items]
    batch = MicroBatch.of(sorted(samples, key=lambda sample: sample.key), state)
    objective = (Supervised if stage.algorithm.name == "sft" else PolicyGradient)(state, StepCache())
    found = objective.loss(batch, saved.call)
    logprobs = logprobs_of(state.parameters, batch, state, temperature=1.0)
    contribution = MindSporeCalls(state, deterministic=True)._contribution(
        [batch], call=saved.call, objective=objective, learns=True
    )
    state.begin_update()
    state.update(contribution.gradient)
    assert "torch" not in sys.modules
    arrays: dict[str, Any] = {
        "loss": found.loss,
        "logprobs": logprobs,
        "sums": [found.sums[name] for name in sorted(found.sums)],
        **{f"gradient/{name}": gradient for name, gradient in found.gradients.items()},
        **{f"updated/{name}": view for name, view in state._layout.actor.views(state._weights).items()},
    }
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
