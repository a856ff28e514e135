"""Starts the ranks of plain fine-tuning and waits for them; when one fails, it says which, and how it ended."""

from __future__ import annotations

import logging
import time

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.placement import log_path
from kintsugi.lab.fragile import orders
from kintsugi.lab.fragile.places import Address, find
from kintsugi.lab.fragile.process import Process, begin
from kintsugi.lab.fragile.rpc import ask, call
from kintsugi.lab.fragile.scale import STOP_JOB_S
from kintsugi.lab.fragile.scheduler import SCHEDULER
from kintsugi.runtime import describe_status, wait
from kintsugi.types import Role, process_id
from kintsugi.worker import EXIT_ERROR

log = logging.getLogger("elastic")

_START_S = 120.0
_LOOK_S = 0.1
_LONGEST_S = 24 * 3600.0
_LAST_LINES = 5


class Elastic:
    """One job of ranks."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler: Address = find(process.run_dir, SCHEDULER, timeout_s=_START_S)
        names = tuple(process_id(Role.MODEL, index) for index in range(process.config.actor.workers))
        order = orders.StartJob("train", names)
        self._job = ask(self._scheduler, "/start", order, whom=SCHEDULER, kind=orders.Job, timeout_s=_START_S)

    def run(self) -> int:
        """Gives the exit code."""
        ends = wait(self._attempt, whom="all ranks", what="their end", timeout_s=_LONGEST_S)
        failed = {name: end for name, end in ends.items() if end and end != _CLEAN}
        for name, end in failed.items():
            lines = log_path(self._process.run_dir, name).read_text(errors="replace").splitlines()
            log.error("%s failed: %s; it said last:\n%s", name, end, "\n".join(lines[-_LAST_LINES:]))
        if failed:
            timeout_s = self._process.scale.of(STOP_JOB_S)
            call(self._scheduler, "/cancel", self._job, whom=SCHEDULER, timeout_s=timeout_s)
            return EXIT_ERROR
        log.info("Training finished")
        return 0

    def _attempt(self, remaining_s: float) -> dict[str, str] | None:
        """How the ranks ended, when all have, or one has failed."""
        status = ask(
            self._scheduler,
            "/status",
            self._job,
            whom=SCHEDULER,
            kind=orders.JobStatus,
            timeout_s=min(remaining_s, _START_S),
        )
        ends = status.ends
        if all(ends.values()) or any(end not in ("", _CLEAN) for end in ends.values()):
            return ends
        time.sleep(min(_LOOK_S, remaining_s))
        return None


_CLEAN = describe_status(0)


def main(bootstrap: Bootstrap) -> int:
    return Elastic(begin(bootstrap)).run()
