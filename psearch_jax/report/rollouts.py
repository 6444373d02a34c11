"""Rollouts for the page: columns to filter them by, and their texts token by token in compressed blocks."""

from __future__ import annotations

import base64
import codecs
import gzip
import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import huggingface_hub
import orjson

from psearch_jax.eval.scores import Score
from psearch_jax.report.runs import Block, RunFiles
from psearch_jax.runtime.paths import packaged
from psearch_jax.text import tags
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")

MOST_ROLLOUTS = 10_000  # per page, over all runs
MOST_BYTES = 5_000_000  # of compressed rollout texts per page; with the charts a page stays below 10 MB
LOGPROB_DIGITS = 4
_COLUMNS = "run step benchmark kind correct status split question sample reward block place".split()


def packed(value: Any) -> str:
    """The value as JSON, gzipped, in base64, which is safe in HTML; deterministic."""
    return packed_bytes(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def packed_bytes(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


class Shown:
    """The rollouts in the page: columns to filter them by, and blocks of their texts.

    Blocks are offered one by one, and kept as long as there is room.
    """

    def __init__(self, runs: int):
        self._full_room = (MOST_ROLLOUTS // runs, MOST_BYTES // runs)
        self._room = [self._full_room] * runs  # (rollouts, bytes) left of each run
        self._questions: dict[tuple[str, str], int] = {}
        self._question_rows: list[dict[str, Any]] = []
        self.columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.blocks: list[str] = []
        self.left_out = 0  # recorded rollouts that are not in the page

    def offer(
        self,
        run: int,
        block: Block,
        rows: Sequence[Mapping[str, Any]],
        scores: Sequence[Score],
        spelling: Spelling | None,
    ) -> None:
        """Adds a block if the run has room for it; of the run's first block, the part that there is room for.

        Args:
          run: its index.
          scores: the scores of the rows, in the same order.
          spelling: converts token ids to text; None if the run's tokenizer is not available.
        """
        rollouts, room = self._room[run]
        first = self._room[run] == self._full_room
        count, text = min(len(rows), rollouts) if first else len(rows), ""
        while 0 < count <= rollouts and room > 0 and not text:
            text = packed(block.convert(rows[:count], lambda row: _body(row, spelling)))
            if len(text) > room * 4 / 3:  # base64 writes 3 bytes in 4 letters
                count, text = count // 2 if first else 0, ""
        if not text:
            self.left_out += len(rows)
            return
        self.left_out += len(rows) - count
        self._room[run] = rollouts - count, room - len(text) * 3 // 4
        for place, ((question, reward), score) in enumerate(
            zip(block.convert(rows[:count], _head), scores, strict=False)
        ):
            values = {
                "run": run,
                "step": block.step,
                "benchmark": block.benchmark,
                "kind": score.kind,
                "correct": int(score.em > 0),
                "status": score.status,
                "split": "split" if score.split else "not_split" if score.first_sub_queries else "no_search",
                "question": self._question(score, question),
                "sample": score.sample,
                "reward": reward,
                "block": len(self.blocks),
                "place": place,
            }
            for name in _COLUMNS:
                self.columns[name].append(values[name])
        self.blocks.append(text)

    def index(self) -> dict[str, Any]:
        """JSON-serialisable: `columns`, `questions` (text and id of each), and the number of rollouts left out."""
        return {"columns": self.columns, "questions": self._question_rows, "left_out": self.left_out}

    def _question(self, score: Score, text: str) -> int:
        number = self._questions.setdefault(score.question, len(self._questions))
        if number == len(self._question_rows):
            self._question_rows.append({"text": text, "id": score.id})
        return number


def spread_out(count: int) -> list[int]:
    """0 .. count-1 in an order whose every prefix is spread evenly: the first, the last, the middle, ..

    So whatever the room, the rollouts in the page range from the first step to the last.
    """
    if count < 3:
        return list(range(count))
    order, seen, parts = [0, count - 1], {0, count - 1}, 2
    while len(order) < count:
        for i in range(1, parts, 2):
            place = (count - 1) * i // parts
            if place not in seen:
                seen.add(place)
                order.append(place)
        parts *= 2
        if parts > 2 * count:
            order += [i for i in range(count) if i not in seen]
    return order


# ---- token ids to text ----


class Spelling:
    """The text of token ids, one by one and together."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. A character split over several tokens is with the last; control tokens are named."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = []
        for i in ids:
            piece = self._tokenizer.token_bytes[i] if 0 <= i < self._tokenizer.size else b""
            pieces.append(self._tokenizer.decode([i], control=True) if piece is None else decoder.decode(piece))
        return pieces

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens that were not sampled; control tokens are named."""
        return self._tokenizer.decode(ids, control=True)

    def spells(self, ids: Sequence[int], text: str) -> bool:
        """Whether the tokens spell a turn's text, optionally followed by one stop token."""
        return text in (self._tokenizer.decode(part, control=True) for part in (ids, ids[:-1]))


def spelling_of(run: RunFiles) -> Spelling | None:
    """The tokenizer that the run's config.json names, or None if it is not on this machine; nothing is downloaded."""
    model = run.config.get("model") or {}
    name = model.get("tokenizer") or model.get("path") or ""
    path: str | None = packaged(name)
    if not run.trained or not path:
        return None
    if not Path(path).is_dir():
        try:
            cached = huggingface_hub.try_to_load_from_cache(path, "tokenizer_config.json")
        except ValueError:  # not a valid hub id
            cached = None
        if not isinstance(cached, str):
            log.info("%s: not on this machine; the rollouts of %s are shown without their log-probs", path, run.name)
            return None
        path = str(Path(cached).parent)
    try:
        return Spelling(Tokenizer.load(path))
    except UserError as error:
        log.warning("%s; the rollouts of %s are shown without their log-probs", error, run.name)
        return None


# ---- one rollout ----


def _head(row: Mapping[str, Any]) -> tuple[str, float | None]:
    """The question, and the total reward if there is one."""
    return row["question"], round(row["reward"]["total"], LOGPROB_DIGITS) if row.get("reward") else None


def _body(row: Mapping[str, Any], spelling: Spelling | None) -> dict[str, Any]:
    """The data of an opened rollout.

    `turns` have `text`; with a spelling also `pieces`, `logprobs` and `ids` of the sampled tokens; `searches`, pairs
    of a sub-query and its passages [title, id, text] (text: None if unknown); and `forced`, other text of the host.
    """
    turns = row["actions"] if "actions" in row else row["turns"]  # in an evaluation `turns` is a count
    cuts = _cuts(row, turns, spelling) if spelling and "ids" in row else None
    shown = {"gold": row["golden_answers"], "reward": row.get("reward") or {}, "turns": []}
    if cuts and spelling:
        shown["prompt"] = spelling.text(row["ids"][: cuts[0][0]])
    for number, turn in enumerate(turns):
        one: dict[str, Any] = {"text": turn["text"]}
        written = None
        if cuts and spelling:
            start, middle, end = cuts[number]
            logprobs = row["logprobs"][start:middle]
            one["pieces"] = spelling.pieces(row["ids"][start:middle])
            one["logprobs"] = [None if x is None else round(x, LOGPROB_DIGITS) for x in logprobs]
            one["ids"] = row["ids"][start:middle]
            written = spelling.text(row["ids"][middle:end])
        if turn["queries"]:
            texts = passage_lines(written, turn["queries"], [len(ranking) for ranking in turn["passages"]])
            one["searches"] = [
                [query, [[p["title"], p["id"], lines[k] if k < len(lines) else None] for k, p in enumerate(ranking)]]
                for query, ranking, lines in zip(turn["queries"], turn["passages"], texts, strict=False)
            ]
        elif written and written.strip():
            one["forced"] = written
        shown["turns"].append(one)
    return shown


def _cuts(
    row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], spelling: Spelling
) -> list[tuple[int, int, int]] | None:
    """(start, end of the sampled tokens, end of the host's tokens after them) of every turn.

    None if token ids and turns disagree, which means that the tokenizer is not the run's.
    """
    ids, mask = row["ids"], row["mask"]
    cuts, place = [], mask.index(1) if 1 in mask else len(mask)
    if turns and not turns[0]["n_sampled"]:  # an initial search lies between the prompt and the first sampled token
        pieces = spelling.pieces(ids[:place])
        begin = "".join(pieces).rfind(tags.INFORMATION_OPEN)
        first = bisect_right(list(accumulate(map(len, pieces))), begin) if begin >= 0 else place
        cuts.append((first, first, place))
    for turn in turns[len(cuts) :]:
        middle = place + turn["n_sampled"]
        if not all(mask[place:middle]) or not spelling.spells(ids[place:middle], turn["text"]):
            return None
        end = middle
        while end < len(mask) and not mask[end]:
            end += 1
        cuts.append((place, middle, end))
        place = end
    return cuts


def passage_lines(written: str | None, queries: Sequence[str], counts: Iterable[int]) -> list[list[str]]:
    """The passages of each sub-query, a line each, parsed from the observation that `tags.render_observation` wrote.

    Args:
      written: the host's text; None if unknown.
      counts: the number of passages retrieved for each; passages cut by the budget have no line.
    """
    passages: list[list[str]] = [[] for _ in queries]
    start, end = ((written or "").find(tag) for tag in (tags.INFORMATION_OPEN, tags.INFORMATION_CLOSE))
    if written is None or start < 0:
        return passages
    inner = written[start + len(tags.INFORMATION_OPEN) : end if end >= 0 else None]
    lines = inner.strip("\n").split("\n")
    headers = [tags.escape_tags(" ".join(q.split()))[: tags.HEADER_CHARACTERS] for q in queries]

    def begins(line: str, number: int) -> bool:
        head = line[:-1].rstrip()
        return number < len(headers) and line.endswith(":") and bool(head) and headers[number].startswith(head)

    if len(queries) > 1 and begins(lines[0], 0):
        group, coming = 0, 0
        for line in lines:
            if begins(line, coming):
                group, coming = coming, coming + 1
            else:
                passages[group].append(line)
    else:
        rest = iter(lines)
        for own, count in zip(passages, counts, strict=False):
            own += [line for _, line in zip(range(max(count, 1)), rest, strict=False)]
    return passages
