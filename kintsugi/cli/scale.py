"""`kintsugi scale`: request a new number of generation servers of a running run and wait for the reply."""

from __future__ import annotations

import time
from pathlib import Path

from kintsugi.cli.capacity import check_more_servers
from kintsugi.config.schema import Config
from kintsugi.config.stages import has_servers
from kintsugi.control.user_requests import UserRequests
from kintsugi.errors import ProcessDied, UserError
from kintsugi.run_folder import reader
from kintsugi.runtime.owned_files import check_owner
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.waits import wait

POLL_S = 0.05


def scale_run(folder: Path, *, servers: int, timeout_s: float) -> None:
    """Return once the master has accepted the number; servers are started or stopped from then on.

    Raises UserError with the reason if it refuses, ProcessDied if the run ends first, DeadlineExceeded without a reply.
    """
    check_owner(folder, action="scale it")
    launcher = reader.living_launcher(folder)
    if launcher is None:
        raise UserError(
            f"{folder} is not running (it is {reader.read_status(folder).state}); there is nothing to scale"
        )
    status = reader.read_status(folder)
    _check_memory(status.config, servers=servers, now=reader.read_journal(folder).num_servers(status.config))
    requests = UserRequests(folder)
    request = requests.submit(servers=servers)
    process = SystemProcesses().adopt(launcher.pid)
    try:
        _await_answer(requests, request, process=process, timeout_s=timeout_s)
    finally:
        process.close()
        requests.remove(request)
    refusal = reader.read_journal(folder).answers.get(request)
    if refusal is None:
        raise ProcessDied(f"{folder}: the run ended before it answered")
    if refusal:
        raise UserError(f"--servers: {refusal}")


def _await_answer(requests: UserRequests, request: str, *, process: Child, timeout_s: float) -> None:
    """Wait until the master has removed the request, which it does once the reply is in the journal."""

    def attempt(remaining_s: float) -> bool | None:
        if not requests.is_waiting(request) or process.ended():
            return True
        time.sleep(min(POLL_S, remaining_s))
        return None

    wait(attempt, whom="the run's master", what="an answer", timeout_s=timeout_s)


def _check_memory(config: Config, *, servers: int, now: int) -> None:
    """Refuse more servers than fit into the memory of this machine, by the estimate of `kintsugi check`."""
    if servers <= now or not has_servers(config):
        return
    check_more_servers(config, servers=servers, now=now)
