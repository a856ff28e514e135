"""The card's health as NVIDIA's library tells it, and a spare that has its context on the card before it is needed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from kintsugi.cluster.accelerators import AcceleratorMonitor, health_signals, nvml_probe
from kintsugi.config.recipe import load
from kintsugi.errors import DeviceError
from kintsugi.journal.facts import IncidentClosed, ProcessJoined, RunEnded, StepCommitted
from kintsugi.journal.journal import read_facts
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.model.device import choose_device, identity
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.process_reports import read_processes
from tests.cluster.real_runs import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
OVERRIDES = (
    "cluster.hosts=1",
    "cluster.spares=1",
    "algorithm.steps=1000",
    "eval.every=0",
    "checkpoint.every=0",
)
END_TIMEOUT_S = 60.0
VICTIM = "model-1"


def test_the_library_reads_the_card_and_finds_nothing_wrong_with_it() -> None:
    pytest.importorskip("pynvml")
    probe = nvml_probe()
    assert probe is not None
    first, second = probe.read(), probe.read()
    cards = {identity(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    assert cards <= {reading.uuid for reading in first}, "processes and driver name a card alike"
    for before, reading in zip(first, second, strict=True):
        assert not reading.lost and not reading.unreadable
        assert health_signals(reading, before=before) == []


def test_the_watch_knows_the_cards_and_tells_nothing_of_them() -> None:
    pytest.importorskip("pynvml")
    watch = AcceleratorMonitor(nvml_probe, host="host-0")
    watch.begin()
    broken: list[str] = []

    def is_read() -> bool:
        broken.extend(fault.summary for fault in watch.new_faults({}, term=1) if fault.broken)
        return watch.num_healthy is not None

    until(is_read, "the first reading")
    watch.close()
    assert broken == [] and watch.num_healthy >= torch.cuda.device_count()  # type: ignore[operator]


def test_a_broken_card_is_not_chosen() -> None:
    cards = tuple(identity(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
    with pytest.raises(DeviceError, match="no accelerator that is not broken"):
        choose_device("model-0", broken=cards)
    if len(cards) > 1:
        assert identity(choose_device("model-0", broken=cards[:1])) == cards[1]


def cards_open_in(pid: int) -> set[str]:
    """Device files of cards that a process has open: only who has a context does."""
    targets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    return {target for target in targets if re.fullmatch(r"/dev/nvidia\d+", target)}


def prepared_spares(run: MarkedRun) -> list[int]:
    reports = read_processes(run.run_dir)
    agents = [report for report in (reports.processes if reports else ()) if report.role == "agent"]
    if not any(report.counters.get("agent.spares_prepared") for report in agents):
        return []
    return [pid for pid in run.pids() if Path(f"/proc/{pid}/comm").read_text().startswith("spare-")]


@pytest.mark.cluster
def test_a_killed_rank_is_replaced_by_a_spare_whose_context_was_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    run = MarkedRun(
        load(ROOT / "kintsugi" / "recipes" / "soak.yaml", OVERRIDES).config, run_dir=tmp_path / "run"
    )
    journal = RunFolder(run.run_dir).journal_file

    def facts_of(kind: type) -> list[object]:
        return [fact for fact in read_facts(journal) if isinstance(fact, kind)] if journal.exists() else []

    def pids_of(process: str) -> list[int]:
        joined = [fact for fact in facts_of(ProcessJoined) if isinstance(fact, ProcessJoined)]
        return [fact.pid for fact in joined if fact.peer.process == process]

    try:
        run.start()
        until(lambda: len(facts_of(StepCommitted)) >= 3 and prepared_spares(run), "three steps and a spare")
        (spare,) = prepared_spares(run)
        assert cards_open_in(spare), "it has a context on the card"
        os.kill(pids_of(VICTIM)[-1], signal.SIGKILL)
        until(lambda: len(pids_of(VICTIM)) == 2, f"another {VICTIM}")
        assert pids_of(VICTIM)[-1] == spare
        until(lambda: facts_of(IncidentClosed), "the end of the incident")
        assert run.launcher is not None
        run.launcher.send_signal(signal.SIGTERM)
        run.launcher.wait_ended(whom="launcher", timeout_s=END_TIMEOUT_S)
        assert run.exit_code() == 0, run.output()
        assert run.pids() == []
    finally:
        run.close()
    (closed,) = facts_of(IncidentClosed)
    (ended,) = facts_of(RunEnded)
    assert isinstance(closed, IncidentClosed) and closed.processes == (VICTIM,)
    assert isinstance(ended, RunEnded) and ended.outcome == "stopped"
