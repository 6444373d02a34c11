"""Trajectories as bytes: their arrays and, in JSON, everything else that learning reads."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from psearch_jax.types import Question, Trajectory, Turn
from retrieval.protocol import Passage

_ARRAYS = ("ids", "mask", "logprobs")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # of one trajectory: ids, mask, log-probs


def pack(rows: Sequence[tuple[Mapping[str, Any], Arrays]], **facts: Any) -> bytes:
    """(JSON-ready description, arrays) of each trajectory, and facts about all of them, as a compressed npz file."""
    empty = (np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32))
    columns = zip(*(arrays for _, arrays in rows), strict=True) if rows else ((x,) for x in empty)
    arrays = {name: np.concatenate(column) for name, column in zip(_ARRAYS, columns, strict=True)}
    descriptions = [{**row, "tokens": len(ids)} for row, (ids, _, _) in rows]
    text = json.dumps(facts | {"rows": descriptions})  # ASCII: a text may hold half a surrogate pair
    content = io.BytesIO()
    np.savez_compressed(content, **arrays, described=np.frombuffer(text.encode(), np.uint8))
    return content.getvalue()


def unpack(content: bytes) -> tuple[list[tuple[dict[str, Any], Arrays]], dict[str, Any]]:
    """The rows and the facts of `pack`.

    Raises:
      ValueError: the bytes are not those of `pack`.
    """
    try:
        with np.load(io.BytesIO(content)) as saved:
            arrays = [saved[name] for name in _ARRAYS]
            facts = json.loads(saved["described"].tobytes())
    except (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error)) from None
    rows = facts.pop("rows")
    ends = np.cumsum([row["tokens"] for row in rows])[:-1]
    columns = (np.split(x, ends) for x in arrays)
    return list(zip(rows, zip(*columns, strict=True), strict=True)) if rows else [], facts


def describe(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory without its arrays, JSON-ready."""
    t = trajectory
    return {
        "question": asdict(t.question),
        "sample": t.sample,
        "status": t.status,
        "turns": [asdict(turn) for turn in t.turns],
        "prompt_length": t.prompt_length,
        "versions": t.versions,
    }


def parse_trajectory(row: Mapping[str, Any], arrays: Arrays) -> Trajectory:
    """The trajectory of a description and its arrays."""
    versions = tuple((int(position), int(version)) for position, version in row["versions"])
    question, turns = parse_question(row["question"]), tuple(map(parse_turn, row["turns"]))
    return Trajectory(question, row["sample"], row["status"], turns, *arrays, row["prompt_length"], versions)


def parse_question(row: Mapping[str, Any]) -> Question:
    """The question of `asdict(question)`, from JSON."""
    return Question(**{**row, "answers": tuple(row["answers"])})


def parse_turn(row: Mapping[str, Any]) -> Turn:
    """The turn of `asdict(turn)`, from JSON."""
    passages = tuple(tuple(Passage(**passage) for passage in ranking) for ranking in row["passages"])
    return Turn(**{**row, "queries": tuple(row["queries"]), "passages": passages})
