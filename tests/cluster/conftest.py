"""The run that nothing happened to: what every other one is compared with."""

from __future__ import annotations

import pytest

from tests.cluster.real_runs import Run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run")
    run.start()
    try:
        code, errors = run.end()
        assert code == 0, errors
        run.assert_nothing_left()
    finally:
        run.kill_leftovers()
    return run
