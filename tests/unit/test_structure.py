"""The rules about which part may know which, and the habits that a machine can check."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kintsugi"

GROUND = frozenset(
    {"types", "errors", "protocol", "runtime", "transport", "process", "journal.facts", "run_folder.layout"}
    | {"config.schema", "config.stages", "config.recipe", "config.custom_algorithm"}
)
"""Vocabulary and process frame: every folder may import these."""
SHARED = GROUND | {"model", "telemetry"}

ALLOWED: dict[str, frozenset[str]] = {
    "access": GROUND,
    "bulk": GROUND | {"telemetry"},
    "checkpoint": SHARED,
    "cli": SHARED
    | {
        "access",
        "checkpoint",
        "cluster",
        "config",
        "control",
        "data",
        "diagnosis",
        "graph",
        "journal",
        "lab",
        "learning_health",
        "rollout",
    }
    | {"page", "run_folder", "serving", "simulation"},
    "cluster": SHARED
    | {"bulk", "checkpoint.snapshot", "checkpoint.store", "control.placement", "device_lease"}
    | {"run_folder", "weights"},
    "config": GROUND
    | {"model", "telemetry.export", "data", "rollout", "control.placement", "graph.algorithms"},
    "control": SHARED
    | {
        "samples",
        "graph",
        "dataplane",
        "data.dataset",
        "checkpoint.store",
        "recovery",
        "run_folder",
        "journal",
    }
    | {"weights.selection"},
    "data": SHARED,
    "dataplane": SHARED | {"samples.sharding"},
    "device_lease": SHARED,
    "diagnosis": GROUND | {"telemetry", "learning_health"},
    "generation": SHARED | {"bulk", "weights", "cluster.shared_memory", "device_lease"},
    "graph": SHARED | {"samples.sharding", "dataplane"},
    "journal": GROUND | {"control.protocol"},
    "lab": SHARED
    | {"cli.scale", "cluster", "control", "data", "diagnosis", "generation", "graph", "journal", "rollout"}
    | {"run_folder", "simulation", "training"},
    "learning_health": GROUND | {"telemetry"},
    "model": frozenset({"types", "errors", "config.schema", "config.stages"}),
    "openai_api": GROUND | {"model"},
    "page": SHARED | {"access", "diagnosis", "journal", "learning_health", "run_folder"},
    "process": GROUND | {"telemetry"},
    "protocol": frozenset({"types", "errors"}),
    "recovery": SHARED,
    "rollout": SHARED | {"data", "openai_api"},
    "run_folder": SHARED | {"checkpoint.store", "config.resolution", "data.manifest", "journal"},
    "runtime": frozenset({"types", "errors"}),
    "samples": SHARED,
    "serving": SHARED | {"access", "generation", "cluster", "weights", "openai_api"},
    "simulation": SHARED | {"control", "recovery", "samples", "journal", "cluster.backends.contract"},
    "telemetry": GROUND | {"journal"},
    "training": SHARED
    | {"data", "dataplane", "weights", "checkpoint", "recovery", "samples.sharding", "cluster.shared_memory"}
    | {"bulk", "device_lease"},
    "transport": GROUND,
    "weights": SHARED | {"bulk"},
}
"""What each folder may import of the package, besides itself. Stages do not import each other: the master wires them.

Rollout and training read the data, because prompts are prepared and held-out pairs are ranked there. Processes that
hold weights publish, fetch or save them through memory that the host's agent keeps (`cluster.shared_memory`). How a
batch is cut is defined once (`samples.sharding`). The laboratory builds a contrasting system from the stages' parts
(`lab.fragile`).
"""

WITH_TORCH = frozenset(
    {"training", "generation.server", "generation.cuda", "generation.cpu", "serving.server"}
    | {"generation.engine.rng", "generation.engine.sampler", "generation.engine.factory"}
    | {"generation.native.runner", "generation.native.weights"}
    | {"generation.backends.vllm_plugin.kintsugi_vllm"}
    | {
        f"lab.fragile.{name}"
        for name in ("plain_sft", "rollout_worker", "sampler", "train_worker", "trainer")
    }
    | {"device_lease.memory", "weights.transports.collective", "weights.transports.device"}
    | {"weights.device_digests", "weights.digest_kernels"}
    | {f"model.{name}" for name in ("attention", "device", "device_errors", "device_usage", "huggingface")}
    | {f"model.{name}" for name in ("known_answer", "logprobs", "logprob_kernels", "rotary", "transformer")}
    | {f"model.{name}" for name in ("fused_layers", "gradient_roots", "layer_kernels", "recompute")}
    | {f"model.{name}" for name in ("tensor_group", "sliced_logprobs", "sliced_transformer")}
    | {"model.torch_internals"}
)
"""Modules that compute. All others are the control plane and must be importable without torch."""

TOUCHES_THE_WORLD = frozenset(
    {f"kintsugi.control.{name}" for name in ("process", "records", "user_requests")}
)
"""The master's edge; the rest of `control` decides, and is replayed and simulated."""
WORLD = frozenset(
    {"os", "pathlib", "random", "select", "shutil", "signal", "socket", "subprocess", "tempfile", "threading"}
    | {"time", "kintsugi.runtime.disk", "kintsugi.runtime.clock.SYSTEM_CLOCK", "kintsugi.runtime.waits"}
    | {"kintsugi.transport", "kintsugi.process"}
)

MAX_FUNCTION_LINES = 70
MAX_ROOT_MODULES = 10


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders or ("kintsugi", "tests", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module named in an import statement, inside functions too, but not those for the type checker alone."""
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if node in skipped:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def is_within(name: str, parts: Iterable[str]) -> bool:
    """Whether a module is one of `parts` or inside one; parts of the package may be named without it."""
    inner = name.removeprefix("kintsugi.")
    return any(f"{each}.".startswith(f"{part}.") for part in parts for each in (name, inner))


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_stage_imports_no_other_stage_and_not_the_master(folder: str) -> None:
    refused = [
        f"{module_name(path)} imports {name}"
        for path in sources(f"kintsugi/{folder}")
        for name in sorted(imports_of(path))
        if name.startswith("kintsugi.") and not is_within(name, {folder, *ALLOWED[folder]})
    ]
    assert refused == []


def test_every_folder_of_the_package_has_its_rule() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ALLOWED)


def test_what_everyone_stands_on_imports_nothing_above_it() -> None:
    allowed = GROUND | {"telemetry.disk_budget", "telemetry.events", "telemetry.readings", "telemetry.spans"}
    refused = [
        f"{module_name(path)} imports {name}"
        for path in sources("kintsugi")
        if is_within(module_name(path), GROUND)
        for name in sorted(imports_of(path))
        if name.startswith("kintsugi.") and not is_within(name, allowed)
    ]
    assert refused == []


def test_the_masters_decisions_touch_nothing_outside_themselves() -> None:
    refused = [
        f"{module_name(path)} imports {name}"
        for path in sources("kintsugi/control")
        if module_name(path) not in TOUCHES_THE_WORLD
        for name in sorted(imports_of(path))
        if is_within(name, WORLD)
    ]
    assert refused == []


@cache
def control_modules() -> tuple[str, ...]:
    every = [module_name(path) for path in sources("kintsugi") if path.stem != "__main__"]
    return tuple(name for name in every if not is_within(name, WITH_TORCH))


def test_the_control_plane_imports_no_torch() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *control_modules()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


def seconds_to_import(*modules: str, cache: Path) -> float:
    """Processor time, the shortest of several tries: what else runs on the machine is not the code's fault, nor is it
    that somebody's environment forbids to keep what was compiled."""
    program = (
        "import importlib, sys, time\n"
        "start = time.process_time()\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "sys.stdout.write(str(time.process_time() - start))\n"
    )
    command = [sys.executable, "-c", program, *modules]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache)}
    tries = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
        for _ in range(6)
    )
    return min(float(result.stdout) for result in tries)


def test_the_control_plane_is_imported_in_less_than_three_tenths_of_a_second(tmp_path: Path) -> None:
    assert seconds_to_import("kintsugi.control.process", "kintsugi.cluster.launcher", cache=tmp_path) < 0.3


def test_the_command_line_is_imported_in_a_tenth_of_a_second(tmp_path: Path) -> None:
    assert seconds_to_import("kintsugi.cli.main", cache=tmp_path) < 0.1


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{module_name(path)}.{node.name}": length
        for path in sources("kintsugi", "benchmarks")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := body_lines(node)) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_the_package_root_holds_the_public_api_and_the_nouns_only() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_MODULES


def test_nothing_is_pickled() -> None:
    refused = [
        f"{module_name(path)} imports {name}"
        for path in sources("kintsugi")
        for name in imports_of(path)
        if name.split(".")[0] in {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    ]
    assert refused == []


def test_nothing_is_called_utils() -> None:
    nameless = {"utils", "util", "common", "base", "helpers", "misc"}
    assert [
        module_name(path) for path in sources() if path.stem in nameless or path.parent.name in nameless
    ] == []


def texts_of_the_tree() -> Iterator[tuple[Path, str]]:
    """What a clone contains; what git ignores is not part of it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=60,
    )
    if listed.returncode != 0:
        pytest.skip("not a git clone")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


MACHINE_WORDS = re.compile(
    r"/(?:work|root|opt)/|/home/\w+|index-url|find-links|pypi\.org|files\.pythonhosted|download\.pytorch\.org",
    re.IGNORECASE,
)


def test_no_path_of_a_machine_and_no_registry_address_is_in_the_tree() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts_of_the_tree()
        for match in MACHINE_WORDS.finditer(text)
    ]
    assert found == []
