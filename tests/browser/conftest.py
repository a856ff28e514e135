"""One browser and one server of the page for all tests; skipped by name where there is no chromium."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from tests.browser import recorded_runs

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # No name is resolved: a request that would leave the machine fails.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
LONGEST_MS = 45_000
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


# The listener comes after that of the page, which has begun with the new route when this one is called.
GO = """(hash) => location.hash === hash || new Promise((done) => {
  addEventListener("hashchange", () => done(), { once: true });
  location.hash = hash;
})"""
DRAWN = """() => document.querySelector("main :is(.view > *, .state)") && !document.querySelector("main .spinner")"""


class Viewer:
    """A page of the browser that notes what must not happen."""

    def __init__(self, page: Page, address: str) -> None:
        """`address`: as it was printed, with a token or without one."""
        self.page, self._first = page, address
        self.address = address.partition("?")[0]
        self.foreign: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(LONGEST_MS)
        page.add_init_script(WATCH)
        page.on("request", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _note(self, request: Request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.foreign.append(request.url)

    def open(self, route: str) -> Page:
        """Open a route and wait until its view has been drawn; the page itself is loaded only once."""
        if self.page.url.startswith(self.address):
            self.page.evaluate(GO, f"#{route}")
        else:
            self.page.goto(f"{self._first}#{route}")
        self.page.wait_for_function(DRAWN)
        return self.page

    def assert_nothing_forbidden(self) -> None:
        assert self.foreign == []
        assert self.errors == []
        assert self.page.evaluate("window.violations") == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: `make system-packages` installs it as root")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that shows all recorded runs."""
    folder = recorded_runs.make(tmp_path_factory.mktemp("runs"))
    yield from serve(folder)


def serve(folder: Path, *options: str, lines: int = 1, home: Path | None = None) -> Iterator[str]:
    """Serve the runs of a folder; yields the address of the given line of its output.

    `home`: folder of tokens and of the host's audit log."""
    command = [sys.executable, "-m", "kintsugi", "page", str(folder), "--port", "0", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "KINTSUGI_HOME": str(home or folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            line = [process.stdout.readline() for _ in range(lines)][-1]
            assert ": http://" in line, line
            yield line.partition(": ")[2].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


@pytest.fixture(scope="module")
def viewer(browser: Browser, address: str) -> Iterator[Viewer]:
    """One page for all tests of a module: a view must not depend on those before it."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    yield Viewer(context.new_page(), address)
    context.close()
