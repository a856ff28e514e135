"""The layout of a run folder: stable names, spelled in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.run_folder import layout
from kintsugi.run_folder.layout import RELATIVE, RunFolder

PACKAGE = Path(layout.__file__).parents[1]

FILES = {
    "config_file": "config.yaml",
    "origins_file": "origins.json",
    "webhook_file": "webhook",
    "started_file": "started.json",
    "rewards_file": "rewards.py",
    "data_file": "data.json",
    "journal_file": "journal",
    "inputs_file": "inputs",
    "summary_file": "summary.json",
    "tags_file": "tags.json",
    "launcher_file": "launcher.json",
    "processes_file": "processes.json",
    "metrics_file": "metrics.jsonl",
    "samples_file": "samples.jsonl",
    "samples_index_file": "samples.index",
    "eval_answers_file": "verdicts.jsonl",
    "diagnoses_file": "diagnoses.jsonl",
    "learning_file": "learning.jsonl",
    "incidents_file": "incidents.jsonl",
    "audit_file": "audit.jsonl",
    "index_file": "store.db",
    "decode_step_file": "steps",
    "devices_file": "devices.json",
    "hosts_file": "joined_hosts.json",
    "host_files_folder": "host_files",
    "host_files_index_file": "host_files/index.json",
    "slurm_job_file": "slurm_job.json",
    "slurm_script_file": "slurm_job.sh",
    "copies_file": "copies.json",
    "checkpoints_folder": "checkpoints",
    "evaluations_folder": "evaluations",
    "events_folder": "events",
    "readings_folder": "figures",
    "logs_folder": "logs",
    "requests_folder": "requests",
    "rollouts_folder": "rollouts",
    "streams_folder": "streams",
    "tensorboard_folder": "tensorboard",
}
FILES_BY_NAME = {
    "agent_file": "agents/x-0.json",
    "events_file": "events/x-0.jsonl",
    "spans_file": "events/x-0.spans.jsonl",
    "readings_file": "figures/x-0.jsonl",
    "log_file": "logs/x-0.log",
    "request_file": "requests/x-0.json",
    "external_weights_folder": "handed_over/x-0",
    "published_weights_folder": "weights/x-0",
}


def test_the_names_in_a_run_folder_are_stable() -> None:
    run = RunFolder("runs/a")
    assert {name: getattr(run, name) for name in FILES} == {
        name: Path("runs/a", path) for name, path in FILES.items()
    }
    assert {name: getattr(run, name)("x-0") for name in FILES_BY_NAME} == {
        name: Path("runs/a", path) for name, path in FILES_BY_NAME.items()
    }


def test_every_path_of_the_layout_is_in_these_tables_and_in_the_tree_of_its_docstring() -> None:
    named = {name for name in vars(RunFolder) if name.endswith(("_file", "_folder"))}
    assert named == FILES.keys() | FILES_BY_NAME.keys() | {"earlier_config_file"}
    assert RunFolder("a").earlier_config_file(7) == Path("a/config.until-step-7.yaml")
    tree = layout.__doc__ or ""
    first_parts = {path.partition("/")[0] for path in (*FILES.values(), *FILES_BY_NAME.values())}
    assert [part for part in sorted(first_parts) if f"\n    {part}" not in tree] == []


def test_a_path_may_be_text_and_relative() -> None:
    assert RunFolder("a") == RunFolder(Path("a"))
    assert str(RELATIVE.log_file("model-0")) == "logs/model-0.log"


def test_a_run_folder_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        RunFolder("a").path = Path("b")  # type: ignore[misc]


UNMISTAKABLE = {path for path in FILES.values() if "." in path}
"""Names that mean a file of a run folder wherever they stand; words such as `journal` have other meanings too."""
FOLDERS = {path.partition("/")[0] for path in (*FILES_BY_NAME.values(), *FILES.values()) if "." not in path}


def spelled_names(source: str) -> Iterator[str]:
    """Literals of a module that name a file of a run folder: on their own, or as a part of a path."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if text in UNMISTAKABLE:
                yield text
            case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str(text))) if (
                text in FOLDERS and "run" in ast.unparse(left)
            ):
                yield text
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if text.endswith(
                "/"
            ) and text.removesuffix("/") in {"events", "figures", "logs", "agents"}:
                yield text
            case _:
                pass


def test_no_other_module_spells_the_name_of_a_file_of_a_run_folder() -> None:
    spelled = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(layout.__file__)
        and (names := sorted(set(spelled_names(path.read_text(encoding="utf-8")))))
    }
    assert spelled == {}


@pytest.mark.parametrize(
    "source",
    [
        'path = folder / "metrics.jsonl"',
        'run_dir / "journal"',
        'f"events/{process}.jsonl"',
        'NAME = "store.db"',
    ],
)
def test_a_spelled_name_is_found(source: str) -> None:
    assert list(spelled_names(source)) != []
