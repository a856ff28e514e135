"""Verdicts on their way from the watcher to the master."""

from __future__ import annotations

from pathlib import Path

from kintsugi.control.user_requests import UserRequests
from kintsugi.protocol.agents import DiagnosisVerdict
from kintsugi.telemetry.verdict_files import HostNotice, give_notice, hand_over, read_notices, take_verdicts

VERDICT = DiagnosisVerdict("model-1", "1.3", "cpu", 12.0, 0.9, "model-1: is starved", ("model-1", "master-0"))


def test_a_verdict_is_taken_once_in_the_order_of_handing_over(tmp_path: Path) -> None:
    hand_over(tmp_path, VERDICT)
    hand_over(tmp_path, DiagnosisVerdict("server-0", "1.1", "killed", 13.0, 0.9, "server-0: was killed"))
    assert [each.process for each in take_verdicts(tmp_path)] == ["model-1", "server-0"]
    assert take_verdicts(tmp_path) == []


def test_one_that_can_not_be_read_is_taken_away(tmp_path: Path) -> None:
    hand_over(tmp_path, VERDICT)
    (path,) = (tmp_path / "requests").iterdir()
    path.write_bytes(b"{")
    assert take_verdicts(tmp_path) == []
    assert list((tmp_path / "requests").iterdir()) == []


def test_the_master_takes_it_as_a_suspicion_and_people_who_ask_for_servers_are_not_disturbed(
    tmp_path: Path,
) -> None:
    requests = UserRequests(tmp_path)
    name = requests.submit(servers=3)
    hand_over(tmp_path, VERDICT)
    (event,) = requests.verdicts()
    assert (event.process, event.incarnation, event.verdict) == ("model-1", "1.3", VERDICT)
    assert [request.request for request in requests.waiting()] == [name]


def test_a_notice_of_a_host_stays_until_the_master_has_acted_on_it(tmp_path: Path) -> None:
    notice = HostNotice("agent-2", 20_000, 29_999, "its connection was closed")
    path = give_notice(tmp_path, notice)
    assert read_notices(tmp_path) == read_notices(tmp_path) == [(path, notice)]
    assert take_verdicts(tmp_path) == [] and path.exists()
    path.unlink()
    assert read_notices(tmp_path) == []


def test_a_notice_is_about_the_agents_of_one_ticket() -> None:
    notice = HostNotice("agent-2", 20_000, 29_999, "")
    assert notice.covers("20000") and notice.covers("29999")
    assert not any(notice.covers(incarnation) for incarnation in ("19999", "30000", "a", ""))
