"""The page on a run with a million samples: first paint, time to interactive, memory and CPU of the server, 20 viewers;
and beside a run that goes on: the CPU time that an open page adds.

    python benchmarks/page.py [--samples 1000000] [--viewers 20] [--folder FOLDER]
    python benchmarks/page.py --live [--recipe grpo_arithmetic]

The run is generated from the recorded one of the package: same journal and events, as many samples and steps as asked
for (about 280 bytes a sample). Every load is one of a fresh browser context, so nothing is cached. Beside a run, the
page is a process of its own and the run does nothing for it, so what it adds is the CPU time of that process, compared
with that of all processes of the run in the same time; the browser counts for neither. Needs the chromium of the system
and the extra `test`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, sync_playwright

from kintsugi.page.demo import FAULTS, unpack

PER_STEP = 256
LOADS = 5
IDLE_S = 10.0
LIVE_S = 12.0
STARTED_STEP = 3
VIEWS = ("learning", "rollouts", "time", "health", "incidents", "logs", "levels")
DRAWN = "() => document.querySelector('main .view *') && !document.querySelector('main .spinner')"
PAINTED = """() => {
  const paint = performance.getEntriesByName('first-contentful-paint')[0];
  return [paint ? paint.startTime / 1000 : null, performance.now() / 1000];
}"""


def generate(folder: Path, *, samples: int) -> Path:
    """Write a run with as many samples as asked for."""
    run_dir = unpack(folder) / FAULTS
    texts = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    texts = [record for record in texts if record["step"] > 52]
    steps = -(-samples // PER_STEP)
    with (run_dir / "samples.jsonl").open("w") as file:
        for number in range(samples):
            record = texts[number % len(texts)]
            step = number // PER_STEP + 1
            record |= {
                "step": step,
                "version": step - 1,
                "ticket": f"grpo:0:{number // 8}:0",
                "sample": number % 8,
            }
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    template = next(line for line in lines if line["step"] > 60 and "reward/mean" in line)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            time_s = lines[0]["time"] + step * 0.02
            file.write(json.dumps({**template, "step": step, "time": time_s}) + "\n")
    return run_dir


class Server:
    """A `kintsugi page` of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-u", "-m", "kintsugi", "page", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().removeprefix("page: ").strip()
        self._watched = psutil.Process(self.process.pid)

    def memory_mb(self) -> float:
        return float(self._watched.memory_full_info().uss) / 1e6

    def cpu_s(self) -> float:
        used = self._watched.cpu_times()
        return float(used.user + used.system)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def load(browser: Browser, address: str, route: str) -> tuple[float, float]:
    """Open a route in a fresh context: seconds to the first paint and to a drawn view."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(f"{address}#{route}")
    page.wait_for_function(DRAWN)
    painted, drawn = page.evaluate(PAINTED)
    context.close()
    return painted or drawn, drawn


def measure(server: Server, browser: Browser, *, viewers: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    first = load(browser, server.address, f"/run/{FAULTS}/rollouts")
    results["rollouts, first load of the server"] = first
    for view in VIEWS:
        loads = [load(browser, server.address, f"/run/{FAULTS}/{view}") for _ in range(LOADS)]
        results[view] = tuple(statistics.median(column) for column in zip(*loads, strict=True))
    results["server MB after all views"] = server.memory_mb()
    contexts = [browser.new_context() for _ in range(viewers)]
    start = time.monotonic()
    pages = [context.new_page() for context in contexts]
    for page in pages:
        page.goto(f"{server.address}#/run/{FAULTS}/learning", wait_until="commit")
    for page in pages:
        page.wait_for_function(DRAWN)
    results[f"{viewers} viewers, all drawn after s"] = time.monotonic() - start
    before = server.cpu_s()
    time.sleep(IDLE_S)
    results[f"server CPU with {viewers} viewers, % of one core"] = (server.cpu_s() - before) / IDLE_S * 100
    results[f"server MB with {viewers} viewers"] = server.memory_mb()
    for context in contexts[1:]:
        context.close()
    before = server.cpu_s()
    time.sleep(IDLE_S)
    results["server CPU with 1 viewer, % of one core"] = (server.cpu_s() - before) / IDLE_S * 100
    contexts[0].close()
    return results


def cpu_s(processes: list[psutil.Process]) -> dict[int, float]:
    """CPU seconds of each process so far; those that ended are left out."""
    found = {}
    for process in processes:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[process.pid] = float(used.user + used.system)
    return found


def live(browser: Browser, folder: Path, *, recipe: str) -> dict[str, Any]:
    """Train with the page beside it, and look at each view for a while."""
    run_dir = folder / "live"
    command = [
        sys.executable,
        "-m",
        "kintsugi",
        "train",
        recipe,
        f"run_dir={run_dir}",
        "algorithm.steps=100000",
    ]
    launcher = subprocess.Popen([*command, "--page"], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    address = launcher.stdout.readline().removeprefix("page: ").strip()
    results: dict[str, Any] = {}
    try:
        metrics = run_dir / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < STARTED_STEP:
            assert launcher.poll() is None
            time.sleep(0.2)
        for view in ("learning", "time", "health", "logs"):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page = context.new_page()
            page.goto(f"{address}#/run/live/{view}")
            page.wait_for_function(DRAWN)
            processes = psutil.Process(launcher.pid).children(recursive=True)
            (beside,) = [each for each in processes if "kintsugi.cli.page" in each.cmdline()]
            steps, before = metrics.read_bytes().count(b"\n"), cpu_s(processes)
            time.sleep(LIVE_S)
            after = cpu_s(processes)
            used = {pid: after[pid] - before[pid] for pid in after.keys() & before.keys()}
            of_page = used.pop(beside.pid)
            steps = metrics.read_bytes().count(b"\n") - steps
            results[view] = (
                f"{of_page / sum(used.values()):.2%} of the run's CPU time: {of_page:.2f} s beside "
                f"{sum(used.values()):.1f} s in {LIVE_S:.0f} s and {steps} steps"
            )
            context.close()
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=60)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where the run is generated; default: a temporary folder")
    parser.add_argument("--live", action="store_true", help="only the page beside a run that goes on")
    parser.add_argument("--recipe", default="grpo_arithmetic", help="recipe of that run")
    arguments = parser.parse_args()
    if arguments.live:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            for view, result in live(browser, Path(folder), recipe=arguments.recipe).items():
                print(f"{view}: {result}")
            browser.close()
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run_dir = generate(Path(folder), samples=arguments.samples)
        size = (run_dir / "samples.jsonl").stat().st_size
        print(
            f"{arguments.samples} samples, {size / 1e6:.0f} MB; {platform.machine()}, {os.cpu_count()} cores"
        )
        server = Server(Path(folder))
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
                )
                results = measure(server, browser, viewers=arguments.viewers)
                browser.close()
        finally:
            server.close()
    for name, value in results.items():
        shown = (
            " / ".join(f"{each:.2f}" for each in value) + " s" if isinstance(value, tuple) else f"{value:.2f}"
        )
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
