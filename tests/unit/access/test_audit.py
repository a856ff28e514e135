from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from kintsugi.access.audit import DAMAGE_FOUND, LOG_MISSING, AuditReport, host_log, record, verify, verify_run
from kintsugi.access.gate import Caller, local_caller
from kintsugi.access.roles import AccessRole, Action
from kintsugi.errors import UntrustedFile
from kintsugi.run_folder.layout import RunFolder

ADA = Caller("ada", AccessRole.OPERATOR, origin="10.0.0.7", token="3f9a61c2")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "grpo-1"
    folder.mkdir()
    record(folder, local_caller(folder), Action.START, begins=True)
    record(folder, ADA, Action.SCALE, detail="servers=4")
    record(folder, ADA, Action.STOP, answer="refused: \x1b]52;c;eA==\x07 <b>")
    return folder


def log(run: Path) -> Path:
    return RunFolder(run).audit_file


def actions(report: AuditReport) -> list[str]:
    return [entry.action for entry in report.entries]


def test_a_chain_verifies_and_names_time_caller_origin_action_and_answer(run: Path) -> None:
    report = verify_run(run)
    assert (report.problems, actions(report)) == ([], ["start", "scale", "stop"])
    entry = report.entries[1]
    assert (entry.number, entry.name, entry.origin, entry.detail) == (2, "ada", "10.0.0.7", "servers=4")
    assert (entry.answer, entry.role, entry.token, entry.time > 0) == (
        "accepted",
        "operator",
        "3f9a61c2",
        True,
    )
    assert report.entries[0].uid == os.getuid()
    assert log(run).stat().st_mode & 0o777 == 0o600
    assert (verify(host_log()).problems, actions(verify(host_log()))) == ([], ["start", "scale", "stop"])


def test_any_changed_byte_is_found_and_its_line_named(run: Path) -> None:
    whole = log(run).read_bytes()
    for position in range(len(whole)):
        changed = bytes([whole[position] ^ 1])
        log(run).write_bytes(whole[:position] + changed + whole[position + 1 :])
        line = whole[:position].count(b"\n") + 1
        problems = verify(log(run)).problems
        assert problems and problems[0].line in (line, line + 1), position
    log(run).write_bytes(whole)
    assert verify(log(run)).is_intact


@pytest.mark.parametrize("order", [(0, 2), (1, 2), (0, 2, 1), (0, 1, 1, 2)])
def test_removed_moved_and_repeated_lines_are_found(run: Path, order: tuple[int, ...]) -> None:
    lines = log(run).read_bytes().splitlines(keepends=True)
    log(run).write_bytes(b"".join(lines[number] for number in order))
    assert "removed, inserted or moved" in str(verify(log(run)).problems[0])


def test_lines_cut_off_the_end_are_found_by_the_hosts_log(run: Path) -> None:
    lines = log(run).read_bytes().splitlines(keepends=True)
    log(run).write_bytes(b"".join(lines[:2]))
    assert verify(log(run)).is_intact
    assert "missing here: stop by ada" in str(verify_run(run).problems[0])


def test_a_log_that_was_rewritten_as_a_whole_is_found_by_the_hosts_log(run: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged"
    forged.mkdir()
    record(forged, local_caller(forged), Action.START, begins=True)
    log(run).write_bytes(log(forged).read_bytes())
    assert verify(log(run)).is_intact
    assert len(verify_run(run).problems) == 3


def test_a_folder_that_is_used_again_has_a_log_of_its_own(run: Path) -> None:
    log(run).unlink()
    record(run, local_caller(run), Action.START, begins=True)
    assert verify_run(run).problems == []


def test_a_removed_log_is_never_begun_again_silently(run: Path) -> None:
    log(run).unlink()
    assert "does not exist" in str(verify_run(run).problems[0])
    record(run, ADA, Action.STOP)
    report = verify_run(run)
    assert actions(report) == [LOG_MISSING, "stop"]
    assert "log missing when it was written" in str(report.problems[0])


@pytest.mark.parametrize("damage", [b"\x00" * 40, b'{"entry":{"number":4', b"x\n"])
def test_an_entry_behind_damage_says_so_for_good(run: Path, damage: bytes) -> None:
    whole = log(run).read_bytes()
    log(run).write_bytes(whole + damage)
    assert verify(log(run)).problems[0].line == 4
    record(run, ADA, Action.STOP)
    record(run, ADA, Action.RESUME)
    report = verify_run(run)
    assert actions(report) == ["start", "scale", "stop", DAMAGE_FOUND, "stop", "resume"]
    assert {problem.line for problem in report.problems} == {4, 5}
    assert "damage found when it was written: line 4" in str(report.problems[-1])


def test_a_changed_last_line_is_noted_by_the_next_entry(run: Path) -> None:
    log(run).write_bytes(log(run).read_bytes().replace(b'"action":"stop"', b'"action":"view"'))
    record(run, ADA, Action.RESUME)
    assert [str(problem)[:7] for problem in verify(log(run)).problems] == ["line 3:", "line 4:"]


def test_entries_of_several_processes_at_once_form_one_chain(run: Path) -> None:
    def write() -> None:
        for _ in range(10):
            record(run, ADA, Action.SCALE)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    report = verify_run(run)
    assert (report.problems, len(report.entries)) == ([], 43)


def test_hostile_texts_are_bounded_and_stay_on_one_line(run: Path) -> None:
    hostile = Caller("x" * 10**6, AccessRole.VIEWER, origin="\n\x00\ud800" * 10**5)
    record(run, hostile, Action.STOP, answer="\x01" * 10**6)
    report = verify_run(run)
    assert report.is_intact and len(report.entries[-1].name) == 1000
    record(run, ADA, Action.STOP)
    assert verify_run(run).is_intact


def test_a_log_that_others_may_write_or_a_link_is_refused(run: Path, tmp_path: Path) -> None:
    log(run).chmod(0o666)
    with pytest.raises(UntrustedFile, match="others can write it"):
        record(run, ADA, Action.STOP)
    target = tmp_path / "victim"
    target.write_text("mine\n")
    log(run).unlink()
    log(run).symlink_to(target)
    with pytest.raises(UntrustedFile, match="symbolic link"):
        record(run, ADA, Action.STOP)
    assert target.read_text() == "mine\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_root_leaves_the_log_to_the_owner_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, -1)
    record(folder, ADA, Action.STOP)
    assert log(folder).stat().st_uid == 65534
    record(folder, ADA, Action.STOP)
    assert actions(verify_run(folder)) == [LOG_MISSING, "stop", "stop"]


def test_a_removed_log_of_the_host_is_never_begun_again_silently(run: Path) -> None:
    host_log().unlink()
    record(run, ADA, Action.RESUME)
    assert actions(verify(host_log())) == [LOG_MISSING, "resume"]


def test_entries_are_json_lines(run: Path) -> None:
    for line in log(run).read_bytes().splitlines():
        assert set(msgspec.json.decode(line)) == {"entry", "previous", "hash"}
