"""A run in JupyterLab, in a real browser: one block that is redrawn while it runs, and kept after a reload."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.browser.conftest import ARGUMENTS
from tests.cluster.tiny_runs import until

pytest.importorskip("jupyterlab", reason="needs jupyterlab: make test-extras")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-extras")

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: make system-packages"),
]

START_S = 120.0
LONGEST_MS = 240_000
CELL = """
from kintsugi import train

result = train(
    "grpo_arithmetic",
    "warmup.steps=5",
    "algorithm.steps=15",
    "actor.warmup_steps=0",
    "data.num_eval=20",
    "eval.num_samples=0",
)
"""
BLOCKS = ".jp-Cell:first-of-type .jp-OutputArea-child"
RECORD_STATES = """
window.states = [];
window.mostBlocks = 0;
new MutationObserver(() => {
  const blocks = document.querySelectorAll(".jp-OutputArea-child");
  window.mostBlocks = Math.max(window.mostBlocks, blocks.length);
  const step = /step (\\d+)\\/20/.exec([...blocks].map((each) => each.textContent).join(" "));
  if (step && window.states.at(-1) !== step[1]) window.states.push(step[1]);
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    cell = {"cell_type": "code", "id": "cell-0", "metadata": {}, "source": CELL.strip(), "outputs": []}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}}
    content["cells"] = [{**cell, "execution_count": None}]
    (folder / "run.ipynb").write_text(json.dumps(content))
    return folder / "run.ipynb"


@pytest.fixture(scope="module")
def address(notebook: Path) -> Iterator[str]:
    """JupyterLab on a free port of this machine, with all of its files in a folder of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token, own = token_hex(16), notebook.parent / "own"
    options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": notebook.parent}
    arguments = [f"--ServerApp.{name}={value}" for name, value in options.items()]
    folders = {f"JUPYTER_{name}_DIR": str(own / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    with (notebook.parent / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *arguments],
            env={**os.environ, **folders, "JUPYTER_TOKEN": token, "IPYTHONDIR": str(own / "ipython")},
            cwd=notebook.parent,
            stdout=log,
            stderr=log,
        )

    def answers() -> bool:
        assert server.poll() is None, (notebook.parent / "server.log").read_text()
        try:
            with urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=5):
                return True
        except (URLError, TimeoutError):
            return False

    try:
        until(answers, "the answer of JupyterLab", timeout_s=START_S)
        yield f"http://127.0.0.1:{port}/lab/tree/run.ipynb?token={token}&reset"
    finally:
        server.terminate()
        server.wait(30)


def test_a_run_is_one_block_of_the_page_and_of_the_saved_notebook(address: str, notebook: Path) -> None:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(LONGEST_MS)
        page.add_init_script(RECORD_STATES)
        page.goto(address)
        page.get_by_text("Python 3 (ipykernel) | Idle").or_(
            page.get_by_text("Python 3 | Idle")
        ).first.wait_for()
        page.get_by_text("Run", exact=True).first.click()
        page.get_by_text("Run All Cells", exact=True).first.click()
        page.locator(BLOCKS, has_text="step 20/20").wait_for()
        page.get_by_text("| Idle").first.wait_for()
        states, most = page.evaluate("[window.states, window.mostBlocks]")
        assert len(set(states)) >= 3, f"the block is redrawn while the run runs: {states}"
        assert [int(each) for each in states] == sorted(int(each) for each in states)
        assert most == 1, "there is never a second block"
        final = page.locator(BLOCKS).inner_text()
        page.keyboard.press("Control+s")
        until(lambda: b"step 20/20" in notebook.read_bytes(), "the saved notebook", timeout_s=30)
        page.reload()
        page.locator(BLOCKS, has_text="step 20/20").wait_for()
        assert page.locator(BLOCKS).count() == 1 and page.locator(BLOCKS).inner_text() == final
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=f"{folder}/jupyterlab.png")
        browser.close()
    (outputs,) = [cell["outputs"] for cell in json.loads(notebook.read_text())["cells"]]
    assert [each["output_type"] for each in outputs] == ["display_data"]
