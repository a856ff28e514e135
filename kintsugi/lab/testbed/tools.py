"""Calls of system programs: `ip`, `nft`, `mount`."""

from __future__ import annotations

import shutil
import subprocess

from kintsugi.errors import DeadlineExceeded, WorldError
from kintsugi.runtime.waits import wait

TIMEOUT_S = 10.0


class ToolFailed(WorldError):
    """A system program failed; the message contains its output."""


def has(program: str) -> bool:
    return shutil.which(program) is not None


def call(*command: str, text: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Run a program to its end and return its output; ToolFailed with its error message when it failed."""

    def attempt(remaining_s: float) -> subprocess.CompletedProcess[str] | None:
        try:
            return subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=remaining_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None

    try:
        result = wait(attempt, whom=command[0], what="its end", timeout_s=timeout_s)
    except FileNotFoundError as error:
        raise ToolFailed(f"{command[0]} is not installed") from error
    except DeadlineExceeded as error:
        raise ToolFailed(f"{' '.join(command)}: no end after {timeout_s:g} s") from error
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"
        raise ToolFailed(f"{' '.join(command)}: {words[-500:]}")
    return result.stdout
