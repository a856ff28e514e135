"""Python imports this at the start of every process of a test's run: one of them dies where the test says.

`KINTSUGI_TEST_DIE_IN=kintsugi.training.objectives:ValueRegression.loss:6` ends the process that first calls this method
with something of step 6 among its arguments, as SIGKILL would; `<run>.gates/died` has its pid. `KINTSUGI_TEST_LINKS` is
for `slow_links.py`. With `KINTSUGI_TEST_DEAF=once` no process ever hears the first `LeaseRecalled` that is sent to it,
however often it is said; with `=stuck` the first process that is recalled goes on as if the device were its own.
`<run>.gates/deaf-PID` has the token.

`KINTSUGI_TEST_KEPT=model-1:kintsugi.training.worker:ModelWorker._run_call:sleep:8:5` lets the first call of this method
in model-1 once step 5 is committed hold the interpreter for 8 s after its work, in one C function: `sleep` sleeps,
`compute` computes. Several are separated by spaces. `<run>.gates/kept-model-1` has the pid and the seconds.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class Changed:
    """Finds one module, and changes it when it has been executed."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module, self._change = module, change

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Fatal:
    """Changes one method so that whoever calls it with something of this step dies."""

    def __init__(self, method: str, step: int) -> None:
        self._method, self._step = method, step

    def change(self, module: ModuleType) -> None:
        owner, _, method = self._method.rpartition(".")
        kind = getattr(module, owner)
        setattr(kind, method, self._deadly(getattr(kind, method)))

    def _deadly(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if any(getattr(each, "step", None) == self._step for each in (*arguments, *named.values())):
                self._die_once()
            return method(*arguments, **named)

        return called

    def _die_once(self) -> None:
        died = Path(os.environ["KINTSUGI_TEST_RUN"]).with_suffix(".gates") / "died"
        try:
            with died.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def deafen(module: ModuleType) -> None:
    """Lose the first recall of every lease: the notification that the other side waits for."""
    hears, ticks = module.DeviceLease.handle, module.DeviceLease.tick
    gates = Path(os.environ["KINTSUGI_TEST_RUN"]).with_suffix(".gates")
    is_stuck = os.environ["KINTSUGI_TEST_DEAF"] == "stuck"
    lost: list[int] = []

    def handle(lease: Any, delivery: Any) -> bool:
        body = delivery.body
        is_first = not lost and not (is_stuck and any(gates.glob("deaf-*")))
        if type(body).__name__ != "LeaseRecalled" or not (is_first or body.token in lost):
            return bool(hears(lease, delivery))
        if is_first:
            lost.append(body.token)
            (gates / f"deaf-{os.getpid()}").write_text(str(body.token))
        return True

    def tick(lease: Any, now: float) -> None:
        if not (is_stuck and lost):
            ticks(lease, now)

    module.DeviceLease.handle, module.DeviceLease.tick = handle, tick


class Keeping:
    """Changes one method so that one call of it keeps its process: no other thread of it runs meanwhile."""

    def __init__(self, process: str, method: str, how: str, seconds: float, step: int) -> None:
        self._process, self._method, self._how, self._seconds, self._step = (
            process,
            method,
            how,
            seconds,
            step,
        )
        self._run_dir = Path(os.environ["KINTSUGI_TEST_RUN"])

    def change(self, module: ModuleType) -> None:
        owner, _, method = self._method.rpartition(".")
        kind = getattr(module, owner)
        setattr(kind, method, self._keeping(getattr(kind, method)))

    def _keeping(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            if Path("/proc/self/comm").read_text().strip() == self._process and self._is_due():
                self._keep_once()
            return result

        return called

    def _is_due(self) -> bool:
        metrics = self._run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return bool(lines) and int(json.loads(lines[-1])["step"]) >= self._step

    def _keep_once(self) -> None:
        mark = self._run_dir.with_suffix(".gates") / f"kept-{self._process}"
        try:
            with mark.open("x") as file:
                begun = time.monotonic()
                if self._how == "sleep":
                    ctypes.PyDLL(None).sleep(int(self._seconds))
                else:
                    self._compute()
                file.write(f"{os.getpid()} {time.monotonic() - begun}")
        except FileExistsError:
            return

    def _compute(self) -> None:
        """Read the clock until it is time, in one call: none of these functions enters the interpreter's loop."""
        is_before = (time.monotonic() + self._seconds).__gt__
        deque(itertools.takewhile(is_before, iter(time.monotonic, None)), maxlen=0)


for kept in os.environ.get("KINTSUGI_TEST_KEPT", "").split():
    name, kept_module, kept_method, how, seconds, at_step = kept.split(":")
    keeping = Keeping(name, kept_method, how, float(seconds), int(at_step))
    sys.meta_path.insert(0, Changed(kept_module, keeping.change))
if "KINTSUGI_TEST_DEAF" in os.environ:
    sys.meta_path.insert(0, Changed("kintsugi.device_lease.client", deafen))
if "KINTSUGI_TEST_DIE_IN" in os.environ:
    module, method, step = os.environ["KINTSUGI_TEST_DIE_IN"].split(":")
    sys.meta_path.insert(0, Changed(module, Fatal(method, int(step)).change))
if "KINTSUGI_TEST_LINKS" in os.environ:
    links = import_module("slow_links").Links(os.environ["KINTSUGI_TEST_LINKS"])
    sys.meta_path.insert(0, Changed("kintsugi.rollout.worker", links.change))
