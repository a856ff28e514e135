"""`kintsugi page` as a process, and the page beside a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kintsugi.cli.page import PageBesideRun, address_of, listening_socket
from kintsugi.cli.run_actions import RunActions
from kintsugi.errors import UserError
from kintsugi.runtime.waits import wait
from tests.unit.page.made_runs import make_run

LONGEST_S = 60.0


def get(address: str, path: str = "", *, token: str | None = None) -> bytes:
    """Read a path of the page at a printed address, with the token of that address or another."""
    base, _, printed = address.partition("?token=")
    request = urllib.request.Request(base + path)
    given = printed if token is None else token
    if given:
        request.add_header("Authorization", f"Bearer {given}")
    with urllib.request.urlopen(request, timeout=LONGEST_S) as response:
        return bytes(response.read())


def refusal(address: str, path: str, *, token: str = "") -> int:
    """Return the status of an answer that is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(address, path, token=token)
    refused.value.close()
    return refused.value.code


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command and return its first line."""
    command = [sys.executable, "-m", "kintsugi", "page", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_command_serves_the_runs_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine-1")
    with started("--port", "0", folder=tmp_path) as (process, first):
        address = first.removeprefix("page: ")
        assert address.startswith("http://127.0.0.1:")
        runs = msgspec.json.decode(get(address, "api/runs"))
        assert refusal(address, "api/runs") == refusal(address, "api/runs", token="wrong") == 401
        assert [run["id"] for run in runs["runs"]] == ["mine-1"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LONGEST_S)
        assert (process.returncode, errors) == (0, "")


@pytest.mark.slow
def test_without_a_token_only_on_this_machine_and_only_when_told(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine-1")
    with started("--port", "0", "--no-token", folder=tmp_path) as (_, first):
        address = first.removeprefix("page: ")
        assert "token" not in address
        assert [run["id"] for run in msgspec.json.decode(get(address, "api/runs"))["runs"]] == ["mine-1"]
    with started("--port", "0", "--no-token", "--host", "0.0.0.0", folder=tmp_path) as (process, _):
        _, errors = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 2
    assert "--no-token" in errors and "Traceback" not in errors


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine-1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with started("--port", port, folder=tmp_path) as (process, _):
            _, errors = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 2
    assert port in errors and "in use" in errors and "Traceback" not in errors


@pytest.mark.slow
def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with started(".", folder=tmp_path) as (process, _):
        _, errors = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 2
    assert "without config.yaml" in errors and "Traceback" not in errors


def test_beyond_loopback_the_address_has_a_token() -> None:
    with listening_socket("0.0.0.0", 0) as listener:
        assert address_of(listener, host="0.0.0.0").startswith(f"http://{socket.gethostname()}:")
    with listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener, host="127.0.0.1") == f"http://127.0.0.1:{port}/"


@pytest.mark.slow
def test_the_page_beside_a_run_shows_it_and_ends_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine-1")
    warnings: list[str] = []
    page = PageBesideRun(run, port=0, warn=warnings.append)
    try:
        header = msgspec.json.decode(get(page.address, "api/runs/mine-1"))
        assert header["name"] == "mine"
        assert refusal(page.address, "api/runs/mine-1") == 401
        token = page.address.partition("?token=")[2]
        assert token and token.encode() not in Path(f"/proc/{page.pid}/cmdline").read_bytes()
        page.check()
    finally:
        page.close()
    assert warnings == []
    with pytest.raises(OSError, match="refused"):
        get(page.address)


@pytest.mark.slow
def test_a_page_that_dies_is_reported_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine-1")
    warnings: list[str] = []
    page = PageBesideRun(run, port=0, warn=warnings.append)
    try:
        get(page.address, "api/session")
        assert page.pid is not None
        os.kill(page.pid, signal.SIGKILL)

        def attempt(remaining_s: float) -> bool | None:
            page.check()
            return True if warnings else None

        wait(attempt, whom="the page", what="its end", timeout_s=LONGEST_S)
        page.check()
    finally:
        page.close()
    assert len(warnings) == 1
    assert "killed by SIGKILL" in warnings[0] and "the run continues" in warnings[0]


def test_a_page_that_can_not_start_is_a_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine-1")
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        page = PageBesideRun(run, port=taken.getsockname()[1], warn=warnings.append)
    page.check()
    page.close()
    assert page.address == "" and len(warnings) == 1
    assert "could not be started" in warnings[0]


def test_actions_on_a_run_that_does_not_run_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine-1")
    with pytest.raises(UserError, match="nothing to stop"):
        RunActions().stop(run)
    with pytest.raises(UserError, match="nothing to scale"):
        RunActions().scale(run, servers=2)


def test_a_resume_that_fails_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine-1")
    with pytest.raises(UserError, match=r"."):
        RunActions().resume(run)
