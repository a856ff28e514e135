from __future__ import annotations

import json
from pathlib import Path

from kintsugi.cli.notebook_view import NotebookView, curve_html, in_notebook
from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, EventLog

CONFIG = Config(name="mine", algorithm=AlgorithmSection(steps=4))


class Cell:
    """Output of a notebook cell: blocks by their handle."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.num_updates = 0

    def display(self, html: str) -> int:
        self.blocks.append(html)
        return len(self.blocks) - 1

    def update(self, handle: int, html: str) -> None:
        self.blocks[handle] = html
        self.num_updates += 1


def test_one_block_is_updated_and_keeps_the_final_state(tmp_path: Path) -> None:
    cell, clock = Cell(), VirtualClock()
    view = NotebookView(CONFIG, run_dir=tmp_path, clock=clock, display=cell.display, update=cell.update)
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0")
    for step in range(1, 5):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            line = {"step": step, "time": float(step), "reward/mean": 0.25 * step, "timing/train": 1.0}
            file.write(json.dumps(line) + "\n")
        clock.advance(0.6)
        view.tick()
        view.tick()
    log.emit(Alert("model-1 was lost: <b>killed</b>. More"))
    log.close()
    view.close()
    (block,) = cell.blocks
    assert cell.num_updates == 5
    assert "step 4/4" in block and "1.000" in block and "starting" not in block
    assert "model-1 was lost: &lt;b&gt;killed&lt;/b&gt;" in block and "More" not in block


def test_a_curve_needs_two_points() -> None:
    assert curve_html("reward", [(1.0, 0.5)]) == ""
    assert "0,90.0" in curve_html("reward", [(1.0, 0.0), (2.0, 1.0)])


def test_a_script_is_no_notebook() -> None:
    assert not in_notebook()
