"""How long the patience of this system is, and how much of it an experiment waits for.

Waits of minutes and hours are shortened by one factor (an hour takes 6 s). Half a minute would be 50 ms then, less than
a busy machine needs to answer at all, so waits of less than a minute have a factor of their own. Both, and every wait
with its length there and here, are written into the run folder.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.errors import UserError

SCALE_FILE = "scale.json"

HOUR_S = 3600.0
MINUTE_S = 60.0
DEFAULT_FACTOR = 600.0
REQUEST_S = 2 * HOUR_S
"""The controller waits so long for any answer of a worker."""
TRANSFER_S = HOUR_S
"""For weights on their way through the meta-server, and for a checkpoint on its way to the disk."""
NOTIFY_S = 600.0
"""For an event to be taken."""
STOP_JOB_S = 30.0
"""For the scheduler's API to stop a job."""


class Scaled(msgspec.Struct, frozen=True):
    """One wait: `Scaled(real_s=3600.0, here_s=6.0)`."""

    real_s: float
    here_s: float


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """`Scale().of(3600.0) == 6.0`."""

    hour_s: float = HOUR_S / DEFAULT_FACTOR
    """What an hour takes here."""
    half_minute_s: float = 3.0
    """What half a minute takes here."""

    @classmethod
    def by(cls, factor: float) -> Scale:
        """`Scale.by(600.0).hour_s == 6.0`."""
        if not factor > 0:
            raise UserError(f"expected a positive scale, got {factor:g}")
        return cls(hour_s=HOUR_S / factor)

    @property
    def factor(self) -> float:
        """A second of a long wait here stands for so many."""
        return HOUR_S / self.hour_s

    def of(self, real_s: float) -> float:
        """How long a wait is here."""
        if real_s < MINUTE_S:
            return real_s * self.half_minute_s / (MINUTE_S / 2)
        return real_s / self.factor


class _Record(msgspec.Struct, frozen=True):
    scale: Scale
    factor: float
    waits: dict[str, Scaled]


def write_scale(run_dir: Path, scale: Scale) -> None:
    real = {"request": REQUEST_S, "transfer": TRANSFER_S, "notify": NOTIFY_S, "stop_job": STOP_JOB_S}
    waits = {name: Scaled(real_s, scale.of(real_s)) for name, real_s in real.items()}
    content = msgspec.json.format(msgspec.json.encode(_Record(scale, scale.factor, waits)))
    (run_dir / SCALE_FILE).write_bytes(content)


def read_scale(run_dir: Path) -> Scale:
    return msgspec.json.decode((run_dir / SCALE_FILE).read_bytes(), type=_Record).scale
