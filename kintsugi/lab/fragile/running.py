"""A run of the fragile system that may be broken: the same folder, mark and names as one of ours."""

from __future__ import annotations

import sys
from pathlib import Path

from kintsugi.config import LEARN_PAIRS, Config
from kintsugi.errors import UserError
from kintsugi.lab.fragile.places import address_of
from kintsugi.lab.fragile.process import write_hosts
from kintsugi.lab.fragile.scale import DEFAULT_FACTOR, Scale, write_scale
from kintsugi.lab.places import Place
from kintsugi.lab.running import MarkedRun

LAUNCHER = (sys.executable, "-m", "kintsugi.lab.fragile.launcher")


class FragileRun(MarkedRun):
    """What the recipe says decides how it is put together, as for ours: `weights.transport: disk` sends weights
    through checkpoints, `cluster.share_device` lets train and rollout workers of one number share a device, and
    `algorithm.name: sft` is plain fine-tuning.

    Its processes are `master-0` (the controller), `scheduler-0`, `model-N` and `rollout-N`. Hosts are gone round by
    their numbers. On each `monitor-N` measures what our agents measure.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        place: Place | None = None,
        scale: float = DEFAULT_FACTOR,
    ) -> None:
        """`scale`: for how many seconds of a long wait one stands here."""
        check(config)
        super().__init__(config, run_dir=run_dir, command=LAUNCHER, place=place)
        self.scale = Scale.by(scale)
        write_scale(run_dir, self.scale)
        write_hosts(run_dir, place.hosts if place is not None else ())

    def start(self, *, resume: bool = False) -> None:
        if resume:
            raise UserError("a run of the fragile system can not be resumed; start another")
        super().start()

    def port_of(self, name: str) -> int:
        """Where a process of the run, or `meta`, is called; UserError while it is not there yet."""
        return address_of(self.run_dir, name).port


def check(config: Config) -> None:
    """UserError for a workload that the fragile system does not have."""
    refused = {
        "algorithm.name": config.algorithm.name in {*LEARN_PAIRS, "rollout"} and config.algorithm.name,
        "rollout.environment": config.rollout.environment,
        "generation.backend": config.generation.backend != "embedded" and config.generation.backend,
        "asynchrony.max_staleness": config.asynchrony.max_staleness,
    }
    for field, value in refused.items():
        if value:
            raise UserError(
                f"`{field}`: expected what the fragile system has (single turns or rows, the own engine, in step "
                f"with the training), got {value}"
            )
