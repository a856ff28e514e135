"""Records what a pure refactoring must not change, and compares two records.

    python benchmarks/frozen.py record FILE [--only PART …] [--campaign DIR]
    python benchmarks/frozen.py compare FILE FILE

Parts: `tags` (every tagged msgspec struct with its encoded field names), `protocol` (the recovery table), `tests`
(names of all collected test functions), `simulation` (trace hashes of 2,000 seeds), `weights` (`weights_sha256` of four
recipes), `soak` (hashes of a soak of 40 faults) and `verdicts` (diagnoses of a recorded campaign at the end of every
fault). The script uses only stable commands, files and module paths, so one copy of it can record any commit: run it
with `PYTHONPATH` pointing at the tree to be recorded.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

TREE = Path(os.environ.get("PYTHONPATH", ".").split(os.pathsep)[0]).resolve()
NUM_SEEDS = 2_000
SOAK_FAULTS = 40
SOAK_SEED = 16
RECIPES: dict[str, tuple[str, ...]] = {
    "grpo 2+2": ("grpo_arithmetic",),
    "grpo 1+1": ("grpo_arithmetic", "actor.workers=1", "generation.servers=1"),
    "sft": ("sft_arithmetic",),
    "ppo": ("ppo_arithmetic",),
}


def tagged_structs() -> dict[str, Any]:
    """Encoded fields of every tagged struct in the package, by tag."""
    import msgspec

    import kintsugi

    found: dict[str, set[str]] = collections.defaultdict(set)
    for module in pkgutil.walk_packages(kintsugi.__path__, "kintsugi."):
        if module.name.endswith("__main__"):
            continue
        try:
            loaded = importlib.import_module(module.name)
        except ImportError as error:
            sys.stderr.write(f"{module.name}: not imported: {error}\n")
            continue
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                config = value.__struct_config__
                if (
                    isinstance(config.tag, str)
                    and not value.__name__.startswith("_")
                    and not value.__name__.endswith("Body")
                ):
                    layout = "array" if config.array_like else "object"
                    found[config.tag].add(f"{layout}({', '.join(value.__struct_encode_fields__)})")
    return {tag: sorted(shapes) for tag, shapes in sorted(found.items())}


def recovery_protocol() -> list[str]:
    """Transitions of the recovery protocol by the names of states and events; their descriptions may be reworded."""
    from kintsugi.recovery.states import TRANSITIONS

    return sorted(
        f"{state.name} + {event.name} -> {after.name}" for (state, event), after in TRANSITIONS.items()
    )


def collected_tests() -> dict[str, int]:
    """How many collected cases each test function has; files may move."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not gpu"],
        capture_output=True,
        text=True,
        check=False,
        cwd=TREE,
    )
    names = (re.sub(r"\[.*", "", line.split("::")[-1]) for line in result.stdout.splitlines() if "::" in line)
    return dict(sorted(collections.Counter(names).items()))


def _trace_hashes(seeds: range) -> list[str]:
    from kintsugi.simulation.campaign import Runner

    runner = Runner()
    return [f"{seed}:{runner.run(seed).trace_hash}" for seed in seeds]


def simulated_traces() -> list[str]:
    parts = [range(first, first + 100) for first in range(0, NUM_SEEDS, 100)]
    with ProcessPoolExecutor() as pool:
        return [entry for part in pool.map(_trace_hashes, parts) for entry in part]


def _command(*arguments: str) -> None:
    log = subprocess.run(
        [sys.executable, "-m", "kintsugi", *arguments], capture_output=True, text=True, check=False, cwd=TREE
    )
    if log.returncode:
        raise SystemExit(f"kintsugi {' '.join(arguments)}: exit {log.returncode}\n{log.stdout}\n{log.stderr}")


def trained_weights() -> dict[str, str]:
    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe, *overrides) in RECIPES.items():
            run_dir = Path(folder) / name.replace(" ", "_")
            _command("train", f"recipes/{recipe}.yaml", f"run_dir={run_dir}", *overrides)
            hashes[name] = json.loads((run_dir / "summary.json").read_text())["weights_sha256"]
            sys.stderr.write(f"{name}: {hashes[name]}\n")
    return hashes


def soaked() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "soak.json"
        _command(
            *("soak", "recipes/soak.yaml", f"run_dir={folder}/run", "--json", str(report)),
            *("--faults", str(SOAK_FAULTS), "--seed", str(SOAK_SEED)),
        )
        totals = json.loads(report.read_text())["totals"]
    kept = ("weights_sha256", "weights_sha256_undisturbed", "step_hashes_equal", "samples_trained")
    return {name: totals[name] for name in (*kept, "samples_lost", "samples_duplicated", "processes_left")}


def verdicts(campaign: Path) -> dict[str, Any]:
    """Causes named at the end of every fault of a recorded campaign of one cluster, by the diagnosis of this tree."""
    from kintsugi.diagnosis import diagnose

    answers: dict[str, Any] = {}
    recorded = json.loads((campaign / "campaign.json").read_text())
    (run_dir,) = (path.parent for path in campaign.glob("*/**/config.yaml"))
    for case in recorded["cases"]:
        if case["faults"]:
            diagnosis = diagnose(run_dir, at=case["faults"][0]["start"] + case["seconds"])
            answers[str(case["number"])] = [[cause.process, str(cause.kind)] for cause in diagnosis.causes]
    return answers


def record(path: Path, parts: list[str], campaign: Path | None) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "tags": tagged_structs,
        "protocol": recovery_protocol,
        "tests": collected_tests,
        "simulation": simulated_traces,
        "soak": soaked,
        "weights": trained_weights,
    }
    if campaign is not None:
        makers["verdicts"] = lambda: verdicts(campaign)
    kept = json.loads(path.read_text()) if path.exists() else {}
    for part, make in makers.items():
        if not parts or part in parts:
            kept[part] = make()
            path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
            digest = hashlib.sha256(json.dumps(kept[part], sort_keys=True).encode()).hexdigest()
            sys.stderr.write(f"{part}: {digest[:16]}\n")


def compare(left: Path, right: Path) -> int:
    before, after = json.loads(left.read_text()), json.loads(right.read_text())
    different = False
    for part in sorted(before.keys() | after.keys()):
        old, new = before.get(part), after.get(part)
        if old == new:
            size = len(old) if isinstance(old, list | dict) else 1
            sys.stdout.write(f"{part}: equal ({size} entries)\n")
            continue
        different = True
        sys.stdout.write(f"{part}: DIFFERENT\n")
        if isinstance(old, dict) and isinstance(new, dict):
            for key in sorted(old.keys() | new.keys()):
                if old.get(key) != new.get(key):
                    sys.stdout.write(f"  {key}: {old.get(key)} -> {new.get(key)}\n")
    return int(different)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--only", nargs="*", default=[])
    recording.add_argument("--campaign", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("left", type=Path)
    comparing.add_argument("right", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.file, arguments.only, arguments.campaign)
        return 0
    return compare(arguments.left, arguments.right)


if __name__ == "__main__":
    sys.exit(main())
