"""Weight updates of a vLLM server in a GRPO run of a real model on this machine.

    python benchmarks/external_engine.py --model FOLDER --out DIR [--steps 6] [--vllm PYTHON] [--no-plugin]
    python benchmarks/external_engine.py --device cuda --random-weights 0.6b --tokenizer FOLDER --out DIR \\
        [--vllm-path FOLDERS] [--dtype bfloat16] [--set FIELD=VALUE]

Starts vLLM as docs/generation_backends.md says (`--no-plugin`: without the plugin, so that it reads folders), then runs
`kintsugi train grpo_smollm2_arithmetic` with it. Reported per update, from the spans of `server-0`: seconds to fetch
and stage a version, during which decoding continues, and seconds of pause; and of each step, how far vLLM's
log-probabilities are from the trainer's. `--vllm-path` names folders of unpacked wheels. With `--random-weights` the
reward is a function of the characters, so that the weights change. `$KINTSUGI` names another checkout to measure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(  # So that it runs as a script.
    0, os.environ.get("KINTSUGI", str(Path(__file__).resolve().parents[1]))
)

from benchmarks.real_model_weights import write_random_model

ROOT = Path(sys.path[0])
PLUGIN = ROOT / "kintsugi/generation/backends/vllm_plugin"
MAX_LENGTH = 96
DEVICE_MEMORY_SHARE = 0.3
"""Of an accelerator, which the rank shares."""
START_TIMEOUT_S = 240.0


def started(arguments: argparse.Namespace, *, port: int) -> subprocess.Popen[bytes]:
    command = [
        str(arguments.vllm),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(arguments.model),
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", arguments.dtype, "--enforce-eager"]
    command += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(arguments.slots)]
    command += ["--logprobs-mode", "processed_logprobs"]
    if not is_before_labels(arguments):
        command.append("--enable-scale-out")
    if not arguments.no_plugin:
        command += ["--worker-extension-cls", "kintsugi_vllm.WeightReceipts"]
        command += ["--weight-transfer-config", '{"backend": "kintsugi"}']
    if arguments.device == "cuda":
        command += ["--gpu-memory-utilization", str(DEVICE_MEMORY_SHARE)]
    path = [str(PLUGIN), arguments.vllm_path, os.environ.get("PYTHONPATH", "")]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with (arguments.out / "vllm.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def is_before_labels(arguments: argparse.Namespace) -> bool:
    """Whether this is vLLM 0.25, which has no labels of weights and no option for tokens in and out."""
    folders = [folder for folder in arguments.vllm_path.split(os.pathsep) if folder]
    found = importlib.metadata.distributions(name="vllm", path=folders)
    return any(distribution.version.startswith("0.25.") for distribution in found)


def wait_until_healthy(server: subprocess.Popen[bytes], *, url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError("vLLM has ended, see vllm.log")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(f"expected vLLM at {url} within {START_TIMEOUT_S:g} s")


def train(arguments: argparse.Namespace, *, url: str) -> None:
    run_dir = arguments.out / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    fields = [f"run_dir={run_dir}", f"model.path={arguments.model}", "deterministic=false"]
    fields += ["generation.backend=vllm", f'generation.urls=["{url}"]']
    fields += [f"generation.slots={arguments.slots}", f"algorithm.batch_size={arguments.slots // 4}"]
    fields += [f"algorithm.steps={arguments.steps}", "algorithm.group_size=4"]
    fields += ["data.num_eval=4", "eval.every=0", "eval.num_samples=0", "checkpoint.every=100"]
    fields += [f"actor.dtype={arguments.dtype}", "actor.warmup_steps=0", "rollout.workers=1"]
    if arguments.random_weights is not None:
        fields.append("algorithm.reward=[real_model.varied_reward]")
    fields += arguments.set
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    with (arguments.out / "train.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "kintsugi", "train", "grpo_smollm2_arithmetic", *fields],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )


def report(arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds per update; the first one, for which the run waits at its start, is left out."""
    lines = (arguments.out / "run" / "events" / "server-0.spans.jsonl").read_text().splitlines()
    spans = [json.loads(line) for line in lines]
    found: dict[str, object] = {"plugin": not arguments.no_plugin, "dtype": arguments.dtype}
    for name in ("weights_fetch", "weights_swap"):
        seconds = [round(_seconds(span), 3) for span in spans if span.get("name") == name][1:]
        found[name] = {"median_s": statistics.median(seconds), "all_s": seconds}
    rows = map(json.loads, (arguments.out / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if "timing/step" in row]
    for name in ("logprob_abs_diff_mean", "logprob_abs_diff_max", "update_ratio", "timing/step"):
        found[name] = [round(step[name], 7) for step in steps]
    return found


def _seconds(span: dict[str, float]) -> float:
    return span["duration_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--random-weights", metavar="SHAPE", help="as of real_model.py, instead of --model")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer files, for --random-weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slots", type=int, default=16, help="concurrent requests; samples of a step")
    parser.add_argument("--vllm-path", default="", help="further folders for the modules of vLLM")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--no-plugin", action="store_true")
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.random_weights is None):
        parser.error("expected either --model or --random-weights with --tokenizer")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.random_weights is not None:
        arguments.model = arguments.out / "model"
        write_random_model(arguments.random_weights, folder=arguments.model, tokenizer=arguments.tokenizer)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # So that vLLM ends too.
    server = started(arguments, port=port)
    try:
        wait_until_healthy(server, url=url)
        train(arguments, url=url)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    sys.stdout.write(json.dumps(report(arguments), indent=1) + "\n")


if __name__ == "__main__":
    main()
