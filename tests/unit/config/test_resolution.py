from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.config.algorithm_rules import algorithm_problems
from kintsugi.config.recipe import load, packaged_recipes
from kintsugi.config.resolution import NOT_USED, with_resolved_algorithm
from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.run_folder.creation import make_run_folder


def test_a_run_folder_says_which_values_of_the_algorithm_it_used(tmp_path: Path) -> None:
    loaded = load("grpo_arithmetic", ["algorithm.name=dapo", f"run_dir={tmp_path / 'run'}"])
    config, folder = make_run_folder(loaded)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.ratio == "token" and config.algorithm.scale_by_std is True
    filled = with_resolved_algorithm(loaded)
    assert filled.origins["algorithm.clip_high"] == "default of dapo"
    assert (filled.config.algorithm.kl, filled.origins["algorithm.kl"]) == (None, NOT_USED)
    assert stages(config)[-1].algorithm.clip_high == stages(loaded.config)[-1].algorithm.clip_high
    again = load(folder / "config.yaml", ["algorithm.name=grpo"])
    assert stages(again.config)[-1].algorithm.clip_high == 0.2  # Not the default of dapo.


@pytest.mark.parametrize("name", packaged_recipes())
def test_values_that_are_filled_in_are_valid_and_change_nothing(name: str) -> None:
    config: Config = load(name).config
    filled = with_resolved_algorithm(load(name)).config
    assert list(algorithm_problems(filled, stages(filled)[-1])) == []
    assert stages(filled) == stages(config)
