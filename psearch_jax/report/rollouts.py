"""The rollouts in the page: what they are filtered by, and their texts, with log-probs where the tokenizer is here."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import huggingface_hub
import orjson

from psearch_jax.report.runs import RunFiles, read_lines
from psearch_jax.runtime.paths import packaged
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")
MAX_ROLLOUTS = 5_000  # per page, over all runs
MAX_BYTES = 20_000_000  # of JSON per page, which is compressed to about a fifth


def select_rollouts(runs: Sequence[RunFiles]) -> tuple[list[dict[str, Any]], int]:
    """Rollouts of all runs, and the number of those that did not fit. The files with rollouts are evenly spaced."""
    shown: list[tuple[int, int, dict[str, Any]]] = []
    left_out = 0
    for number, run in enumerate(runs):
        tokenizer, files = find_tokenizer(run), list(run.rollouts.items())
        rollouts, size = MAX_ROLLOUTS // len(runs), MAX_BYTES // len(runs)
        for at in spread_out(len(files)):
            part, file = files[at]
            for line, row in enumerate(read_lines(file), 1):
                try:
                    entry = describe_rollout(row, tokenizer) | {"run": number, "part": part}
                except (KeyError, TypeError, AttributeError) as error:
                    raise UserError(f"{file}:{line}: field {error} not found or of another type") from None
                rollouts, size = rollouts - 1, size - len(orjson.dumps(entry))
                if rollouts >= 0 and size >= 0:
                    shown.append((number, at, entry))
                else:
                    left_out += 1
    return [entry for _, _, entry in sorted(shown, key=lambda row: row[:2])], left_out


def spread_out(count: int) -> list[int]:
    """0 .. count-1 in an order whose every prefix is spread evenly: by the reversed bits of each index."""
    bits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))


def find_tokenizer(run: RunFiles) -> Tokenizer | None:
    """The tokenizer that the run's config.json names, or None if it is not on this machine; nothing is downloaded."""
    model = run.config.get("model") or {}
    path = packaged(model.get("tokenizer") or model.get("path") or "") if run.trained else ""
    if not path:
        return None
    try:
        if not Path(path).is_dir():
            cached = huggingface_hub.try_to_load_from_cache(path, "tokenizer_config.json")
            path = str(Path(cached).parent) if isinstance(cached, str) else path
        return Tokenizer.load(path) if Path(path).is_dir() else None
    except (UserError, ValueError) as error:
        log.warning("%s; the rollouts of %s are shown without their log-probs", error, run.name)
        return None


def describe_rollout(row: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A row of launch/train.py or launch/eval.py as the page shows it.

    `segments` are pairs of tokens that were sampled (text, log-prob and id of each), or of one text; without a
    tokenizer they are the texts of the turns with the titles of the passages.
    """
    turns = row["actions"] if "actions" in row else row["turns"]  # in an evaluation `turns` is a count
    return {
        "question": row["question"],
        "kind": row["kind"],
        "correct": "correct" if row["em"] else "incorrect",
        "status": row["status"],
        "split": ("no search", "not split", "split")[min(row["first_sub_queries"], 2)],
        "sample": row["sample"],
        "gold": row["golden_answers"],
        "reward": row.get("reward") or {},
        "segments": token_segments(row, tokenizer) if tokenizer and "ids" in row else turn_segments(turns),
    }


def token_segments(row: Mapping[str, Any], tokenizer: Tokenizer) -> list[Any]:
    segments: list[Any] = []
    tokens = zip(row["ids"], row["mask"], row["logprobs"], strict=True)
    for sampled, group in groupby(tokens, key=lambda token: token[1]):
        ids, _, logprobs = zip(*group, strict=True)
        if not sampled:
            segments.append(tokenizer.decode(ids, control=True))
            continue
        decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
        for i in ids:  # a character split over several tokens is with the last
            piece = tokenizer.token_bytes[i] if 0 <= i < tokenizer.size else b""
            pieces.append(tokenizer.decode([i], control=True) if piece is None else decoder.decode(piece))
        segments.append([[*token] for token in zip(pieces, logprobs, ids, strict=True)])
    return segments


def turn_segments(turns: Sequence[Mapping[str, Any]]) -> list[Any]:
    segments: list[Any] = []
    for turn in turns:
        segments += [[[turn["text"], 0.0, -1]]] if turn["text"] else []
        for query, ranking in zip(turn["queries"], turn["passages"], strict=False):
            segments.append("\n".join([f"{query}:", *(f"  {p['title'] or ''} [{p['id']}]" for p in ranking)]))
    return segments
