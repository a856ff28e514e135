"""The accelerator of a host breaks under a run: who computes there goes on elsewhere, and the weights are the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster.accelerators import AcceleratorReading
from kintsugi.journal.facts import ProcessJoined
from kintsugi.run_folder.incidents import report_of
from kintsugi.types import Role
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COMPUTE = (Role.MODEL, Role.SERVER)


def computing_on(run: Run, host: str) -> set[str]:
    """Ranks and servers whose latest incarnation joined there."""
    joined = [fact for fact in run.facts if isinstance(fact, ProcessJoined) and fact.role in COMPUTE]
    latest = {fact.peer.process: fact.peer.host for fact in joined}
    return {process for process, where in latest.items() if where == host}


def test_ranks_and_servers_leave_a_host_whose_accelerator_broke(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips = tmp_path / "chips"
    chips.mkdir()
    monkeypatch.setenv("KINTSUGI_TEST_CHIPS", str(chips))
    run = Run(tmp_path / "run", program="kintsugi_with_probe")
    try:
        run.start("cluster.hosts=2", gates=(5,))
        run.wait_at(5)
        victims = computing_on(run, "host-1")
        assert victims
        broken = AcceleratorReading(uuid="cpu", name="GPU 0", xids=(79,))
        (chips / "agent-1.new").write_bytes(msgspec.json.encode([broken]))
        (chips / "agent-1.new").rename(chips / "agent-1.json")
        until(lambda: not computing_on(run, "host-1"), "everybody to have left host-1")
        run.let_through(5)
        run.finish()
    finally:
        run.close()
    assert all(len(run.pids_joined()[process]) == 2 for process in victims)
    (incident,) = report_of(run.facts).incidents
    assert (
        incident.cause.kind == "ChipFault" and "GPU 0 of host-1 is broken: XID 79" in incident.cause.message
    )
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert_trained_exactly_once(run)
