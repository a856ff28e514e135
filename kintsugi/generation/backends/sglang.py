"""SGLang (0.5): tokens in and out by `/generate`, weights by `/update_weights_from_disk`.

Its log-probabilities are at the temperature (1 where greedy), after a repetition penalty and biases, which are
therefore refused, and before top-k, top-p and min-p. `SGLANG_RETURN_ORIGINAL_LOGPROB` must not be set.
"""

from __future__ import annotations

from math import nan
from typing import Any, TypeVar

import msgspec

from kintsugi.errors import IntegrityError, UserError, WorldError
from kintsugi.generation.backends.dialect import HEALTH_TIMEOUT_S, UPDATE_TIMEOUT_S, Ended, Increment
from kintsugi.generation.backends.http import HttpClient
from kintsugi.generation.backends.staged_weights import Greeting, StagedWeights
from kintsugi.types import SamplingParams

_READ_BACK = "model.norm.weight"
_NUM_READ_BACK = 100

T = TypeVar("T")
_Candidate = tuple[float | None, int, str | None]
"""(log-probability, token, its text)."""


class _Finish(msgspec.Struct):
    type: Ended
    message: str = ""
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    """Number of tokens of the whole stream so far."""
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Candidate] = []
    """All so far, or those of this event alone with `--incremental-streaming-output`."""
    output_top_logprobs: list[list[_Candidate] | None] = []
    weight_version: str | None = None
    weight_versions: list[_Span] = []


class _Refusal(msgspec.Struct):
    message: str
    code: int = 400


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    """Like `output_token_logprobs`."""
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Refusal | None = None


class SGLang:
    name = "SGLang"
    generate_path = "/generate"
    how_to_scale = "without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
    keeps_streams = False
    reports_ends = True

    def connect(self, client: HttpClient, greeting: Greeting) -> bool | None:
        """SGLang has no call that would try it."""
        return None

    def note(self) -> str:
        return ""

    def max_length(self, client: HttpClient) -> int:
        models = client.call("GET", "/v1/models", what="its model")["data"]
        return int(models[0]["max_model_len"])

    def health(self, client: HttpClient) -> None:
        client.call("GET", "/health_generate", what="its health", timeout_s=HEALTH_TIMEOUT_S)

    def label(self, client: HttpClient) -> str:
        return str(client.call("GET", "/model_info", what="the name of its weights")["weight_version"])

    def check(self, sampling: SamplingParams) -> None:
        for name, is_set in (
            ("repetition_penalty", sampling.repetition_penalty != 1),
            ("logit_bias", bool(sampling.logit_bias)),
        ):
            if is_set:
                raise UserError(
                    f"expected no `{name}`: SGLang reports log-probabilities after it, not before"
                )

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
            "rid": name,
            "input_ids": tokens,
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": sampling.top_logprobs,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": ends,
                # With this it ignores stop tokens too: those are then detected here.
                "ignore_eos": sampling.ignore_end,
                "sampling_seed": seed,
                "skip_special_tokens": False,
            },
        }

    def read(self, event: bytes, *, num_known: int, num_top: int) -> Increment:
        said = msgspec.json.decode(event, type=_Event)
        if said.error is not None:
            kind = UserError if said.error.code < 500 else WorldError
            raise kind(f"SGLang refused a request: {said.error.message}")
        meta, finish = said.meta_info, said.meta_info.finish_reason
        if finish is not None and finish.status_code is not None:
            kind = UserError if finish.status_code < 500 else WorldError
            raise kind(f"SGLang gave a request up: {finish.message}")
        num_new = max(0, meta.completion_tokens - num_known)
        ids = _newest(said.output_ids, num_new)
        tops = _newest(meta.output_top_logprobs, num_new) if num_top else [None] * len(ids)
        labels = [span.version for span in meta.weight_versions] or [meta.weight_version or "unknown"]
        return Increment(
            ids=ids,
            logprobs=[_number(place) for place in _newest(meta.output_token_logprobs, num_new)],
            tops=[[(each[1], _number(each)) for each in top or ()] for top in tops],
            ended=None if finish is None else finish.type,
            spans=tuple((label, 0) for label in labels),
        )

    def abort(self, client: HttpClient, name: str) -> None:
        """Abort explicitly: SGLang notices a closed stream only after seconds."""
        client.call("POST", "/abort_request", body={"rid": name}, what="the end of a request")

    def halt(self, client: HttpClient) -> None:
        """Abort all requests. SGLang's pause endpoint would wait for their end in steps of a second; this returns
        immediately."""
        client.call("POST", "/abort_request", body={"abort_all": True}, what="the end of all requests")

    def freeze(self, client: HttpClient, *, keep_cache: bool) -> None:
        raise AssertionError("streams of SGLang are ended")

    def update(self, client: HttpClient, weights: StagedWeights, *, label: str) -> None:
        client.call("POST", "/pause_generation", body={"mode": "retract"}, what="a pause")
        body = {"model_path": str(weights.folder), "weight_version": label, "flush_cache": True}
        answer = client.call(
            "POST",
            "/update_weights_from_disk",
            body=body,
            what="new weights",
            timeout_s=UPDATE_TIMEOUT_S,
        )
        if not answer["success"]:
            raise WorldError(f"the SGLang server at {client.url} took no new weights: {answer['message']}")

    def verify(self, client: HttpClient, weights: StagedWeights, *, label: str) -> None:
        """Verify by reading some parameters back: SGLang's own digests differ between kinds of devices."""
        import torch

        body = {"name": _READ_BACK, "truncate_size": _NUM_READ_BACK}
        found = client.call("POST", "/get_weights_by_name", body=body, what="some of its weights")
        expected = weights[_READ_BACK][:_NUM_READ_BACK]
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        if all(expected.to(dtype).to(torch.float32).tolist() != found for dtype in dtypes):
            raise IntegrityError(
                f"the SGLang server at {client.url} does not have the weights that it was given: {_READ_BACK} differs"
            )

    def proceed(self, client: HttpClient) -> None:
        client.call("POST", "/continue_generation", body={}, what="its going on")


def _newest(values: list[T], count: int) -> list[T]:
    return values[max(0, len(values) - count) :]


def _number(candidate: _Candidate) -> float:
    return nan if candidate[0] is None else candidate[0]
