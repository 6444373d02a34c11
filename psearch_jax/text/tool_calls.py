"""The grammar of native tool calls, as the chat templates of Qwen2.5 and Qwen3 write them: parses and writes turns.

    <think> reasoning </think>
    <tool_call>
    {"name": "search", "arguments": {"query": "first query"}}
    </tool_call>
    <tool_call>
    {"name": "search", "arguments": {"query": "second query"}}
    </tool_call>

The calls of one turn run at once. Their results follow as messages of the role `tool`. An answer is written as with
tags, `<answer> answer </answer>`. Depends on no model and no tokenizer.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

from psearch_jax.text.tags import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    MAX_SUB_QUERIES,
    NO_ACTION,
    THINK_CLOSE,
    THINK_OPEN,
    Action,
    find_first,
    parse_answer,
)
from psearch_jax.types import SEARCH, Call
from retrieval.protocol import as_utf8

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN = "<tool_response>"
QUERY = "query"  # the only argument of the search

# As `tags.CORRECTIVE_MESSAGE`.
CORRECTIVE_MESSAGE = (
    "No tool call and no answer was found. Call tools with valid JSON, or answer with both of its tags."
)

_NO_TAG = r"(?:(?!</?(?:think|tool_call|tool_response|answer)>).)*"
_CALL = re.compile(rf"{CALL_OPEN}({_NO_TAG}){CALL_CLOSE}", re.DOTALL)
_THINK = rf"\s*{THINK_OPEN}{_NO_TAG}{THINK_CLOSE}\s*"
_CALLS = re.compile(rf"{_THINK}(?:{CALL_OPEN}{_NO_TAG}{CALL_CLOSE}\s*)+", re.DOTALL)
_ANSWER = re.compile(rf"{_THINK}{ANSWER_OPEN}{_NO_TAG}{ANSWER_CLOSE}", re.DOTALL)


def parse_turn(text: str, max_calls: int = MAX_SUB_QUERIES, tail_start: int | None = None) -> Action:
    """Parse the action of one turn.

    The earliest closing tag of a call or an answer decides. Calls count up to the first answer. If one of them is not
    valid JSON with a `name` and an object `arguments`, or is not closed, the turn has no action. Equal calls count
    once.

    Args:
      text: the sampled text of the turn, without control tokens.
      max_calls: the number of distinct calls kept.
      tail_start: as in `tags.parse_turn`, of an answer.
    """
    close_at, closing = find_first(text, CALL_CLOSE, ANSWER_CLOSE)
    if closing == ANSWER_CLOSE:
        return parse_answer(text, close_at, _ANSWER, tail_start)
    written = find_calls(text.partition(ANSWER_CLOSE)[0])
    if not written:
        return NO_ACTION
    distinct: dict[tuple[str, str], Call] = {}
    for call in itertools.starmap(_make_call, written):
        distinct.setdefault((call.tool, call.text.casefold()), call)
    kept = [*distinct.values()][:max_calls]
    queries, tools = tuple(call.text for call in kept), tuple(call.tool for call in kept)
    return Action("search", queries, None, _CALLS.fullmatch(text) is not None, tools)


def find_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of all calls in a text, in order; [] if one of them is not valid."""
    blocks = _CALL.findall(text)
    try:
        values = [json.loads(block, parse_constant=_refuse) for block in blocks]
        calls = [(value["name"], value["arguments"]) for value in values]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    valid = all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls)
    return calls if valid and text.count(CALL_OPEN) == len(calls) else []


def _make_call(name: str, arguments: dict[str, Any]) -> Call:
    """The text of a search is its query with collapsed white space, "" if it has none."""
    if name == SEARCH:
        query = arguments.get(QUERY)
        return Call(SEARCH, as_utf8(" ".join(query.split())) if isinstance(query, str) else "")
    return Call(as_utf8(name), as_utf8(json.dumps(arguments, ensure_ascii=False)))


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # NaN and infinities are not JSON


def write_calls(calls: Iterable[Call]) -> str:
    """The calls as a model writes them; what `parse_turn` reads."""
    return write_json_calls((call.tool, _arguments(call)) for call in calls)


def write_json_calls(calls: Iterable[tuple[str, str]]) -> str:
    """As `write_calls`, from names and arguments as JSON text."""
    return "\n".join(
        f'{CALL_OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{CALL_CLOSE}'
        for name, arguments in calls
    )


def _arguments(call: Call) -> str:
    return json.dumps({QUERY: call.text}, ensure_ascii=False) if call.tool == SEARCH else call.text
