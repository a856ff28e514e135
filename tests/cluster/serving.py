"""A small model in a folder, and `kintsugi serve` of it as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import psutil

ALPHABET = 'abcdefghijklmnopqrstuvwxyz .:?{}"ABC<>|_\n'
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}A:"
)
READY = re.compile(r"is served at (http://\S+)/v1 by")
PATIENCE_S = 60.0


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """A random model whose sampled text looks like nothing, but is never the same twice."""
    import torch

    from kintsugi.config.schema import NewModel
    from kintsugi.model.huggingface import save
    from kintsugi.model.plan import new_model_config
    from kintsugi.model.tokenizer import character_tokenizer
    from kintsugi.model.transformer import Transformer

    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save(folder)
    shape = NewModel(hidden_size=64, intermediate_size=128, num_kv_heads=2, max_positions=256)
    config = new_model_config(shape, tokenizer=tokenizer)
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(each.shape, generator=generator) * 0.2 if each.dim() > 1 else torch.ones(each.shape)
        for name, each in Transformer(config).named_parameters()
    }
    save(state, config=config, folder=folder, tokenizer_folder=folder)
    return folder


class Served:
    """A gateway that runs, as its users see it."""

    def __init__(self, process: subprocess.Popen[str], address: str, *, key: str) -> None:
        self.process = process
        self.address = address
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._psutil = psutil.Process(process.pid)

    def get(self, path: str) -> Any:
        return msgspec.json.decode(self._read(path))

    def _read(self, path: str) -> bytes:
        request = urllib.request.Request(f"{self.address}{path}", headers=self._headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            body: bytes = response.read()
            return body

    def servers(self) -> list[dict[str, Any]]:
        """Also while none of them is well, which is told by the status."""
        try:
            answer = self.get("/health")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            answer = msgspec.json.decode(error.read())
        found: list[dict[str, Any]] = answer["servers"]
        return found

    def figure(self, name: str) -> dict[str, float]:
        """Of /metrics, by server (empty where there is none)."""
        text = self._read("/metrics").decode()
        pattern = rf'^kintsugi_{name}(?:\{{server="(.*?)"\}})? (\S+)$'
        return {match[1] or "": float(match[2]) for match in re.finditer(pattern, text, re.MULTILINE)}

    def num_descriptors(self) -> int:
        return self._psutil.num_fds()

    def descendants(self) -> list[psutil.Process]:
        return self._psutil.children(recursive=True)

    def kill_servers(self, *numbers: int) -> list[int]:
        """With -9, all at once; gives their pids."""
        servers = self.servers()
        pids = [int(servers[number]["pid"]) for number in numbers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def is_at_rest(self) -> bool:
        """Both servers are well, nothing is under way, and no page is in use."""
        healthy = all(server["health"] == "healthy" for server in self.servers())
        busy = [*self.figure("server_pages_used").values(), *self.figure("queue_depth").values()]
        return healthy and not any(busy)


def until(condition: Callable[[], Any], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Served]:
    """`kintsugi serve`, from ready to ended; whatever happens, nothing of it is left."""
    command = [sys.executable, "-m", "kintsugi", "serve", str(model), "--port", "0", *options]
    key = options[options.index("--api-key") + 1] if "--api-key" in options else ""
    # One that is killed leaves its folder behind, which goes with the model's.
    environment = {**os.environ, "TMPDIR": str(model.parent)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        try:
            said = ""
            while (ready := READY.search(line := process.stdout.readline())) is None:
                said += line
                errors.seek(0)
                assert line, f"{said}{errors.read()}"
            watchdog.cancel()
            yield Served(process, ready[1], key=key)
        finally:
            watchdog.cancel()
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
            process.stdout.close()
            for each in family:
                if each.is_running():
                    each.kill()
