"""Evaluation benchmarks: closed-world sets, question files, and the published figures to compare with."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import LARGEST, SIZES, calculated_forms, known_questions, questions
from psearch_jax.closed_world.wordings import PAIRED
from psearch_jax.data.prepared import open_questions
from psearch_jax.runtime.paths import ASSETS
from psearch_jax.types import KINDS, Kind, Question, UserError

CLOSED_WORLD = "closed_world"
CLOSED_WORLD_COUNT = 400  # questions per set
PAIRS = "pairs"  # parallel and sequential questions with the same words, in wordings that no training question has
MANY = "many"  # comparisons of more entities than any training question has
KNOWN = "known"  # facts that every cold start states, reworded: answerable without a search
# Questions that need the search and the calculator, at once or one after the other, also in such wordings.
TOOLS: dict[str, Kind] = {"tools_parallel": "parallel", "tools_sequential": "sequential"}
HALVES: tuple[Kind, Kind] = ("parallel", "sequential")  # of PAIRS
SETS = (*KINDS, PAIRS, MANY, KNOWN, *TOOLS)
# The sets whose questions a run's evaluation summarises separately, by the source of their questions.
SEPARATE = {f"{CLOSED_WORLD}:{name}": name for name in (PAIRS, *TOOLS)}
# Draws the evaluation questions. Fixed, so that the set does not depend on the seed of a run.
QUESTION_SEED = 1


@dataclass(frozen=True)
class Published:
    """One published result (arXiv 2508.09303). `decomposition_ratio` is None if the paper reports none."""

    method: str
    model: str
    em: float
    decomposition_ratio: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """Named questions. `closed_world`: their passages come from the closed world's corpus."""

    name: str
    questions: list[Question]
    closed_world: bool


def closed_world_benchmark(world: ClosedWorld, name: str, count: int) -> list[Question]:
    """`count` questions of a closed-world set, held out except in `KNOWN`. Equal worlds give equal questions.

    Half of `PAIRS` are parallel, half sequential. The source of `PAIRS` and of `TOOLS` is `closed_world:NAME`.

    Raises:
      UserError: the world has fewer questions.
    """
    separate = f"{CLOSED_WORLD}:{name}"
    if name in TOOLS:
        kind = TOOLS[name]
        asked = questions(world, "eval", kind, count, QUESTION_SEED, calculated_forms(kind), held_out_wordings=True)
        return [replace(q, source=separate) for q in asked]
    if name == PAIRS:
        pairs = []
        for i, half in enumerate(HALVES):
            forms = [pair[i] for pair in PAIRED]
            pairs += questions(world, "eval", half, (count + 1 - i) // 2, QUESTION_SEED, forms, held_out_wordings=True)
        return [replace(q, source=separate) for q in pairs]
    if name == MANY:
        sizes = dict.fromkeys(range(max(SIZES) + 1, LARGEST + 1), 1.0)
        return questions(world, "eval", "parallel", count, QUESTION_SEED, ["first", "has"], sizes)
    if name == KNOWN:
        known = known_questions(world, held_out_wordings=True)
        return [known[row] for row in draw_rows(len(known), count)]
    return questions(world, "eval", cast(Kind, name), count, QUESTION_SEED)


def load_benchmarks(
    arguments: Sequence[str],
    world: Callable[[], ClosedWorld],
    count: int = 0,
    skipped: list[str] | None = None,
) -> list[Benchmark]:
    """The benchmarks that the arguments name.

    - NAME:LOCATION: `count` questions (0: all) of a file, a prepared directory or tfds:BUILDER:SPLIT. They are sampled
      from the entire file, because merged files hold one set after another. The file's order is kept.
    - closed_world: one benchmark per question kind; closed_world:SET+SET: one benchmark of one or more sets.

    Args:
      world: makes the closed world; called only when needed.
      count: questions per benchmark; for the closed world, per set (0: `CLOSED_WORLD_COUNT`).
      skipped: receives one line per bad row of a file; without it the first bad row is an error.

    Raises:
      UserError: an argument of another form, no argument, a duplicate name, or bad rows.
    """
    benchmarks: list[Benchmark] = []
    for argument in arguments:
        name, _, location = argument.partition(":")
        if name == CLOSED_WORLD:
            for names in [location.split("+")] if location else [[kind] for kind in KINDS]:
                if not set(names) <= set(SETS):
                    raise UserError(f"--benchmark={argument}: {location!r} found, accepted: {', '.join(SETS)}")
                asked = [q for s in names for q in closed_world_benchmark(world(), s, count or CLOSED_WORLD_COUNT)]
                unique = {(q.source, q.id): q for q in asked}  # sets may share a question
                benchmarks.append(Benchmark(f"{name}:{'+'.join(names)}", list(unique.values()), True))
        elif name and location:
            asked = open_questions(location, name, skipped)
            if 0 < count < len(asked):
                asked = [asked[row] for row in draw_rows(len(asked), count)]
            benchmarks.append(Benchmark(name, list(asked), False))
        else:
            forms = f"NAME:FILE, {CLOSED_WORLD}, or {CLOSED_WORLD}:SET with SET one of {', '.join(SETS)}"
            raise UserError(f"--benchmark={argument}: accepted: {forms}")
    names = [benchmark.name for benchmark in benchmarks]
    if not benchmarks or len({file_name(name) for name in names}) < len(names):
        raise UserError(f"--benchmark: {', '.join(names) or 'none'} found, accepted: one or more, each name once")
    return benchmarks


def file_name(benchmark: str) -> str:
    """A benchmark's name, with characters that do not belong in a file name replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", benchmark)


def draw_rows(rows: int, count: int) -> list[int]:
    """`count` of `rows` indices in order, the same on every machine. A larger count includes a smaller one's."""
    shuffled = sorted(range(rows), key=lambda row: hashlib.sha256(f"{QUESTION_SEED} {row}".encode()).digest())
    return sorted(shuffled[:count])


# ---- published figures ----

ALIASES = {"naturalquestions": "nq", "hotpot": "hotpotqa", "2wiki": "2wikimultihopqa"}


@functools.cache
def published_table() -> dict[tuple[str, str], list[Published]]:
    """All rows of assets/published.tsv, keyed by (benchmark, kind); kind "" means the full set."""
    table: dict[tuple[str, str], list[Published]] = {}
    for line in (ASSETS / "published.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        name, kind, method, model, em, decomposed = line.split("\t")
        row = Published(method, model, float(em), float(decomposed) if decomposed else None)
        table.setdefault((name, kind), []).append(row)
    return table


def find_published(name: str, kind: str = "") -> Sequence[Published]:
    """A benchmark's published rows, by its name in any spelling (`HotpotQA`, `hotpot_qa`); () when unknown."""
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return published_table().get((ALIASES.get(bare, bare), kind), ())
