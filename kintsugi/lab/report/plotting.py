"""Style of the figures, and conversion of a drawn figure to SVG and PNG.

Colours are from a fixed set, so that the page can replace each by a CSS variable for light and dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kintsugi.errors import UserError
from kintsugi.lab.scenarios.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "paper": "#ffffff",
    "ink": "#1a1a1a",
    "soft": "#5b5b5b",
    "rule": "#d9d9d4",
    "grid": "#e6e6e1",
    "fragile": "#c2410c",
    "ours": "#0b5fa5",
    "contrast": "#0a7d5a",
    "fault": "#e09f1f",
    "error": "#b91c1c",
    "other": "#7c4d9e",
}
PROFILES = {"fragile": "fragile system", "ours": "Kintsugi", "sft": "fragile system, SFT"}
PROFILE_COLOURS = {"fragile": COLOURS["fragile"], "ours": COLOURS["ours"], "sft": COLOURS["contrast"]}
WIDTH_IN = 10.0
NARROW_IN = 6.0
"""Width of a figure with one panel."""
DOTS_PER_INCH = 200
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": COLOURS["soft"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "figure.facecolor": COLOURS["paper"],
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
}


class RenderedFigure(msgspec.Struct, frozen=True):
    """RenderedFigure figure."""

    name: str
    svg: str
    png: bytes
    width_in: float

    def write(self, folder: Path) -> None:
        (folder / f"{self.name}.svg").write_text(self.svg, encoding="utf-8")
        (folder / f"{self.name}.png").write_bytes(self.png)

    def inline(self, label: str) -> str:
        """Return the SVG for the page: CSS variables for colours, unique ids, no background."""
        body = self.svg[self.svg.index("<svg") :]
        body = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", body, count=1)
        body = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", body, count=1)
        quoted = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
        width = f"max-width: {self.width_in / WIDTH_IN:.0%}"
        body = body.replace("<svg", f'<svg role="img" aria-label="{quoted}" style="{width}"', 1)
        body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        body = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', body)
        body = re.sub(r'href="#([^"]+)"', rf'href="#{self.name}-\1"', body)
        body = re.sub(r"url\(#([^)]+)\)", rf"url(#{self.name}-\1)", body)
        for name, colour in COLOURS.items():
            body = re.sub(rf": {colour}\b", f": var(--{name})", body)
        return body


def require_matplotlib() -> None:
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise UserError("the report's figures need matplotlib: `pip install 'kintsugi[plots]'`") from error


@contextmanager
def canvas(height_in: float, *, panels: int) -> Iterator[Figure]:
    """Create a figure with panels next to each other."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        yield Figure(figsize=(WIDTH_IN if panels > 1 else NARROW_IN, height_in), layout="constrained")


def drawn(figure: Figure, name: str) -> RenderedFigure:
    """Render a figure; the same data give the same bytes: no date, and ids derived from the name."""
    import matplotlib as mpl

    svg, png = io.StringIO(), io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    # The layout found by the first rendering is reused, since finding it is most of the work.
    figure.set_layout_engine("none")
    figure.savefig(png, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return RenderedFigure(name, svg.getvalue(), png.getvalue(), figure.get_figwidth())


def profile_name(run: RunRecord) -> str:
    return PROFILES.get(run.profile, run.profile)
