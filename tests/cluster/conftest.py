"""The run that nothing happened to: what every other one is compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.real_runs import Run


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
