"""Errors of the API, in the API's own shape and wording."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from kintsugi.errors import USER_ERRORS, DeadlineExceeded, Fault

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An error response: `ApiError("expected …", param="n")` is a 400.

    Not part of the tree in `errors.py`: it crosses no process boundary, and is not a failure of this program.
    """

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        """`{"error": {"message": …, "type": …, "param": …, "code": …}}`."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def too_long(num_prompt: int, max_new_tokens: int, *, max_length: int) -> ApiError:
    """A prompt that leaves no room for a completion."""
    return ApiError(
        f"This model's maximum context length is {max_length} tokens. However, you requested "
        f"{num_prompt + max_new_tokens} tokens ({num_prompt} in the prompt, {max_new_tokens} for the completion). "
        "Please reduce the length of the prompt or of the completion.",
        param="messages",
        code="context_length_exceeded",
    )


def queue_full(num_unanswered: int, *, limit: int) -> ApiError:
    return ApiError(
        f"The server is overloaded: {num_unanswered} completions are unanswered, and at most {limit} may be. "
        "Please try again later.",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        kind="rate_limit_error",
        code="queue_full",
        retry_after_s=RETRY_AFTER_S,
    )


def quota_exceeded(reason: str) -> ApiError:
    """A named key has used up its quota."""
    return ApiError(
        f"Rate limit reached: {reason}.",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=RETRY_AFTER_S,
    )


def unavailable(reason: str) -> ApiError:
    """No server can respond now; a retry may succeed."""
    return ApiError(
        f"No generation server is ready: {reason}. Please try again later.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        kind="service_unavailable_error",
        code="no_server_ready",
        retry_after_s=RETRY_AFTER_S,
    )


def broken() -> ApiError:
    """An internal error; the log has its details."""
    return ApiError(
        "The server had an error while processing your request.",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        kind="server_error",
    )


def wrong_key(*, given: bool) -> ApiError:
    said = "Incorrect API key provided." if given else "You didn't provide an API key."
    return ApiError(
        f"{said} Send it as `Authorization: Bearer YOUR_KEY`.",
        status=HTTPStatus.UNAUTHORIZED,
        code="invalid_api_key" if given else None,
    )


def unknown_model(name: str, *, served: str) -> ApiError:
    return ApiError(
        f"The model `{name}` does not exist; this server has `{served}`.",
        status=HTTPStatus.NOT_FOUND,
        param="model",
        code="model_not_found",
    )


def from_fault(fault: Fault) -> ApiError:
    """Error response for a request that generation gave up."""
    if fault.kind in USER_ERRORS:
        return ApiError(fault.message)
    if fault.kind == DeadlineExceeded.__name__:
        return ApiError(
            f"The request timed out: {fault.message}",
            status=HTTPStatus.GATEWAY_TIMEOUT,
            kind="timeout_error",
            code="timeout",
        )
    return unavailable(f"{fault.kind}: {fault.message}")
