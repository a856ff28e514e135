"""Screenshots of the page for README and docs, from the recorded runs of the package.

    python benchmarks/page_screenshots.py [FOLDER]      writes docs/page_*.png, or FOLDER/page_*.png

Needs the chromium of the system and the extra `test`. Pictures have 200 colours, so that all are below 300 kB together.
"""

from __future__ import annotations

import argparse
import io
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from kintsugi.page.demo import FAULTS

ROUTES = {
    "learning": f"/run/{FAULTS}/learning",
    "rollouts": f"/run/{FAULTS}/rollouts?step=60",
    "incidents": f"/run/{FAULTS}/incidents?incident=1",
    "time": f"/run/{FAULTS}/time?step=58",
}
COLOURS = 200
LARGEST_SIZE = 300_000
SETTLED_MS = 2500


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1] / "docs")
    folder: Path = parser.parse_args().folder
    command = [sys.executable, "-u", "-m", "kintsugi", "page", "--demo", "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("page: ").strip()
        try:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
            for name, route in ROUTES.items():
                page.goto("about:blank")
                page.goto(f"{address}#{route}")
                page.wait_for_selector("main .view")
                page.wait_for_timeout(SETTLED_MS)
                write(folder / f"page_{name}.png", page.screenshot())
            browser.close()
        finally:
            server.send_signal(signal.SIGTERM)
    total = sum((folder / f"page_{name}.png").stat().st_size for name in ROUTES)
    print(f"{len(ROUTES)} pictures, {total / 1e3:.0f} kB")
    assert total <= LARGEST_SIZE


def write(path: Path, content: bytes) -> None:
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
