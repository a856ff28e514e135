"""Program of the other interpreter: steps of one MindSpore rank, and its recovery with the state of another process.

python mindspore_steps_program.py INPUT.msgpack OUTPUT.json STATE.npz lives | replaces
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.model.tensor_file import TensorFile
from kintsugi.protocol.recovery import DeviceClean, DeviceStop, NotifyNormal, PreLock, RebuildGroup, Repair
from kintsugi.protocol.training import RunCall
from kintsugi.recovery.rank import Operation, Processor
from kintsugi.training.host_weights import initialize
from kintsugi.training.mindspore.framework import MindSporeFramework
from kintsugi.training.packing import sample_of
from kintsugi.training.snapshots import CopyCounters
from kintsugi.transport import new_key_pair
from kintsugi.types import Trajectory

STEPS, AGREED = 14, 6
"""Steps of the program, and the one from which it goes on after the recovery. Kernels of MindSpore change how they
divide their work after the first five executions of a shape."""


class Steps(msgspec.Struct):
    """Calls by step with their trajectories."""

    config: Config
    calls: list[RunCall]
    trajectories: dict[str, Trajectory]


class Stored:
    """A state in arrays of this program."""

    has_any_box = False
    box = ""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = {name: np.array(array) for name, array in arrays.items()}
        self.places = {place.name: place for place in TensorFile(self._arrays).places}

    def read(
        self, into: Mapping[str, Any], *, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> None:
        for name, array in into.items():
            array[...] = self._arrays[name]


class Rank:
    """A rank of MindSpore in a group of its own, as `training.worker` drives it."""

    def __init__(self, given: Steps, saved: Path) -> None:
        self.given, self.saved = given, saved
        self.stage = stages(given.config)[-1]
        framework = MindSporeFramework.open()
        self.state = framework.open_state(given.config, process="model-0", segments=None)
        self.state.fill_initial(lambda weights: initialize(weights, 3, num_layers=2))
        self.calls = framework.open_calls(
            self.state, deterministic=True, check=lambda: None, store=lambda call: None
        )
        self.adapter = framework.open_adapter(
            self.state,
            process="model-0",
            keys=new_key_pair(),
            stages={self.stage.name: self.stage},
            load_state=lambda step, source: (self._stored(), self._counters()),
            forget=self.calls.forget,
            interruption=lambda: None,
        )
        self.processor = Processor(self.adapter)

    def _stored(self) -> Stored:
        return Stored(dict(np.load(self.saved)))

    def _counters(self) -> CopyCounters:
        return msgspec.json.decode(self.saved.with_suffix(".json").read_bytes(), type=CopyCounters)

    def save(self) -> None:
        np.savez(self.saved, **self.state.snapshot_tensors())
        self.saved.with_suffix(".json").write_bytes(msgspec.json.encode(self.state.committed_counters))

    def recover(self, *, sequence: int) -> None:
        """The operations of a recovery whose agreed step is `AGREED`."""
        operations: list[Operation] = [
            PreLock(AGREED, sequence),
            DeviceStop(sequence - 1, sequence, ()),
            DeviceClean(sequence),
            RebuildGroup(sequence, ("model-0",), "", sequence=sequence),
            Repair(AGREED, ("model-1",), sequence),
            NotifyNormal(AGREED, sequence),
        ]
        for operation in operations:
            self.processor.carry_out(operation)

    def run(self, step: int) -> str:
        """Run and commit a step; digest of the state after it."""
        call = msgspec.structs.replace(self.given.calls[step - 1], generation=self.adapter.group_id)
        shards = {
            shard.index: [sample_of(item, self.given.trajectories[item.key]) for item in shard.items]
            for shard in call.shards
        }
        self.processor.admit(step)
        self.calls.run(call, shards, groups=self.adapter.groups(call.generation))
        self.state.commit(step)
        return self.state.committed_digest

    def live(self) -> list[str]:
        """Run all steps, recover, and run those after the agreed one again."""
        self.adapter.rebuild(RebuildGroup(1, ("model-0",), "", sequence=0))
        self.state.start_stage(self.stage, step=0)
        digests = []
        for step in range(1, STEPS + 1):
            digests.append(self.run(step))
            if step == AGREED:
                self.save()
        self.recover(sequence=2)
        return [*digests, *(self.run(step) for step in range(AGREED + 1, STEPS + 1))]

    def replace(self) -> list[str]:
        """Begin with the state of another process."""
        self.recover(sequence=2)
        return [self.run(step) for step in range(AGREED + 1, STEPS + 1)]


def main(given: Path, output: Path, saved: Path, what: str) -> None:
    rank = Rank(msgspec.msgpack.decode(given.read_bytes(), type=Steps), saved)
    digests = rank.live() if what == "lives" else rank.replace()
    output.write_bytes(msgspec.json.encode(digests))
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
