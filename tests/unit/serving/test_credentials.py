"""Keys of `kintsugi serve`: administration apart from inference, quotas, strangers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kintsugi.access.audit import host_log, verify
from kintsugi.access.tokens import TokenFile
from kintsugi.errors import UntrustedFile, UserError
from kintsugi.serving.credentials import Credentials, read_key
from kintsugi.serving.gateway import Gateway, GatewayLimits
from tests.unit.serving.fakes import LIMITS, FakeGeneration, tokenizer

Client = TestClient[Any, Any]
ASKED = {"model": "tiny", "prompt": "abc", "max_tokens": 2}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))


class FakeAdministration:
    def __init__(self) -> None:
        self.done: list[Any] = []

    async def load_weights(self, path: str) -> dict[str, Any]:
        self.done.append(path)
        return {}

    async def resize(self, num_servers: int) -> dict[str, Any]:
        self.done.append(num_servers)
        return {}


def served(
    body: Callable[[Client], Awaitable[None]],
    credentials: Credentials,
    *,
    administration: FakeAdministration | None = None,
    generation: FakeGeneration | None = None,
) -> None:
    async def run() -> None:
        gateway = Gateway(
            generation or FakeGeneration(),
            tokenizer(),
            GatewayLimits(LIMITS, credentials=credentials),
            administration=administration or FakeAdministration(),
        )
        async with TestClient(TestServer(gateway.application(), handler_cancellation=True)) as client:
            await body(client)

    asyncio.run(run())


async def status(client: Client, method: str, path: str, *, key: str = "", json: Any = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with client.request(method, path, json=json, headers=headers) as response:
        return response.status


def test_the_key_of_clients_changes_neither_weights_nor_servers() -> None:
    administration = FakeAdministration()

    async def body(client: Client) -> None:
        for key, expected in (("", 401), ("inference", 403), ("wrong", 401), ("admin", 200)):
            assert await status(client, "POST", "/admin/servers", key=key, json={"count": 2}) == expected
            assert await status(client, "POST", "/admin/weights", key=key, json={"path": "x"}) == expected
        assert await status(client, "POST", "/v1/completions", key="inference", json=ASKED) == 200
        assert await status(client, "POST", "/v1/completions", key="admin", json=ASKED) == 200

    served(body, Credentials(api_key="inference", admin_key="admin"), administration=administration)
    assert administration.done == [2, "x"]
    assert [(entry.name, entry.action, entry.detail) for entry in verify(host_log()).entries] == [
        ("admin key", "scale service", "servers=2"),
        ("admin key", "load weights", "x"),
    ]


@pytest.mark.parametrize("credentials", [Credentials(), Credentials(api_key="inference")])
def test_without_an_admin_key_there_is_no_administration(credentials: Credentials) -> None:
    async def body(client: Client) -> None:
        for key in ("inference", ""):
            assert await status(client, "POST", "/admin/servers", key=key, json={"count": 2}) == 403

    served(body, credentials)


def test_an_action_that_cannot_be_recorded_is_refused() -> None:
    administration = FakeAdministration()

    async def body(client: Client) -> None:
        assert await status(client, "POST", "/admin/servers", key="admin", json={"count": 2}) == 200
        host_log().chmod(0o666)
        assert await status(client, "POST", "/admin/servers", key="admin", json={"count": 3}) == 503

    served(body, Credentials(admin_key="admin"), administration=administration)
    assert administration.done == [2]


def test_named_keys_have_roles_and_quotas(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    viewer = file.add("ada", role="viewer", in_flight=2)
    hasty = file.add("bob", role="viewer", requests_per_minute=2)
    admin = file.add("eve", role="admin")
    generation = FakeGeneration(holds=True)

    async def ask(client: Client, key: str, **fields: Any) -> int:
        return await status(client, "POST", "/v1/completions", key=key, json={**ASKED, **fields})

    async def body(client: Client) -> None:
        first = asyncio.create_task(ask(client, viewer, n=2))
        await generation.until(lambda: len(generation.submitted) == 1)
        assert await ask(client, viewer) == 429
        other = asyncio.create_task(ask(client, admin))
        await generation.until(lambda: len(generation.submitted) == 2)
        generation.release()
        generation.holds = False
        assert (await first, await other) == (200, 200)
        assert await ask(client, viewer) == 200
        assert [await ask(client, hasty) for _ in range(3)] == [200, 200, 429]
        assert [await ask(client, key) for key in ("", "kt_0", f"{viewer}x")] == [401, 401, 401]
        for key, expected in ((viewer, 403), (admin, 200)):
            assert await status(client, "POST", "/admin/servers", key=key, json={"count": 2}) == expected
        file.revoke("ada")
        assert await ask(client, viewer) == 401

    served(body, Credentials(token_file=file.path), generation=generation)


def test_strangers_learn_only_whether_the_service_works() -> None:
    async def body(client: Client) -> None:
        async with client.get("/health") as response:
            assert await response.json() == {"status": "ok"}
        async with client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
            assert [line for line in lines if line and line[0] != "#"] == ["kintsugi_ready 1"]
        headers = {"Authorization": "Bearer right"}
        async with client.get("/health", headers=headers) as response:
            assert "pid" in (await response.json())["servers"][0]
        async with client.get("/metrics", headers=headers) as response:
            assert "kintsugi_queue_depth" in await response.text()

    served(body, Credentials(api_key="right"))


def test_details_are_also_hidden_where_a_server_without_a_key_is_open_to_others() -> None:
    async def body(client: Client) -> None:
        async with client.get("/health") as response:
            assert await response.json() == {"status": "ok"}

    served(body, Credentials(host="0.0.0.0"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost:8000", 200),
        ("[::1]:8000", 200),
        ("127.0.0.1", 200),
        ("proxy.example", 200),
    ],
)
def test_a_page_of_another_origin_cannot_reach_a_local_server_by_its_own_name(
    host: str, expected: int
) -> None:
    async def body(client: Client) -> None:
        async with client.get("/v1/models", headers={"Host": host}) as response:
            assert response.status == expected

    served(body, Credentials(allowed_hosts=("proxy.example",)))


def test_other_machines_need_a_key_unless_told_otherwise(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", ""):
        with pytest.raises(UserError, match="--insecure"):
            Credentials(host=host).check(insecure=False)
        Credentials(host=host).check(insecure=True)
        Credentials(host=host, api_key="x").check(insecure=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        Credentials(host=host).check(insecure=False)
    with pytest.raises(UserError, match="differs from the API key"):
        Credentials(api_key="x", admin_key="x").check(insecure=False)
    for empty in ("", " "):
        with pytest.raises(UserError, match="not empty"):
            Credentials(api_key=empty).check(insecure=False)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.raises(UntrustedFile, match="others can read"):
        read_key(file)
    file.chmod(0o600)
    assert read_key(file) == "secret"
