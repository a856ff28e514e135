"""Runs that tests share: the undisturbed one, with which others are compared, and runs of tiny programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.real_runs import Run
from tests.cluster.tiny_runs import TinyRun, until


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run")
    run.start()
    try:
        code, errors = run.end()
        assert code == 0, errors
        run.assert_nothing_left()
        yield run
    finally:
        run.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    """A run of tiny programs that is not started yet."""
    run = TinyRun(tmp_path)
    yield run
    until(lambda: not run.kill_all(), "the end of whatever a failed test has left")
    if run.launcher is not None:
        run.launcher.communicate(timeout=10)
