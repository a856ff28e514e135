"""`kintsugi serve` from its first check to its last process: HTTP in this thread, servers in the control thread."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from kintsugi.cluster.handover import Programs
from kintsugi.errors import DataError, KintsugiError, ModelError, UserError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import load_config
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.openai_api import http
from kintsugi.openai_api.api_errors import ApiError
from kintsugi.openai_api.requests import ApiLimits
from kintsugi.protocol.weights import LoadWeights, WeightsLoaded
from kintsugi.runtime.secrecy import private_process
from kintsugi.serving.control_thread import ControlThread
from kintsugi.serving.credentials import Credentials
from kintsugi.serving.folder import folder_of_logs
from kintsugi.serving.gateway import Gateway, GatewayLimits
from kintsugi.serving.options import ServerOptions, described, make_options, write_options
from kintsugi.types import FolderSource, Role
from kintsugi.weights.transports.disk import folder_manifest

EXAMPLES = ("Hello", "1+1=")
"""Prompts of the example that is printed; the first that the model has tokens for."""
DRAIN_S = 30.0
"""Time to finish requests in flight when the gateway is asked to end."""
BACKLOG = 1024
PROGRAMS = Programs(
    entries={Role.SERVER: "kintsugi.serving.server:main"},
    preload=("torch", "kintsugi.serving.server"),
    forked=(Role.SERVER,),
)


@dataclass(frozen=True)
class ServeOptions:
    """Options of the command line."""

    model: Path
    host: str
    port: int
    num_servers: int
    queue: int
    credentials: Credentials = field(default_factory=Credentials)
    insecure: bool = False
    """Listen beyond loopback without any key."""
    weights_folders: tuple[Path, ...] = ()
    """Folders below which an administrator may load weights from; default: the one that contains the model."""
    max_length: int | None = None


def serve(options: ServeOptions, given: Mapping[str, Any], *, print_line: Callable[[str], None]) -> int:
    """Serve until a signal; return the exit code. `given` are fields of `ServerOptions`."""
    options.credentials.check(insecure=options.insecure)
    config, tokenizer = described(options.model)
    server_options = make_options(options.model, config, max_length=options.max_length, given=given)
    with private_process(), folder_of_logs(print_line=print_line) as run_dir:
        write_options(server_options, run_dir)
        session = ServeSession(
            options,
            server_options,
            config=config,
            tokenizer=tokenizer,
            run_dir=run_dir,
            print_line=print_line,
        )
        asyncio.run(session.run())
    return 0


class ServeSession:
    """Waits for HTTP requests, signals and server events. After the first SIGTERM or Ctrl-C it ends when all requests
    in flight are answered, after the second immediately; it also ends when no server can be started."""

    def __init__(
        self,
        options: ServeOptions,
        server_options: ServerOptions,
        *,
        config: ModelConfig,
        tokenizer: Tokenizer,
        run_dir: Path,
        print_line: Callable[[str], None],
    ) -> None:
        self._options = options
        self._server_options = server_options
        self._config = config
        self._print_line = print_line
        self._tokenizer = tokenizer
        self._run_dir = run_dir
        self._name = options.model.resolve().name
        self._control = ControlThread(run_dir=run_dir, programs=PROGRAMS, strategy=server_options.strategy)
        limits = ApiLimits(self._name, vocab_size=config.vocab_size, max_length=server_options.max_length)
        rules = GatewayLimits(limits, credentials=options.credentials, queue=options.queue)
        self._gateway = Gateway(self._control, tokenizer, rules, administration=self)
        self._was_ready = False
        self._port = options.port
        self._version = 0
        self._num_signals = 0
        self._ended: asyncio.Future[None]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._control.close)
            count = self._options.num_servers
            self._print_line(f"starting {count} server{'s' * (count != 1)} with {self._options.model}")
            weights = await asyncio.to_thread(self._weights, self._options.model, 0)
            self._control.start(
                self._options.num_servers,
                weights,
                loop=loop,
                on_change=self._changed,
                on_note=self._print_line,
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
        if self._control.failure is not None:
            raise self._control.failure

    def _weights(self, folder: Path, version: int) -> LoadWeights:
        if load_config(folder) != self._config:
            raise ModelError(
                f"expected the architecture of {self._options.model}, got another one in {folder}"
            )
        manifest = folder_manifest(folder, config=self._config, version=version)
        return LoadWeights(manifest, (FolderSource(str(folder.resolve())),))

    async def _drained(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until no request is in flight, a second signal arrives, or the time is up."""
        deadline = loop.time() + DRAIN_S
        while self._gateway.num_active and self._num_signals < 2 and loop.time() < deadline:
            if self._control.is_over:
                return
            moment = loop.create_future()
            loop.call_later(0.05, moment.set_result, None)
            await moment

    def _signalled(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self._gateway.num_active:
            self._print_line(
                f"ending when {self._gateway.num_active} requests are answered; a second signal ends immediately"
            )
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _changed(self) -> None:
        """Called in the event loop when the servers have changed: when the first one is ready, print how to use it."""
        if self._control.is_over:
            self._end()
            return
        snapshot = self._control.snapshot
        settled = all(server.health == "healthy" or server.state == "failed" for server in snapshot.servers)
        if snapshot.is_ready and settled and not self._was_ready:
            self._was_ready = True
            for line in self._welcome():
                self._print_line(line)

    def _welcome(self) -> list[str]:
        options, servers = self._options, self._control.snapshot.servers
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{self._port}"
        key = ' -H "Authorization: Bearer $KINTSUGI_API_KEY"' if options.credentials.has_keys else ""
        prompt = next(filter(self._can_be_asked, EXAMPLES), EXAMPLES[0])
        asked = {"model": self._name, "prompt": prompt, "max_tokens": 16}
        body = msgspec.json.encode(asked).decode()
        count = f"{len(servers)} server{'s' * (len(servers) != 1)}"
        most = f"{self._server_options.max_length} tokens at most"
        return [
            f"{self._name} is served at {address}/v1 by {count}, {most}; logs in {self._run_dir}",
            f"try: curl {address}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        ]

    def _can_be_asked(self, prompt: str) -> bool:
        try:
            return bool(self._tokenizer.encode(prompt))
        except DataError:  # A tokenizer of single characters may have no letters.
            return False

    # Administration.

    async def load_weights(self, path: str) -> dict[str, Any]:
        """Change all servers to the weights in a folder, between two of their steps; running requests continue."""
        version = self._version + 1
        self._check_place(Path(path))
        try:
            weights = await asyncio.to_thread(self._weights, Path(path), version)
        except KintsugiError as error:
            raise ApiError(str(error), param="path") from error
        self._version = version
        loaded: asyncio.Future[WeightsLoaded | KintsugiError] = asyncio.get_running_loop().create_future()
        self._control.load_weights(weights, partial(_settle, loaded))
        outcome = await loaded
        if isinstance(outcome, KintsugiError):
            raise ApiError(str(outcome), kind="server_error") from outcome
        return {"version": outcome.version, "digest": outcome.digest, "servers": list(outcome.servers)}

    def _check_place(self, folder: Path) -> None:
        """Refuse a folder outside of the allowed ones before anything about it is looked at."""
        places = self._options.weights_folders or (self._options.model.resolve().parent,)
        resolved = Path(os.path.realpath(folder))
        if not any(resolved.is_relative_to(os.path.realpath(place)) for place in places):
            raise ApiError(
                f"expected a folder below {', '.join(map(str, places))} (`--weights-folder`)",
                status=HTTPStatus.FORBIDDEN,
                param="path",
            )

    async def resize(self, num_servers: int) -> dict[str, Any]:
        self._control.resize(num_servers)
        return {"servers": num_servers}


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    if not future.done():
        future.set_result(outcome)
