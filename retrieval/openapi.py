"""What retrieval/server.py speaks, as OpenAPI 3.1, and the words in which every server here describes itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
PROMETHEUS = {"text/plain": {"schema": TEXT}}


def fields(required: Schema, **optional: Schema) -> Schema:
    """An object, by the schemas of its fields; it may have others."""
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def rows_of(item: Schema, **bounds: int) -> Schema:
    """A list."""
    return {"type": "array", "items": item, **bounds}


def json_of(schema: Schema) -> Schema:
    """A body of JSON."""
    return {"application/json": {"schema": schema}}


@dataclass(frozen=True)
class Describer:
    """Writes operations that refuse in one form.

    Attributes:
      error: the schema of a refusal.
      token: a bearer token is asked for.
    """

    error: Schema
    token: bool

    def operation(self, name: str, what: str, content: Schema, *refusals: int, body: Schema | None = None) -> Schema:
        """One that answers `what` as `content`, and may refuse with these codes."""
        refused = {"description": "refused: the message says why", "content": json_of(self.error)}
        codes = (*refusals, *((401,) if self.token else ()))
        return {
            "operationId": name,
            "security": [{"bearer": []}] if self.token else [],
            **({"requestBody": {"required": True, "content": json_of(body)}} if body else {}),
            "responses": {"200": {"description": what, "content": content}, **{str(code): refused for code in codes}},
        }

    def health(self, schema: Schema, well: str, ill: str) -> Schema:
        """GET /health, which asks for no token."""
        both = (("200", well), ("503", ill))
        responses = {code: {"description": text, "content": json_of(schema)} for code, text in both}
        return {"operationId": "health", "security": [], "responses": responses}

    def document(self, title: str, about: str, paths: Schema) -> Schema:
        """The whole, by path and method."""
        return {
            "openapi": "3.1.0",
            "info": {"title": title, "version": "1", "description": about},
            "paths": paths,
            "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        }


def description(queries: int, query_chars: int, topk: int, rows: int, with_token: bool) -> Schema:
    """What /openapi.json of the retrieval server returns, by what one request may ask for."""
    describer = Describer(fields({"detail": TEXT}), with_token)
    asked = fields(
        {"queries": rows_of({**TEXT, "maxLength": query_chars}, maxItems=queries)},
        topk={"type": ["integer", "null"], "minimum": 1, "maximum": topk},
        return_scores={"type": "boolean"},
    )
    asked["description"] = f"Queries x topk may be {rows} at most."
    passage = fields({"id": TEXT, "contents": TEXT})
    found = {"anyOf": [passage, fields({"document": passage, "score": NUMBER})]}
    told = {"type": ["string", "null"]}
    about = fields({"corpus": told, "corpus_sha256": told, "rows": {"type": ["integer", "null"]}})
    answer = json_of(fields({"result": rows_of(rows_of(found))}))
    health = fields({"status": TEXT, "rows": {"type": ["integer", "null"]}})
    return describer.document(
        "psearch_jax retrieval",
        "Passages for queries.",
        {
            "/retrieve": {
                "post": describer.operation(
                    "retrieve", "a ranking a query", answer, 400, 408, 413, 422, 503, body=asked
                )
            },
            "/info": {"get": describer.operation("info", "what is searched", json_of(about))},
            "/health": {"get": describer.health(health, "searches work", "they fail")},
            "/metrics": {"get": describer.operation("metrics", "Prometheus text", PROMETHEUS)},
        },
    )
