from __future__ import annotations

import hmac
import os
import threading
from pathlib import Path

import pytest

from kintsugi.access.gate import FREE_FAILURES, MOST_ORIGINS, Gate, bearer_token, local_caller
from kintsugi.access.quota import Quotas
from kintsugi.access.roles import AccessRole, Action, may
from kintsugi.access.tokens import Token, TokenFile
from kintsugi.errors import StorageError, UntrustedFile, UserError

DAY_S = 86400.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tokens(tmp_path: Path, clock: FakeClock) -> TokenFile:
    return TokenFile(tmp_path / "access" / "tokens.json", clock=clock)


def status(gate: Gate, text: str | None, action: Action, run: str | None = "grpo-1") -> int:
    return gate.decide(text, action, origin="10.0.0.7", run=run).status


def test_roles_are_nested() -> None:
    changing = [Action.STOP, Action.SCALE, Action.RESUME]
    assert [may(AccessRole.VIEWER, each) for each in (Action.VIEW, *changing)] == [True, False, False, False]
    assert all(may(AccessRole.OPERATOR, each) for each in (Action.VIEW, *changing))
    assert not may(AccessRole.OPERATOR, Action.START)
    assert may(AccessRole.EDITOR, Action.START) and not may(AccessRole.EDITOR, Action.LOAD_WEIGHTS)
    assert all(may(AccessRole.ADMIN, each) for each in Action)


def test_a_viewer_gets_403_on_stop_and_scale_and_an_operator_200(tokens: TokenFile, clock: FakeClock) -> None:
    viewer, operator = tokens.add("ada", role="viewer"), tokens.add("bob", role="operator")
    gate = Gate(tokens, clock=clock)
    assert [status(gate, f"Bearer {viewer}", each) for each in (Action.VIEW, Action.STOP, Action.SCALE)] == [
        200,
        403,
        403,
    ]
    assert [status(gate, f"bearer {operator}", each) for each in (Action.STOP, Action.START)] == [200, 403]
    refused = gate.decide(viewer, Action.STOP, origin="x", run="grpo-1")
    assert refused.reason == "stop needs the role operator; the token ada has viewer"
    assert refused.name == "ada" and refused.is_recorded


def test_an_expired_or_foreign_token_gets_401_and_a_revoked_one_too(
    tokens: TokenFile, clock: FakeClock, tmp_path: Path
) -> None:
    short = tokens.add("ada", role="admin", expires=clock.now + DAY_S)
    foreign = TokenFile(tmp_path / "other.json", clock=clock).add("ada", role="admin")
    gate = Gate(tokens, clock=clock)
    assert status(gate, short, Action.STOP) == 200
    assert [status(gate, text, Action.VIEW) for text in (foreign, None, "", "kt_0", "Bearer x")] == [401] * 5
    clock.now += DAY_S
    expired = gate.decide(short, Action.VIEW, origin="x")
    assert (expired.status, expired.reason) == (401, "the token ada has expired")
    kept = tokens.add("bob", role="viewer")
    assert status(gate, kept, Action.VIEW) == 200
    tokens.revoke("bob")
    assert status(gate, kept, Action.VIEW) == 401


def test_a_scope_is_a_pattern_of_run_names(tokens: TokenFile, clock: FakeClock) -> None:
    text = tokens.add("ada", role="operator", runs=("grpo-*", "sft-1"))
    gate = Gate(tokens, clock=clock)
    assert [status(gate, text, Action.STOP, run) for run in ("grpo-7", "sft-1", "sft-10", "ppo-1")] == [
        200,
        200,
        403,
        403,
    ]


def test_the_file_holds_hashes_only_and_is_private(tokens: TokenFile) -> None:
    text = tokens.add("ada", role="admin")
    assert text.rpartition("_")[2].encode() not in tokens.path.read_bytes()
    assert tokens.path.stat().st_mode & 0o777 == 0o600
    assert tokens.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(
    tokens: TokenFile, clock: FakeClock, mode: int
) -> None:
    text = tokens.add("ada", role="admin")
    gate = Gate(tokens, clock=clock)
    assert status(gate, text, Action.STOP) == 200
    tokens.path.chmod(mode)
    with pytest.raises(
        UntrustedFile, match=r"expected permissions 0600, found 0\d{3}: others can (read|write)"
    ):
        TokenFile(tokens.path).all()
    assert status(gate, text, Action.STOP) == 503
    with pytest.raises(UntrustedFile):
        tokens.add("bob", role="viewer")
    tokens.path.chmod(0o600)
    assert status(gate, text, Action.STOP) == 200


def test_a_symbolic_link_and_a_fifo_are_refused_at_once(tmp_path: Path) -> None:
    real = TokenFile(tmp_path / "real.json")
    real.add("ada", role="admin")
    (tmp_path / "link.json").symlink_to(real.path)
    with pytest.raises(UntrustedFile, match="symbolic link"):
        TokenFile(tmp_path / "link.json").all()
    os.mkfifo(tmp_path / "pipe.json", 0o600)
    with pytest.raises(UntrustedFile, match="regular file"):
        TokenFile(tmp_path / "pipe.json").all()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tokens: TokenFile) -> None:
    tokens.add("ada", role="admin")
    os.chown(tokens.path, 65534, -1)
    with pytest.raises(UntrustedFile, match="found one of user 65534"):
        tokens.all()


def test_a_damaged_file_accepts_no_token(tokens: TokenFile, clock: FakeClock) -> None:
    text = tokens.add("ada", role="admin")
    tokens.path.write_bytes(tokens.path.read_bytes()[:-20])
    with pytest.raises(StorageError, match="damaged"):
        tokens.all()
    assert status(Gate(tokens, clock=clock), text, Action.VIEW) == 503


def test_names_roles_and_scopes_are_checked(tokens: TokenFile, clock: FakeClock) -> None:
    tokens.add("ada", role="viewer")
    for name, arguments in (
        ("ada", {"role": "viewer"}),
        ("a b", {"role": "viewer"}),
        ("\x1b[31m", {"role": "viewer"}),
        ("bob", {"role": "root"}),
        ("bob", {"role": "viewer", "expires": clock.now - 1}),
        ("bob", {"role": "viewer", "runs": ("",)}),
    ):
        with pytest.raises(UserError):
            tokens.add(name, **arguments)
    with pytest.raises(UserError, match=r"\(ada\)"):
        tokens.revoke("bob")
    assert [token.name for token in tokens.all()] == ["ada"]


def test_digests_are_compared_in_constant_time_also_for_an_unknown_id(
    tokens: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokens.add("ada", role="viewer")
    compared: list[int] = []
    real = hmac.compare_digest

    def counted(left: str, right: str) -> bool:
        compared.append(len(right))
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    unknown = f"kt_00000000_{'x' * 43}"
    assert (tokens.find(text) is not None, tokens.find(unknown), tokens.find("x" * 100_000)) == (
        True,
        None,
        None,
    )
    assert compared == [64, 64]


def test_ten_thousand_wrong_tokens_neither_lock_out_nor_fill_anything(
    tokens: TokenFile, clock: FakeClock
) -> None:
    right = tokens.add("ada", role="operator")
    gate = Gate(tokens, clock=clock)
    wrong = [gate.decide(f"kt_{n:08x}_{'x' * 43}", Action.STOP, origin="10.0.0.7") for n in range(10_000)]
    assert [each.status for each in wrong[:FREE_FAILURES]] == [401] * FREE_FAILURES
    assert {each.status for each in wrong[FREE_FAILURES:]} == {429}
    assert sum(each.is_recorded for each in wrong) == FREE_FAILURES
    # The same address with the right token, and another with a wrong one, are answered as before.
    assert status(gate, right, Action.STOP) == 200
    assert gate.decide("wrong", Action.STOP, origin="10.0.0.8").status == 401
    for n in range(MOST_ORIGINS + 100):
        gate.decide("wrong", Action.STOP, origin=f"origin {n}")
    assert len(gate._failures) == MOST_ORIGINS
    clock.now += 61
    assert gate.decide("wrong", Action.STOP, origin="10.0.0.7").status == 401


def test_two_commands_at_once_lose_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    threads = [
        threading.Thread(target=lambda n=n: TokenFile(path).add(f"user{n}", role="viewer")) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(TokenFile(path).all()) == 8


def test_quotas_bound_requests_per_minute_and_completions_in_flight(clock: FakeClock) -> None:
    quotas = Quotas(clock=clock)
    token = Token("1", "ada", "viewer", "", 0.0, requests_per_minute=3, in_flight=4)
    other = Token("2", "bob", "viewer", "", 0.0)
    assert quotas.refusal(token, count=4) is None
    assert quotas.refusal(token) == "the key ada has a quota of 4 completions in flight"
    quotas.release(token, count=4)
    assert [quotas.refusal(token), quotas.refusal(token)] == [None, None]
    assert quotas.refusal(token) == "the key ada has a quota of 3 requests per minute"
    assert all(quotas.refusal(other) is None for _ in range(100))
    clock.now += 60
    assert quotas.refusal(token) is None


def test_the_owner_of_a_folder_is_admin(tmp_path: Path) -> None:
    assert local_caller(tmp_path).role is AccessRole.ADMIN
    assert bearer_token("Bearer  kt_1 ") == "kt_1"
