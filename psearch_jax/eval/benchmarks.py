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
ENTITIES = {f"entities{n}": n for n in range(min(SIZES), LARGEST + 1)}  # comparisons of n entities, in two forms
SETS = (*KINDS, PAIRS, MANY, KNOWN, *ENTITIES)
PAIRS_SOURCE = f"{CLOSED_WORLD}:{PAIRS}"
DEPENDENCY_LABELS = ASSETS / "hotpotqa100_dependency.tsv"
# Draws the closed-world evaluation questions. Fixed, so that the set does not depend on the seed of a run.
QUESTION_SEED = 1


PAPER = "arXiv 2508.09303"


@dataclass(frozen=True)
class Published:
    """One published result. `decomposition_ratio` is None if the source reports none."""

    method: str
    model: str
    em: float
    decomposition_ratio: float | None = None
    source: str = PAPER


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
    if name in ENTITIES:
        return questions(world, "eval", "parallel", count, seed, ["first", "has"], {ENTITIES[name]: 1.0})
    if name == KNOWN:
        known = known_questions(world, held_out_wordings=True)
        return [known[place] for place in _drawn(len(known), min(count, len(known)), seed)]
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
                benchmarks.append(_closed(f"{name}:{part}", part, argument, world, count, QUESTION_SEED))
        elif location.partition(":")[0] == CLOSED_WORLD:
            own_seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
            parts = location.partition(":")[2] or "+".join(KINDS)
            benchmark = _closed(name, parts, argument, world, count, own_seed)
            benchmarks.append(replace(benchmark, questions=[replace(q, source=name) for q in benchmark.questions]))
        elif name and location:
            asked = open_questions(location, name, skipped)
            if 0 < count < len(asked):
                asked = [asked[place] for place in _drawn(len(asked), count, seed)]
            benchmarks.append(Benchmark(name, _with_labels(asked), False))
        else:
            forms = f"NAME:FILE, {CLOSED_WORLD}, or {CLOSED_WORLD}:SET with SET one of {', '.join(SETS)}"
            raise UserError(f"--benchmark={argument}: accepted: {forms}")
    names = [benchmark.name for benchmark in benchmarks]
    if not benchmarks or len({file_name(name) for name in names}) < len(names):
        raise UserError(f"--benchmark: {', '.join(names) or 'none'} found, accepted: one or more, each name once")
    return benchmarks


def _closed(name: str, sets: str, argument: str, world: Callable[[], ClosedWorld], count: int, seed: int) -> Benchmark:
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


def _drawn(rows: int, count: int, seed: int) -> list[int]:
    """`count` of `rows` indices in order, the same on every machine. A larger count includes a smaller one's."""
    shuffled = sorted(range(rows), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())
    return sorted(shuffled[:count])


def _with_labels(questions: Sequence[Question]) -> list[Question]:
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


# ---------------------------------------------------------------------------------------------- published figures
# EM of the paper's main tables (`PAPER`), in the order of `_SETS`.
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
# Subsets of one kind: EM of Search-R1 and of ParallelSearch, and the share of questions that the latter decomposed.
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
# Averages over the seven sets, as the paper prints them.
_AVERAGES = tuple(
    Published(method, model, em)
    for method, model, em in (
        ("R1 (no search)", _INSTRUCT, 0.271),
        ("Search-R1", _INSTRUCT, 0.370),
        ("ZeroSearch", _INSTRUCT, 0.391),
        ("ParallelSearch", _INSTRUCT, 0.425),
        ("R1 (no search)", _BASE, 0.276),
        ("Search-R1", _BASE, 0.434),
        ("ParallelSearch", _BASE, 0.458),
    )
)
# Newer results by others, with other retrievers or training questions, in the order of `_SETS`; None: not reported.
_NEWER: tuple[tuple[str, str, str, tuple[float | None, ...]], ...] = (
    ("MultiSearch", "model not stated", "arXiv 2605.13534", (0.491, 0.630, 0.455, 0.446, 0.416, 0.163, 0.476)),
    ("REINFORCE", _INSTRUCT, "tinker-cookbook", (0.516, 0.673, None, 0.497, 0.428, None, None)),
)
_NEWER_AVERAGES = (
    Published("Search-R1++ (REINFORCE)", "Qwen2.5-7B", 0.442, source="arXiv 2602.19526"),
    Published("Search-R1++ (REINFORCE)", "Qwen2.5-3B", 0.331, source="arXiv 2602.19526"),
)
_ALIASES = {"naturalquestions": "nq", "hotpot": "hotpotqa", "2wiki": "2wikimultihopqa"}


def published_table() -> dict[tuple[str, Kind | None], tuple[Published, ...]]:
    """All published rows, keyed by (benchmark, kind); kind None means the full set."""
    table: dict[tuple[str, Kind | None], tuple[Published, ...]] = {}
    for place, name in enumerate(_SETS):
        table[name, None] = tuple(Published(method, model, em[place]) for model, method, em in _MAIN)
        for method, model, source, ems in _NEWER:
            em = ems[place]
            if em is not None:
                table[name, None] += (Published(method, model, em, source=source),)
    for name, kind, model, before, after, decomposed in _SUBSETS:
        rows = (Published("Search-R1", model, before), Published("ParallelSearch", model, after, decomposed))
        table[name, kind] = table.get((name, kind), ()) + rows
    return table


PUBLISHED = published_table()


def published(name: str, kind: Kind | None = None) -> tuple[Published, ...]:
    """A benchmark's published rows, by its name in any spelling (`HotpotQA`, `hotpot_qa`); () when unknown."""
    return PUBLISHED.get((_bare(name), kind), ())


def published_average(names: Sequence[str]) -> tuple[Published, ...]:
    """The published averages if `names` are exactly the seven sets that they cover; otherwise ()."""
    return (*_AVERAGES, *_NEWER_AVERAGES) if sorted(map(_bare, names)) == sorted(_SETS) else ()


def _bare(name: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return _ALIASES.get(bare, bare)
