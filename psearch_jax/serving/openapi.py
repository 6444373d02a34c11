"""What serving/chat.py speaks, as OpenAPI 3.1: for clients that are generated, and for those that test them."""

from __future__ import annotations

from typing import Any


def description(with_token: bool) -> dict[str, Any]:
    """The document that /openapi.json returns; `with_token`: a bearer token is asked for."""
    security = [{"bearer": []}] if with_token else []
    return {
        "openapi": "3.1.0",
        "info": {"title": "psearch_jax", "version": "1", "description": "A policy that answers by searching."},
        "paths": {
            "/v1/chat/completions": {
                "post": {
                    "operationId": "answer",
                    "security": security,
                    "requestBody": {"required": True, "content": _json(_REQUEST)},
                    "responses": {
                        "200": {
                            "description": "the answer; with stream as server-sent events, each a chunk",
                            "content": {**_json(_COMPLETION), "text/event-stream": {"schema": {"type": "string"}}},
                        },
                        **_refusals(*([401] if with_token else []), 400, 408, 413, 422, 503),
                    },
                }
            },
            "/v1/models": _get("models", "the one policy", _json(_MODELS), security),
            "/health": {
                "get": {
                    "operationId": "health",
                    "responses": {
                        code: {"description": text, "content": _json(_HEALTH)}
                        for code, text in (("200", "questions are answered"), ("503", "they fail"))
                    },
                }
            },
            "/metrics": _get("metrics", "Prometheus text", {"text/plain": {"schema": {"type": "string"}}}, security),
        },
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _get(name: str, what: str, content: dict[str, Any], security: list[Any]) -> dict[str, Any]:
    found = {"200": {"description": what, "content": content}, **_refusals(*([401] if security else []))}
    return {"get": {"operationId": name, "security": security, "responses": found}}


def _refusals(*codes: int) -> dict[str, Any]:
    return {str(code): {"description": "refused: the message says why", "content": _json(_ERROR)} for code in codes}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_ERROR = _object({"error": _object({"message": _TEXT, "type": _TEXT, "code": _WHOLE})})
_HEALTH = _object({"status": _TEXT})
_MODELS = _object({"object": {"const": "list"}, "data": {"type": "array", "items": _object({"id": _TEXT})}})
_PART = _object({"type": {"const": "text"}, "text": _TEXT})
_REQUEST = _object(
    {
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": _object(
                {
                    "role": {"type": "string", "examples": ["user"]},
                    "content": {
                        "anyOf": [
                            {"type": "string", "pattern": "\\S"},
                            {"type": "array", "items": _PART, "minItems": 1},
                        ]
                    },
                }
            ),
        }
    },
    model=_TEXT,
    stream={"type": ["boolean", "null"]},
    temperature={"type": ["number", "null"], "minimum": 0, "maximum": 2},
    seed={"type": ["integer", "null"], "minimum": -(2**63) + 1, "maximum": 2**63 - 1},
    n={"enum": [1, None]},
)
_PASSAGE = _object({"id": _TEXT, "title": _TEXT, "text": _TEXT})
_TURN = _object(
    {
        "text": _TEXT,
        "queries": {"type": "array", "items": _TEXT},
        "passages": {"type": "array", "items": {"type": "array", "items": _PASSAGE}},
        "seconds": _NUMBER,
        "search_seconds": _NUMBER,
    }
)
_COMPLETION = _object(
    {
        "id": _TEXT,
        "object": {"const": "chat.completion"},
        "created": _WHOLE,
        "model": _TEXT,
        "choices": {
            "type": "array",
            "items": _object(
                {
                    "index": _WHOLE,
                    "message": _object({"role": {"const": "assistant"}, "content": _TEXT, "reasoning_content": _TEXT}),
                    "finish_reason": {"enum": ["stop", "length"]},
                }
            ),
        },
        "usage": _object({"prompt_tokens": _WHOLE, "completion_tokens": _WHOLE, "total_tokens": _WHOLE}),
        "psearch": _object(
            {
                "question": _TEXT,
                "answer": {"type": ["string", "null"]},
                "status": _TEXT,
                "turns": {"type": "array", "items": _TURN},
                "found_in": {"type": "array", "items": _TEXT},
                "seconds": _NUMBER,
            }
        ),
    }
)
