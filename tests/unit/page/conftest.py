from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.page.demo import unpack
from tests.unit.page.made_runs import make_run


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the recorded runs of the package."""
    return unpack(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one run."""
    make_run(tmp_path / "runs" / "mine-1")
    return tmp_path / "runs"
