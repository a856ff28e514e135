"""Every view of the page in a real browser, on runs that ended well, that died, that are empty, damaged or hostile."""

from __future__ import annotations

import re
import time
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import LONGEST_MS, Viewer
from tests.browser.recorded_runs import CONSTANT, DAMAGED, DEAD, EMPTY, FAULTS, HOSTILE, SLOW, WIDE

VIEWS = ("learning", "rollouts", "time", "health", "incidents", "logs", "levels")
SERIOUS = ("serious", "critical")
AXE = """(rule) => axe.run(rule ? { runOnly: { type: "rule", values: [rule] } } : { resultTypes: ["violations"] })"""
LOOKS = ((1440, "light"), (1440, "dark"), (390, "dark"), (390, "light"))

pytestmark = pytest.mark.slow


def fits(page: Page, width: int) -> bool:
    """Whether nothing is wider than the window, once the charts are drawn for its width."""
    deadline = time.monotonic() + LONGEST_MS / 1000
    while page.evaluate("document.documentElement.scrollWidth") > width and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    return bool(page.evaluate("document.documentElement.scrollWidth") <= width)


def test_every_view_is_accessible_in_light_and_dark_and_fits_a_phone(viewer: Viewer, tmp_path: Path) -> None:
    """Screenshots of each view stay in the folder of the test."""
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    page = viewer.page
    found: list[str] = []
    for route in (
        "/",
        f"/compare?runs={FAULTS},{SLOW}",
        *(f"/run/{FAULTS}/{view}" for view in VIEWS),
        f"/run/{CONSTANT}/learning",
    ):
        viewer.open(route)
        page.evaluate(axe)
        name = re.sub(r"\W+", "-", route).strip("-") or "overview"
        for width, theme in LOOKS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
            page.screenshot(path=tmp_path / f"{name}-{theme}-{width}.png")
            if width == 1440:
                # What differs between the themes is colour.
                answer = page.evaluate(AXE, None if theme == "light" else "color-contrast")
                found += [
                    f"{route} {theme}: {each['id']} {[node['target'] for node in each['nodes']][:3]}"
                    for each in answer["violations"]
                    if each["impact"] in SERIOUS
                ]
            else:
                assert fits(page, width), route
        assert page.locator("main .failed").count() == 0, f"{route}: {page.locator('main').inner_text()}"
    page.set_viewport_size({"width": 1440, "height": 900})
    viewer.assert_nothing_forbidden()
    assert found == []


@pytest.mark.parametrize("run", [DEAD, EMPTY, HOSTILE, DAMAGED])
def test_every_view_of_a_broken_run_is_drawn(viewer: Viewer, run: str) -> None:
    for view in VIEWS:
        page = viewer.open(f"/run/{run}/{view}")
        assert page.locator("main .failed").count() == 0, f"{view}: {page.locator('main').inner_text()}"
    viewer.assert_nothing_forbidden()
    assert page.evaluate("window.owned") is None


def test_the_overview_lists_every_run_and_says_what_is_wrong_with_one(viewer: Viewer) -> None:
    page = viewer.open("/")
    for run in (FAULTS, SLOW, DEAD, EMPTY, HOSTILE, DAMAGED):
        expect(page.locator(f'tr[data-run="{run}"]')).to_be_visible(timeout=LONGEST_MS)
    assert page.locator('tr[data-run="no_run"]').count() == 0
    expect(page.locator(f'tr[data-run="{DEAD}"]')).to_contain_text("interrupted")
    expect(page.locator(f'tr[data-run="{DAMAGED}"]')).to_contain_text("2 problems")
    viewer.open(f"/run/{DAMAGED}/learning")
    page.locator(".run-head .problems summary").click()
    expect(page.locator(".run-head .problems")).to_contain_text("another version of kintsugi")
    expect(page.locator(".run-head .problems")).to_contain_text("metrics.jsonl, line 6")


def test_what_keeps_a_run_from_learning_is_shown_and_a_healthy_run_has_no_such_panel(
    viewer: Viewer, tmp_path: Path
) -> None:
    page = viewer.open(f"/run/{CONSTANT}/learning")
    found = page.locator(".finding")
    expect(found).to_have_count(1)
    expect(found).to_contain_text("equal rewards")
    expect(found).to_contain_text("no group has different rewards")
    found.locator("summary").click()
    expect(found.locator("details")).to_contain_text("frac_reward_zero_std 1")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        page.screenshot(path=tmp_path / f"finding-{theme}.png")
    since = found.get_by_role("button", name="step").first
    step = since.inner_text().removeprefix("step ")
    since.click()
    expect(page.locator(".step-number b")).to_have_text(step)
    expect(page.locator(".run-head")).to_contain_text("equal_rewards since step")
    viewer.open("/")
    expect(page.locator(f'tr[data-run="{CONSTANT}"]')).to_contain_text("learning: equal_rewards")
    assert page.locator(".learning-note").count() == 1
    viewer.open(f"/run/{SLOW}/learning")
    assert page.locator(".finding").count() == 0
    viewer.assert_nothing_forbidden()


def test_an_incident_is_told_in_order_with_its_cause(viewer: Viewer) -> None:
    page = viewer.open(f"/run/{FAULTS}/incidents?incident=1")
    expect(page.locator("article.incident h2")).to_have_text("model-1 was killed by SIGKILL")
    kinds = page.locator(".story-line").evaluate_all("lines => lines.map((each) => each.className)")
    told = [re.sub(r".*is-", "", kind) for kind in kinds]
    assert told[:3] == ["broke", "noticed", "decided"] and told[-1] == "resumed"
    expect(page.locator(".incident-why")).to_contain_text("model-1")
    expect(page.locator(".causal-picture")).to_be_visible()
    page.locator(".evidence a").first.click()
    expect(page.locator(".log-line.target")).to_be_visible(timeout=LONGEST_MS)


def test_a_click_on_a_curve_sets_the_step_that_all_views_follow(viewer: Viewer) -> None:
    page = viewer.open(f"/run/{FAULTS}/learning")
    area = page.locator(".chart-area").first
    area.click(position={"x": 150, "y": 80})
    expect(page.locator(".step-number")).to_be_visible()
    step = page.locator(".step-number b").inner_text()
    page.keyboard.press("2")
    expect(page.locator(".step-picker input")).to_have_value(step, timeout=LONGEST_MS)
    page.locator(".sample").first.press("Enter")
    expect(page.locator("dialog.drawer .turn").first).to_be_visible(timeout=LONGEST_MS)
    page.keyboard.press("Escape")
    expect(page.locator("dialog.drawer")).to_have_count(0)
    viewer.assert_nothing_forbidden()


def test_many_processes_are_drawn_as_a_heat_map(viewer: Viewer, tmp_path: Path) -> None:
    page = viewer.open(f"/run/{WIDE}/time")
    expect(page.get_by_role("button", name="Heat map")).to_have_attribute("aria-pressed", "true")
    page.screenshot(path=tmp_path / "heat-map.png")
    page.get_by_role("button", name="Lanes", exact=True).click()
    expect(page.get_by_role("button", name="Lanes", exact=True)).to_have_attribute("aria-pressed", "true")
    viewer.assert_nothing_forbidden()


def test_two_runs_are_compared_with_what_differs(viewer: Viewer) -> None:
    page = viewer.open(f"/compare?runs={FAULTS},{SLOW}")
    expect(page.locator("main")).to_contain_text("actor.learning_rate", timeout=LONGEST_MS)
    assert page.locator(".chart").count() >= 5
    viewer.assert_nothing_forbidden()


def test_what_a_hostile_model_wrote_is_shown_as_text(viewer: Viewer) -> None:
    page = viewer.open(f"/run/{HOSTILE}/rollouts?sort=longest")
    expect(page.locator("main")).to_contain_text(re.compile(r"x{50}"), timeout=LONGEST_MS)
    page = viewer.open(f"/run/{HOSTILE}/rollouts?text=owned")
    expect(page.locator("main")).to_contain_text("<script>", timeout=LONGEST_MS)
    assert page.locator("main script, main img").count() == 0
    page = viewer.open(f"/run/{HOSTILE}/rollouts?text=right")
    expect(page.locator(".sample .escape").first).to_have_text("\\u202e", timeout=LONGEST_MS)
    assert page.evaluate("window.owned") is None
    viewer.assert_nothing_forbidden()


def test_a_run_that_does_not_exist_is_said_and_the_page_goes_on(viewer: Viewer) -> None:
    page = viewer.open("/run/nothing/learning")
    expect(page.locator("main [role=alert]")).to_contain_text("there is no run 'nothing'", timeout=LONGEST_MS)
    page = viewer.open("/")
    expect(page.locator("main")).to_contain_text(FAULTS, timeout=LONGEST_MS)
