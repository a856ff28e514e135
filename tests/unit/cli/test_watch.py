from __future__ import annotations

import json
from pathlib import Path

from kintsugi.cli.watch import RunFollower
from kintsugi.errors import Fault
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, FaultHandled, FaultSeen, Note, ProcessGone, Span
from kintsugi.telemetry.export.webhooks import Webhook
from tests.unit.telemetry.recorded_run import RecordedRun, begun_run


def cause(process: str, kind: str) -> dict[str, object]:
    return {
        "process": process,
        "host": "host-0",
        "kind": kind,
        "onset": 1_700_000_008.0,
        "confidence": 0.93,
        "summary": f"{process} is starved",
        "path": [],
        "evidence": [],
        "rules_out": [],
        "advice": "",
    }


def diagnosis(*causes: dict[str, object]) -> str:
    line = {"run": "r", "at": 1_700_000_009.0, "since": 1_700_000_000.0, "causes": causes}
    return f"{json.dumps(line)}\n"


def watched(tmp_path: Path) -> tuple[list[str], list[dict[str, object]], RecordedRun]:
    """(what was told, what was posted, the run) of a run in which every kind of thing happened."""
    run = begun_run(tmp_path / "run")
    run.say("master-0", Alert("before anybody looked"), at=0.0)
    told: list[str] = []
    posted: list[dict[str, object]] = []
    hook = Webhook("http://h/", say=told.append, post=lambda _, body: posted.append(json.loads(body)))
    watching = RunFollower(run.folder, say=told.append, hook=hook)
    run.say("master-0", Span("step", 0.0, 0.5, {"step": "3", "reward": "0.25"}), at=1.0)
    run.say("master-0", Alert("slow", {"ratio": 2.0}), at=2.0)
    run.say("model-0", FaultSeen(Fault("f1", "StorageError", "model-0", "full", 0.0)), at=3.0)
    run.say("agent-0", ProcessGone("model-1", "1.2", 9, -9, "killed by SIGKILL"), at=4.0)
    run.say("agent-0", ProcessGone("model-0", "1.1", 8, 0, "exited with code 0", ordered=True), at=5.0)
    run.say("model-0", Note("nothing to look at"), at=6.0)
    RunFolder(run.folder).diagnoses_file.write_text(f"{diagnosis(cause('model-1', 'cpu'))}{{torn\n")
    watching.look()
    watching.look()
    watching.close()
    hook.close()
    return told, posted, run


def test_new_records_are_printed_once(tmp_path: Path) -> None:
    told, _, _ = watched(tmp_path)
    texts = [line.partition(" ")[2] for line in told]
    assert texts == [
        "agent-0    model-1 1.2 (pid 9) is gone: killed by SIGKILL",
        "master-0   step 3 took 0.50 s, reward 0.25",
        "master-0   alert: slow (ratio=2)",
        "model-0    StorageError of model-0: full [f1]",
        "model-1    diagnosis: model-1 is starved (93% sure)",
    ]


def test_alerts_and_diagnoses_are_posted_with_their_process(tmp_path: Path) -> None:
    _, posted, run = watched(tmp_path)
    assert [(each["kind"], each["process"]) for each in posted] == [
        ("fault", "model-1"),
        ("alert", "master-0"),
        ("fault", "model-0"),
        ("diagnosis", "model-1"),
    ]
    assert all(each["run"] == str(run.folder) and each["text"] for each in posted)
    assert posted[-1]["details"] == cause("model-1", "cpu")
    assert posted[1]["values"] == {"ratio": 2.0}


def test_each_of_several_causes_is_printed_once_even_if_another_ends(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    first, second, third = cause("model-0", "cpu"), cause("model-1", "cpu"), cause("model-2", "slow")
    path = RunFolder(run.folder).diagnoses_file
    path.write_text(diagnosis(first))
    told: list[str] = []
    watching = RunFollower(run.folder, say=told.append)
    with path.open("a") as file:
        file.write(diagnosis(first, second) + diagnosis(third, second) + diagnosis(second) + diagnosis())
        file.write(diagnosis(second))
    watching.look()
    watching.close()
    assert [line.split()[1] for line in told] == ["model-1", "model-2", "model-1"]


class Watched:
    """A run that is watched from its beginning."""

    def __init__(self, tmp_path: Path) -> None:
        self.run = begun_run(tmp_path / "run")
        self.diagnoses = RunFolder(self.run.folder).diagnoses_file
        self._told: list[str] = []
        self._watching = RunFollower(self.run.folder, say=self._told.append)

    def told(self) -> list[str]:
        self._watching.look()
        self._watching.close()
        return self._told


def test_a_kill_that_agent_master_and_diagnosis_record_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    lost = Fault("model-1@1.3", "ProcessDied", "model-1", "model-1 (pid 9) was lost: killed by SIGKILL", 0.0)
    watched.run.say("agent-0", ProcessGone("model-1", "1.3", 9, -9, "killed by SIGKILL"), at=8.0)
    watched.run.say("master-0", FaultSeen(lost), at=8.01)
    watched.run.say("master-0", FaultHandled("training stops", of="model-1", fault=lost.id), at=8.02)
    watched.run.say(
        "master-0",
        FaultHandled("recovered by recover: lost", {"total": 1.5}, of="model-1", fault=lost.id),
        at=9.0,
    )
    watched.diagnoses.write_text(diagnosis(cause("model-1", "killed")))
    assert [line.partition(" ")[2] for line in watched.told()] == [
        "agent-0    model-1 1.3 (pid 9) is gone: killed by SIGKILL",
        "master-0   recovered in 1.5 s: lost",
    ]


def test_two_kills_of_a_process_and_the_loss_of_a_master_are_told_once_each(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for number, incarnation in enumerate(("1.3", "1.8")):
        watched.run.say(
            "agent-0", ProcessGone("model-1", incarnation, 9, -9, "killed by SIGKILL"), at=8.0 + number
        )
        lost = Fault(f"model-1@{incarnation}", "ProcessDied", "model-1", "was lost", 0.0)
        watched.run.say("master-0", FaultSeen(lost), at=8.1 + number)
    watched.run.say("agent-0", ProcessGone("master-0", "e8f8", 7, -9, "killed by SIGKILL"), at=20.0)
    gone = Fault("master-0@1", "ProcessDied", "master-0", "the master of term 1 is gone", 0.0)
    watched.run.say("master-0", FaultSeen(gone), at=21.0)
    watched.run.say("master-0", FaultHandled("all wait", of="master-0", fault=gone.id), at=21.0)
    told = watched.told()
    assert [line.split()[2] for line in told] == ["model-1", "model-1", "master-0"]


def test_a_cause_that_says_more_than_the_loss_is_told_beside_it(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.run.say("agent-0", ProcessGone("model-1", "1.3", 9, -9, "killed by SIGKILL"), at=8.0)
    watched.diagnoses.write_text(diagnosis(cause("model-1", "memory")))
    assert ["diagnosis:" in line for line in watched.told()] == [False, True]
