"""Evaluation benchmarks: closed-world sets, question files, and the published figures to compare with."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import LARGEST, SIZES, known_questions, questions
from psearch_jax.closed_world.wordings import PAIRED
from psearch_jax.data.prepared import open_questions
from psearch_jax.runtime.paths import ASSETS
from psearch_jax.types import KINDS, Kind, Question, UserError

CLOSED_WORLD = "closed_world"
CLOSED_WORLD_COUNT = 400  # questions per set
PAIRS = "pairs"  # parallel and sequential questions with the same words, in wordings that no training question has
MANY = "many"  # comparisons of more entities than any training question has
KNOWN = "known"  # facts that every cold start states, reworded: answerable without a search
SETS = (*KINDS, PAIRS, MANY, KNOWN)
PAIRS_SOURCE = f"{CLOSED_WORLD}:{PAIRS}"
DEPENDENCY_LABELS = ASSETS / "hotpotqa100_dependency.tsv"
# Draws the closed-world evaluation questions. Fixed, so that the set does not depend on the seed of a run.
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


def closed_world_benchmark(world: ClosedWorld, name: str, count: int, seed: int = QUESTION_SEED) -> list[Question]:
    """`count` questions of a closed-world set, held out except in `KNOWN`. Equal worlds give equal questions.

    Half of `PAIRS` are parallel, half sequential; their source is `closed_world:pairs`.

    Raises:
      UserError: the world has fewer questions.
    """
    if name == PAIRS:
        pairs = []
        for i, kind in enumerate(("parallel", "sequential")):
            forms = [pair[i] for pair in PAIRED]
            pairs += questions(world, "eval", kind, (count + 1 - i) // 2, seed, forms, held_out_wordings=True)
        return [replace(q, source=PAIRS_SOURCE) for q in pairs]
    if name == MANY:
        sizes = dict.fromkeys(range(max(SIZES) + 1, LARGEST + 1), 1.0)
        return questions(world, "eval", "parallel", count, seed, ["first", "has"], sizes)
    if name == KNOWN:
        known = known_questions(world, held_out_wordings=True)
        return [known[row] for row in draw_rows(len(known), min(count, len(known)), seed)]
    return questions(world, "eval", cast(Kind, name), count, seed)


def is_paired(source: str) -> bool:
    """Whether a question's source is the set `PAIRS`."""
    return source == PAIRS_SOURCE


def load_benchmarks(
    arguments: Sequence[str],
    world: Callable[[], ClosedWorld],
    count: int = 0,
    skipped: list[str] | None = None,
    seed: int = QUESTION_SEED,
) -> list[Benchmark]:
    """The benchmarks that the arguments name.

    - NAME:LOCATION: `count` questions (0: all) of a file, a prepared directory or tfds:BUILDER:SPLIT. `seed` samples
      them from the entire file, because merged files hold one set after another. The file's order is kept.
    - closed_world: one benchmark per question kind; closed_world:SET: one set;
    - NAME:closed_world:SET+SET: closed-world questions under another name, sampled with a seed derived from that name.

    Args:
      world: makes the closed world; called only when needed.
      count: questions per benchmark; for the closed world, per set (0: `CLOSED_WORLD_COUNT`).
      skipped: receives one line per bad row of a file; without it the first bad row is an error.
      seed: samples the `count` questions of a file.

    Raises:
      UserError: an argument of another form, no argument, a duplicate name, or bad rows.
    """
    benchmarks: list[Benchmark] = []
    for argument in arguments:
        name, _, location = argument.partition(":")
        if name == CLOSED_WORLD:
            for part in (location,) if location else KINDS:
                benchmarks.append(closed_benchmark(f"{name}:{part}", part, argument, world, count, QUESTION_SEED))
        elif location.partition(":")[0] == CLOSED_WORLD:
            name_seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
            parts = location.partition(":")[2] or "+".join(KINDS)
            benchmark = closed_benchmark(name, parts, argument, world, count, name_seed)
            benchmarks.append(replace(benchmark, questions=[replace(q, source=name) for q in benchmark.questions]))
        elif name and location:
            asked = open_questions(location, name, skipped)
            if 0 < count < len(asked):
                asked = [asked[row] for row in draw_rows(len(asked), count, seed)]
            benchmarks.append(Benchmark(name, add_labels(asked), False))
        else:
            forms = f"NAME:FILE, {CLOSED_WORLD}, or {CLOSED_WORLD}:SET with SET one of {', '.join(SETS)}"
            raise UserError(f"--benchmark={argument}: accepted: {forms}")
    names = [benchmark.name for benchmark in benchmarks]
    if not benchmarks or len({file_name(name) for name in names}) < len(names):
        raise UserError(f"--benchmark: {', '.join(names) or 'none'} found, accepted: one or more, each name once")
    return benchmarks


def closed_benchmark(
    name: str, sets: str, argument: str, world: Callable[[], ClosedWorld], count: int, seed: int
) -> Benchmark:
    parts = sets.split("+")
    for part in parts:
        if part not in SETS:
            raise UserError(f"--benchmark={argument}: set {part!r} found, accepted: {', '.join(SETS)}")
    if len(set(parts)) < len(parts):
        raise UserError(f"--benchmark={argument}: a set is named twice, accepted: each set once")
    asked = [q for part in parts for q in closed_world_benchmark(world(), part, count or CLOSED_WORLD_COUNT, seed)]
    return Benchmark(name, list({(q.source, q.id): q for q in asked}.values()), True)  # sets may share a question


def file_name(benchmark: str) -> str:
    """A benchmark's name, with characters that do not belong in a file name replaced."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", benchmark)


def draw_rows(rows: int, count: int, seed: int) -> list[int]:
    """`count` of `rows` indices in order, the same on every machine. A larger count includes a smaller one's."""
    shuffled = sorted(range(rows), key=lambda row: hashlib.sha256(f"{seed} {row}".encode()).digest())
    return sorted(shuffled[:count])


def add_labels(questions: Sequence[Question]) -> list[Question]:
    labels = dependency_labels()
    return [
        replace(q, metadata={**q.metadata, "dependency": labels[q.id]}) if q.id in labels else q for q in questions
    ]


@functools.cache
def dependency_labels() -> dict[str, Kind]:
    """The dependency structure of 100 HotpotQA questions by question id, where two manual labellings agree."""
    lines = DEPENDENCY_LABELS.read_text(encoding="utf-8").splitlines()[1:]
    readings = [line.split("\t") for line in lines]
    return {identifier: cast(Kind, first) for identifier, first, second in readings if first == second}


# ---- published figures ----

ALIASES = {"naturalquestions": "nq", "hotpot": "hotpotqa", "2wiki": "2wikimultihopqa"}


@functools.cache
def published_table() -> dict[tuple[str, Kind | None], tuple[Published, ...]]:
    """All rows of assets/published.tsv, keyed by (benchmark, kind); kind None means the full set."""
    table: dict[tuple[str, Kind | None], tuple[Published, ...]] = {}
    for line in (ASSETS / "published.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        name, kind, method, model, em, decomposed = line.split("\t")
        row = Published(method, model, float(em), float(decomposed) if decomposed else None)
        key = name, cast(Kind, kind) if kind else None
        table[key] = (*table.get(key, ()), row)
    return table


def published(name: str, kind: Kind | None = None) -> tuple[Published, ...]:
    """A benchmark's published rows, by its name in any spelling (`HotpotQA`, `hotpot_qa`); () when unknown."""
    return published_table().get((bare_name(name), kind), ())


def bare_name(name: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return ALIASES.get(bare, bare)
