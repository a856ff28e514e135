"""Run folders for tests of the page: made by hand, or those that the package ships."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, Request

from kintsugi.config.recipe import dump
from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.errors import UserError
from kintsugi.page.access import PageAccess, SessionAccess
from kintsugi.page.catalog import RunCatalog
from kintsugi.page.server import PageServer

CONFIG = Config(name="mine", algorithm=AlgorithmSection(steps=10))
LONGEST_S = 60.0

Client = TestClient[Request, Application]


def sample(step: int, number: int, *, reward: float = 0.0, **fields: Any) -> dict[str, Any]:
    """One line of `samples.jsonl`; eight samples share a prompt."""
    return {
        "step": step,
        "ticket": f"grpo:0:{number // 8}:0",
        "sample": number % 8,
        "version": step - 1,
        "prompt": f"{number}+1=",
        "completion": str(number + 1),
        "reward": reward,
        "reward_components": {"exact_answer": reward},
        "finish": "eos",
        "advantage": reward - 0.5,
        **fields,
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def make_run(folder: Path, *, steps: int = 4, per_step: int = 16) -> Path:
    """A run with metrics and samples; every fourth sample has reward 1."""
    folder.mkdir(parents=True)
    dump(CONFIG, folder / "config.yaml")
    metrics = [
        {
            "step": step,
            "time": 1000.0 + step,
            "reward/mean": step / 10,
            "timing/step": 1.0,
            "timing/train": 0.5,
        }
        for step in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    numbers = range(steps * per_step)
    write_lines(
        folder / "samples.jsonl",
        [sample(1 + number // per_step, number, reward=float(number % 4 == 3)) for number in numbers],
    )
    return folder


class FakeActions:
    """Notes what it was asked to do."""

    def __init__(self, *, refusal: str = "") -> None:
        self.done: list[str] = []
        self._refusal = refusal

    def stop(self, run_dir: Path) -> str:
        return self._do(f"stop {run_dir.name}")

    def scale(self, run_dir: Path, *, servers: int) -> str:
        return self._do(f"scale {run_dir.name} to {servers}")

    def resume(self, run_dir: Path) -> str:
        return self._do(f"resume {run_dir.name}")

    def _do(self, what: str) -> str:
        if self._refusal:
            raise UserError(self._refusal)
        self.done.append(what)
        return what


def with_page(
    folder: Path,
    use: Callable[[Client], Awaitable[None]],
    *,
    access: PageAccess | None = None,
    actions: FakeActions | None = None,
    demo: bool = False,
) -> None:
    """Serve the runs of a folder on loopback and use them."""

    async def run() -> None:
        server = PageServer(
            RunCatalog.of(str(folder)),
            access=access or SessionAccess(needs_token=False, may_act=False),
            actions=actions or FakeActions(),
            host="127.0.0.1",
            demo=demo,
        )
        async with asyncio.timeout(LONGEST_S), TestClient(TestServer(server.application())) as client:
            try:
                await use(client)
            finally:
                server.end()

    asyncio.run(run())


async def answer(client: Client, path: str, *, status: int = 200) -> Any:
    """Return the JSON of a GET."""
    response = await client.get(f"/api/{path}")
    body = await response.json()
    assert response.status == status, (path, response.status, body)
    return body


def asked(folder: Path, *paths: str) -> list[Any]:
    """Return the JSON of several GETs of a page that shows a folder."""
    found: list[Any] = []

    async def use(client: Client) -> None:
        found.extend([await answer(client, path) for path in paths])

    with_page(folder, use)
    return found
