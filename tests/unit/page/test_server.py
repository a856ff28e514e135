"""The HTTP application: security, live changes, actions, bad requests."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kintsugi.errors import StorageError, UserError
from kintsugi.page.access import PageDecision, SessionAccess
from kintsugi.page.catalog import RunCatalog
from kintsugi.page.feed import RunFeed
from kintsugi.page.run_reader import RunReader
from kintsugi.page.security import COOKIE, POLICY
from kintsugi.telemetry.events import Note, read_events
from tests.unit.page.made_runs import Client, FakeActions, answer, asked, make_run, with_page

OPEN = SessionAccess(needs_token=False, may_act=True, operator="right")
RIGHT = {"Authorization": "Bearer right"}


async def csrf(client: Client) -> str:
    response = await client.get("/api/session", headers=RIGHT)
    return str((await response.json())["csrf"])


async def ordered(
    client: Client, action: str, *, headers: dict[str, str] = RIGHT, **body: Any
) -> tuple[int, dict[str, Any]]:
    response = await client.post(f"/api/runs/mine-1/{action}", json=body, headers=headers)
    return response.status, await response.json()


def test_every_answer_has_the_strict_headers(runs: Path) -> None:
    async def use(client: Client) -> None:
        for path in ("/", "/api/runs", "/api/runs/none", "/static/none.js", "/nothing"):
            response = await client.get(path)
            assert response.headers["Content-Security-Policy"] == POLICY, path
            assert response.headers["X-Content-Type-Options"] == "nosniff", path
        assert "unsafe" not in POLICY

    with_page(runs, use)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
def test_a_foreign_name_in_the_host_header_is_refused(runs: Path, host: str) -> None:
    async def use(client: Client) -> None:
        response = await client.get("/api/runs", headers={"Host": host})
        assert response.status in (400, 403)

    with_page(runs, use)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8420", "[::1]:8420", "10.1.2.3"])
def test_names_and_addresses_of_this_machine_are_accepted(runs: Path, host: str) -> None:
    async def use(client: Client) -> None:
        assert (await client.get("/api/runs", headers={"Host": host})).status == 200

    with_page(runs, use)


def test_beyond_loopback_a_token_is_needed_for_everything(runs: Path) -> None:
    async def use(client: Client) -> None:
        for path in ("/", "/api/runs", "/api/runs/mine-1/events", "/static/app.js"):
            assert (await client.get(path)).status == 401, path
            wrong = {"Authorization": "Bearer wrong"}
            assert (await client.get(path, headers=wrong)).status == 401, path
        assert (await client.get("/?token=wrong")).status == 401
        response = await client.get("/?token=secret", allow_redirects=False)
        assert response.status == 303 and response.headers["Location"] == "/"
        (name,) = response.cookies
        cookie = response.cookies[name]
        assert name == COOKIE.format(port=client.port)
        assert cookie["httponly"] and cookie["samesite"] == "Lax"
        assert (await client.get("/api/runs", headers={"Cookie": f"{name}=secret"})).status == 200

    with_page(runs, use, access=SessionAccess(needs_token=True, may_act=False, viewer="secret"))


def test_the_cookie_of_an_earlier_page_does_not_keep_a_viewer_out(runs: Path) -> None:
    async def use(client: Client) -> None:
        old = {"Cookie": f"{COOKIE.format(port=client.port)}=of-yesterday"}
        answer = await client.get("/api/runs", headers=old)
        assert answer.status == 200 and (await answer.json())["runs"]
        assert (await client.get("/api/runs", headers={"Authorization": "Bearer of-yesterday"})).status == 401

    with_page(runs, use)


def test_a_viewer_from_elsewhere_is_refused_without_a_token() -> None:
    access = SessionAccess(needs_token=False, may_act=False)
    assert access.decide(None, "view", run=None, origin="127.0.0.1").status == 200
    assert access.decide(None, "view", run=None, origin="10.0.0.1").status == 401
    assert access.decide(None, "view", run=None, origin="").status == 401


def test_the_page_is_read_only_without_a_token_that_may(runs: Path) -> None:
    actions = FakeActions()

    async def use(client: Client) -> None:
        assert (await answer(client, "session"))["may"] == []
        for action in ("stop", "scale", "resume"):
            status, body = await ordered(client, action, headers={}, csrf="", servers=2)
            assert status == 403 and "operator" in body["error"]

    with_page(runs, use, access=OPEN, actions=actions)
    assert actions.done == []


def test_actions_are_done_and_recorded(runs: Path) -> None:
    actions = FakeActions()

    async def use(client: Client) -> None:
        secret = await csrf(client)
        assert await ordered(client, "stop", csrf=secret) == (200, {"text": "stop mine-1"})
        assert (await ordered(client, "scale", csrf=secret, servers=4))[0] == 200
        assert (await ordered(client, "resume", csrf=secret))[0] == 200

    with_page(runs, use, access=OPEN, actions=actions)
    assert actions.done == ["stop mine-1", "scale mine-1 to 4", "resume mine-1"]
    notes = [
        record.event.message for record in read_events(runs / "mine-1") if isinstance(record.event, Note)
    ]
    assert notes[0] == "stop by page token (operator) from 127.0.0.1: accepted"
    assert "scale (servers=4)" in notes[1]


def test_an_order_without_the_secret_of_the_page_does_nothing(runs: Path) -> None:
    actions = FakeActions()

    async def use(client: Client) -> None:
        secret = await csrf(client)
        assert (await ordered(client, "stop", csrf="wrong"))[0] == 403
        foreign = RIGHT | {"Origin": "http://evil.example"}
        assert (await ordered(client, "stop", headers=foreign, csrf=secret))[0] == 403
        response = await client.post("/api/runs/mine-1/stop", data="csrf=x", headers=RIGHT)
        assert response.status == 400
        assert (await ordered(client, "scale", csrf=secret, servers=0))[0] == 400
        assert (await ordered(client, "scale", csrf=secret))[0] == 400

    with_page(runs, use, access=OPEN, actions=actions)
    assert actions.done == []


def test_a_refused_action_says_why_and_is_recorded(runs: Path) -> None:
    async def use(client: Client) -> None:
        secret = await csrf(client)
        status, body = await ordered(client, "stop", csrf=secret)
        assert (status, body) == (400, {"error": "it is not running"})

    with_page(runs, use, access=OPEN, actions=FakeActions(refusal="it is not running"))
    notes = [
        record.event.message for record in read_events(runs / "mine-1") if isinstance(record.event, Note)
    ]
    assert notes[-1].endswith("failed: it is not running")


def test_an_action_that_can_not_be_recorded_is_not_done(runs: Path) -> None:
    class Unrecorded(SessionAccess):
        def record(
            self, run_dir: Path, decision: PageDecision, action: str, *, answer: str, detail: str
        ) -> None:
            raise StorageError("the disk is full")

    actions = FakeActions()

    async def use(client: Client) -> None:
        status, body = await ordered(client, "stop", csrf=await csrf(client))
        assert status == 503 and "the disk is full" in body["error"]

    access = Unrecorded(needs_token=False, may_act=True, operator="right")
    with_page(runs, use, access=access, actions=actions)
    assert actions.done == []


def test_recorded_runs_of_the_demonstration_can_not_be_acted_on(runs: Path) -> None:
    actions = FakeActions()

    async def use(client: Client) -> None:
        session = await (await client.get("/api/session", headers=RIGHT)).json()
        assert session["demo"] and session["may"] == []
        assert (await ordered(client, "stop", csrf=""))[0] == 403

    with_page(runs, use, access=OPEN, actions=actions, demo=True)
    assert actions.done == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("runs/none", 404),
        ("runs/..", 404),
        ("runs/%2e%2e%2fmine-1", 404),
        ("runs/mine-1/samples?sort=best", 400),
        ("runs/mine-1/samples?step=x", 400),
        ("runs/mine-1/samples/abc", 400),
        ("runs/mine-1/samples/3", 404),
        ("runs/mine-1/incidents/7", 404),
        ("runs/mine-1/timeline?from=9&to=3", 400),
        ("runs/mine-1/timeline?from=nan", 400),
        ("compare?runs=mine-1", 400),
        ("compare?runs=mine-1,none", 404),
        ("nothing", 404),
    ],
)
def test_a_wrong_request_gets_a_sentence(runs: Path, path: str, status: int) -> None:
    async def use(client: Client) -> None:
        body = await answer(client, path, status=status)
        assert body["error"]
        assert (await answer(client, "runs/mine-1"))["name"] == "mine"

    with_page(runs, use)


def test_hostile_text_arrives_as_it_is(runs: Path) -> None:
    text = "<script>alert(1)</script>\x1b[31m\u202e" + "x" * 1_000_000
    line = json.loads((runs / "mine-1" / "samples.jsonl").read_text().splitlines()[0])
    (runs / "mine-1" / "samples.jsonl").write_text(json.dumps(line | {"completion": text}) + "\n")
    listed, whole = asked(runs, "runs/mine-1/samples", "runs/mine-1/samples/0")
    assert listed["items"][0]["cut"] and len(listed["items"][0]["completion"]) < 2000
    assert whole["completion"] == text


async def next_event(lines: asyncio.StreamReader | Any) -> tuple[str, Any]:
    """Return the next event of a stream; comments are skipped."""
    name = ""
    while True:
        line = (await lines.readline()).decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))


def test_a_change_of_a_file_reaches_every_viewer(runs: Path) -> None:
    async def use(client: Client) -> None:
        streams = [await client.get("/api/runs/mine-1/events") for _ in range(20)]
        assert all(stream.headers["Content-Type"] == "text/event-stream" for stream in streams)

        async def write() -> None:
            step = 5
            while True:
                with (runs / "mine-1" / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "time": 1000.0 + step}) + "\n")
                step += 1
                await asyncio.sleep(0.2)

        writer = asyncio.create_task(write())
        events = await asyncio.gather(*(next_event(stream.content) for stream in streams))
        writer.cancel()
        assert all(name == "change" and "metrics" in data["what"] for name, data in events)
        for stream in streams:
            stream.close()

    with_page(runs, use)


def test_a_new_run_is_told_to_the_overview(runs: Path) -> None:
    async def use(client: Client) -> None:
        stream = await client.get("/api/events")

        async def make() -> None:
            number = 2
            while True:
                make_run(runs / f"mine-{number}")
                number += 1
                await asyncio.sleep(0.5)

        maker = asyncio.create_task(make())
        name, data = await next_event(stream.content)
        maker.cancel()
        assert name == "change" and data["what"] == ["runs"] and data["runs"]
        stream.close()

    with_page(runs, use)


def test_a_folder_of_runs_or_a_run_is_shown(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(runs / "mine-2")
    assert set(RunCatalog.of(str(runs)).names()) == {"mine-1", "mine-2"}
    assert RunCatalog.of(str(runs / "mine-1")).names() == ["mine-1"]
    monkeypatch.chdir(runs.parent)
    assert RunCatalog.of("mine-2").names() == ["mine-2"]
    single = RunCatalog.of(str(runs / "mine-1"))
    assert single.reader("mine-2") is None


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert RunCatalog.of(str(tmp_path / "other")).names() == []
    (tmp_path / "other" / "file").write_text("x")
    for name, found in (("other", "without config.yaml"), ("other/file", "a file"), ("none", "nothing")):
        with pytest.raises(UserError, match=found):
            RunCatalog.of(str(tmp_path / name))


def test_a_part_that_takes_long_to_answer_is_reported_the_more_rarely(runs: Path) -> None:
    feed = RunFeed(RunReader(runs / "mine-1"), pool=ThreadPoolExecutor(1), on_samples=lambda _: None)
    usual = feed.least_interval_s("timeline")
    feed.note_cost("timeline", 0.2)
    assert feed.least_interval_s("timeline") == 24.0 > usual
    assert feed.least_interval_s("incidents") == 0.0
