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
    {
        "types",
        "messages",
        "operations",
        "leasing",
        "supervision",
        "wire",
        "errors",
        "config",
        "stages",
        "recipe",
        "facts",
        "bootstrap",
    }
    | {"runtime", "signals", "transfers", "disk", "transport", "worker", "patience"}
)
SHARED = GROUND | {"model", "observe"}

ALLOWED: dict[str, frozenset[str]] = {
    "data": SHARED,
    "generation": SHARED | {"weights", "cluster.segments", "lease"},
    "rollout": SHARED | {"data", "serving.openai", "serving.answers", "serving.http", "serving.refusals"},
    "buffer": SHARED,
    "graph": SHARED | {"buffer.packing", "dataplane"},
    "dataplane": SHARED | {"buffer.packing"},
    "training": SHARED
    | {
        "data",
        "dataplane",
        "weights",
        "checkpoint",
        "recovery",
        "buffer.packing",
        "cluster.segments",
        "lease",
    },
    "weights": SHARED,
    "lease": SHARED,
    "checkpoint": SHARED,
    "control": SHARED
    | {"buffer", "graph", "dataplane", "data.source", "checkpoint.store", "recovery", "runs", "incidents"}
    | {"weights.choice"},
    "recovery": SHARED,
    "cluster": SHARED | {"lease", "runs"},
    "serving": SHARED | {"generation", "cluster", "weights"},
    "simulation": SHARED | {"control", "recovery", "buffer"},
    "lab": SHARED
    | {"control", "simulation", "runs", "cluster", "scaling"}
    | {"data", "generation", "graph", "rollout", "training", "diagnosis"},
    "diagnosis": GROUND | {"observe"},
    "model": frozenset({"types", "errors", "config", "stages"}),
    "observe": GROUND | {"control.journal", "control.inputs"},
    "transport": GROUND,
}
"""What each folder may import of the package, besides itself. Stages do not import each other: the master wires them.

Whoever prepares a prompt, or ranks held-out pairs, reads the data (rollout, training); whoever holds weights publishes,
fetches or saves them, through memory that the host's agent keeps (`cluster.segments`); how a batch is cut is said once
(`buffer.packing`), and so is what the OpenAI API looks like (`serving.openai` and those beside it). The laboratory
builds a system of its own from the stages' parts (`lab.fragile`).
"""

WITH_TORCH = frozenset(
    {"training", "generation.noise", "generation.sampler", "generation.server", "generation.building"}
    | {"generation.cuda", "generation.kernels"}
    | {"generation.cpu", "generation.cpu_network", "generation.cpu_places", "generation.cpu_rows"}
    | {"generation.native", "generation.native_weights"}
    | {f"lab.fragile.{name}" for name in ("plain", "rollout_worker", "sampler", "train_worker", "trainer")}
    | {
        "serving.server",
        "lease.memory",
        "model.attention",
        "model.device",
        "model.faults",
        "model.huggingface",
        "model.importing",
        "model.known_answer",
    }
    | {
        "model.logprobs",
        "model.logprob_kernels",
        "model.rotary",
        "model.transformer",
        "weights.collective",
        "weights.device",
    }
)
"""What computes. Everything else is the control plane and must start without torch, a new module too."""

TOUCHES_THE_WORLD = frozenset(
    {f"kintsugi.control.{name}" for name in ("shell", "journal", "inputs", "records", "requests")}
)
"""The master's edge; the rest of `control` decides, and is replayed and simulated."""
WORLD = frozenset(
    {"os", "pathlib", "random", "select", "shutil", "signal", "socket", "subprocess", "tempfile", "threading"}
    | {"time", "kintsugi.disk", "kintsugi.runtime.SYSTEM_CLOCK", "kintsugi.runtime.wait"}
    | {"kintsugi.transport", "kintsugi.worker"}
)

MAX_LINES = 500


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
    allowed = GROUND | {"observe.events", "observe.figures", "observe.spans"}
    refused = [
        f"{module} imports {name}"
        for module in sorted(GROUND - {"transport"})
        for name in sorted(imports_of(PACKAGE / f"{module}.py"))
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
    assert seconds_to_import("kintsugi.control.shell", "kintsugi.cluster.launcher", cache=tmp_path) < 0.3


def test_the_command_line_is_imported_in_a_tenth_of_a_second(tmp_path: Path) -> None:
    assert seconds_to_import("kintsugi.cli", cache=tmp_path) < 0.1


def test_files_stay_short() -> None:
    long = {
        module_name(path): count
        for path in sources()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


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
