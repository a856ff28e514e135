"""`kintsugi serve` from its first check to its last process: HTTP in this thread, servers behind the other one."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from kintsugi.cluster.handover import Programs
from kintsugi.errors import KintsugiError, ModelError, UserError
from kintsugi.messages import LoadWeights, WeightsLoaded
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import load_config
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.serving import http
from kintsugi.serving.backstage import Backstage
from kintsugi.serving.gateway import Gateway, Rules
from kintsugi.serving.logs import folder_of_logs
from kintsugi.serving.openai import Limits
from kintsugi.serving.plan import ServePlan, described, make_plan, write_plan
from kintsugi.serving.refusals import Refusal
from kintsugi.types import FolderSource, Role
from kintsugi.weights.folder import folder_manifest

DRAIN_S = 30.0
"""For requests that are under way when the gateway is asked to end."""
BACKLOG = 1024
PROGRAMS = Programs(
    entries={Role.SERVER: "kintsugi.serving.server:main"},
    preload=("torch", "kintsugi.serving.server"),
    forked=(Role.SERVER,),
)


@dataclass(frozen=True)
class ServeOptions:
    """The command line."""

    model: Path
    host: str
    port: int
    num_servers: int
    queue: int
    api_key: str | None = None
    max_length: int | None = None


def serve(options: ServeOptions, given: Mapping[str, Any], *, say: Callable[[str], None]) -> int:
    """Serve until somebody asks for the end; gives the exit code. `given` are fields of a `ServePlan`."""
    if options.api_key == "":
        raise UserError(
            "expected an API key that is not empty, got an empty one; leave it out to let anybody in"
        )
    config, tokenizer = described(options.model)
    plan = make_plan(options.model, config, max_length=options.max_length, given=given)
    with folder_of_logs(say=say) as run_dir:
        write_plan(plan, run_dir)
        session = Session(options, plan, config=config, tokenizer=tokenizer, run_dir=run_dir, say=say)
        asyncio.run(session.run())
    return 0


class Session:
    """Waits for HTTP requests, for signals and for what the servers do; ends with a first SIGTERM or Ctrl-C when what
    is under way is answered, with a second one at once, or when no server can be had."""

    def __init__(
        self,
        options: ServeOptions,
        plan: ServePlan,
        *,
        config: ModelConfig,
        tokenizer: Tokenizer,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._plan = plan
        self._config = config
        self._say = say
        self._run_dir = run_dir
        self._name = options.model.resolve().name
        self._backstage = Backstage(run_dir=run_dir, programs=PROGRAMS, strategy=plan.strategy)
        limits = Limits(self._name, vocab_size=config.vocab_size, max_length=plan.max_length)
        rules = Rules(limits, api_key=options.api_key, queue=options.queue)
        self._gateway = Gateway(self._backstage, tokenizer, rules, administration=self)
        self._was_ready = False
        self._port = options.port
        self._version = 0
        self._num_signals = 0
        self._ended: asyncio.Future[None]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._backstage.close)
            weights = await asyncio.to_thread(self._weights, self._options.model, 0)
            self._backstage.start(
                self._options.num_servers, weights, loop=loop, on_change=self._changed, on_note=self._say
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled)
            runner = http.runner(self._gateway.application(), shutdown_timeout_s=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, self._options.host, self._options.port, backlog=BACKLOG)
            try:
                await site.start()
            except OSError as error:
                address = f"{self._options.host}:{self._options.port}"
                raise UserError(f"can not listen on {address}: {error.strerror or error}") from error
            self._port = int(runner.addresses[0][1])
            await self._ended
            self._gateway.closing = True
            await site.stop()
            await self._drained(loop)
        if self._backstage.failure is not None:
            raise self._backstage.failure

    def _weights(self, folder: Path, version: int) -> LoadWeights:
        if load_config(folder) != self._config:
            raise ModelError(
                f"expected the architecture of {self._options.model}, got another one in {folder}"
            )
        manifest = folder_manifest(folder, config=self._config, version=version)
        return LoadWeights(manifest, (FolderSource(str(folder.resolve())),))

    async def _drained(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until nothing is under way, somebody insists, or the bound is reached."""
        deadline = loop.time() + DRAIN_S
        while self._gateway.num_active and self._num_signals < 2 and loop.time() < deadline:
            if self._backstage.is_over:
                return
            moment = loop.create_future()
            loop.call_later(0.05, moment.set_result, None)
            await moment

    def _signalled(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self._gateway.num_active:
            self._say(f"ending when {self._gateway.num_active} requests are answered; once more ends at once")
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _changed(self) -> None:
        """In the event loop, when the servers have changed: the first time that one is ready, say how to call it."""
        if self._backstage.is_over:
            self._end()
            return
        picture = self._backstage.picture
        settled = all(server.health == "healthy" or server.state == "failed" for server in picture.servers)
        if picture.is_ready and settled and not self._was_ready:
            self._was_ready = True
            for line in self._welcome():
                self._say(line)

    def _welcome(self) -> list[str]:
        options, servers = self._options, self._backstage.picture.servers
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{self._port}"
        key = ' -H "Authorization: Bearer $KINTSUGI_API_KEY"' if options.api_key else ""
        asked = {"model": self._name, "prompt": "Hello", "max_tokens": 16}
        body = msgspec.json.encode(asked).decode()
        count = f"{len(servers)} server{'s' * (len(servers) != 1)}"
        most = f"{self._plan.max_length} tokens at most"
        return [
            f"{self._name} is served at {address}/v1 by {count}, {most}; logs in {self._run_dir}",
            f"try: curl {address}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        ]

    # Administration.

    async def load_weights(self, path: str) -> dict[str, Any]:
        """All servers change to the weights in a folder, between two of their steps; running requests go on."""
        version = self._version + 1
        try:
            weights = await asyncio.to_thread(self._weights, Path(path), version)
        except KintsugiError as error:
            raise Refusal(str(error), param="path") from error
        self._version = version
        loaded: asyncio.Future[WeightsLoaded | KintsugiError] = asyncio.get_running_loop().create_future()
        self._backstage.load_weights(weights, partial(_settle, loaded))
        outcome = await loaded
        if isinstance(outcome, KintsugiError):
            raise Refusal(str(outcome), kind="server_error") from outcome
        return {"version": outcome.version, "digest": outcome.digest, "servers": list(outcome.servers)}

    async def resize(self, num_servers: int) -> dict[str, Any]:
        self._backstage.resize(num_servers)
        return {"servers": num_servers}


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)
