"""The tag grammar: parses turns and renders observations.

A turn is what the model writes in one call:

    <think> reasoning </think> <search> query ## query </search>
    <think> reasoning </think> <answer> answer </answer>

The host answers a search with an observation block, `<information> passages </information>`. Only this file defines
the tags; it depends on no model and no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from psearch_jax.types import Call, UserError
from retrieval.protocol import Passage

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
SEARCH_OPEN, SEARCH_CLOSE = "<search>", "</search>"
INFORMATION_OPEN, INFORMATION_CLOSE = "<information>", "</information>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
SEPARATOR = "##"
MAX_SUB_QUERIES = 8

# Appended by the host after a turn without an action. It contains no literal tag, which could be parsed as an action.
CORRECTIVE_MESSAGE = "\nNo search and no answer was found. Search or answer, with both of its tags.\n"

# The two tags of an observation and their line ends are 30 bytes, so at most 30 tokens in any byte-level vocabulary.
MIN_OBSERVATION_TOKENS = 32
NOTHING_FOUND = "nothing found"
HEADER_CHARACTERS = 120  # a sub-query can be as long as a turn; its header stays one short line

_TAG_NAMES = "think|search|information|answer"
_ALL_NAMES = rf"{_TAG_NAMES}|tools|tool_call|tool_response"  # with those of tool calls (text/tool_calls.py)
TAG = re.compile(rf"(</?(?:{_TAG_NAMES})>)")
ANY_TAG = re.compile(rf"(</?(?:{_ALL_NAMES})>)")
# `<` before a tag name, whatever the spacing, slashes or case between and after.
_TAG_LIKE = re.compile(rf"<(?=[\s/]*(?:{_ALL_NAMES})(?![a-z0-9]))", re.IGNORECASE)
_NO_TAG = rf"(?:(?!</?(?:{_TAG_NAMES})>).)*"
_WELL_FORMED = re.compile(
    rf"\s*<think>{_NO_TAG}</think>\s*<(search|answer)>{_NO_TAG}</\1>",
    re.DOTALL,
)


@dataclass(frozen=True)
class Action:
    """The action of one turn. `queries` is empty unless kind is `search`; `answer` is None unless it is `answer`.

    `tools` and `queries` are as in `Turn`.
    """

    kind: Literal["search", "answer", "none"]
    queries: tuple[str, ...]
    answer: str | None
    well_formed: bool
    tools: tuple[str, ...] = ()


NO_ACTION = Action("none", (), None, False)


@dataclass(frozen=True)
class Observation:
    """What a search adds to a rollout.

    Attributes:
      ids: its tokens.
      shown: per sub-query, what they show of each passage, title included, best first; those left out are missing.
    """

    ids: list[int]
    shown: tuple[tuple[str, ...], ...]


def parse_turn(text: str, max_sub_queries: int = MAX_SUB_QUERIES, tail_start: int | None = None) -> Action:
    """Parse the action of one turn.

    The earliest closing tag of a search or an answer decides. The content starts at the last matching opening tag
    before it, so a tag mentioned in a thought does not extend the content. An action inside an unclosed thought
    counts, with invalid format. A closing tag without an opening tag, and an empty search, are no action.

    Args:
      text: the sampled text of the turn, without control tokens.
      max_sub_queries: the number of sub-queries kept per search.
      tail_start: character offset of the first token after the one that completed the closing tag. Characters between
        the tag and this offset belong to the completing token and are ignored; default: the tail begins right after
        the tag. A tail that is not blank makes an answer ill-formed; text after a search is ignored.
    """
    close_at, closing = find_first(text, SEARCH_CLOSE, ANSWER_CLOSE)
    if closing == ANSWER_CLOSE:
        return parse_answer(text, close_at, _WELL_FORMED, tail_start)
    open_at = text.rfind(SEARCH_OPEN, 0, close_at) if closing else -1
    if open_at < 0:
        return NO_ACTION
    well_formed = _WELL_FORMED.fullmatch(text, 0, close_at + len(closing)) is not None
    queries = split_sub_queries(text[open_at + len(SEARCH_OPEN) : close_at], max_sub_queries)
    return Action("search", queries, None, well_formed) if queries else NO_ACTION


def find_first(text: str, *tags: str) -> tuple[int, str]:
    """The character offset of the earliest of these tags, and the tag; (-1, "") without any."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=(-1, ""))


def parse_answer(text: str, close_at: int, grammar: re.Pattern[str], tail_start: int | None) -> Action:
    """The answer that is closed at `close_at`, in valid format if `grammar` matches the text up to the end of its tag.

    `tail_start` as in `parse_turn`. Without an opening tag it is no action.
    """
    open_at, end = text.rfind(ANSWER_OPEN, 0, close_at), close_at + len(ANSWER_CLOSE)
    if open_at < 0:
        return NO_ACTION
    tail = text[max(end, end if tail_start is None else tail_start) :]
    well_formed = grammar.fullmatch(text, 0, end) is not None and not tail.strip()
    return Action("answer", (), text[open_at + len(ANSWER_OPEN) : close_at].strip(), well_formed)


def split_sub_queries(content: str, cap: int = MAX_SUB_QUERIES) -> tuple[str, ...]:
    """Split the content of a search at `##` (or a longer run of `#`): stripped, non-empty, distinct, at most `cap`.

    Inner white space is collapsed; two sub-queries that differ only in case or spacing are one (the first is kept).
    """
    distinct: dict[str, str] = {}
    for part in re.split("#{2,}", content):
        query = " ".join(part.split())
        if query:
            distinct.setdefault(query.casefold(), query)
    return tuple(distinct.values())[:cap]


def write_calls(calls: Iterable[Call]) -> str:
    """One search with these sub-queries, as a model writes it."""
    return f"{SEARCH_OPEN}{f' {SEPARATOR} '.join(call.text for call in calls)}{SEARCH_CLOSE}"


def escape_tags(text: str) -> str:
    """Escape our tags in untrusted text, in any spacing or case, so that it can neither end a block nor act."""
    return _TAG_LIKE.sub("&lt;", text)


def render_observation(
    queries: Sequence[str],
    passages: Sequence[Sequence[Passage]],
    encode: Callable[[str], list[int]],
    budget_tokens: int,
) -> Observation:
    """Render the passages of one search as at most `budget_tokens` token ids, tags and headers included.

    The budget without the two tags is split evenly over the sub-queries; unused tokens pass to the next one. Within a
    sub-query the lower ranks are cut first. Its header and the title of its first passage are cut only if its share
    cannot hold them. The closing tag is always present. Lines are encoded separately, so cutting one changes no other.

    Args:
      queries: the Q sub-queries that were run.
      passages: Q rankings, best first.
      encode: text -> token ids without control tokens (`Tokenizer.encode_foreign`).
      budget_tokens: at least `MIN_OBSERVATION_TOKENS`, which the two tags may need, else `UserError`.
    """
    if budget_tokens < MIN_OBSERVATION_TOKENS:
        raise UserError(f"budget_tokens: {budget_tokens} found, at least {MIN_OBSERVATION_TOKENS} accepted")
    opening, closing = encode(f"\n{INFORMATION_OPEN}\n"), encode(f"{INFORMATION_CLOSE}\n")
    headers = queries if len(queries) > 1 else [None] * len(queries)
    blocks, shown = render_blocks(headers, passages, encode, budget_tokens - len(opening) - len(closing))
    return Observation(opening + [i for block in blocks for i in block] + closing, shown)


def render_blocks(
    headers: Sequence[str | None],
    passages: Sequence[Sequence[Passage]],
    encode: Callable[[str], list[int]],
    budget_tokens: int,
) -> tuple[list[list[int]], tuple[tuple[str, ...], ...]]:
    """The token ids of each ranking with its header, within a budget for all, and what they show of each passage."""
    blocks: list[list[int]] = []
    shown = []
    for i, (header, ranking) in enumerate(zip(headers, passages, strict=True)):
        block, texts = _render_block(header, ranking, encode, budget_tokens // (len(headers) - i))
        blocks.append(block)
        shown.append(tuple(texts[: len(ranking)]))  # without NOTHING_FOUND
        budget_tokens -= len(block)
    return blocks, tuple(shown)


def _render_block(
    query: str | None, ranking: Sequence[Passage], encode: Callable, share: int
) -> tuple[list[int], list[str]]:
    """One sub-query's header (unless None) and passages as at most `share` tokens, and the text of each passage."""
    lines = [_passage_line(p) for p in ranking] or [(NOTHING_FOUND, NOTHING_FOUND)]
    block: list[int] = []
    texts: list[str] = []
    if query is not None:
        title_cost = len(encode(f"{lines[0][0]}\n"))
        # The header leaves room for the first title, but gets between a quarter and half of the share.
        room = max(share // 4, min(share // 2, max(3, share - title_cost)))
        header = escape_tags(" ".join(query.split()))[:HEADER_CHARACTERS]
        block += _encode_cut(header, ":\n", encode, room)[0]
    for rank, (title, line) in enumerate(lines):
        room = share - len(block)
        tokens = encode(f"{line}\n")
        if len(tokens) > room:
            if rank == 0 or len(encode(f"{title}\n")) <= room:
                tokens, line = _encode_cut(line, "\n", encode, room)
                block, texts = block + tokens, [*texts, line]
            break
        block += tokens
        texts.append(line)
    return block, texts


def _passage_line(passage: Passage) -> tuple[str, str]:
    """(title part, full line) of a passage; a title is not repeated if the text begins with it."""
    title = escape_tags(" ".join(passage.title.split()))
    text = escape_tags(" ".join(passage.text.split()))
    if not title or re.match(rf"{re.escape(title)}(?!\w)", text):
        return title, text
    return f"({title})", f"({title}) {text}".rstrip()


def _encode_cut(text: str, ending: str, encode: Callable, limit: int) -> tuple[list[int], str]:
    """A prefix of `text` that fits with `ending` into `limit` tokens, as long as bisection finds, and these tokens.

    Without one, [] and "".
    """
    tokens = encode(text + ending)
    if len(tokens) <= limit:
        return tokens, text
    best, low, high = [], 0, len(text) - 1  # text[:low] fits (or is empty), text[:high + 1] does not
    while low < high:
        middle = (low + high + 1) // 2
        tokens = encode(text[:middle].rstrip() + ending)
        if len(tokens) <= limit:
            best, low = tokens, middle
        else:
            high = middle - 1
    return best, text[:low].rstrip()
