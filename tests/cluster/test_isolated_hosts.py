"""A run whose hosts are network namespaces, with names and a disk of its own, is the same run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.config.recipe import anchored, load
from kintsugi.lab.testbed import hosts
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.run_folder.reader import read_summary
from tests.cluster.real_runs import LONGEST_S, PROGRAMS, RECIPE, Run

DISK_BYTES = 256 << 20


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or hosts.missing() is not None,
    reason="hosts of their own need root and the kernel's network namespaces: see `kintsugi lab abilities`",
)
def test_it_ends_in_the_same_bits_as_on_one_host_and_leaves_nothing(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = anchored(load(RECIPE, ["cluster.hosts=2"]).config)
    with RunTestbed(tmp_path / "place", num_hosts=2, named=True, disk_bytes=DISK_BYTES) as testbed:
        run_dir, kept = testbed.run_dir(), tmp_path / "kept"
        monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
        monkeypatch.setenv("KINTSUGI_TEST_RUN", str(run_dir))
        run, watch = MarkedRun(config, run_dir=run_dir, testbed=testbed), RunWatch(run_dir)
        try:
            run.start()
            watch.until(lambda: not run.running, what="the end", timeout_s=LONGEST_S, pause_s=0.02)
            assert run.exit_code() == 0, run.output()
            assert b"tcp://host-1.lab:" in (run_dir / "journal").read_bytes()
        finally:
            watch.close()
            run.close()
        testbed.keep(run_dir, kept)
    summary = read_summary(kept)
    assert summary is not None
    assert summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
