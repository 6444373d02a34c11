"""The OpenAPI 3.1 document of retrieval/remote/server.py, and the helpers with which every server here writes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
PROMETHEUS = {"text/plain": {"schema": TEXT}}


def fields(required: Schema, **optional: Schema) -> Schema:
    """The schema of an object with these fields; other fields are allowed."""
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def rows_of(item: Schema, **bounds: int) -> Schema:
    """The schema of a list."""
    return {"type": "array", "items": item, **bounds}


def json_of(schema: Schema) -> Schema:
    """A JSON body."""
    return {"application/json": {"schema": schema}}


@dataclass(frozen=True)
class Describer:
    """Writes operations that share one form of error.

    Attributes:
      error: the schema of an error.
      token: whether a bearer token is required.
    """

    error: Schema
    token: bool

    def operation(self, name: str, what: str, content: Schema, *refusals: int, body: Schema | None = None) -> Schema:
        """An operation that answers `content`, described by `what`, or refuses with one of these status codes."""
        refused = {"description": "refused: the message says why", "content": json_of(self.error)}
        codes = (*refusals, *((401,) if self.token else ()))
        return {
            "operationId": name,
            "security": [{"bearer": []}] if self.token else [],
            **({"requestBody": {"required": True, "content": json_of(body)}} if body else {}),
            "responses": {"200": {"description": what, "content": content}, **{str(code): refused for code in codes}},
        }

    def health(self, schema: Schema, well: str, ill: str) -> Schema:
        """GET /health, which requires no token."""
        both = (("200", well), ("503", ill))
        responses = {code: {"description": text, "content": json_of(schema)} for code, text in both}
        return {"operationId": "health", "security": [], "responses": responses}

    def document(self, title: str, about: str, paths: Schema) -> Schema:
        """The complete document. `paths` maps path and method to operation."""
        return {
            "openapi": "3.1.0",
            "info": {"title": title, "version": "1", "description": about},
            "paths": paths,
            "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        }


def description(queries: int, query_chars: int, topk: int, rows: int, with_token: bool) -> Schema:
    """The document at /openapi.json of the retrieval server, with the limits of one request."""
    describer = Describer(fields({"detail": TEXT}), with_token)
    request = fields(
        {"queries": rows_of({**TEXT, "maxLength": query_chars}, maxItems=queries)},
        topk={"type": ["integer", "null"], "minimum": 1, "maximum": topk},
        return_scores={"type": "boolean"},
    )
    request["description"] = f"Queries x topk may be at most {rows}."
    passage = fields({"id": TEXT, "contents": TEXT})
    result = {"anyOf": [passage, fields({"document": passage, "score": NUMBER})]}
    text_or_null = {"type": ["string", "null"]}
    about = fields(
        {name: text_or_null for name in ("corpus", "corpus_sha256", "ranking_sha256")}
        | {"rows": {"type": ["integer", "null"]}}
    )
    answer = json_of(fields({"result": rows_of(rows_of(result))}))
    health = fields({"status": TEXT, "rows": {"type": ["integer", "null"]}})
    return describer.document(
        "psearch_jax retrieval",
        "Passages for queries.",
        {
            "/retrieve": {
                "post": describer.operation(
                    "retrieve", "one ranking per query", answer, 400, 408, 413, 422, 503, body=request
                )
            },
            "/info": {"get": describer.operation("info", "what is searched", json_of(about))},
            "/health": {"get": describer.health(health, "searches work", "they fail")},
            "/metrics": {"get": describer.operation("metrics", "Prometheus text", PROMETHEUS)},
        },
    )
