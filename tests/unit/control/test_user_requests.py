"""Requests lie in the run folder, whole, until they are answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.control.protocol import ScaleRequested
from kintsugi.control.user_requests import UserRequests
from kintsugi.errors import StorageError


def test_a_run_that_nobody_asked_anything_has_no_requests(tmp_path: Path) -> None:
    assert UserRequests(tmp_path).waiting() == []


def test_requests_wait_in_the_order_of_asking_until_they_are_taken_away(tmp_path: Path) -> None:
    first = UserRequests(tmp_path).submit(servers=4)
    second = UserRequests(tmp_path).submit(servers=1)
    requests = UserRequests(tmp_path)
    assert requests.waiting() == [ScaleRequested(first, 4), ScaleRequested(second, 1)]
    requests.remove(first)
    assert requests.waiting() == [ScaleRequested(second, 1)]
    assert (requests.is_waiting(first), requests.is_waiting(second)) == (False, True)


def test_a_request_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    requests = UserRequests(tmp_path)
    requests.submit(servers=4)
    (tmp_path / "requests" / ".0-unfinished.json.1.new").write_bytes(b'{"ser')
    assert len(requests.waiting()) == 1


@pytest.mark.parametrize("text", ["", "{", '{"servers": "four"}', '{"servers": 1, "ranks": 2}'])
def test_what_is_no_request_is_set_aside_and_hides_no_other(tmp_path: Path, text: str) -> None:
    requests = UserRequests(tmp_path)
    requests.submit(servers=4)
    (tmp_path / "requests" / "0-odd.json").write_text(text)
    assert [request.servers for request in requests.waiting()] == [4]
    assert (tmp_path / "requests" / "0-odd.unreadable").read_text() == text


def test_where_no_request_can_be_left_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "requests").write_text("a file")
    with pytest.raises(StorageError, match="could not write a request to"):
        UserRequests(tmp_path).submit(servers=4)
    assert UserRequests(tmp_path).waiting() == []


def test_taking_away_twice_is_no_mistake(tmp_path: Path) -> None:
    requests = UserRequests(tmp_path)
    name = requests.submit(servers=4)
    requests.remove(name)
    requests.remove(name)
