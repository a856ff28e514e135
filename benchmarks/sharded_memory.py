"""Memory of a rank whose optimizer state is cut: bytes per parameter that stay resident, by number of shards.

    python benchmarks/sharded_memory.py [--model tiny|135m] [--dtype float32|bfloat16] [--shards 1 2 4]
                                        [--gather step layer] [--start]

One process per number of shards makes the model with random weights, takes it over as rank 0 does (weights, moments,
gradient, weights to compute with), starts a stage, and writes every byte. Compared are the growth of its anonymous
memory and of its shared memory (the snapshot slot of the committed state) with the number of parameters. Activations
and what an update needs for a moment are not in it; `layer_gathering.py` measures peaks, with ranks that compute.

With `--start` it is the peak of the anonymous memory, sampled, while rank 0 starts as in a run: it opens its state,
reads its initial weights from a model folder in bfloat16 (random weights, written before), and starts a stage.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.config.schema import (
    ActorSection,
    AlgorithmSection,
    Config,
    CriticSection,
    ModelSection,
    ReferenceSection,
    resolved,
)
from kintsugi.config.stages import Stage, stages
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.huggingface import save
from kintsugi.model.plan import plan_architecture
from kintsugi.model.seats import Mesh, seat_of
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.state import TrainingState
from kintsugi.training.torch_framework import TorchFramework

SAMPLED_S = 0.002

MODELS = {
    "tiny": ModelConfig(
        family="qwen2",
        vocab_size=14,
        hidden_size=96,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=24,
        max_positions=64,
        tie_embeddings=True,
        attention_bias=True,
    ),
    "135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        tie_embeddings=True,
        attention_bias=False,
    ),
}
"""The second has the shape of SmolLM2-135M."""


def resident() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")}


def measure(model: str, *, dtype: str, shards: int, gather: str) -> dict[str, float]:
    """Bytes per parameter of one rank, in this process."""
    torch.set_num_threads(1)
    stage = Stage(
        "sft",
        1,
        resolved(AlgorithmSection(name="sft")),
        ActorSection(),
        0,
        CriticSection(),
        ReferenceSection(),
    )
    torch.zeros(1)
    before = resident()
    whole = Transformer(MODELS[model])
    seat = seat_of("model-0", Mesh(shards))
    state = TrainingState(
        whole, compute_dtype=getattr(torch, dtype), seat=seat, gathers_layers=gather == "layer"
    )
    count = sum(parameter.numel() for parameter in whole.parameters())
    del whole
    gc.collect()
    state.start_stage(stage, step=0)
    state.gradient.fill_(1.0)
    state._live.add_(0.0)
    state.await_copy()
    after = resident()
    return {
        "parameters": count,
        "state": state._live.nbytes / count,
        "resident": (after["RssAnon"] - before["RssAnon"]) / count,
        "snapshot": (after["RssShmem"] - before["RssShmem"]) / count,
    }


class Peak:
    """Samples the anonymous memory of this process in a thread."""

    def __init__(self) -> None:
        self.highest = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLED_S):
            self.highest = max(self.highest, resident()["RssAnon"])

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.highest


def write_folder(model: str, folder: Path) -> None:
    """A Hugging Face folder with random weights in bfloat16."""
    whole = Transformer(MODELS[model], dtype=torch.bfloat16)
    initialize(whole, seed=1)
    save(dict(whole.named_parameters()), config=MODELS[model], folder=folder)


def measure_start(folder: Path, *, dtype: str, shards: int, gather: str) -> dict[str, float]:
    """Bytes per parameter of rank 0 while it starts, in this process: the state, the peak, and what stays."""
    torch.set_num_threads(1)
    config = Config(
        name="start",
        model=ModelSection(path=str(folder)),
        algorithm=AlgorithmSection(name="sft", steps=2),
        actor=msgspec.convert(
            {"workers": shards, "dtype": dtype, "layout": {"shards": shards, "gather": gather}}, ActorSection
        ),
    )
    (stage,) = stages(config)
    count = num_parameters(plan_architecture(config))
    framework = TorchFramework(torch.device("cpu"))
    torch.zeros(1)
    gc.collect()
    before, peak = resident()["RssAnon"], Peak()
    state = framework.open_state(config, process="model-0", segments=None)
    assert isinstance(state, TrainingState)
    framework.fill_initial(state, config)
    state.start_stage(stage, step=0)
    state.await_copy()
    highest = peak.end()
    gc.collect()
    return {
        "parameters": count,
        "state": state._live.nbytes / count,
        "peak": (highest - before) / count,
        "after it": (resident()["RssAnon"] - before) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gather", choices=["step", "layer"], nargs="+", default=["step"])
    parser.add_argument("--start", action="store_true", help="The peak while a rank starts.")
    parser.add_argument("--measure", action="store_true", help="In this process, for one number of shards.")
    parser.add_argument("--folder", type=Path, help="Of the model, for --measure --start.")
    given = parser.parse_args()
    if given.measure and given.start:
        found = measure_start(given.folder, dtype=given.dtype, shards=given.shards[0], gather=given.gather[0])
        sys.stdout.write(json.dumps(found) + "\n")
        return
    if given.measure:
        found = measure(given.model, dtype=given.dtype, shards=given.shards[0], gather=given.gather[0])
        sys.stdout.write(json.dumps(found) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.start:
            write_folder(given.model, Path(folder))
        for shards in given.shards:
            for gather in given.gather if shards > 1 else ["step"]:
                print_measured(given, shards=shards, gather=gather, folder=folder)


def print_measured(given: argparse.Namespace, *, shards: int, gather: str, folder: str) -> None:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--measure", "--model", given.model, "--dtype", given.dtype]
    command += ["--start", "--folder", folder] if given.start else []
    output = subprocess.run(
        [*command, "--shards", str(shards), "--gather", gather],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout
    found = json.loads(output)
    sizes = ", ".join(f"{name} {found[name]:.2f}" for name in found if name != "parameters")
    about = f"{given.model} {given.dtype}, {found['parameters']:,} parameters, {shards} shards"
    sys.stdout.write(f"{about}, gathered by {gather}: {sizes} bytes per parameter\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
