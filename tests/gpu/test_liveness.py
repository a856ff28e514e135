"""The end of a process with much memory on the accelerator and of the host: known before that memory is free."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from kintsugi.runtime.proc import ending_status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE_BYTES = 16 << 30
PINNED_BYTES = 8 << 30
PROGRAM = f"""
import time, torch
held = [torch.ones({DEVICE_BYTES}, dtype=torch.uint8, device="cuda")]
held.append(torch.ones({PINNED_BYTES}, dtype=torch.uint8).pin_memory())
torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_kill_is_known_with_its_signal_before_the_memory_is_free_and_the_pidfd_comes_after_that(
    record_property: Callable[[str, object], None],
) -> None:
    free_before, _ = torch.cuda.mem_get_info()
    if free_before < DEVICE_BYTES + (2 << 30):
        pytest.skip(f"needs {DEVICE_BYTES + (2 << 30)} free bytes on the device, has {free_before}")
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert torch.cuda.mem_get_info()[0] < free_before - DEVICE_BYTES
        pidfd = os.pidfd_open(process.pid)
        killed_at = time.monotonic()
        process.send_signal(signal.SIGKILL)
        status, known_s = None, 0.0
        while not select.select([pidfd], [], [], 0.001)[0]:
            if status is None:
                status, known_s = ending_status(process.pid), time.monotonic() - killed_at
        ended_s = time.monotonic() - killed_at
        free_after, _ = torch.cuda.mem_get_info()
        os.close(pidfd)
    record_property("known_s", known_s)
    record_property("ended_s", ended_s)
    assert status == -signal.SIGKILL
    assert known_s < 0.25
    assert free_after > free_before - (1 << 30), "a successor that starts now would not find the memory"
