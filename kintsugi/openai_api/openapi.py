"""OpenAPI description of the API, generated from the request types."""

from __future__ import annotations

from typing import Any

import msgspec

from kintsugi.openai_api.requests import ChatRequest, CompletionRequest

_SCHEMAS, _COMPONENTS = msgspec.json.schema_components(
    (CompletionRequest, ChatRequest), ref_template="#/components/schemas/{name}"
)


def _posted(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    answers = {
        "200": {"description": "The API's object, or server-sent events where `stream` is true."},
        "4XX": {"description": "The request's own fault, in the API's error shape."},
        "503": {"description": "No server is ready."},
        "504": {"description": "The request timed out."},
    }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": answers}}


def _got(summary: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}


DESCRIPTION: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "kintsugi serve", "version": "1"},
    "paths": {
        "/v1/completions": _posted("Continue a text.", _SCHEMAS[0]),
        "/v1/chat/completions": _posted("Continue a conversation.", _SCHEMAS[1]),
        "/v1/models": _got("The model that is served."),
        "/health": _got("Whether a server is ready, and the state of every server."),
        "/metrics": _got("Figures in Prometheus' text format."),
    },
    "components": {
        "schemas": _COMPONENTS,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    },
}
