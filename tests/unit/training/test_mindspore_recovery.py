"""After a recovery a MindSpore rank computes the bits that it would have computed without one: in the process that
lived, and in its replacement."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection, Config, ModelSection, NewModel
from kintsugi.config.stages import stages
from tests.cluster.mindspore_interpreter import PYTHON, needs_mindspore
from tests.unit.training.world import new_batch

PROGRAM = Path(__file__).with_name("mindspore_steps_program.py")
ROOT = Path(__file__).parents[3]
STEPS, AGREED = 14, 6
ALGORITHMS = {"sft": AlgorithmSection(name="sft"), "grpo": AlgorithmSection(name="grpo", entropy_weight=0.01)}
BATCH = new_batch([(5 + index % 11, 1 + index % 4) for index in range(23)])


def digests_of(what: str, folder: Path) -> list[str]:
    arguments = [folder / "steps", folder / f"{what}.json", folder / "state.npz", what]
    subprocess.run(
        [str(PYTHON), str(PROGRAM), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    return msgspec.json.decode((folder / f"{what}.json").read_bytes(), type=list[str])


@needs_mindspore
@pytest.mark.mindspore
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_steps_after_a_recovery_have_the_bits_of_an_undisturbed_process(name: str, tmp_path: Path) -> None:
    new = NewModel(hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, max_positions=64)
    config = Config(name="test", model=ModelSection(new=new), algorithm=ALGORITHMS[name])
    stage = stages(config)[-1]
    calls = [BATCH.call(stage, step=step, rank=0, world_size=1, num_shards=1) for step in range(1, STEPS + 1)]
    given = {"config": config, "calls": calls, "trajectories": BATCH.trajectories}
    (tmp_path / "steps").write_bytes(msgspec.msgpack.encode(given))
    lived = digests_of("lives", tmp_path)
    undisturbed, again = lived[:STEPS], lived[STEPS:]
    assert len(set(undisturbed)) == STEPS, "every step changes the state"
    assert again == undisturbed[AGREED:]
    assert digests_of("replaces", tmp_path) == undisturbed[AGREED:]
