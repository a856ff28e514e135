"""A real run of a real model on this machine, measured from outside, undisturbed or with a fault in the middle.

    python benchmarks/real_model.py --model FOLDER --data GSM8K_FOLDER --out DIR [--steps 8] [--faults none,rank,…]
    python benchmarks/real_model.py --random-weights 1.8b --tokenizer FOLDER --data GSM8K_FOLDER --out DIR …
    python benchmarks/real_model.py --recipe grpo_arithmetic --out DIR --faults none,rank,server,master,save

Runs `kintsugi train` with the recipe (`grpo_qwen_gsm8k`), once for each fault, one after the other. Measured: seconds
to the first prompt; each step and its parts; use of the GPU while steps run (NVML, ten times a second); device and host
memory of each process over time; the longest gap between heartbeats; saves; after a fault the seconds to the next
committed step, the diagnosis, and whether the final weights are those of the run without a fault. A fault is a signal
to one process in the middle of a phase (`--fault-step`, `--fault-share`, `--during`); `rank-stop` and so on send
SIGSTOP. With several faults `none` runs first; a later call with the same --out compares with its report.

`--random-weights` writes a model folder of that shape with the tokenizer of another folder, so that no weights have to
be transferred. Its answers are noise, so the reward is a function of their characters: there is something to learn, and
the hash of the weights says something.

`--set FIELD=VALUE` overrides any field of the recipe. Reports: DIR/FAULT.json, samples in DIR/FAULT.samples.jsonl, the
run folder in DIR/FAULT. A run folder that exists is removed first. Evaluation is left out but for 8 problems
(`--evaluate` keeps the recipe's).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks import real_model_report
from benchmarks.real_model_watch import (
    FAULTS,
    TRIGGER_INTERVAL_S,
    Device,
    Fault,
    Monitor,
    Trigger,
    shared_memory_files,
)

HERE = Path(__file__).resolve().parent
SAVE_BYTES_PER_PARAMETER = 14
"""bfloat16 weights, float32 master weights and two moments."""
GRACE_S = 60.0
EXIT_S = 10.0


def varied_reward(completions: list[str], **columns: Any) -> list[float]:
    """Varies within a group and depends on every character."""
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]


def overrides(arguments: argparse.Namespace, *, run_dir: Path) -> list[str]:
    """Fields that this benchmark sets; those of `--set` come last and win."""
    fields = [f"run_dir={run_dir}", f"algorithm.steps={arguments.steps}"]
    fields += [f"checkpoint.every={arguments.save_every}", "checkpoint.keep=1"]
    if arguments.model is not None:
        fields.append(f"model.path={arguments.model}")
    if arguments.data is not None:
        fields += [
            f"data.source={arguments.data / 'train.jsonl'}",
            f"data.eval_source={arguments.data / 'test.jsonl'}",
        ]
    if not arguments.evaluate:
        fields += ["data.num_eval=8", "eval.every=0", "eval.num_samples=0"]
    if arguments.random_weights is not None:
        fields.append("algorithm.reward=[real_model.varied_reward]")
    if arguments.warmup is not None:
        fields.append(f"actor.warmup_steps={arguments.warmup}")
    return [*fields, *arguments.set]


def start(arguments: argparse.Namespace, *, run_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    path = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "kintsugi", "train", arguments.recipe]
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, *overrides(arguments, run_dir=run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )


def watched(process: subprocess.Popen[bytes], *, trigger: Trigger | None, timeout_s: float) -> str:
    """Wait for the end of the run and send the fault at its moment; why it was ended, if it was."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        waiting = trigger is not None and trigger.fired is None
        if trigger is not None:
            trigger.poll()
        time.sleep(TRIGGER_INTERVAL_S if waiting else 0.05)
        if time.monotonic() > deadline:
            return _ended(process, timeout_s=timeout_s)
    return ""


def _ended(process: subprocess.Popen[bytes], *, timeout_s: float) -> str:
    """End the run: normally at first, then at once, which takes its children with it."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return f"ended after {timeout_s:g} s"


def one(name: str, fault: Fault | None, *, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run and its report."""
    run_dir: Path = arguments.out / name
    if run_dir.exists():
        shutil.rmtree(run_dir)
    device, before = Device(), shared_memory_files()
    monitor = Monitor(run_dir, device)
    trigger = None
    if fault is not None:
        fault = replace(fault, during=arguments.during or fault.during)
        trigger = Trigger(
            fault,
            run_dir=run_dir,
            step=arguments.fault_step,
            share=arguments.fault_share,
            save_bytes=save_bytes(arguments.model),
        )
    log = arguments.out / f"{name}.log"
    started = time.monotonic()
    process = start(arguments, run_dir=run_dir, log=log)
    monitor.start()
    try:
        why_ended = watched(process, trigger=trigger, timeout_s=arguments.timeout)
    finally:
        if process.poll() is None:
            _ended(process, timeout_s=time.monotonic() - started)
        monitor.stop()
    wall_s = time.monotonic() - started
    monitor.write(arguments.out / f"{name}.samples.jsonl")
    if not run_dir.exists():
        sys.exit(f"`kintsugi train` ended with code {process.returncode}:\n{log.read_text(errors='replace')}")
    result = real_model_report.report(
        name,
        fault,
        trigger.fired if trigger is not None else None,
        run_dir=run_dir,
        monitor=monitor,
        started_monotonic=started,
    )
    result |= {
        "exit_code": process.returncode,
        "why_ended": why_ended,
        "wall_s": round(wall_s, 1),
        "overrides": overrides(arguments, run_dir=run_dir),
        "left_in_shared_memory": sorted(shared_memory_files() - before),
    }
    if process.returncode != 0 or why_ended:
        result["log_tail"] = log.read_text(errors="replace").splitlines()[-20:]
    return result


def save_bytes(model: Path | None) -> int:
    """Expected size of a checkpoint; 0 where it is not known."""
    if model is None:
        return 0
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return weights // 2 * SAVE_BYTES_PER_PARAMETER


def compared(result: dict[str, Any], undisturbed: Path) -> None:
    """Note whether the weights are those of the undisturbed run, where that has a report."""
    if result["fault"] == "none" or not undisturbed.exists():
        return
    expected = json.loads(undisturbed.read_text(encoding="utf-8"))["weights_sha256"]
    result["weights_equal"] = expected is not None and expected == result["weights_sha256"]


def show_all(results: Sequence[dict[str, Any]]) -> None:
    print(
        f"\n{'fault':<14}{'outcome':<10}{'step s':>8}{'train':>8}{'gen':>8}{'weights':>9}{'GPU':>7}", end=""
    )
    print(f"{'next step s':>13}{'late s':>8}  {'equal':<7}{'diagnosis'}")
    for result in results:
        parts = result["typical"]
        effect = result.get("effect")
        effect = effect if isinstance(effect, dict) else {}
        busy = result["gpu_busy"]["steps"] if isinstance(result["gpu_busy"], dict) else math.nan
        named = (effect or result)["verdicts"]
        said = f"{named[0]['kind']} {named[0]['process']}" if named else "nothing"
        print(
            f"{result['fault']:<14}{result['outcome']!s:<10}{parts.get('seconds', math.nan):>8}"
            f"{parts.get('train', math.nan):>8}{parts.get('generate', math.nan):>8}"
            f"{parts.get('weights', math.nan):>9}{busy:>7}{effect.get('next_step_s')!s:>13}"
            f"{effect.get('late_s')!s:>8}  {result.get('weights_equal', '-')!s:<7}{said}"
        )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that describe the run, whatever is done to it."""
    parser.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--data", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--recipe", default="recipes/grpo_qwen_gsm8k.yaml", help="recipe, by path or name")
    parser.add_argument(
        "--save-every", type=int, default=0, help="steps between checkpoints; 0: only the last"
    )
    parser.add_argument("--warmup", type=int, help="warm-up updates; at most as many as steps")
    parser.add_argument("--evaluate", action="store_true", help="evaluate as the recipe says")
    parser.add_argument(
        "--random-weights", metavar="SHAPE", help="tiny, 135m, 0.6b, 1.5b, 1.8b, llama-3b or 4b"
    )
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer files, for --random-weights")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path, required=True)


def check_run_arguments(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if "/" not in arguments.recipe:
        arguments.recipe = f"recipes/{arguments.recipe}.yaml"
    if arguments.random_weights is not None and arguments.tokenizer is None:
        parser.error("--random-weights needs --tokenizer")


def make_random_model(arguments: argparse.Namespace) -> None:
    """Write the model folder of `--random-weights`, unless it exists, and use it as `--model`."""
    if arguments.random_weights is None:
        return
    from benchmarks.real_model_weights import write_random_model

    arguments.model = arguments.out / f"model-{arguments.random_weights}"
    if not arguments.model.exists():
        began = time.monotonic()
        count = write_random_model(
            arguments.random_weights, folder=arguments.model, tokenizer=arguments.tokenizer
        )
        print(
            f"{arguments.model}: {count / 1e9:.3f} B parameters in {time.monotonic() - began:.1f} s",
            flush=True,
        )


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--faults", default="none", help=f"some of {', '.join(FAULTS)}, with commas between")
    parser.add_argument(
        "--during", help="phase of the master in which the fault is sent, if not the fault's own"
    )
    parser.add_argument(
        "--fault-step", type=int, default=4, help="pass of the phase in which the fault is sent"
    )
    parser.add_argument("--fault-share", type=float, default=0.5, help="share of the phase before the fault")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for each run")
    arguments = parser.parse_args(words)
    check_run_arguments(arguments, parser)
    arguments.faults = sorted(arguments.faults.split(","), key=lambda name: name != "none")
    if unknown := [name for name in arguments.faults if name not in FAULTS]:
        parser.error(f"--faults: expected some of {', '.join(FAULTS)}, got {', '.join(unknown)}")
    if "save" in arguments.faults and arguments.save_every == 0:
        arguments.save_every = max(1, arguments.steps // 2)
    return arguments


def main() -> None:
    arguments = parsed(sys.argv[1:])
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_random_model(arguments)
    results = []
    for name in arguments.faults:
        result = one(name, FAULTS[name], arguments=arguments)
        compared(result, arguments.out / "none.json")
        results.append(result)
        (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(real_model_report.table(result), flush=True)
        if result.get("log_tail"):
            print("\n".join(["  the end of its output:", *result["log_tail"]]), flush=True)
    show_all(results)


if __name__ == "__main__":
    main()
