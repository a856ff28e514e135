"""Starts the ranks of plain fine-tuning and waits for them; logs which rank failed and how it ended."""

from __future__ import annotations

import logging
import time

from kintsugi.lab.fragile import messages
from kintsugi.lab.fragile.directory import Address, find
from kintsugi.lab.fragile.process import FragileProcess, begin
from kintsugi.lab.fragile.rpc import call, request
from kintsugi.lab.fragile.scheduler import SCHEDULER
from kintsugi.lab.fragile.timeouts import STOP_JOB_S
from kintsugi.process.exit_codes import EXIT_ERROR
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.processes import describe_status
from kintsugi.runtime.waits import wait
from kintsugi.types import Role, process_id

log = logging.getLogger("elastic")

_START_S = 120.0
_LOOK_S = 0.1
_LONGEST_S = 24 * 3600.0
_LAST_LINES = 5


class Elastic:
    """One job of ranks."""

    def __init__(self, process: FragileProcess) -> None:
        self._process = process
        self._scheduler: Address = find(process.run_dir, SCHEDULER, timeout_s=_START_S)
        names = tuple(process_id(Role.MODEL, index) for index in range(process.config.actor.workers))
        order = messages.StartJob("train", names)
        self._job = request(
            self._scheduler, "/start", order, peer=SCHEDULER, kind=messages.JobSpec, timeout_s=_START_S
        )

    def run(self) -> int:
        """Wait for the ranks and return the exit code."""
        ends = wait(self._attempt, whom="all ranks", what="their end", timeout_s=_LONGEST_S)
        failed = {name: end for name, end in ends.items() if end and end != _CLEAN}
        for name, end in failed.items():
            lines = RunFolder(self._process.run_dir).log_file(name).read_text(errors="replace").splitlines()
            log.error("%s failed: %s; its last output:\n%s", name, end, "\n".join(lines[-_LAST_LINES:]))
        if failed:
            timeout_s = self._process.scale.of(STOP_JOB_S)
            call(self._scheduler, "/cancel", self._job, peer=SCHEDULER, timeout_s=timeout_s)
            return EXIT_ERROR
        log.info("Training finished")
        return 0

    def _attempt(self, remaining_s: float) -> dict[str, str] | None:
        """Return how the ranks ended, once all have ended or one has failed."""
        status = request(
            self._scheduler,
            "/status",
            self._job,
            peer=SCHEDULER,
            kind=messages.JobStatus,
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
