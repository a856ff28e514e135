"""A running run in the browser: a rank is killed, its incident appears without reloading, and the run is stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import LONGEST_MS, Viewer, serve
from tests.cluster.real_runs import Run

KILLED, STOPPED = 5, 6
"""Steps after which the run stands still, with every process alive."""

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def run(tmp_path: Path, browser: Browser) -> Iterator[Run]:
    """A run with its page; made after the browser, so that none is started where that is missing."""
    folder = tmp_path / "runs"
    folder.mkdir()
    run = Run(folder / "live")
    try:
        run.start("--page", "algorithm.steps=8", gates=(KILLED, STOPPED))
        yield run
    finally:
        run.close()


def test_a_run_is_watched_while_a_rank_is_killed_and_stopped_from_the_page(
    run: Run, browser: Browser, tmp_path: Path
) -> None:
    assert run.launcher is not None and run.launcher.stdout is not None
    first = run.launcher.stdout.readline()
    assert first.startswith("page: http://127.0.0.1:"), first
    run.wait_at(KILLED)
    viewer = Viewer(browser.new_page(), first.removeprefix("page: ").strip())
    page = viewer.open("/run/live/incidents")
    expect(page.locator("main")).to_contain_text("No incidents", timeout=LONGEST_MS)
    expect(page.locator(".bar .live")).to_contain_text("Live", timeout=LONGEST_MS)
    assert page.locator("[data-action]").count() == 0, "the page beside a run only reads"
    page.evaluate("window.notReloaded = true")
    killed = time.monotonic()
    run.kill("model-0")
    expect(page.locator(".incident-list")).to_contain_text("model-0", timeout=LONGEST_MS)
    (tmp_path / "seconds_to_incident").write_text(f"{time.monotonic() - killed:.2f}")
    run.let_through(KILLED)
    run.wait_at(STOPPED)
    expect(page.locator(".story-line.is-replaced")).to_contain_text("model-0", timeout=LONGEST_MS)
    assert page.evaluate("window.notReloaded") is True
    viewer.assert_nothing_forbidden()
    page.close()
    for address in serve(run.run_dir.parent, "--operate", lines=2, home=tmp_path):
        stop_from(address, browser, run)
    audited = [json.loads(line)["entry"] for line in (run.run_dir / "audit.jsonl").read_text().splitlines()]
    stop = audited[-1]
    assert (stop["action"], stop["answer"], stop["name"]) == ("stop", "accepted", "page token (operator)")


def stop_from(address: str, browser: Browser, run: Run) -> None:
    """Press the button, answer its question, and see the run end."""
    viewer = Viewer(browser.new_page(), address)
    page = viewer.open("/run/live/health")
    expect(page.locator(".health tr[data-process]").first).to_be_visible(timeout=LONGEST_MS)
    page.screenshot(path=run.run_dir.parent / "health.png")
    page.locator("[data-action=stop]").click()
    expect(page.locator("dialog")).to_contain_text("Stop this run")
    page.locator("dialog button.danger").click()
    expect(page.locator("dialog")).to_have_count(0, timeout=LONGEST_MS)
    run.let_through(STOPPED)
    run.end()
    expect(page.locator(".run-head .badge")).to_have_text("stopped", timeout=LONGEST_MS)
    expect(page.locator("[data-action=resume]")).to_be_visible(timeout=LONGEST_MS)
    viewer.assert_nothing_forbidden()
    page.close()
