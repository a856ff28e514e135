"""ARCHITECTURE.md names files and folders that exist, and every folder of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kintsugi"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
FILE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)`")


def test_every_file_that_the_architecture_names_exists() -> None:
    named = set(FILE.findall(PAGE))
    assert len(named) > 100
    assert (
        sorted(name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()) == []
    )


def test_the_map_has_every_folder_of_the_package() -> None:
    tree = PAGE.partition("## Map")[2].partition("## Processes")[0]
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(folder for folder in folders if f"{folder}/" not in tree) == []


def test_both_walks_name_files_of_every_folder_that_a_prompt_and_a_fault_pass_through() -> None:
    prompt = PAGE.partition("## One prompt")[2].partition("## One killed rank")[0]
    fault = PAGE.partition("## One killed rank")[2].partition("## When something fails")[0]
    for walk, folders in (
        (prompt, "control samples journal transport rollout data generation graph training weights"),
        (fault, "cluster telemetry process control recovery training checkpoint diagnosis"),
    ):
        named = {name.split("/")[0] for name in FILE.findall(walk)}
        assert sorted(set(folders.split()) - named) == []
