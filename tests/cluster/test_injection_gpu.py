"""What is done to an accelerator bites, and is over when it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import EventLog, ProcessBegan

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys, time, torch
a = torch.randn(4096, 4096, device="cuda")
for line in sys.stdin:
    if line == "work\\n":
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(200):
            a @ a
        torch.cuda.synchronize()
        print(time.monotonic() - began, flush=True)
    else:
        try:
            b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
            del b
            torch.cuda.empty_cache()
            print("allocated", flush=True)
        except torch.OutOfMemoryError:
            print("refused", flush=True)
"""


class User:
    """A run of one process, which uses the card."""

    testbed: RunTestbed | None = None
    remote: None = None
    running = True

    def __init__(self, run_dir: Path, process: subprocess.Popen[str]) -> None:
        self.run_dir = run_dir
        self._process = process
        EventLog(RunFolder(run_dir).events_file("model-0"), process="model-0").emit(
            ProcessBegan("model", "1", process.pid)
        )

    def is_ours(self, pid: int) -> bool:
        return pid == self._process.pid

    def ask(self, what: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        user = User(tmp_path / "run", process)
        user.ask("work")
        yield user
        process.kill()


def test_a_full_card_refuses_memory_until_it_ends(user: User, tmp_path: Path) -> None:
    with Injector(user, tmp_path / "lab") as injector:
        injected = injector.begin(Injection(ability=Ability.DEVICE_MEMORY, target="model-0", duration_s=30.0))
        assert "CUDA" in injected.mechanism
        assert user.ask("allocate") == "refused"
        injected = injector.end(injected)
        assert injected.measured["taken_bytes"] > 1e9
        assert user.ask("allocate") == "allocated"


def test_a_busy_card_is_slower_until_it_ends(user: User, tmp_path: Path) -> None:
    alone = float(user.ask("work"))
    with Injector(user, tmp_path / "lab") as injector:
        injected = injector.begin(
            Injection(ability=Ability.DEVICE_SLOW, target="model-0", amount={"factor": 4.0}, duration_s=30.0)
        )
        assert "CUDA" in injected.mechanism
        slowed = float(user.ask("work"))
        injected = injector.end(injected)
        again = float(user.ask("work"))
    sys.stdout.write(
        f"alone {alone:.3f} s, slowed {slowed:.3f} s, again {again:.3f} s, {injected.measured}\n"
    )
    assert slowed > 1.5 * alone
    assert again < 1.5 * alone
