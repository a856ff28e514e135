"""A running run in the browser: a rank is killed, and its incident appears without reloading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import LONGEST_MS, Viewer, serve
from tests.cluster.real_runs import Run

GATE = 5
"""Step after which the run stands still, with every process alive."""

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def run(tmp_path: Path, browser: Browser) -> Iterator[Run]:
    """A run that stands at the gate; made after the browser, so that none is started where that is missing."""
    folder = tmp_path / "runs"
    folder.mkdir()
    run = Run(folder / "live")
    try:
        run.start(gates=(GATE,))
        run.wait_at(GATE)
        yield run
    finally:
        run.close()


def test_the_incident_of_a_killed_rank_appears_without_reloading(
    run: Run, browser: Browser, tmp_path: Path
) -> None:
    for address in serve(run.run_dir.parent):
        viewer = Viewer(browser.new_page(), address)
        page = viewer.open("/run/live/incidents")
        expect(page.locator("main")).to_contain_text("No incidents", timeout=LONGEST_MS)
        expect(page.locator(".bar .live")).to_contain_text("Live", timeout=LONGEST_MS)
        page.evaluate("window.notReloaded = true")
        killed = time.monotonic()
        run.kill("model-0")
        expect(page.locator(".incident-list")).to_contain_text("model-0", timeout=LONGEST_MS)
        (tmp_path / "seconds_to_incident").write_text(f"{time.monotonic() - killed:.2f}")
        run.let_through(GATE)
        code, errors = run.end()
        assert code == 0, errors
        expect(page.locator(".run-head .badge")).to_have_text("finished", timeout=LONGEST_MS)
        expect(page.locator(".incident-list")).to_contain_text("recovered", timeout=LONGEST_MS)
        assert page.evaluate("window.notReloaded") is True
        viewer.assert_nothing_forbidden()
        page.close()
