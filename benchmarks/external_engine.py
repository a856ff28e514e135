"""Weight updates of a vLLM server in a GRPO run of a real model on this machine.

    python benchmarks/external_engine.py --model FOLDER --out DIR [--steps 6] [--vllm PYTHON] [--no-plugin]

Starts vLLM on the CPU as docs/generation_backends.md says (`--no-plugin`: without the plugin, so that it reads
folders), then runs `kintsugi train grpo_smollm2_arithmetic` with it. Reported per update, from the spans of `server-0`:
seconds to fetch and stage a version, during which decoding continues, and seconds of pause. `$KINTSUGI` names another
checkout to measure.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(os.environ.get("KINTSUGI", Path(__file__).resolve().parents[1]))
PLUGIN = ROOT / "kintsugi/generation/backends/vllm_plugin"
MAX_LENGTH = 96
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
    command += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "16", "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs"]
    if not arguments.no_plugin:
        command += ["--worker-extension-cls", "kintsugi_vllm.WeightReceipts"]
        command += ["--weight-transfer-config", '{"backend": "kintsugi"}']
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PLUGIN)}
    with (arguments.out / "vllm.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


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
    fields += ["generation.backend=vllm", f'generation.urls=["{url}"]', "generation.slots=16"]
    fields += [f"algorithm.steps={arguments.steps}", "algorithm.batch_size=4", "algorithm.group_size=4"]
    fields += ["data.num_eval=4", "eval.every=0", "eval.num_samples=0", "checkpoint.every=100"]
    fields += [f"actor.dtype={arguments.dtype}", "actor.warmup_steps=0", "rollout.workers=1"]
    with (arguments.out / "train.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "kintsugi", "train", "grpo_smollm2_arithmetic", *fields],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
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
    return found


def _seconds(span: dict[str, float]) -> float:
    return span["duration_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--no-plugin", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
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
