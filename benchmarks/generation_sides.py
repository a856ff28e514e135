"""The sides of `generation.py` as its parent sees them: which models, which processes, and rounds that alternate."""

from __future__ import annotations

import json
import os
import random
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.generation_rounds import Order, Round
from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.transformer import Transformer, initialize

HERE = Path(__file__).parent
READY_TIMEOUT_S = 240
"""vLLM compiles its kernels first."""
ROUND_TIMEOUT_S = 600
CHECK_TOKENS = 8
PROBE_TIMEOUT_S = 60
MODULES = {
    "generation_llama": "llama_cpp",
    "generation_transformers": "transformers",
    "generation_vllm": "vllm",
}
"""Library that a side needs in its environment."""

MODELS = {
    # 1.32 M parameters.
    "tiny": ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=128,
        intermediate_size=416,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=8192,
        tie_embeddings=True,
    ),
    # SmolLM2-135M.
    "135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rope_theta=100000.0,
        tie_embeddings=True,
    ),
    # Qwen3-0.6B.
    "0.6b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40960,
        rope_theta=1e6,
        tie_embeddings=True,
        qk_norm=True,
    ),
    # Qwen2.5-1.5B.
    "1.5b": ModelConfig(
        family="qwen2",
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        max_positions=32768,
        rope_theta=1e6,
        tie_embeddings=True,
        attention_bias=True,
    ),
}


def write_model(config: ModelConfig, *, folder: Path, dtype: torch.dtype, device: str) -> Path:
    """Random weights as a Hugging Face folder, and as GGUF beside it where llama.cpp is to read them."""
    model = Transformer(config, device=device)
    initialize(model, 0)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, tensor in state.items():
        # A new model attends to everything alike and repeats its last token. Sharper, a side that computed something
        # else would be seen.
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor.mul_(4)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(12)
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    huggingface.save(state, config=config, folder=folder)
    if device == "cpu" and config.family == "llama":
        from benchmarks.generation_gguf import write_gguf

        write_gguf(folder, path=folder / "model.gguf")
    return folder


def random_prompts(count: int, *, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """New ones each round: a side that keeps computed prefixes gains nothing by it."""
    stream = random.Random(seed)
    return [[stream.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class Played(NamedTuple):
    seconds: float
    cpu_seconds: float
    """Of the side's own threads: while others use the machine too, this hardly changes."""
    tokens: list[list[int]]


@dataclass
class SideProcess:
    """A side in a process of its own, which computes only while it is asked to."""

    program: str
    python: Path
    order: Order
    log: Path
    path: str = ""
    """Further folders for its modules, of this side alone."""
    version: str = ""
    _process: subprocess.Popen[str] | None = field(init=False, default=None)

    def why_missing(self) -> str:
        """Why this side can not run here; empty if it can. Only looks for its environment and library."""
        module = MODULES.get(self.program)
        if module is None:
            return ""
        if not self.python.exists():
            return f"there is no {self.python}"
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        found = subprocess.run(
            [str(self.python), "-c", probe],
            check=False,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            env=self._environment(),
        )
        return "" if found.returncode == 0 else f"{self.python} has no module {module}"

    def _environment(self) -> dict[str, str]:
        threads = "1" if self.order.device == "cpu" else "8"
        path = os.pathsep.join(filter(None, (self.path, os.environ.get("PYTHONPATH", ""))))
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            **({"PYTHONPATH": path} if path else {}),
        }

    def start(self) -> None:
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(self.python), str(HERE / f"{self.program}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
            )
        self._say(self.order.to_json())
        self.version = self._answer(timeout_s=READY_TIMEOUT_S)["version"]

    def play(self, work: Round) -> Played:
        self._say(work.to_json())
        answer = self._answer(timeout_s=ROUND_TIMEOUT_S)
        assert list(map(len, answer["tokens"])) == work.new_tokens, f"{self.program} stopped early"
        return Played(answer["seconds"], answer["cpu_seconds"], answer["tokens"])

    def stop(self) -> None:
        """End it, if it was started."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self, *, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            sys.exit(
                f"{self.program} did not answer within {timeout_s} s; see {self.log}:\n{_tail(self.log)}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])


def present(sides: Mapping[str, SideProcess], *, skipped: dict[str, str]) -> dict[str, SideProcess]:
    """Sides whose environment is here; the others are added to `skipped` with the reason."""
    found = {}
    for name, side in sides.items():
        why = side.why_missing()
        if not why:
            found[name] = side
        elif name not in skipped:
            skipped[name] = why
            print(f"skipped: {name}: {why}", file=sys.stderr, flush=True)
    return found


@contextmanager
def running(sides: Mapping[str, SideProcess]) -> Iterator[None]:
    """All of them prepared, one after the other; stopped at the end."""
    with ExitStack() as stack:
        for side in sides.values():
            stack.callback(side.stop)
            side.start()
        yield


@dataclass(frozen=True)
class Case:
    """What is asked of some of the sides in every round."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    sides: Sequence[str]
    """The first is compared with the others."""
    temperature: float = 1.0

    def work(self, *, seed: int, vocab_size: int) -> Round:
        """Prompts that no other seed has."""
        prompts = random_prompts(self.batch, length=self.prompt_tokens, vocab_size=vocab_size, seed=seed)
        return Round(prompts, [self.new_tokens] * self.batch, self.temperature, seed=seed)

    def check(self, *, vocab_size: int) -> Round:
        """The first tokens of greedy answers, which show whether all sides compute the same model."""
        work = self.work(seed=1, vocab_size=vocab_size)
        return Round(work.prompts, [CHECK_TOKENS] * self.batch, 0.0, seed=0)

    @property
    def num_tokens(self) -> int:
        return self.batch * self.new_tokens

    def described(self) -> dict[str, Any]:
        return {"batch": self.batch, "prompt": self.prompt_tokens, "new": self.new_tokens}


@dataclass(frozen=True)
class MixedCase(Case):
    """nano-vLLM's: lengths exactly as its `bench.py` draws them. Each round has other tokens, of the same lengths."""

    batch: int = 256
    prompt_tokens: int = 1024
    new_tokens: int = 1024
    sides: Sequence[str] = ()
    temperature: float = 0.6

    def work(self, *, seed: int, vocab_size: int) -> Round:
        prompts, budgets = self.drawn()
        shifted = [[(token + 7919 * seed) % 10001 for token in prompt] for prompt in prompts]
        return Round(shifted, budgets, self.temperature, seed=seed)

    def drawn(self) -> tuple[list[list[int]], list[int]]:
        """Prompts, and the number of new tokens of each."""
        stream = random.Random(0)
        prompts = [
            [stream.randint(0, 10000) for _ in range(stream.randint(100, 1024))] for _ in range(self.batch)
        ]
        return prompts, [stream.randint(100, 1024) for _ in range(self.batch)]

    @property
    def num_tokens(self) -> int:
        return sum(self.drawn()[1])

    def described(self) -> dict[str, Any]:
        return {"batch": self.batch, "prompt": "100-1024", "new": "100-1024"}


@dataclass
class Figures:
    """What the sides did in the rounds of one case."""

    case: Case
    played: dict[str, list[Played]]
    alike: dict[tuple[str, str], int]
    """Sequences that began with the very same tokens on two sides when both were greedy."""

    def row(self, *, part: str, model: str, dtype: str) -> dict[str, Any]:
        """Ratios are medians of each round's own: what disturbs a machine disturbs neighbours in time alike."""
        ours, *peers = self.case.sides
        speeds = {
            side: [self.num_tokens / played.seconds for played in self.played[side]]
            for side in self.case.sides
        }
        return {
            "part": part,
            "case": {
                "model": model,
                "dtype": dtype,
                **self.case.described(),
            },
            "unit": "tokens/s",
            "ours": round(statistics.median(speeds[ours]), 1),
            "peers": {peer: round(statistics.median(speeds[peer]), 1) for peer in peers},
            "ratio": {peer: round(self.ratio(peer), 2) for peer in peers},
            "ratio_of_cpu_seconds": {peer: round(self.ratio(peer, what="cpu_seconds"), 2) for peer in peers},
            "same_greedy_tokens": {peer: f"{self.alike[ours, peer]}/{self.case.batch}" for peer in peers},
            "rounds": {side: [round(speed, 1) for speed in found] for side, found in speeds.items()},
        }

    @property
    def num_tokens(self) -> int:
        return self.case.num_tokens

    def ratio(self, peer: str, *, what: str = "seconds") -> float:
        pairs = zip(self.played[self.case.sides[0]], self.played[peer], strict=True)
        return statistics.median(getattr(theirs, what) / getattr(ours, what) for ours, theirs in pairs)


def alternate(
    cases: Sequence[Case],
    *,
    sides: Mapping[str, SideProcess],
    rounds: int,
    vocab_size: int,
    whole_warm_up: bool,
) -> list[Figures]:
    """Every case in every round, its sides one after the other, forwards and backwards in turns."""
    figures = [warmed_up(case, sides=sides, vocab_size=vocab_size, whole=whole_warm_up) for case in cases]
    for number in range(rounds):
        for each in figures:
            work = each.case.work(seed=number + 2, vocab_size=vocab_size)
            for name in each.case.sides if number % 2 == 0 else reversed(each.case.sides):
                played = sides[name].play(work)
                each.played[name].append(played)
                print(
                    f"round {number + 1}, batch {each.case.batch}, {name}: "
                    f"{each.num_tokens / played.seconds:.0f} tokens/s, {played.cpu_seconds:.1f} CPU s",
                    file=sys.stderr,
                    flush=True,
                )
    return figures


def warmed_up(case: Case, *, sides: Mapping[str, SideProcess], vocab_size: int, whole: bool) -> Figures:
    """What comes cold is not counted. It also shows that all sides compute the same model."""
    greedy = case.check(vocab_size=vocab_size)
    tokens = {name: sides[name].play(greedy).tokens for name in case.sides}
    if whole:
        again = case.work(seed=0, vocab_size=vocab_size)
        for name in case.sides:
            sides[name].play(again)
    alike = {
        (one, other): sum(ours == theirs for ours, theirs in zip(tokens[one], tokens[other], strict=True))
        for one in case.sides
        for other in case.sides
    }
    return Figures(case, {name: [] for name in case.sides}, alike)
