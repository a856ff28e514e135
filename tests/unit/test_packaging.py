"""The wheel: what it contains, and one source of the version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kintsugi

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kintsugi")


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of this tree, built without a network, from a copy so that nothing is left in the tree."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: `make setup-test` installs it")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    copy.mkdir()
    for name in SOURCES:
        command = ["cp", "-r", str(ROOT / name), str(copy / name)]
        subprocess.run(command, check=True, timeout=60)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.slow
def test_the_wheel_carries_every_file_that_a_run_needs(wheel: zipfile.ZipFile) -> None:
    carried = set(wheel.namelist())
    needed = {
        str(path.relative_to(ROOT))
        for suffix in ("yaml", "py", "cpp", "h", "html", "js", "css", "svg", "xz", "typed")
        for path in (ROOT / "kintsugi").rglob(f"*.{suffix}")
    }
    assert len([name for name in needed if name.endswith(".yaml")]) > 20
    assert sorted(needed - carried) == []


@pytest.mark.slow
def test_the_wheel_carries_the_licence_and_nothing_outside_the_package(wheel: zipfile.ZipFile) -> None:
    information = f"kintsugi-{kintsugi.__version__}.dist-info"
    assert f"{information}/licenses/LICENSE" in wheel.namelist()
    assert {name.partition("/")[0] for name in wheel.namelist()} == {"kintsugi", information}


@pytest.mark.slow
def test_the_wheel_names_version_licence_and_command(wheel: zipfile.ZipFile) -> None:
    information = f"kintsugi-{kintsugi.__version__}.dist-info"
    metadata = wheel.read(f"{information}/METADATA").decode()
    assert f"\nVersion: {kintsugi.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "kintsugi = kintsugi.cli.main:main" in wheel.read(f"{information}/entry_points.txt").decode()


def test_the_version_is_written_in_one_place() -> None:
    described = project()
    assert "version" not in described["project"] and described["project"]["dynamic"] == ["version"]
    assert described["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kintsugi.__version__"}


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{kintsugi.__version__}]" in text and text.index("## [Unreleased]") < text.index("## [0.")


def test_every_dependency_of_the_project_and_its_extras_is_pinned() -> None:
    pinned = {
        _normal(line.partition("==")[0])
        for name in ("constraints.txt", "benchmarks/constraints-extras.txt", "benchmarks/constraints-ray.txt")
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    described = project()["project"]
    wanted = sum(described["optional-dependencies"].values(), described["dependencies"])
    names = {_normal(re.split(r"[<>=\[]", each)[0]) for each in wanted} - {"kintsugi"}
    assert sorted(names - pinned - {"nvidia-ml-py"}) == [], "`nvidia` is only installed where there is a GPU"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
