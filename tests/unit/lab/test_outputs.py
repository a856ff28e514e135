from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kintsugi.lab.testbed.outputs import LINES_READ, CommandOutput, Output

WRITES = """
import os, sys
sys.stdin.readline()
try:
    for number in range(20_000):
        os.write(1, f"line {number} {os.isatty(1)}\\n".encode())
except OSError as error:
    sys.exit(error.errno)
"""


def written(output: Output, log: Path) -> int:
    """Let a command write 20,000 lines; return the number of the error that it met, 0 for none."""
    log.touch()
    opened = CommandOutput(output, log=log)
    argv = opened.command([sys.executable, "-c", WRITES])
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=opened.descriptor, stderr=opened.descriptor
    ) as process:
        opened.started()
        process.communicate(b"\n")
    return process.returncode


def text_of(log: Path, *, until: str) -> str:
    deadline = time.monotonic() + 10.0
    while until not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    return log.read_text()


def test_a_terminal_is_one_and_all_of_it_is_read(tmp_path: Path) -> None:
    assert written(Output.TERMINAL, tmp_path / "log") == 0
    assert "line 0 True" in text_of(tmp_path / "log", until="line 19999 True")


def test_the_reader_of_a_pipe_goes_away_after_some_lines(tmp_path: Path) -> None:
    assert written(Output.PIPE, tmp_path / "log") == 32
    assert f"line {LINES_READ - 1} False" in text_of(tmp_path / "log", until=f"line {LINES_READ - 1} ")


@pytest.mark.parametrize(("output", "errno"), [(Output.FULL_DISK, 28), (Output.CLOSED, 9)])
def test_an_output_that_fails_does_so_from_the_first_line(output: Output, errno: int, tmp_path: Path) -> None:
    assert written(output, tmp_path / "log") == errno
    assert (tmp_path / "log").read_text() == ""
