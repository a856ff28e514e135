"""Validation of requests before any work is done for them."""

from __future__ import annotations

from kintsugi.errors import DataError, UserError
from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.types import MIN_TEMPERATURE, SamplingParams

MAX_STOP_TOKENS = 16
"""Most end tokens of the model and stop tokens of a request together."""
MAX_STOP_TEXTS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOP_K = 1 << 31
MAX_LOGIT_BIAS = 1e6
MAX_REPETITION_PENALTY = 1e3
"""Keeps processed logits finite in float32 at every temperature; the smallest penalty is 1 / this."""


def check_request(
    request: GenerationRequest, *, max_length: int, vocab_size: int, num_end_tokens: int, reads_text: bool
) -> None:
    """Raise DataError for invalid tokens and UserError for invalid sampling parameters."""
    name = "/".join(map(str, request.id))
    sampling = request.sampling
    if len(request.prompt) == 0:
        raise DataError(f"expected a prompt of at least one token, got none for {name}")
    if sampling.max_new_tokens < 1:
        raise UserError(f"expected `max_new_tokens` of at least 1, got {sampling.max_new_tokens} for {name}")
    if request.max_length > max_length:
        raise DataError(
            f"expected prompt + `max_new_tokens` within `generation.max_length` {max_length}, "
            f"got {len(request.prompt)} + {sampling.max_new_tokens} for {name}"
        )
    if request.prompt.min() < 0 or request.prompt.max() >= vocab_size:
        raise DataError(
            f"expected prompt tokens within the vocabulary of {vocab_size}, got others for {name}"
        )
    if request.produced is not None:
        _check_produced(request, vocab_size=vocab_size, name=name)
    _check_distribution(sampling, vocab_size=vocab_size, name=name)
    _check_ends(
        sampling, vocab_size=vocab_size, num_end_tokens=num_end_tokens, reads_text=reads_text, name=name
    )


def _check_produced(request: GenerationRequest, *, vocab_size: int, name: str) -> None:
    """Validate tokens that came over the wire from another server."""
    tokens = request.produced
    assert tokens is not None
    num_tokens = len(tokens.ids)
    if num_tokens >= request.sampling.max_new_tokens:
        raise DataError(
            f"expected fewer produced tokens than `max_new_tokens` {request.sampling.max_new_tokens}, "
            f"got {num_tokens} for {name}"
        )
    if num_tokens and (tokens.ids.min() < 0 or tokens.ids.max() >= vocab_size):
        raise DataError(
            f"expected produced tokens within the vocabulary of {vocab_size}, got others for {name}"
        )
    shape = (num_tokens, request.sampling.top_logprobs)
    if not (
        len(tokens.logprobs) == len(tokens.versions) == num_tokens
        and tokens.top_ids.shape == tokens.top_logprobs.shape == shape
    ):
        raise DataError(f"expected a log-probability and a version per produced token, got others for {name}")


def _check_distribution(sampling: SamplingParams, *, vocab_size: int, name: str) -> None:
    if sampling.temperature != 0 and not MIN_TEMPERATURE <= sampling.temperature < float("inf"):
        raise UserError(
            f"expected `temperature` 0 or at least {MIN_TEMPERATURE}, got {sampling.temperature} for {name}"
        )
    if not 0 <= sampling.top_k <= MAX_TOP_K:
        raise UserError(f"expected `top_k` from 0 to {MAX_TOP_K}, got {sampling.top_k} for {name}")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"expected `top_p` above 0 and up to 1, got {sampling.top_p} for {name}")
    if not 0 <= sampling.min_p < 1:
        raise UserError(f"expected `min_p` from 0 and below 1, got {sampling.min_p} for {name}")
    if not 1 / MAX_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise UserError(
            f"expected `repetition_penalty` from {1 / MAX_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}, "
            f"got {sampling.repetition_penalty} for {name}"
        )
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"expected tokens of `logit_bias` within the vocabulary of {vocab_size}, got {token} for {name}"
            )
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise UserError(
                f"expected values within ±{MAX_LOGIT_BIAS} in `logit_bias`, got {bias} for token {token} of {name}"
            )
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise UserError(f"expected each token of `logit_bias` once, got one twice for {name}")
    if not 0 <= sampling.top_logprobs <= min(MAX_TOP_LOGPROBS, vocab_size):
        raise UserError(
            f"expected `top_logprobs` from 0 to {min(MAX_TOP_LOGPROBS, vocab_size)}, "
            f"got {sampling.top_logprobs} for {name}"
        )


def _check_ends(
    sampling: SamplingParams, *, vocab_size: int, num_end_tokens: int, reads_text: bool, name: str
) -> None:
    if num_end_tokens + len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise UserError(f"expected at most {MAX_STOP_TOKENS} end and stop tokens, got more for {name}")
    if any(not 0 <= token < vocab_size for token in sampling.stop_token_ids):
        raise UserError(f"expected stop tokens within the vocabulary of {vocab_size}, got others for {name}")
    if len(sampling.stop) > MAX_STOP_TEXTS:
        raise UserError(f"expected at most {MAX_STOP_TEXTS} stop texts, got {len(sampling.stop)} for {name}")
    if not all(sampling.stop):
        raise UserError(f"expected stop texts of at least one character, got an empty one for {name}")
    if any("\ufffd" in text for text in sampling.stop):
        raise UserError(
            f"expected stop texts without U+FFFD, which stands for a character yet incomplete, got one for {name}"
        )
    if sampling.stop and not reads_text:
        raise UserError(f"expected no stop texts where there is no tokenizer, got some for {name}")
