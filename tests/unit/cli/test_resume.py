"""Runs that ended without a word, were changed, or belong to another host or user: what the commands say of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from kintsugi.cli.run_actions import LAUNCH_S, find_launcher, find_started
from kintsugi.errors import UntrustedFile, UserError
from kintsugi.run_folder import reader
from kintsugi.run_folder.ending import read_end
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import ELSEWHERE_S, Launcher, write_launcher
from kintsugi.run_folder.started import changes_since_start, record_start
from kintsugi.runtime.owned_files import check_owner
from kintsugi.runtime.proc import boot_id, process_start_time
from kintsugi.telemetry.events import EventLog, ProcessBegan, ProcessGone, RunAborted
from tests.unit.cli.test_main import GRPO, FakeCluster, Kintsugi, cluster, kintsugi

__all__ = ["cluster", "kintsugi"]

SAMPLE = {
    "step": 1,
    "ticket": "grpo:0:1:0",
    "sample": 0,
    "version": 3,
    "prompt": "1+1=",
    "completion": "2",
    "reward": 1.0,
    "reward_components": {"exact": 1.0},
    "finish": "eos",
    "advantage": 0.5,
}


@pytest.fixture
def run(kintsugi: Kintsugi, cluster: FakeCluster) -> RunFolder:
    """A run that was killed after a step."""
    cluster.outcome = "stopped"
    assert kintsugi("train", GRPO, "run_dir=mine").code == 0
    run = RunFolder("mine")
    run.summary_file.unlink()
    log = EventLog(run.events_file("agent-0"), process="agent-0")
    log.emit(ProcessBegan("agent", "1", 7))
    log.close()
    return run


def leave_launcher(run: RunFolder, *, host_name: str = "", boot: str = "") -> None:
    """Leave the record of a launcher that does not run any more."""
    write_launcher(run.path, pid=os.getpid())
    record = msgspec.json.decode(run.launcher_file.read_bytes(), type=Launcher)
    changed = msgspec.structs.replace(
        record, start_time=1, host_name=host_name or record.host_name, boot_id=boot or record.boot_id
    )
    run.launcher_file.write_bytes(msgspec.json.encode(changed))


def lose_launcher(run: RunFolder) -> None:
    log = EventLog(run.events_file("agent-0"), process="agent-0")
    log.emit(ProcessGone("launcher-0", "", 7, None, "ended together with its standby"))
    log.close()


def test_a_run_that_is_being_started_is_waited_for_and_one_that_never_began_is_not(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config_file.write_text("name: mine\n")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            write_launcher(run.path, pid=os.getpid())

    assert find_started(run.path, pause=pause) and len(pauses) == 3
    run.launcher_file.unlink()
    old = run.config_file.stat().st_mtime - LAUNCH_S
    os.utime(run.config_file, (old, old))
    assert not find_started(run.path, pause=pause) and len(pauses) == 3


def test_a_run_that_a_second_ctrl_c_ended_says_so_until_it_was_resumed(run: RunFolder) -> None:
    log = EventLog(run.events_file("launcher-0"), process="launcher-0")
    log.emit(RunAborted("a second request to stop ends the run at once"))
    log.close()
    end = read_end(run.path)
    assert end is not None and end.what == "a second Ctrl-C or signal ended it at once, without a checkpoint"
    leave_launcher(run)
    end = read_end(run.path)
    assert end is not None and end.what.startswith("all its processes were killed at the same moment")


@pytest.mark.parametrize("command", ["status", "incidents", "diagnose"])
def test_a_run_whose_processes_were_all_killed_says_so_and_how_to_continue(
    kintsugi: Kintsugi, run: RunFolder, command: str
) -> None:
    leave_launcher(run)
    told = " ".join(kintsugi(command, "mine").output.replace("│", " ").split())
    assert "interrupted at 20" in told
    assert "all its processes were killed at the same moment, the launcher and its standby too" in told
    assert "`kintsugi resume mine` continues it" in told
    assert "no incidents" not in told and "nothing to blame" not in told


def test_the_end_names_launchers_that_were_killed_and_hosts_that_went_down(run: RunFolder) -> None:
    leave_launcher(run, boot="another")
    end = read_end(run.path)
    assert end is not None and "went down or was restarted while it ran" in end.what
    leave_launcher(run)
    lose_launcher(run)
    end = read_end(run.path)
    assert end is not None and end.what.startswith("the launcher and its standby were killed")


def test_a_finished_run_has_no_end_to_explain_and_a_stopped_one_was_asked_to(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    kintsugi("train", GRPO, "run_dir=done")
    assert read_end(Path("done")) is None
    assert "no incidents" in kintsugi("incidents", "done").output
    cluster.outcome = "stopped"
    kintsugi("train", GRPO, "run_dir=stopped")
    assert "it was asked to stop" in kintsugi("status", "stopped").output
    cluster.outcome = "failed"
    kintsugi("train", GRPO, "run_dir=failed")
    told = " ".join(kintsugi("incidents", "failed").output.split())
    assert "model-0: disk full; `kintsugi resume failed` continues it" in told
    assert json.loads(kintsugi("incidents", "failed", "--json").output)["end"]["state"] == "failed"


def test_damaged_lines_cost_those_lines_and_the_run_is_resumed(
    kintsugi: Kintsugi, cluster: FakeCluster, run: RunFolder
) -> None:
    for file in ("metrics.jsonl", "samples.jsonl", "summary.json", "verdicts.jsonl"):
        path = run.path / file
        for damage in (b"\0\0\0\n", b'{"step": 2, \xff\n', b"[1,2]\n", b"{}\n"):
            path.write_bytes((path.read_bytes() if path.exists() else b"") + damage)
    assert "1 of " in kintsugi("status", "mine").output
    assert kintsugi("resume", "mine").code == 0
    assert len(cluster.launched) == 2


def test_a_changed_configuration_is_resumed_only_if_it_is_accepted(
    kintsugi: Kintsugi, cluster: FakeCluster, run: RunFolder
) -> None:
    text = run.config_file.read_text()
    assert "seed: 0" in text
    run.config_file.write_text(text.replace("seed: 0", "seed: 5"))
    refused = kintsugi("resume", "mine")
    assert refused.code == 2 and len(cluster.launched) == 1
    assert "seed: 0 at the start, 5 now" in refused.errors and "kintsugi resume --accept" in refused.errors
    assert kintsugi("resume", "mine", "--accept").code == 0
    run.summary_file.unlink()
    assert kintsugi("resume", "mine").code == 0, "it was accepted before"


def test_a_lost_note_of_the_servers_is_asked_for(
    kintsugi: Kintsugi, cluster: FakeCluster, run: RunFolder
) -> None:
    assert kintsugi("resume", "mine").code == 0, "no server has sampled"
    run.summary_file.unlink()
    run.samples_file.write_text(json.dumps(SAMPLE) + "\n")
    refused = kintsugi("resume", "mine")
    assert refused.code == 2 and "mine/steps is missing" in refused.errors
    run.decode_step_file.write_text("compiled")
    assert kintsugi("resume", "mine").code == 0


def test_a_run_of_an_earlier_version_has_no_record_of_its_start_and_is_not_asked(run: RunFolder) -> None:
    run.started_file.unlink()
    assert changes_since_start(run.path, reader.read_status(run.path).config) == []


def test_a_field_that_the_version_of_the_start_did_not_have_is_no_change(run: RunFolder) -> None:
    config = reader.read_status(run.path).config
    record_start(run.path, config)
    started = json.loads(run.started_file.read_bytes())
    del started["fields"]["seed"]
    run.started_file.write_text(json.dumps(started))
    assert changes_since_start(run.path, config) == []


def test_a_run_of_a_host_that_is_gone_is_taken_over_on_request(
    kintsugi: Kintsugi, cluster: FakeCluster, run: RunFolder
) -> None:
    leave_launcher(run, host_name="elsewhere")
    run.processes_file.write_text("{}")
    assert kintsugi("status", "mine").output.count("running on elsewhere") == 1
    refused = kintsugi("resume", "mine", "--take-over")
    assert refused.code == 2 and "is running (on host elsewhere)" in refused.errors
    said = " ".join(refused.errors.split())
    assert "`kintsugi resume --take-over` works 60 s after the last one" in said
    long_ago = run.processes_file.stat().st_mtime - ELSEWHERE_S - 1.0
    os.utime(run.processes_file, (long_ago, long_ago))
    assert "host elsewhere ran it" in " ".join(kintsugi("incidents", "mine").output.split())
    refused = kintsugi("resume", "mine")
    assert refused.code == 2 and "kintsugi resume --take-over" in refused.errors
    assert len(cluster.launched) == 1
    assert kintsugi("resume", "mine", "--take-over").code == 0


def test_the_folder_of_another_user_is_not_resumed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(UntrustedFile, match=r"mine belongs to user .*; resume it as"):
        check_owner(run.path, action="resume it")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file of another user")
def test_a_launcher_file_of_another_user_does_not_make_root_signal_a_process(run: RunFolder) -> None:
    write_launcher(run.path, pid=os.getpid())
    assert process_start_time(os.getpid()) and boot_id()
    find_launcher(run.path).close()
    os.chown(run.launcher_file, 65534, 65534)
    with pytest.raises(UserError, match="found one of user 65534"):
        find_launcher(run.path)
