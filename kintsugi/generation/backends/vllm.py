"""vLLM (0.25, 0.32): tokens in and out by `/inference/v1/generate`, weights by its endpoints for RL.

It has to be started with `VLLM_SERVER_DEV_MODE=1` in its environment and `--enable-scale-out --logprobs-mode
processed_logprobs`. Log-probabilities are then those of the distribution that it samples from: at the temperature (1
where greedy), but also after all logits processors, which are therefore refused.

Weights go through its weight transfer (init, start, update, finish) where it was started with `vllm_plugin`, and
through `reload_weights` of a folder otherwise. Requests are frozen meanwhile and keep their KV cache unless it is to be
recomputed. The label of the weights is the salt of the prefix cache: no request uses entries of other weights than it
was started with.

vLLM before `/weight_info` does not know labels, and does not report which tokens are of which weights. There the plugin
is required, which keeps the label in its receipts, and streams are closed before an update, so that each is of one
version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

import msgspec

from kintsugi.errors import ConfigError, IntegrityError, UserError, WorldError
from kintsugi.generation.backends.dialect import HEALTH_TIMEOUT_S, UPDATE_TIMEOUT_S, Ended, Increment
from kintsugi.generation.backends.http import HttpClient
from kintsugi.generation.backends.staged_weights import Greeting, StagedWeights, check_digests
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
    token: str = ""
    """`token_id:7` in vLLM 0.25, which has no `token_id`."""
    logprob: float | None = None
    """None if it was not a number."""
    token_id: int | None = None

    @property
    def id(self) -> int:
        if self.token_id is not None:
            return self.token_id
        name, _, number = self.token.partition(":")
        if name != "token_id" or not number.isdecimal():
            raise msgspec.ValidationError(f"expected a token as token_id:7, got {self.token!r}")
        return int(number)


class _Place(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Place] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int


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


class _Receipt(msgspec.Struct):
    """`vllm_plugin/kintsugi_vllm.py` describes it."""

    reads_memory: bool
    label: str
    digests: dict[str, str]
    num_equal: int
    num_split: int
    different: list[str]


class Vllm:
    name = "vLLM"
    generate_path = "/inference/v1/generate"
    how_to_scale = "with --logprobs-mode processed_logprobs"
    reports_ends = False

    def __init__(self) -> None:
        self._has_plugin = False
        self._has_labels = True

    @property
    def keeps_streams(self) -> bool:
        return self._has_labels

    def connect(self, client: HttpClient, greeting: Greeting) -> bool | None:
        body = {"init_info": {"path": greeting.path, "content": greeting.content}}
        try:
            client.call("POST", "/init_weight_transfer_engine", body=body, what="its weight transfer")
            receipts = self._receipts(client)
        except (WorldError, IntegrityError):
            # It was started without the plugin; if it is gone, the next call shows it.
            self.health(client)
            if not self._has_labels:
                raise ConfigError(
                    f"`generation.urls`: expected the vLLM server at {client.url} to name its weights: this version "
                    "of vLLM does so only with --worker-extension-cls kintsugi_vllm.WeightReceipts and "
                    "--weight-transfer-config (docs/generation_backends.md)"
                ) from None
            return None
        self._has_plugin = True
        return all(receipt.reads_memory for receipt in receipts)

    def note(self) -> str:
        if self._has_plugin:
            return ""
        return "vLLM reads each version from a folder: its weight transfer needs --weight-transfer-config"

    def max_length(self, client: HttpClient) -> int:
        self._has_labels = client.status("GET", "/weight_info") != 404
        if not self._has_labels and client.status("GET", "/is_paused") == 404:
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
        if not self._has_labels:
            return ", ".join(
                dict.fromkeys(receipt.label or "without a label" for receipt in self._receipts(client))
            )
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
        label: str,
        sampling: SamplingParams,
        max_new_tokens: int,
        seed: int,
        ends: list[int],
    ) -> dict[str, Any]:
        return {
            "request_id": name,
            "token_ids": tokens,
            "stream": True,
            "cache_salt": label,
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
            spans=tuple((span.version, span.start) for span in choice.weight_versions or ()),
        )

    def abort(self, client: HttpClient, name: str) -> None:
        """Nothing to do: vLLM ends a request when its stream is closed."""

    def halt(self, client: HttpClient) -> None:
        client.call("POST", "/pause?mode=abort", what="a pause")

    def freeze(self, client: HttpClient, *, keep_cache: bool) -> None:
        clear_cache = "false" if keep_cache else "true"
        client.call("POST", f"/pause?mode=keep&clear_cache={clear_cache}", what="a pause")

    def update(self, client: HttpClient, weights: StagedWeights, *, label: str) -> None:
        if self._has_plugin:
            self._transfer(client, weights, label=label)
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        client.call("POST", "/collective_rpc", body=body, what="new weights", timeout_s=UPDATE_TIMEOUT_S)
        client.call("POST", "/update_weight_version", body={"new_version": label}, what="a new version")

    def _transfer(self, client: HttpClient, weights: StagedWeights, *, label: str) -> None:
        parts = {name: parts for name, parts in _fused(weights) if len(parts) > 1}
        info = {"label": label, "paths": list(weights.digests), "parts": parts}
        call = partial(client.call, "POST", what="new weights", timeout_s=UPDATE_TIMEOUT_S)
        try:
            call("/start_weight_update")
        except WorldError:
            # A predecessor of this process died in an update, which vLLM takes for unfinished.
            call("/finish_weight_update", body={"weight_version": None})
            call("/start_weight_update")
        call("/update_weights", body={"update_info": info})
        call("/finish_weight_update", body={"weight_version": label})

    def verify(self, client: HttpClient, weights: StagedWeights, *, label: str) -> None:
        if self._has_plugin:
            where = f"the vLLM server at {client.url}"
            _verify_receipts(self._receipts(client), weights, label=label, where=where)
        else:
            self._verify_checksums(client, weights)

    def _receipts(self, client: HttpClient) -> list[_Receipt]:
        """Receipts of all workers."""
        body = {"method": "kintsugi_receipt"}
        said = client.call("POST", "/collective_rpc", body=body, what="receipts for its weights")
        try:
            return msgspec.convert(said["results"], list[_Receipt])
        except msgspec.ValidationError as error:
            raise IntegrityError(f"the vLLM server at {client.url} has another plugin: {error}") from error

    def _verify_checksums(self, client: HttpClient, tensors: Mapping[str, Tensor]) -> None:
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


def _verify_receipts(receipts: Sequence[_Receipt], weights: StagedWeights, *, label: str, where: str) -> None:
    """Check that every worker has finished this update, that all bytes were read, and that parameters in the layout of
    the files have their values."""
    for rank, receipt in enumerate(receipts):
        if receipt.label != label:
            raise IntegrityError(
                f"{where} does not have the weights that it was given: expected {label} in worker {rank}, got "
                f"{receipt.label or 'an unfinished update'}"
            )
        if receipt.different:
            raise IntegrityError(
                f"{where} does not have the weights that it was given: {receipt.different[0]} differs"
            )
        if not receipt.num_equal or (receipt.num_split and len(receipts) == 1):
            raise IntegrityError(f"{where} has a model of another shape: {receipt}")
    check_digests(
        {path: digest for receipt in receipts for path, digest in receipt.digests.items()},
        weights,
        where=where,
    )


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


def _fused(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """vLLM's parameters, each with the names of the tensors that it concatenates."""
    for name in names:
        if ".q_proj." in name:
            parts = [name.replace("q_proj", each) for each in ("q_proj", "k_proj", "v_proj")]
            yield name.replace("q_proj", "qkv_proj"), parts
        elif ".gate_proj." in name:
            yield name.replace("gate_proj", "gate_up_proj"), [name, name.replace("gate", "up")]
        else:
            yield name, [name]


def _as_vllm_has_them(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """vLLM's parameters, each with the tensors that it consists of."""
    for name, parts in _fused(tensors):
        found = [tensors[part] for part in parts]
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            # Rows of zeros up to a multiple of 64.
            found.append(found[0].new_zeros(-len(found[0]) % _VOCABULARY_STEP, found[0].shape[1]))
        yield name, found


def _digest(parts: Sequence[Tensor], dtype: torch.dtype) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(tensor_bytes(part.to(dtype)))
    return digest.hexdigest()


def _number(candidate: _Candidate) -> float:
    return nan if candidate.logprob is None else candidate.logprob


def _most_likely(candidates: Sequence[_Candidate], count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens; the list also contains the sampled token, which may not be one of them."""
    ranked = sorted({each.id: _number(each) for each in candidates}.items(), key=lambda item: -item[1])
    return ranked[:count]
