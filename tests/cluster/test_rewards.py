"""Rewards in real runs: what happens in or to their processes changes neither the run nor a bit of its weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.rollout.sandbox import jail
from kintsugi.run_folder.reader import read_journal
from tests.cluster.real_runs import Run, until
from tests.unit.rollout.escapes import ATTEMPTS, DAEMON, FORK_BOMB

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ATTACKS = {
    "attempts": ATTEMPTS,
    "fork bomb": FORK_BOMB,
    "daemon": DAEMON,
    # Zeroed by the kernel when touched, which it is not: clearing 512 MiB may take more than a second of CPU time.
    "memory bomb": "kept = []\nwhile True: kept.append(bytes(2**24))",
    "endless loop": "while True: pass",
    "endless output": "while True: print('x' * 1000)",
    "killer": "import os, signal\nfor pid in range(1, 40000):\n try: os.kill(pid, 9) if pid != os.getpid() else None\n"
    " except ProcessLookupError: pass\nprint('killed all')",
}


def users() -> Iterator[int]:
    """Of all processes; each sandbox has one of its own."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError):
            yield entry.stat().st_uid


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    run.close()


def test_programs_that_attack_from_the_sandbox_do_not_disturb_the_run(real: Run, undisturbed: Run) -> None:
    (real.gates / "attacks.json").write_text(json.dumps(ATTACKS))
    real.start("algorithm.reward=[attacked_rewards.odd_digits]", "rollout.reward_timeout_s=50")
    code, errors = real.end()
    assert code == 0, errors
    told = [json.loads(file.read_text()) for file in real.gates.glob("attacked.*")]
    assert len(told) == 2, "each rollout worker's reward process was attacked once, and lived"
    for outcomes in told:
        assert {name: reason for name, (reason, _) in outcomes.items()} == {
            "attempts": "",
            "fork bomb": "",
            "daemon": "",
            "memory bomb": "needed more than 512 MiB of memory",
            "endless loop": "used more than 1 s of processor time",
            "endless output": "wrote more than 1048576 bytes",
            "killer": "",
        }
        found = json.loads(outcomes["attempts"][1])
        assert (found["run folder"], found["internet socket"]) == ("ENOENT", "EPERM")
        assert outcomes["killer"][1] == "killed all\n"
    until(lambda: max(users()) < jail.FIRST_USER, "the end of everything in sandboxes", timeout_s=5.0)
    assert real.summary.weights_sha256 == undisturbed.summary.weights_sha256
    real.assert_nothing_left()


def test_a_reward_process_that_is_killed_is_replaced_and_no_bit_changes(real: Run, undisturbed: Run) -> None:
    real.start(gates=(5,))
    real.wait_at(5)
    workers = {name: pid for name, pid in read_journal(real.run_dir).processes.items() if "rollout" in name}
    killed = [
        int(child)
        for pid in workers.values()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    real.let_through(5)
    code, errors = real.end()
    assert code == 0, errors
    assert real.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert all(len(pids) == 1 for name, pids in real.pids_joined().items() if "rollout" in name)
    notes = "".join(file.read_text() for file in (real.run_dir / "events").glob("rollout-*.jsonl"))
    assert notes.count("the reward process killed by SIGKILL; it is replaced") == 2
    real.assert_nothing_left()
