from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.config.schema import AlgorithmSection, AsynchronySection, Config
from kintsugi.errors import UserError
from kintsugi.lab.fragile.directory import Address, announce
from kintsugi.lab.fragile.run import FragileRun
from kintsugi.lab.fragile.timeouts import Scale, read_scale


@pytest.fixture
def run(tmp_path: Path) -> FragileRun:
    return FragileRun(Config(name="lab"), run_dir=tmp_path / "run", scale=1200.0)


def test_the_scale_is_recorded_in_the_run_folder(run: FragileRun) -> None:
    assert read_scale(run.run_dir) == run.scale == Scale(hour_s=3.0)


def test_it_can_not_be_resumed(run: FragileRun) -> None:
    with pytest.raises(UserError, match="can not be resumed"):
        run.start(resume=True)
    assert not run.running


def test_ports_are_known_once_a_process_serves_there(run: FragileRun) -> None:
    with pytest.raises(UserError, match="none yet"):
        run.port_of("meta")
    announce(run.run_dir, "meta", Address("127.0.0.1", 8080))
    assert run.port_of("meta") == 8080


@pytest.mark.parametrize(
    "config",
    [
        Config(name="lab", algorithm=AlgorithmSection(name="dpo")),
        Config(name="lab", asynchrony=AsynchronySection(max_staleness=2)),
    ],
)
def test_a_workload_that_it_does_not_have_is_refused_by_name(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`(algorithm.name|asynchrony.max_staleness)`.*got (dpo|2)"):
        FragileRun(config, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
