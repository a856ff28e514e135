"""Named tokens at the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.access.audit import verify_run
from kintsugi.access.gate import Gate
from kintsugi.access.tokens import TokenFile
from kintsugi.page.token_access import TokenAccess
from tests.unit.page.made_runs import Client, FakeActions, make_run, with_page


def test_a_named_operator_acts_and_is_in_the_audit_log(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    tokens = TokenFile(tmp_path / "home" / "tokens.json")
    right = {"Authorization": f"Bearer {tokens.add('ada', role='operator')}"}
    weak = {"Authorization": f"Bearer {tokens.add('bob', role='viewer')}"}
    other = {"Authorization": f"Bearer {tokens.add('eve', role='admin', runs=('other-*',))}"}
    actions = FakeActions()

    async def use(client: Client) -> None:
        session = await (await client.get("/api/session", headers=right)).json()
        assert session["role"] == "operator" and session["may"] == ["stop", "scale", "resume"]
        body = {"csrf": session["csrf"]}
        assert (await client.post("/api/runs/mine-1/stop", json=body, headers=weak)).status == 403
        assert (await client.get("/api/runs/mine-1", headers=other)).status == 403
        assert (await client.get("/api/runs", headers={"Authorization": "Bearer kt_wrong"})).status == 401
        assert (await client.post("/api/runs/mine-1/stop", json=body, headers=right)).status == 200

    access = TokenAccess(Gate(tokens), needs_token=True, may_act=False)
    with_page(runs, use, access=access, actions=actions)
    assert actions.done == ["stop mine-1"]
    report = verify_run(runs / "mine-1")
    assert [(entry.name, entry.action, entry.answer) for entry in report.entries][-1] == (
        "ada",
        "stop",
        "accepted",
    )


def test_a_token_of_other_runs_sees_neither_their_list_nor_their_comparison(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    tokens = TokenFile(tmp_path / "home" / "tokens.json")
    some = {"Authorization": f"Bearer {tokens.add('eve', role='admin', runs=('mine-2*',))}"}
    every = {"Authorization": f"Bearer {tokens.add('ada', role='viewer')}"}
    make_run(runs / "mine-2")

    async def use(client: Client) -> None:
        whole = await (await client.get("/api/runs", headers=every)).json()
        names = {row["id"] for row in whole["runs"]}
        assert {"mine-1", "mine-2"} <= names
        seen = await (await client.get("/api/runs", headers=some)).json()
        assert {row["id"] for row in seen["runs"]} == {name for name in names if name.startswith("mine-2")}
        assert (await client.get("/api/compare?runs=mine-1,mine-2", headers=every)).status == 200
        assert (await client.get("/api/compare?runs=mine-1,mine-2", headers=some)).status == 404

    with_page(runs, use, access=TokenAccess(Gate(tokens), needs_token=True, may_act=False))
