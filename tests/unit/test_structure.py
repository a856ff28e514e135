"""The rules about which part may know which, and the habits that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kintsugi"

GROUND = frozenset(
    {"types", "messages", "errors", "config", "recipe", "facts", "bootstrap"}
    | {"runtime", "disk", "transport", "worker", "patience"}
)
SHARED = GROUND | {"model", "observe"}

ALLOWED: dict[str, frozenset[str]] = {
    "data": SHARED,
    "generation": SHARED | {"weights", "cluster.segments"},
    "rollout": SHARED | {"data"},
    "buffer": SHARED,
    "graph": SHARED | {"buffer.packing"},
    "training": SHARED | {"weights", "checkpoint", "buffer.packing", "cluster.segments"},
    "weights": SHARED,
    "checkpoint": SHARED,
    "model": GROUND,
    "observe": GROUND,
    "transport": GROUND,
}
"""What each stage may import of the package, besides itself. Stages do not import each other: the master wires them.

Whoever prepares a prompt reads the data (rollout); whoever holds weights publishes, fetches or saves them, through
memory that the host's agent keeps (`cluster.segments`); how a batch is cut is said once (`buffer.packing`).
"""

CONTROL_PLANE = (
    "kintsugi.cli",
    "kintsugi.recipe",
    "kintsugi.validation",
    "kintsugi.overview",
    "kintsugi.runs",
    "kintsugi.display",
    "kintsugi.tables",
    "kintsugi.transport",
    "kintsugi.worker",
    "kintsugi.data.source",
    "kintsugi.generation.manager",
    "kintsugi.generation.router",
    "kintsugi.checkpoint.store",
)
CONTROL_FOLDERS = (
    "control",
    "cluster",
    "buffer",
    "graph",
    "rollout",
    "data",
    "observe",
    "simulation",
    "recovery",
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


def is_allowed(name: str, *, folder: str) -> bool:
    inner = name.removeprefix("kintsugi.")
    return any(inner == part or inner.startswith(f"{part}.") for part in (folder, *ALLOWED[folder]))


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_stage_imports_no_other_stage_and_not_the_master(folder: str) -> None:
    refused = [
        f"{module_name(path)} imports {name}"
        for path in sources(f"kintsugi/{folder}")
        for name in sorted(imports_of(path))
        if name.startswith("kintsugi.") and not is_allowed(name, folder=folder)
    ]
    assert refused == []


def test_every_folder_of_the_package_has_its_rule_or_wires_the_others() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    wiring = {"control", "cluster", "simulation"}
    assert folders - wiring - set(ALLOWED) == set()


@cache
def control_modules() -> tuple[str, ...]:
    inside = [module_name(path) for folder in CONTROL_FOLDERS for path in sources(f"kintsugi/{folder}")]
    return (*CONTROL_PLANE, *inside)


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


def seconds_to_import(*modules: str) -> float:
    """Processor time, the shortest of several tries: what else runs on the machine is not the code's fault."""
    program = (
        "import importlib, sys, time\n"
        "start = time.process_time()\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "sys.stdout.write(str(time.process_time() - start))\n"
    )
    command = [sys.executable, "-c", program, *modules]
    tries = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60) for _ in range(5)
    )
    return min(float(result.stdout) for result in tries)


def test_the_control_plane_is_imported_in_less_than_a_third_of_a_second() -> None:
    assert seconds_to_import("kintsugi.control.shell", "kintsugi.cluster.launcher") < 0.3


def test_the_command_line_is_imported_in_a_tenth_of_a_second() -> None:
    assert seconds_to_import("kintsugi.cli") < 0.1


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
