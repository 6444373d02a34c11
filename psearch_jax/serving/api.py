"""The requests of serving/chat.py: the part of OpenAI's chat completions that is used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from psearch_jax.limits import MAX_SEED, MAX_TEMPERATURE

MAX_QUESTION_CHARS = 8192


class ChatMessage(BaseModel):
    """A message; only the last one of role `user` is used, whose content is text or a list of parts."""

    role: str
    content: Any = None


class ChatRequest(BaseModel):
    """A request for an answer. Other fields of OpenAI's requests are ignored."""

    model_config = ConfigDict(strict=True)

    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    n: Literal[1] | None = None

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
        content = next((message.content for message in reversed(self.messages) if message.role == "user"), None)
        if isinstance(content, list):  # parts, of which only text counts
            parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts = [part.get("text") for part in parts]
            content = " ".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        return content.strip() if isinstance(content, str) else ""
