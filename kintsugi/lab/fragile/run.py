"""Run of the fragile system that faults are injected into: same folder layout, mark and process names as ours."""

from __future__ import annotations

import sys
from pathlib import Path

from kintsugi.config.schema import LEARN_PAIRS, Config
from kintsugi.errors import UserError
from kintsugi.lab.fragile.directory import address_of
from kintsugi.lab.fragile.process import write_hosts
from kintsugi.lab.fragile.timeouts import DEFAULT_FACTOR, Scale, write_scale
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.lab.testbed.testbed import RunTestbed

LAUNCHER = (sys.executable, "-P", "-m", "kintsugi.lab.fragile.launcher")


class FragileRun(MarkedRun):
    """Run of the fragile system. The recipe selects its architecture as for ours: `weights.transport: disk` sends
    weights through checkpoints, `cluster.share_device` lets train and rollout workers of one index share a device, and
    `algorithm.name: sft` selects plain fine-tuning.

    Its processes are `master-0` (the controller), `scheduler-0`, `model-N` and `rollout-N`, distributed over the hosts
    by index. On each host `monitor-N` measures what our agents measure.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        testbed: RunTestbed | None = None,
        scale: float = DEFAULT_FACTOR,
    ) -> None:
        """`scale` is the number of seconds of a long time-out that one second stands for here."""
        check(config)
        super().__init__(config, run_dir=run_dir, command=LAUNCHER, testbed=testbed)
        self.scale = Scale.by(scale)
        write_scale(run_dir, self.scale)
        write_hosts(run_dir, testbed.hosts if testbed is not None else ())

    def start(self, *, resume: bool = False) -> None:
        if resume:
            raise UserError("a run of the fragile system can not be resumed; start another")
        super().start()

    def port_of(self, name: str) -> int:
        """Return the port of a process of the run, or of `meta`; UserError while it has not announced one."""
        return address_of(self.run_dir, name).port


def check(config: Config) -> None:
    """Raise UserError for a workload that the fragile system does not support."""
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
