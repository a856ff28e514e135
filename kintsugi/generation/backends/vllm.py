"""vLLM (0.32): tokens in and out by `/inference/v1/generate`, weights by its endpoints for reinforcement learning.

It has to be started with `VLLM_SERVER_DEV_MODE=1` in its environment and `--enable-scale-out --logprobs-mode
processed_logprobs`. Log-probabilities are then those of the distribution that it samples from: at the temperature (1
where greedy), but also after all logits processors, which are therefore refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kintsugi.errors import ConfigError, IntegrityError, UserError, WorldError
from kintsugi.generation.backends.dialect import HEALTH_TIMEOUT_S, UPDATE_TIMEOUT_S, Ended, Increment
from kintsugi.generation.backends.http import HttpClient
from kintsugi.types import SamplingParams
from kintsugi.weights.manifest import tensor_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LAST_NORM = "model.norm.weight"
_NORM = "norm.weight"
"""Suffix of parameters that are neither split over ranks nor repacked."""
_VOCABULARY_STEP = 64
_MAX_TEMPERATURE = 2
_MAX_TOP_LOGPROBS = 19
_NO_BYTES = hashlib.sha256().hexdigest()
"""Digest of a parameter with its values repacked for a kernel and stored elsewhere."""


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float | None
    """None if it was not a number."""


class _Place(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Place] | None = None


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: Ended | None = None
    weight_versions: list[_Span] | None = None
    """Present in the last event of a stream."""


class _Refusal(msgspec.Struct):
    message: str
    code: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Refusal | None = None


class Vllm:
    name = "vLLM"
    generate_path = "/inference/v1/generate"
    how_to_scale = "with --logprobs-mode processed_logprobs"

    def max_length(self, client: HttpClient) -> int:
        if client.status("GET", "/weight_info") == 404:
            raise ConfigError(
                f"`generation.urls`: expected the vLLM server at {client.url} to have its endpoints for weights: start "
                "it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if client.status("POST", self.generate_path) in (403, 404):
            raise ConfigError(
                f"`generation.urls`: expected the vLLM server at {client.url} to take and give tokens: start it with "
                "--enable-scale-out"
            )
        models = client.call("GET", "/v1/models", what="its model")["data"]
        return int(models[0]["max_model_len"])

    def health(self, client: HttpClient) -> None:
        client.call("GET", "/health", what="its health", timeout_s=HEALTH_TIMEOUT_S)

    def label(self, client: HttpClient) -> str:
        return str(client.call("GET", "/weight_info", what="the name of its weights")["weight_version"])

    def check(self, sampling: SamplingParams) -> None:
        if sampling.temperature > _MAX_TEMPERATURE:
            raise UserError(
                f"expected `temperature` up to {_MAX_TEMPERATURE}, which is the highest that vLLM takes, "
                f"got {sampling.temperature}"
            )
        if sampling.top_logprobs > _MAX_TOP_LOGPROBS:
            raise UserError(
                f"expected `top_logprobs` up to {_MAX_TOP_LOGPROBS}, which is the most that vLLM gives, "
                f"got {sampling.top_logprobs}"
            )
        processed = {
            "top_k": sampling.top_k != 0,
            "top_p": sampling.top_p != 1,
            "min_p": sampling.min_p != 0,
            "repetition_penalty": sampling.repetition_penalty != 1,
            "logit_bias": bool(sampling.logit_bias),
        }
        for name in (name for name, is_set in processed.items() if is_set):
            raise UserError(f"expected no `{name}`: vLLM reports log-probabilities after it, not before")

    def body(
        self,
        tokens: list[int],
        *,
        name: str,
        sampling: SamplingParams,
        max_new_tokens: int,
        seed: int,
        ends: list[int],
    ) -> dict[str, Any]:
        return {
            "request_id": name,
            "token_ids": tokens,
            "stream": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": max_new_tokens,
                "seed": seed,
                # vLLM counts the sampled token among them.
                "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
                "stop_token_ids": ends,
                # The end tokens of its own configuration may differ.
                "ignore_eos": True,
                "detokenize": False,
            },
        }

    def read(self, event: bytes, *, num_known: int, num_top: int) -> Increment:
        said = msgspec.json.decode(event, type=_Event)
        if said.error is not None:
            kind = UserError if said.error.code < 500 else WorldError
            raise kind(f"vLLM refused a request: {said.error.message}")
        choice = said.choices[0] if said.choices else _Choice()
        places = (choice.logprobs and choice.logprobs.content) or []
        return Increment(
            ids=choice.token_ids or [],
            logprobs=[_number(place) for place in places],
            tops=[_most_likely(place.top_logprobs, num_top) for place in places],
            ended=choice.finish_reason,
            labels=frozenset(span.version for span in choice.weight_versions or ()),
        )

    def abort(self, client: HttpClient, name: str) -> None:
        """Nothing to do: vLLM ends a request when its stream is closed."""

    def halt(self, client: HttpClient) -> None:
        client.call("POST", "/pause?mode=abort", what="a pause")

    def update(self, client: HttpClient, folder: Path, *, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client.call("POST", "/collective_rpc", body=body, what="new weights", timeout_s=UPDATE_TIMEOUT_S)
        cleared = client.call("POST", "/reset_prefix_cache", what="an empty cache")
        if not cleared["success"]:
            raise WorldError(f"the vLLM server at {client.url} keeps a KV cache of old weights")
        client.call("POST", "/update_weight_version", body={"new_version": label}, what="a new version")

    def verify(self, client: HttpClient, tensors: Mapping[str, Tensor]) -> None:
        """Verify by digests of its parameters: of all parameters on one accelerator. With several ranks vLLM splits the
        matrices, and on a CPU it repacks them; then only the other parameters are compared."""
        answer = client.call(
            "POST",
            "/weight_checker",
            body={"action": "checksum"},
            what="digests of its weights",
            timeout_s=UPDATE_TIMEOUT_S,
        )
        _verify_digests(answer["checksums"], tensors, where=f"the vLLM server at {client.url}")

    def proceed(self, client: HttpClient) -> None:
        client.call("POST", "/resume", what="its going on")


def _verify_digests(checksums: Mapping[str, str], tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Compare digests; `checksums` maps `dp0:pp0:pcp0:tp0:model.norm.weight` to the SHA-256 of its bytes on that
    rank."""
    import torch

    is_cut = len({key.split(":")[3] for key in checksums}) > 1
    found = [
        (key.split(":", 4)[4], digest)
        for key, digest in checksums.items()
        if digest != _NO_BYTES and (not is_cut or key.endswith(_NORM))
    ]
    expected = dict(_as_vllm_has_them(tensors))
    known = [(name, digest) for name, digest in found if name in expected]
    last_norm = [digest for name, digest in known if name == _LAST_NORM]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    served = [each for each in dtypes if _digest(expected[_LAST_NORM], each) in last_norm]
    if not served:
        raise IntegrityError(f"{where} does not have the weights that it was given: {_LAST_NORM} differs")
    for name, digest in known:
        if _digest(expected[name], served[0]) != digest:
            raise IntegrityError(f"{where} does not have the weights that it was given: {name} differs")


def _as_vllm_has_them(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """vLLM's parameters, each with the tensors that it concatenates."""
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")]
            yield name.replace("q_proj", "qkv_proj"), parts
        elif ".gate_proj." in name:
            yield name.replace("gate_proj", "gate_up_proj"), [tensor, tensors[name.replace("gate", "up")]]
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            # Rows of zeros up to a multiple of 64.
            yield name, [tensor, tensor.new_zeros(-len(tensor) % _VOCABULARY_STEP, tensor.shape[1])]
        else:
            yield name, [tensor]


def _digest(parts: Sequence[Tensor], dtype: torch.dtype) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(tensor_bytes(part.to(dtype)))
    return digest.hexdigest()


def _number(candidate: _Candidate) -> float:
    return nan if candidate.logprob is None else candidate.logprob


def _most_likely(candidates: Sequence[_Candidate], count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens; the list also contains the sampled token, which may not be one of them."""
    ranked = sorted({each.token_id: _number(each) for each in candidates}.items(), key=lambda item: -item[1])
    return ranked[:count]
