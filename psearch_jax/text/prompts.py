"""Prompt templates: the packaged ones, a user's file, or the chat messages that come with a data row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from psearch_jax.runtime.paths import ASSETS
from psearch_jax.text.tags import escape_tags
from psearch_jax.types import UserError

PLACEHOLDER = "{question}"
ANSWER = "{answer}"  # only in prompts of drafts (eval/rejection.py)
ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_DIR = ASSETS / "prompts"


def packaged_templates() -> tuple[str, ...]:
    """Names of the templates in the package."""
    return tuple(sorted(p.stem for p in TEMPLATE_DIR.glob("*.txt")))


def load_template(name_or_path: str | Path = "parallel", draft: bool = False) -> str:
    """The text of a packaged template (`packaged_templates`) or of a user's file.

    Raises `UserError` when there is no such template, when it does not hold `{question}`, or when it holds `{answer}`
    although it is not for a `draft`.
    """
    is_packaged = str(name_or_path) in packaged_templates()
    file = TEMPLATE_DIR / f"{name_or_path}.txt" if is_packaged else Path(name_or_path)
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(packaged_templates())
        raise UserError(
            f"prompt template {name_or_path}: not a readable file ({error}), and none of {names}"
        ) from error
    if PLACEHOLDER not in text:
        raise UserError(f"prompt template {file}: {PLACEHOLDER} not found, it must mark the question's place")
    if ANSWER in text and not draft:
        raise UserError(f"prompt template {file}: {ANSWER} found, accepted by launch/sample.py --template only")
    return text


class ChatWriter(Protocol):
    """A tokenizer or a dialect."""

    def chat(self, messages: Sequence[Mapping[str, str]], /) -> list[int]: ...


def render_prompt(writer: ChatWriter, template: str, question: str) -> list[int]:
    """Token ids of a prompt: the template with the question filled in, as one user message.

    The question is untrusted text: its tags are escaped and it cannot produce control tokens. Where the template has
    `?` after the question's place, the prompt has exactly one there, whether or not the question ends with it.
    """
    question = question.strip()
    if f"{PLACEHOLDER}?" in template:
        question = question.removesuffix("?")
    content = template.replace(PLACEHOLDER, escape_tags(question))
    return writer.chat([{"role": "user", "content": content}])


def render_messages(writer: ChatWriter, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
    """Token ids of a data row's own prompt, a list of chat messages (`metadata["prompt"]`).

    Control tokens in their contents become ordinary tokens. Raises `UserError` when it is anything else.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages or not all(_is_message(m) for m in messages):
        raise UserError(
            f"prompt: {str(messages)[:80]!r} found, accepted: a list of messages with content and a role of "
            f"{', '.join(ROLES)}"
        )
    return writer.chat(messages)


def _is_message(message: object) -> bool:
    # A role is part of the template's trusted text, so it must not be chosen freely.
    return isinstance(message, Mapping) and isinstance(message.get("content"), str) and message.get("role") in ROLES
