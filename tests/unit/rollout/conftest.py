from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kintsugi.config.schema import Config
from kintsugi.rollout import worker as worker_module
from tests.unit.rollout.reward_functions import FOLDER
from tests.unit.rollout.worlds import InlineJudging, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Config], World]]:
    monkeypatch.setattr(worker_module, "UserProcess", InlineJudging)
    monkeypatch.setattr(InlineJudging, "holding", False)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(worker_module, "IDLE_S", 0.002)
    opened: list[World] = []

    def build(settings: Config) -> World:
        opened.append(World(tmp_path, settings))
        return opened[-1]

    yield build
    for each in opened:
        each.close()
