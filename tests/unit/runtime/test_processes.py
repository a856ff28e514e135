"""Child processes on a host that lacks descriptors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

import pytest

from kintsugi.cluster.backends.command import EngineCommand
from kintsugi.runtime.processes import SystemProcesses


@pytest.mark.parametrize("start", [SystemProcesses().spawn, EngineCommand])
def test_a_process_that_can_not_be_held_is_ended(
    start: Callable[[Sequence[str]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def no_descriptor(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        start(["sleep", "600"])
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
