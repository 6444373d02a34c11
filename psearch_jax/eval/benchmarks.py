"""What is evaluated on: closed-world sets, question files, and the published figures to put beside our own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from psearch_jax.data.closed_world import ClosedWorld
from psearch_jax.data.sources import read_questions
from psearch_jax.types import KINDS, Kind, Question, UserError

CLOSED_WORLD = "closed_world"
FOUR_ENTITIES = "parallel4"  # comparisons of four entities: more than any training question holds
# Of the draw of closed-world evaluation questions: one fixed set, whatever the seed of a run.
QUESTION_SEED = 1


@dataclass(frozen=True)
class Published:
    """One published result. `decomposition_ratio` is None where the paper gives none."""

    method: str
    model: str
    em: float
    decomposition_ratio: float | None = None


def closed_world_benchmark(world: ClosedWorld, name: str, count: int) -> list[Question]:
    """`count` held-out questions of a closed-world set, a kind or `FOUR_ENTITIES`; equal for equal worlds.

    Raises:
      UserError: the world has fewer.
    """
    if name == FOUR_ENTITIES:
        return world.questions("eval", "parallel", count, QUESTION_SEED, entities=4)
    return world.questions("eval", name, count, QUESTION_SEED)


def closed_world_sets(argument: str) -> tuple[str, ...] | None:
    """The sets that `closed_world` (all kinds) or `closed_world:SET` stands for; None for any other benchmark.

    Raises:
      UserError: SET is none of ours.
    """
    first, _, name = argument.partition(":")
    if first != CLOSED_WORLD:
        return None
    if not name:
        return KINDS
    if name not in (*KINDS, FOUR_ENTITIES):
        raise UserError(f"--benchmark={argument}: set {name!r} found, accepted: {', '.join((*KINDS, FOUR_ENTITIES))}")
    return (name,)


def load_benchmark(argument: str, count: int = 0) -> tuple[str, list[Question]]:
    """Name and questions of a benchmark given as NAME:FILE: the file's first `count` questions (0: all).

    Raises:
      UserError: the argument has another form, or the file is not a question file.
    """
    name, colon, file = argument.partition(":")
    if not colon or not name or not file:
        accepted = f"NAME:FILE, {CLOSED_WORLD}, or {CLOSED_WORLD}:KIND with KIND one of {', '.join(KINDS)}"
        raise UserError(f"--benchmark={argument}: accepted: {accepted}")
    questions = read_questions(file, source=name)
    return name, questions[:count] if count else questions


# ---------------------------------------------------------------------------------------------- published figures
# EM of the paper's main tables (arXiv 2508.09303), in the order of `_SETS`.
_INSTRUCT, _BASE = "Qwen2.5-7B-Instruct", "Qwen2.5-7B"
_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_MAIN: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    (_INSTRUCT, "R1 (no search)", (0.270, 0.537, 0.199, 0.237, 0.292, 0.072, 0.293)),
    (_INSTRUCT, "Search-R1", (0.383, 0.593, 0.399, 0.376, 0.317, 0.151, 0.371)),
    (_INSTRUCT, "ZeroSearch", (0.436, 0.652, 0.488, 0.346, 0.352, 0.184, 0.278)),
    (_INSTRUCT, "ParallelSearch", (0.462, 0.628, 0.429, 0.429, 0.424, 0.197, 0.411)),
    (_BASE, "R1 (no search)", (0.297, 0.539, 0.202, 0.242, 0.273, 0.083, 0.296)),
    (_BASE, "Search-R1", (0.488, 0.644, 0.469, 0.436, 0.412, 0.187, 0.403)),
    (_BASE, "ParallelSearch", (0.492, 0.658, 0.455, 0.457, 0.452, 0.229, 0.468)),
)
# Subsets of one kind: EM of Search-R1 and ParallelSearch, and how many questions the latter decomposed.
_SUBSETS: tuple[tuple[str, Kind, str, float, float, float | None], ...] = (
    ("hotpotqa", "parallel", _INSTRUCT, 0.580, 0.656, 0.943),
    ("hotpotqa", "parallel", _BASE, 0.641, 0.673, 0.970),
    ("2wikimultihopqa", "parallel", _INSTRUCT, 0.476, 0.650, 0.998),
    ("2wikimultihopqa", "parallel", _BASE, 0.624, 0.691, 0.999),
    ("multihoprag", "parallel", _INSTRUCT, 0.509, 0.641, 0.887),
    ("hotpotqa", "sequential", _INSTRUCT, 0.311, 0.374, None),
    ("2wikimultihopqa", "sequential", _INSTRUCT, 0.212, 0.225, None),
    ("multihoprag", "sequential", _INSTRUCT, 0.773, 0.862, None),
)
_ALIASES = {"naturalquestions": "nq", "hotpot": "hotpotqa", "2wiki": "2wikimultihopqa"}


def published_table() -> dict[tuple[str, Kind | None], tuple[Published, ...]]:
    """All published rows, keyed by (benchmark, kind); kind None means the whole set."""
    table: dict[tuple[str, Kind | None], tuple[Published, ...]] = {}
    for place, name in enumerate(_SETS):
        table[name, None] = tuple(Published(method, model, em[place]) for model, method, em in _MAIN)
    for name, kind, model, before, after, decomposed in _SUBSETS:
        rows = (Published("Search-R1", model, before), Published("ParallelSearch", model, after, decomposed))
        table[name, kind] = table.get((name, kind), ()) + rows
    return table


PUBLISHED = published_table()


def published(name: str, kind: Kind | None = None) -> tuple[Published, ...]:
    """The published rows of a benchmark by its name, in any spelling (`HotpotQA`, `hotpot_qa`); () when unknown."""
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return PUBLISHED.get((_ALIASES.get(bare, bare), kind), ())
