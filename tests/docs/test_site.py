"""The documentation site: it builds strictly, every page is in its navigation, and the reference matches the code."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kintsugi
from kintsugi.config.recipe import fields_of
from kintsugi.config.schema import Config
from kintsugi.rollout import rewards
from kintsugi.rollout.environments.protocol import Observation, Step
from tests.docs.pages import PAGES, ROOT

API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def documented(heading: str, *, column: str) -> set[str]:
    """Names in the first column of the table with that heading, of one section of docs/api.md."""
    section = API.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = section.partition(f"| {column} |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`([\w.]+)", cell)}


def test_the_reference_has_every_public_name_of_the_package_and_no_other() -> None:
    assert documented("The package", column="name") == set(kintsugi.__all__)


def test_the_reference_has_every_part_of_a_result() -> None:
    names = {name for name in vars(kintsugi.RunResult) if not name.startswith("_")}
    assert documented("RunResult", column="attribute") == names


def test_the_reference_has_every_reward_of_the_package() -> None:
    expected = {f"kintsugi.rollout.rewards.{name}" for name in rewards.__all__}
    assert documented("Rewards", column="path") == expected


def test_the_reference_has_every_field_of_observations_and_steps() -> None:
    fields = {f"{kind.__name__}.{name}" for kind in (Observation, Step) for name in kind.__struct_fields__}
    assert documented("Environments and agents", column="field") == fields


def test_the_reference_has_every_field_of_a_custom_algorithm_and_of_the_tokens_it_is_given() -> None:
    from kintsugi.training.objectives import PolicyTokens

    for kind in (kintsugi.CustomAlgorithm, PolicyTokens):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert documented("Algorithms", column=f"field of `{kind.__name__}`") == fields


def hooks() -> ModuleType:
    specification = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "mkdocs_hooks.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_page_of_recipe_fields_has_every_field_of_a_configuration() -> None:
    page = hooks().on_page_markdown((ROOT / "docs" / "recipe.md").read_text(encoding="utf-8"))
    missing = [name for name in fields_of(Config(name="x")) if f"| `{name}` |" not in page]
    assert missing == [] and "| `data.sources[].weight` |" in page and "| `warmup.steps` |" in page


def test_blocks_lose_the_attributes_that_only_tests_read() -> None:
    text = '```console root\n```\n```yaml experiment title="x"\n```\n```python title="root"\n```\n'
    assert hooks().on_page_markdown(text) == (
        '```console\n```\n```yaml title="x"\n```\n```python title="root"\n```\n'
    )


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert set(re.findall(r"- (\w+\.md)$", navigation, flags=re.MULTILINE)) == {page.name for page in PAGES}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: `make setup-test` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        built = (tmp_path / f"{page.stem}.html").read_text(encoding="utf-8")
        assert "```" not in built, (
            f"{page.name}: a code block is not closed, or has attributes that are not understood"
        )


def test_the_map_of_the_tree_has_every_folder_of_the_package() -> None:
    rows = [row.split("|")[1] for row in read("CONTRIBUTING.md").splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)/`", row)}
    folders = {
        path.name for path in (ROOT / "kintsugi").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert named == folders


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md"])
def test_every_link_of_a_page_at_the_top_leads_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", read(name))
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
