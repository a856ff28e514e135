from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
from kintsugi.lab.faults.mechanism import end_with_parent
end_with_parent(int(sys.argv[1]))
print("lives")
"""


def said_by_a_child_of(parent: int) -> str:
    command = [sys.executable, "-c", PROGRAM, str(parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout


def test_a_child_whose_parent_had_ended_already_ends_at_once() -> None:
    assert said_by_a_child_of(os.getpid()) == "lives\n"
    assert said_by_a_child_of(2**22 - 1) == ""
