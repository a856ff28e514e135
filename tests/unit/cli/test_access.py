from __future__ import annotations

import json
from pathlib import Path

import pytest

from kintsugi.access.audit import record
from kintsugi.access.gate import Gate, local_caller
from kintsugi.access.roles import Action
from kintsugi.access.tokens import TokenFile, default_token_file
from kintsugi.cli.access import expiry, record_locally
from kintsugi.cli.page import _warn_of_unusable
from kintsugi.errors import UserError
from kintsugi.run_folder.layout import RunFolder
from tests.unit.cli.test_main import Kintsugi, kintsugi

__all__ = ["kintsugi"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "grpo-1"
    folder.mkdir()
    RunFolder(folder).config_file.touch()
    record(folder, local_caller(folder), Action.START, begins=True)
    return folder


def test_a_token_is_printed_once_listed_without_secret_and_revoked(kintsugi: Kintsugi) -> None:
    added = kintsugi("token", "add", "ada", "--role", "operator", "--runs", "grpo-*", "--expires", "30d")
    text = added.output.strip()
    assert (
        Gate(TokenFile(default_token_file())).decide(text, Action.STOP, origin="", run="grpo-1").status == 200
    )
    listed = kintsugi("token", "list").output
    assert listed.startswith("ada: operator, runs grpo-*, until ") and text not in listed
    (shown,) = json.loads(kintsugi("token", "list", "--json").output)
    assert shown["name"] == "ada" and "digest" not in shown
    assert kintsugi("token", "add", "ada").code == 2
    assert kintsugi("token", "revoke", "ada").output == "ada: revoked\n"
    assert kintsugi("token", "list").output == "no tokens\n"
    assert kintsugi("token", "revoke", "ada").code == 2
    audited = kintsugi("audit").output
    assert "add token ada: operator, runs grpo-*: accepted" in audited
    assert "revoke token ada: operator: accepted" in audited


def test_a_token_file_that_is_misspelt_is_named(kintsugi: Kintsugi) -> None:
    assert (
        kintsugi("token", "list", "--file", "tokns.json").output == "no tokens: tokns.json does not exist\n"
    )


def test_a_page_says_that_it_accepts_no_token_of_a_file_that_others_can_read(
    kintsugi: Kintsugi, capsys: pytest.CaptureFixture[str]
) -> None:
    kintsugi("token", "add", "ada")
    tokens = TokenFile(default_token_file())
    _warn_of_unusable(tokens)
    assert capsys.readouterr().err == ""
    tokens.path.chmod(0o644)
    _warn_of_unusable(tokens)
    said = capsys.readouterr().err
    assert said.startswith("warning: named tokens are refused: ") and "others can read it" in said


def test_a_token_file_that_others_can_read_is_refused_by_every_command(kintsugi: Kintsugi) -> None:
    kintsugi("token", "add", "ada")
    default_token_file().chmod(0o644)
    for command in (("list",), ("add", "bob"), ("revoke", "ada")):
        refused = kintsugi("token", *command)
        assert (refused.code, "found 0644: others can read it" in refused.errors) == (2, True)


def test_audit_shows_and_verifies_and_fails_on_tampering(kintsugi: Kintsugi, run: Path) -> None:
    record_locally(run, Action.SCALE, detail="servers=4")
    shown = kintsugi("audit", str(run))
    assert shown.code == 0
    assert "scale servers=4: accepted" in shown.output
    assert shown.output.endswith("2 entries; the chain is intact\n")
    log = RunFolder(run).audit_file
    log.write_bytes(log.read_bytes().replace(b"servers=4", b"servers=2"))
    tampered = kintsugi("audit", str(run))
    assert tampered.code == 1
    assert "line 2: its hash is wrong: the line was changed" in tampered.errors
    assert json.loads(kintsugi("audit", str(run), "--json").output)["problems"]


def test_a_log_that_cannot_be_written_costs_a_warning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(run).audit_file.chmod(0o666)
    record_locally(run, Action.STOP)
    assert "warning: this action is not in the audit log" in capsys.readouterr().err


def test_a_damaged_or_removed_log_is_named_by_the_next_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunFolder(run).audit_file
    log.write_bytes(log.read_bytes().replace(b"start", b"stert"))
    record_locally(run, Action.STOP)
    warning = f"warning: audit log {log}: line 1: its hash is wrong: the line was changed"
    assert warning in capsys.readouterr().err
    log.unlink()
    record_locally(run, Action.STOP)
    assert f"warning: audit log {log} had no entries" in capsys.readouterr().err
    record_locally(run, Action.STOP)
    assert capsys.readouterr().err == ""


def test_expiry_is_a_duration_or_a_date() -> None:
    assert expiry("2h", now=100.0) == 7300.0
    assert expiry("2027-01-31", now=0.0) > 1.8e9
    for text in ("soon", "-1d", "1y", "99999999999d"):
        with pytest.raises(UserError):
            expiry(text, now=0.0)
