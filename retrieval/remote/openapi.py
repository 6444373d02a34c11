"""OpenAPI 3.1 documents made from the pydantic models of requests and answers, for every server here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Model = type[BaseModel]


@dataclass(frozen=True)
class Operation:
    """One method of one path, which answers `answer` as JSON, or text where that is None."""

    method: str
    path: str
    answer: Model | None
    request: Model | None = None
    refusals: Sequence[int] = ()
    failure: Model | None = None  # the answer with status 503, if it is no error
    open: bool = False  # needs no token
    streams: bool = False  # may answer with server-sent events


def document(title: str, operations: Sequence[Operation], error: Model, with_token: bool) -> dict[str, Any]:
    """The document at /openapi.json; `error` is the answer of a refused request."""
    models = {m for o in operations for m in (o.answer, o.request, o.failure) if m} | {error}
    references, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )

    def content(model: Model | None, streams: bool = False) -> dict[str, Any]:
        text = {"schema": {"type": "string"}}
        if model is None:
            return {"text/plain": text}
        json_content = {"application/json": {"schema": references[model, "validation"]}}
        return json_content | ({"text/event-stream": text} if streams else {})

    paths: dict[str, dict[str, Any]] = {}
    for o in operations:
        secured = with_token and not o.open
        answers = {"200": {"description": "answered", "content": content(o.answer, o.streams)}}
        for code in (*o.refusals, *((401,) if secured else ())):
            answers[str(code)] = {"description": "refused", "content": content(error)}
        if o.failure:
            answers["503"] = {"description": "failing", "content": content(o.failure)}
        operation: dict[str, Any] = {"security": [{"bearer": []}] if secured else [], "responses": answers}
        if o.request:
            operation["requestBody"] = {"required": True, "content": content(o.request)}
        paths.setdefault(o.path, {})[o.method] = operation
    components = {
        "schemas": definitions.get("$defs", {}),
        "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
    }
    return {"openapi": "3.1.0", "info": {"title": title, "version": "1"}, "paths": paths, "components": components}
