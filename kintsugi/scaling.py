"""`kintsugi scale`: asks a running run for another number of generation servers, and waits for the answer."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from kintsugi import runs
from kintsugi.config import Config
from kintsugi.control.layout import estimate_memory
from kintsugi.control.requests import Requests
from kintsugi.errors import ProcessDied, UserError
from kintsugi.model.plan import plan_model
from kintsugi.runtime import Child, SystemProcesses, wait
from kintsugi.stages import has_servers
from kintsugi.types import Role

GLANCE_S = 0.05


def scale_run(folder: Path, *, servers: int, timeout_s: float) -> None:
    """Return once the run has taken the number over; its servers come and go from then on.

    UserError where it refuses, with its reason; ProcessDied if it ends first, DeadlineExceeded if it does not answer.
    """
    launcher = runs.living_launcher(folder)
    if launcher is None:
        raise UserError(
            f"{folder} is not running (it is {runs.read_status(folder).state}); there is nothing to scale"
        )
    status = runs.read_status(folder)
    _check_memory(status.config, servers=servers, now=runs.read_journal(folder).num_servers(status.config))
    requests = Requests(folder)
    request = requests.leave(servers=servers)
    process = SystemProcesses().adopt(launcher.pid)
    try:
        _await_answer(requests, request, process=process, timeout_s=timeout_s)
    finally:
        process.close()
        requests.take_away(request)
    refusal = runs.read_journal(folder).answers.get(request)
    if refusal is None:
        raise ProcessDied(f"{folder}: the run ended before it answered")
    if refusal:
        raise UserError(f"--servers: {refusal}")


def _await_answer(requests: Requests, request: str, *, process: Child, timeout_s: float) -> None:
    """The request is taken away when the answer to it is in the journal."""

    def attempt(remaining_s: float) -> bool | None:
        if not requests.is_waiting(request) or process.ended():
            return True
        time.sleep(min(GLANCE_S, remaining_s))
        return None

    wait(attempt, whom="the run's master", what="an answer", timeout_s=timeout_s)


def _check_memory(config: Config, *, servers: int, now: int) -> None:
    """All hosts of a run share this machine's memory. An estimate, as that of `kintsugi check`."""
    if servers <= now or not has_servers(config):
        return
    model, _ = plan_model(config)
    each, available = estimate_memory(config, model)[Role.SERVER], psutil.virtual_memory().available
    if (servers - now) * each > available:
        most = now + int(available // each)
        raise UserError(
            f"--servers: expected at most {most}: one more takes about {each / 1e6:,.0f} MB, "
            f"{available / 1e6:,.0f} MB are available; got {servers}"
        )
