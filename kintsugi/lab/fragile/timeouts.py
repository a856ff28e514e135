"""Time-outs of this system, and how they are scaled down in an experiment.

Time-outs of minutes and hours are divided by one factor (an hour takes 6 s). Half a minute would be 50 ms then, less
than a busy machine needs for a response, so time-outs below a minute have a factor of their own. Both factors, and
every time-out with its real and scaled value, are written to the run folder.
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
"""Time-out of the controller for any response of a worker."""
TRANSFER_S = HOUR_S
"""Time-out of a weight transfer through the meta-server, and of writing a checkpoint."""
NOTIFY_S = 600.0
"""Time-out of a notification."""
STOP_JOB_S = 30.0
"""Time-out of stopping a job through the scheduler's API."""


class Scaled(msgspec.Struct, frozen=True):
    """One time-out: `Scaled(real_s=3600.0, here_s=6.0)`."""

    real_s: float
    here_s: float


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling of time-outs: `Scale().of(3600.0) == 6.0`."""

    hour_s: float = HOUR_S / DEFAULT_FACTOR
    """Scaled duration of an hour."""
    half_minute_s: float = 3.0
    """Scaled duration of half a minute."""

    @classmethod
    def by(cls, factor: float) -> Scale:
        """Return the scale with this factor: `Scale.by(600.0).hour_s == 6.0`."""
        if not factor > 0:
            raise UserError(f"expected a positive scale, got {factor:g}")
        return cls(hour_s=HOUR_S / factor)

    @property
    def factor(self) -> float:
        """Seconds of a long time-out that one second stands for."""
        return HOUR_S / self.hour_s

    def of(self, real_s: float) -> float:
        """Return the scaled duration of a time-out."""
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
