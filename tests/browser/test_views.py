"""Every view of the page in a real browser, on runs that ended well, that died, that are empty, damaged or hostile."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import LONGEST_MS, Viewer
from tests.browser.recorded_runs import DAMAGED, DEAD, EMPTY, FAULTS, HOSTILE, SLOW

VIEWS = ("learning", "rollouts", "time", "health", "incidents", "logs", "levels")
RUNS = (FAULTS, DEAD, EMPTY, HOSTILE, DAMAGED)
SERIOUS = ("serious", "critical")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("run", RUNS)
def test_every_view_of_a_run_is_drawn_without_an_error_or_a_foreign_request(viewer: Viewer, run: str) -> None:
    for view in VIEWS:
        page = viewer.open(f"/run/{run}/{view}")
        assert page.locator("main .failed").count() == 0, f"{view}: {page.locator('main').inner_text()}"
        viewer.assert_nothing_forbidden()
    assert page.evaluate("window.owned") is None


def test_the_overview_lists_every_run_with_its_state(viewer: Viewer) -> None:
    page = viewer.open("/")
    for run in (*RUNS, SLOW):
        expect(page.locator("main")).to_contain_text(run, timeout=LONGEST_MS)
    viewer.assert_nothing_forbidden()


def test_an_incident_tells_what_broke_and_why(viewer: Viewer) -> None:
    page = viewer.open(f"/run/{FAULTS}/incidents?incident=1")
    expect(page.locator("article.incident")).to_contain_text("was killed by SIGKILL", timeout=LONGEST_MS)
    assert page.locator(".story-line").count() >= 3
    expect(page.locator(".incident-why")).to_contain_text("model-1", timeout=LONGEST_MS)


def test_two_runs_are_compared_with_what_differs(viewer: Viewer) -> None:
    page = viewer.open(f"/compare?runs={FAULTS},{SLOW}")
    expect(page.locator("main")).to_contain_text("actor.learning_rate", timeout=LONGEST_MS)
    viewer.assert_nothing_forbidden()


def test_what_a_hostile_model_wrote_is_shown_as_text(viewer: Viewer) -> None:
    page = viewer.open(f"/run/{HOSTILE}/rollouts?sort=longest")
    expect(page.locator("main")).to_contain_text(re.compile(r"x{50}"), timeout=LONGEST_MS)
    page = viewer.open(f"/run/{HOSTILE}/rollouts?text=owned")
    expect(page.locator("main")).to_contain_text("<script>", timeout=LONGEST_MS)
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.owned") is None
    viewer.assert_nothing_forbidden()


def test_a_run_that_does_not_exist_is_said_and_the_page_goes_on(viewer: Viewer) -> None:
    page = viewer.open("/run/nothing/learning")
    expect(page.locator("main [role=alert]")).to_be_visible(timeout=LONGEST_MS)
    page = viewer.open("/")
    expect(page.locator("main")).to_contain_text(FAULTS, timeout=LONGEST_MS)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_view_has_a_serious_finding_of_accessibility(
    browser: Browser, address: str, tmp_path: Path, theme: str
) -> None:
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    context = browser.new_context(
        color_scheme="dark" if theme == "dark" else "light", reduced_motion="reduce"
    )
    viewer = Viewer(context.new_page(), address)
    found: list[str] = []
    routes = ["/", f"/compare?runs={FAULTS},{SLOW}", *(f"/run/{FAULTS}/{view}" for view in VIEWS)]
    for width in (1440, 390):
        viewer.page.set_viewport_size({"width": width, "height": 900})
        for route in routes:
            page = viewer.open(route)
            name = re.sub(r"\W+", "-", route).strip("-") or "overview"
            page.screenshot(path=tmp_path / f"{name}-{theme}-{width}.png")
            if width == 1440:
                page.evaluate(axe)
                answer = page.evaluate("() => axe.run({resultTypes: ['violations']})")
                found += [
                    f"{route}: {each['id']} {[node['target'] for node in each['nodes']][:3]}"
                    for each in answer["violations"]
                    if each["impact"] in SERIOUS
                ]
    context.close()
    assert found == []
