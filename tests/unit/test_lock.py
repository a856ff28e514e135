"""The lock file of the dependencies fits the pins, and has no version with a known hole, where that can be asked."""

from __future__ import annotations

from urllib.error import URLError

import pytest

from benchmarks import lock


def test_the_lock_file_has_every_pin_with_hashes() -> None:
    assert lock.problems(lock.CONSTRAINTS.read_text(), lock.LOCK.read_text()) == []


def test_a_lock_that_does_not_fit_is_named() -> None:
    constraints = "a==1\nb==2\nc==3\n"
    locked = f"a==1 \\\n    --hash=sha256:{'0' * 64}\nb==2\nd==4 \\\n    --hash=sha256:{'1' * 64}\n"
    assert lock.problems(constraints, locked) == [
        "b: expected 2 with hashes, found 2 with 0",
        "c: not locked",
        "d: locked, but not in constraints.txt",
    ]


@pytest.mark.slow
def test_no_locked_version_has_a_known_vulnerability() -> None:
    try:
        found = lock.vulnerabilities()
    except (URLError, TimeoutError) as error:
        pytest.skip(f"the database of vulnerabilities can not be reached: {error}")
    assert found == []
