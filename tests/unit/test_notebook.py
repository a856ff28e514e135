"""`kintsugi.load` on the recorded runs of the package, and on a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

import kintsugi
from kintsugi.errors import UserError
from kintsugi.page.demo import FAULTS, unpack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("runs")) / FAULTS


def test_a_recorded_run_has_its_figures_as_columns(folder: Path) -> None:
    run = kintsugi.load(folder)
    assert run.state == "finished"
    assert run.metrics["step"] == list(range(1, 67))
    assert len(run.metrics["reward/mean"]) == 66
    assert run.evaluations["eval/accuracy"][-1] > run.evaluations["eval/accuracy"][0]
    assert run.problems == []


def test_samples_of_a_step_have_a_column_for_each_component_of_the_reward(folder: Path) -> None:
    table = kintsugi.load(folder).samples(step=60)
    assert len(table) == 256 and set(table["step"]) == {60}
    assert "reward/success" in table
    frame = table.to_pandas()
    assert frame.shape == (256, len(table.columns))


def test_incidents_name_the_process_that_broke_and_the_cost(folder: Path) -> None:
    table = kintsugi.load(folder).incidents
    assert table["process"] == ["model-1", "master-0", "server-0"]
    assert all(seconds > 0 for seconds in table["seconds"])


def test_the_plot_has_a_mark_for_every_incident(folder: Path) -> None:
    run = kintsugi.load(folder)
    figure = run.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[:2] == ["reward", "held-out accuracy"]
    dashed = [line for line in figure.axes[0].get_lines() if line.get_linestyle() == "--"]
    assert len(dashed) == len(run.incidents)


def test_a_damaged_line_costs_that_line_and_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 2}\n{"step": 2, "a\n{"step": 3, "a": 4}\n{"step": 4'
    )
    run = kintsugi.load(tmp_path)
    assert run.metrics["a"] == [2.0, 4.0]
    (problem,) = run.problems
    assert problem.startswith("metrics.jsonl, line at byte 20: ")
    assert len(run.samples()) == 0 and len(run.incidents) == 0


def test_text_of_a_model_is_escaped_in_a_notebook() -> None:
    table = kintsugi.Table({"completion": ["<script>1</script>"] * 12})
    assert "<script>" not in table._repr_html_()
    assert "2 more rows" in table._repr_html_()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a run folder"):
        kintsugi.load(tmp_path)
    with pytest.raises(KeyError, match="expected one of the columns a"):
        kintsugi.Table({"a": [1]})["b"]
