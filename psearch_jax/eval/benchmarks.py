"""What is evaluated on: closed-world sets, question files, and the published figures to put beside our own."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from psearch_jax.data.asking import LARGEST, SIZES, known_questions, questions
from psearch_jax.data.closed_world import ClosedWorld
from psearch_jax.data.prepared import open_questions
from psearch_jax.data.wordings import PAIRED
from psearch_jax.types import KINDS, Kind, Question, UserError

CLOSED_WORLD = "closed_world"
CLOSED_WORLD_COUNT = 400  # questions of a set
PAIRS = "pairs"  # parallel and sequential questions of the same words, in wordings that no training question has
MANY = "many"  # comparisons of more entities than any training question has
KNOWN = "known"  # facts that every cold start states, in other words: what can be answered without a search
ENTITIES = {f"entities{n}": n for n in range(min(SIZES), LARGEST + 1)}  # comparisons of so many, of two forms
SETS = (*KINDS, PAIRS, MANY, KNOWN, *ENTITIES)
PAIRS_SOURCE = f"{CLOSED_WORLD}:{PAIRS}"
DEPENDENCY_LABELS = Path(__file__).parent.parent / "assets" / "hotpotqa100_dependency.tsv"
# Of the draw of closed-world evaluation questions: one fixed set, whatever the seed of a run.
QUESTION_SEED = 1


@dataclass(frozen=True)
class Published:
    """One published result. `decomposition_ratio` is None where the paper gives none."""

    method: str
    model: str
    em: float
    decomposition_ratio: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """Questions under a name; `closed_world`: their passages are the closed world's own."""

    name: str
    questions: list[Question]
    closed_world: bool


def closed_world_benchmark(world: ClosedWorld, name: str, count: int, seed: int = QUESTION_SEED) -> list[Question]:
    """`count` questions of a closed-world set, held-out ones but for `KNOWN`; equal for equal worlds.

    Of `PAIRS` half are parallel, half sequential, and their source is `closed_world:pairs`.

    Raises:
      UserError: the world has fewer.
    """
    if name == PAIRS:
        found = []
        for i, kind in enumerate(("parallel", "sequential")):
            forms = [pair[i] for pair in PAIRED]
            found += questions(world, "eval", kind, (count + 1 - i) // 2, seed, forms, held_out_wordings=True)
        return [replace(q, source=PAIRS_SOURCE) for q in found]
    if name == MANY:
        sizes = dict.fromkeys(range(max(SIZES) + 1, LARGEST + 1), 1.0)
        return questions(world, "eval", "parallel", count, seed, ["first", "has"], sizes)
    if name in ENTITIES:
        return questions(world, "eval", "parallel", count, seed, ["first", "has"], {ENTITIES[name]: 1.0})
    if name == KNOWN:
        found = known_questions(world, held_out_wordings=True)
        return [found[place] for place in _drawn(len(found), min(count, len(found)), seed)]
    return questions(world, "eval", name, count, seed)


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

    - NAME:LOCATION: `count` questions (0: all) of a file, a prepared directory or tfds:BUILDER:SPLIT, drawn by `seed`
      from all of it (merged files hold one set behind the other) and in its order;
    - closed_world: a benchmark per kind of question; closed_world:SET: one set;
    - NAME:closed_world:SET+SET: closed-world questions under another name, drawn anew for that name.

    Args:
      world: makes the closed world; called when it is needed.
      count: questions per benchmark, for the closed world per set (0: `CLOSED_WORLD_COUNT`).
      skipped: gets one line per bad row of a file; without it the first is an error.
      seed: of the draw of `count` questions from a file.

    Raises:
      UserError: an argument of another form, no argument, a name that comes twice, or bad rows.
    """
    found: list[Benchmark] = []
    for argument in arguments:
        name, _, location = argument.partition(":")
        if name == CLOSED_WORLD:
            for part in (location,) if location else KINDS:
                found.append(_closed(f"{name}:{part}", part, argument, world, count, QUESTION_SEED))
        elif location.partition(":")[0] == CLOSED_WORLD:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
            parts = location.partition(":")[2] or "+".join(KINDS)
            benchmark = _closed(name, parts, argument, world, count, seed)
            found.append(replace(benchmark, questions=[replace(q, source=name) for q in benchmark.questions]))
        elif name and location:
            asked = open_questions(location, name, skipped)
            if 0 < count < len(asked):
                asked = [asked[place] for place in _drawn(len(asked), count, seed)]
            found.append(Benchmark(name, _with_labels(asked), False))
        else:
            forms = f"NAME:FILE, {CLOSED_WORLD}, or {CLOSED_WORLD}:SET with SET one of {', '.join(SETS)}"
            raise UserError(f"--benchmark={argument}: accepted: {forms}")
    names = [benchmark.name for benchmark in found]
    if not found or len({file_name(name) for name in names}) < len(names):
        raise UserError(f"--benchmark: {', '.join(names) or 'none'} found, accepted: one or more, each name once")
    return found


def _closed(name: str, sets: str, argument: str, world: Callable[[], ClosedWorld], count: int, seed: int) -> Benchmark:
    asked: list[Question] = []
    for part in sets.split("+"):
        if part not in SETS:
            raise UserError(f"--benchmark={argument}: set {part!r} found, accepted: {', '.join(SETS)}")
        asked += closed_world_benchmark(world(), part, count or CLOSED_WORLD_COUNT, seed)
    return Benchmark(name, asked, True)


def file_name(benchmark: str) -> str:
    """A benchmark's name with every character replaced that a file's should not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", benchmark)


def _drawn(rows: int, count: int, seed: int) -> list[int]:
    """`count` of `rows` places in order, the same on every machine; a larger count holds those of a smaller one."""
    shuffled = sorted(range(rows), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())
    return sorted(shuffled[:count])


def _with_labels(questions: Sequence[Question]) -> list[Question]:
    labels = dependency_labels()
    return [
        replace(q, metadata={**q.metadata, "dependency": labels[q.id]}) if q.id in labels else q for q in questions
    ]


@functools.cache
def dependency_labels() -> dict[str, Kind]:
    """How the facts of 100 HotpotQA questions depend on one another, by question id, where two readings agreed."""
    lines = DEPENDENCY_LABELS.read_text(encoding="utf-8").splitlines()[1:]
    readings = [line.split("\t") for line in lines]
    return {identifier: first for identifier, first, second in readings if first == second}


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
    return PUBLISHED.get((_bare(name), kind), ())


def published_average(names: Sequence[str]) -> tuple[Published, ...]:
    """The published averages, when `names` are the seven sets they are of; () for any others."""
    return _AVERAGES if sorted(map(_bare, names)) == sorted(_SETS) else ()


def _bare(name: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return _ALIASES.get(bare, bare)
