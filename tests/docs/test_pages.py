"""What the documentation says is so: its code runs, its commands and fields exist, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import typer.main
import yaml

from kintsugi.cli import main
from kintsugi.config.custom_algorithm import is_custom_name
from kintsugi.config.schema import Config
from kintsugi.lab.scenarios import experiments
from tests.docs.pages import PAGES, ROOT, Block, Follower, blocks_of, is_run

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TEXTS = [*PAGES, ROOT / "README.md"]
COMMANDS = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]


def of_kind(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]


def named(path: Path) -> str:
    return path.name


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if any(block.kind in ("console", "python") and is_run(block) for block in blocks_of(page))
    ],
    ids=named,
)
def test_everything_that_a_page_says_to_do_can_be_done_in_order(page: Path, tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    follower.follow(page)
    assert follower.num_runs > 0
    written = {
        name
        for file in tmp_path.glob("runs/*/metrics.jsonl")
        for line in file.read_text().splitlines()
        for name in json.loads(line)
    }
    assert written and sorted(filter(is_not_explained, written)) == []


def is_not_explained(figure: str) -> bool:
    """Whether docs/metrics.md does not name a figure."""
    names = re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    figure = re.sub(r"_(low|high)$", "", figure) if figure.startswith("eval/") else figure
    return not any(re.fullmatch(re.sub(r"<\w+>", r"[\\w.]+", name), figure) for name in names)


def test_the_pages_that_a_newcomer_looks_for_are_there() -> None:
    expected = {
        "quickstart",
        "own_reward",
        "own_data",
        "own_algorithm",
        "coming_from_trl",
        "coming_from_verl",
    }
    assert expected <= {page.stem for page in PAGES}
    readme = (ROOT / "README.md").read_text()
    assert [name for name in sorted(expected) if f"docs/{name}.md" not in readme] == []


def test_every_python_block_is_python() -> None:
    for block in of_kind("python"):
        compile(block.body, block.place, "exec")


def test_every_command_exists_and_has_the_options_it_is_given() -> None:
    wrong = []
    for block in of_kind("console"):
        for command, _ in block.commands:
            program, name, *arguments = shlex.split(command)
            chosen = COMMANDS[name]
            while hasattr(chosen, "commands"):
                name, *arguments = arguments
                chosen = chosen.commands[name]
            known = {option for each in chosen.params for option in each.opts}
            used = {argument for argument in arguments if argument.startswith("--")}
            if program != "kintsugi" or not used <= known:
                wrong.append(f"{block.place}: {command}")
    assert wrong == []


def test_every_override_names_a_field() -> None:
    every = set(fields(Config))
    wrong = [
        f"{block.place}: {argument}"
        for block in of_kind("console")
        for command, _ in block.commands
        for argument in shlex.split(command)
        if re.match(r"[a-z_.]+=", argument) and argument.partition("=")[0] not in every
    ]
    assert wrong == []


def test_every_recipe_of_a_page_has_only_fields_that_exist() -> None:
    for block in of_kind("yaml"):
        if "experiment" not in block.attributes:
            tree = yaml.safe_load(block.body)
            tree.pop("extends", None)
            if is_custom_name(tree.get("algorithm", {}).get("name", "")):
                tree["algorithm"].pop("name")
            msgspec.convert(tree, Config)


def test_every_experiment_of_a_page_can_be_carried_out(tmp_path: Path) -> None:
    (tmp_path / "workloads").symlink_to(experiments.experiments_folder() / "workloads")
    found = [block for block in of_kind("yaml") if "experiment" in block.attributes]
    assert found
    for block in found:
        file = tmp_path / block.attributes["title"]
        file.write_text(block.body)
        experiments.read(file)


def test_every_field_that_is_written_in_code_font_exists() -> None:
    """`actor.learning_rate` and the like; those of others stand in the first column of a table and are not ours."""
    every, sections = set(fields(Config)), set(Config.__struct_fields__)
    wrong = []
    for page in TEXTS:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            ours = line if not line.startswith("|") or "coming_from" not in page.name else line.split("|")[2]
            for name in re.findall(r"`([a-z_]+\.[a-z_.]+)[`:=]", ours):
                first = name.split(".")[0]
                if first in sections and name not in every:
                    wrong.append(f"{page.name}:{number}: {name}")
    assert wrong == []


def test_every_link_within_the_tree_leads_somewhere() -> None:
    wrong = [
        f"{page.name}: {target}"
        for page in TEXTS
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert wrong == []


def test_every_file_of_the_tree_that_a_page_names_is_there() -> None:
    wrong = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(
            r"`((?:kintsugi|tests|recipes|benchmarks)/[\w/.]+)`", page.read_text(encoding="utf-8")
        )
        if not (ROOT / name).exists()
    ]
    assert wrong == []


def fields(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Every dotted name of a configuration, sections included."""
    for name, annotation in typing.get_type_hints(section).items():
        yield f"{prefix}{name}"
        for option in typing.get_args(annotation) or (annotation,):
            if isinstance(option, type) and issubclass(option, msgspec.Struct):
                yield from fields(option, f"{prefix}{name}.")
