"""The API of serving/chat.py as OpenAPI 3.1, for client generators and API tests."""

from __future__ import annotations

from psearch_jax.limits import MAX_SEED, MAX_TEMPERATURE
from retrieval.remote.openapi import NUMBER, PROMETHEUS, TEXT, WHOLE, Describer, Schema, fields, json_of, rows_of


def description(question_chars: int, with_token: bool) -> Schema:
    """The document that /openapi.json returns; `with_token`: a bearer token is required."""
    describer = Describer(fields({"error": fields({"message": TEXT, "type": TEXT, "code": WHOLE})}), with_token)
    streamed = {"text/event-stream": {"schema": fields({"data": TEXT})}}  # one event
    what = "the answer; with stream as server-sent events, each a chunk"
    refusals = (400, 403, 408, 413, 422, 503)
    return describer.document(
        "psearch_jax",
        "A policy that answers by searching.",
        {
            "/v1/chat/completions": {
                "post": describer.operation(
                    "answer", what, {**json_of(_COMPLETION), **streamed}, *refusals, body=_request(question_chars)
                )
            },
            "/v1/models": {"get": describer.operation("models", "the one policy", json_of(_MODELS), 403)},
            "/health": {"get": describer.health(fields({"status": TEXT}), "questions are answered", "answers fail")},
            "/metrics": {"get": describer.operation("metrics", "Prometheus text", PROMETHEUS, 403)},
        },
    )


def _is(**values: str) -> Schema:
    """An object with these fields and values."""
    return fields({name: {"const": value} for name, value in values.items()})


def _request(question_chars: int) -> Schema:
    """The schema of a request. Only the last message of role `user` counts, and of its parts only text."""
    question_text = {**TEXT, "pattern": "\\S", "maxLength": question_chars}
    parts = {
        **rows_of(
            {
                "anyOf": [
                    fields({"type": {"const": "text"}, "text": {**TEXT, "maxLength": question_chars}}),
                    {"not": _is(type="text")},
                ]
            }
        ),
        "contains": fields({"type": {"const": "text"}, "text": question_text}),
    }
    question = {"anyOf": [question_text, parts]}
    asked = fields({"role": {"const": "user"}, "content": question})
    message = {"type": "object", "anyOf": [asked, {"not": _is(role="user")}]}
    return fields(
        {"messages": {**rows_of(message), "contains": _is(role="user")}},
        stream={"type": ["boolean", "null"]},
        temperature={"type": ["number", "null"], "minimum": 0, "maximum": MAX_TEMPERATURE},
        seed={"type": ["integer", "null"], "minimum": -MAX_SEED, "maximum": MAX_SEED},
        n={"enum": [1, None]},
    )


_MODEL = fields({"id": TEXT, "object": {"const": "model"}, "created": WHOLE, "owned_by": TEXT})
_MODELS = fields({"object": {"const": "list"}, "data": rows_of(_MODEL)})
_TURN = fields(
    {
        "text": TEXT,
        "queries": rows_of(TEXT),
        "passages": rows_of(rows_of(fields({"id": TEXT, "title": TEXT, "text": TEXT}))),
        "seconds": NUMBER,
        "search_seconds": NUMBER,
    }
)
_MESSAGE = fields({"role": {"const": "assistant"}, "content": TEXT, "reasoning_content": TEXT})
_COMPLETION = fields(
    {
        "id": TEXT,
        "object": {"const": "chat.completion"},
        "created": WHOLE,
        "model": TEXT,
        "choices": rows_of(
            fields({"index": WHOLE, "message": _MESSAGE, "finish_reason": {"enum": ["stop", "length"]}})
        ),
        "usage": fields({"prompt_tokens": WHOLE, "completion_tokens": WHOLE, "total_tokens": WHOLE}),
        "psearch": fields(
            {
                "question": TEXT,
                "answer": {"type": ["string", "null"]},
                "status": TEXT,
                "turns": rows_of(_TURN),
                "found_in": rows_of(TEXT),
                "first_text_seconds": NUMBER,
                "seconds": NUMBER,
            }
        ),
    }
)
