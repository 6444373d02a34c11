"""The requests of serving/chat.py: the part of OpenAI's chat completions that is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from psearch_jax.limits import MAX_SEED, MAX_TEMPERATURE
from psearch_jax.text import tool_calls
from psearch_jax.text.dialects import ToolCalls
from psearch_jax.text.prompts import ROLES
from psearch_jax.text.tags import escape_tags
from psearch_jax.types import UserError

MAX_QUESTION_CHARS = 8192


class Function(BaseModel):
    """The function of a tool that the client runs."""

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}

    @field_validator("parameters")
    @classmethod
    def _check_schema(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            jsonschema.Draft202012Validator.check_schema(parameters)
        except jsonschema.SchemaError as error:
            raise ValueError(f"tools.function.parameters: not a JSON schema: {error.message}") from None
        except RecursionError:
            raise ValueError("tools.function.parameters: nested too deeply") from None
        if parameters.get("type") != "object":
            raise ValueError("tools.function.parameters: expected a JSON schema of type object")
        return parameters


class ToolSpec(BaseModel):
    """A tool that the client runs."""

    type: Literal["function"]
    function: Function


class CalledFunction(BaseModel):
    """A call in an earlier answer, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One of the parallel calls of an earlier answer."""

    function: CalledFunction


class ChatMessage(BaseModel):
    """A message, whose content is text or a list of parts. Without `tools`, only the last question counts."""

    role: str
    content: Any = None
    tool_calls: list[ToolCall] | None = None

    @property
    def text(self) -> str:
        """The content as text; "" if it has another form."""
        content = self.content
        if isinstance(content, list):  # parts, of which only text counts
            parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts = [part.get("text") for part in parts]
            content = " ".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        return content.strip() if isinstance(content, str) else ""


class ChatRequest(BaseModel):
    """A request for an answer. Other fields of OpenAI's requests are ignored."""

    model_config = ConfigDict(strict=True)

    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    n: Literal[1] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # its older name
    tools: list[ToolSpec] | None = None

    @model_validator(mode="after")
    def _check_question(self) -> ChatRequest:
        if not self.question.strip():
            raise ValueError("messages: expected a text as the content of the last one of role user")
        if len(self.question) > MAX_QUESTION_CHARS:
            length = f"messages: found a question of {len(self.question)} characters"
            raise ValueError(f"{length}, accepted: at most {MAX_QUESTION_CHARS}")
        return self

    @property
    def question(self) -> str:
        """The text of the last message of role `user`; "" without one, or with one of another form."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")

    def conversation(self, dialect: ToolCalls) -> list[int]:
        """The prompt of a request with tools that the client runs, as token ids: all messages, and the tools.

        Raises `UserError` for another role than those of `ROLES`, because a template writes it as trusted text.
        """
        messages = []
        for message in self.messages:
            if message.role not in ROLES:
                raise UserError(f"messages: role {message.role[:40]!r} found, accepted: {', '.join(ROLES)}")
            calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            text = "\n".join(filter(None, [message.text, tool_calls.write_json_calls(calls)]))
            messages.append({"role": message.role, "content": text if calls else escape_tags(text)})
        schemas = [tool.model_dump() for tool in self.tools or ()]
        return replace(dialect, schemas=schemas).chat(messages)
