"""Questions from any location: a file, a directory made by launch/prepare_data.py, a TFDS dataset, or a function.

The rows of a prepared directory are read lazily: a million questions cost neither memory nor start-up time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from psearch_jax.config.setting import names_object
from psearch_jax.data.sources import Seen, add_to_seen, convert_rows, iter_questions, read_questions
from psearch_jax.data.triple_questions import ALL_FORMS, SIZES, make_questions
from psearch_jax.data.triples import read_triples, select_stated, without_entities_of
from psearch_jax.runtime.own_code import call_object
from psearch_jax.runtime.paths import locate, on_disk, write_atomically
from psearch_jax.text.answers import normalise
from psearch_jax.types import Kind, Question, UserError, first_line
from retrieval.protocol import Passage

log = logging.getLogger("psearch_jax")
TFDS_PREFIX = "tfds:"
TRIPLES_PREFIX = "triples:"
PREFIXES = (TFDS_PREFIX, TRIPLES_PREFIX, "closed_world:")
# The files of a prepared directory: one JSON object per question, and their number, fingerprint and counts.
_ROWS, _SUMMARY = "questions.array_record", "questions.json"


@dataclass(frozen=True)
class TripleOptions:
    """How questions are made from triples.

    `corpus`: passages that must state the facts; None: no check. `exclude`: a question file whose evidence triples
    share no entity with those used. `sizes`, `forms` and `pairs` as in `make_questions`.
    """

    count: int = 2000
    seed: int = 0
    corpus: Sequence[Passage] | None = None
    exclude: str | None = None
    sizes: Sequence[int] = SIZES
    forms: Sequence[str] = ALL_FORMS
    pairs: bool = False


class PreparedQuestions(Sequence[Question]):
    """The questions of a prepared directory, in the order in which they were written."""

    def __init__(self, directory: str | Path):
        """Raises `UserError` when `directory` is not a prepared directory, or when its files cannot be read."""
        from grain.sources import ArrayRecordDataSource

        directory = on_disk(directory, "questions")
        if not (directory / _SUMMARY).is_file():
            raise UserError(f"{directory}: holds no {_SUMMARY}, accepted: a directory of launch/prepare_data.py")
        try:
            summary = json.loads((directory / _SUMMARY).read_text(encoding="utf-8"))
            self.fingerprint: str = summary["fingerprint"]
            self.counts: list[tuple[str, str, int]] = [tuple(row) for row in summary["counts"]]
            self._rows = ArrayRecordDataSource(str(directory / _ROWS))
            if len(self._rows) != summary["questions"]:
                raise ValueError(f"{len(self._rows)} of {summary['questions']} questions")
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{directory / _ROWS}: cannot be read ({first_line(error)}); prepare it again") from None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        fields = json.loads(self._rows[int(index) % len(self)])
        return Question(**fields | {"answers": tuple(fields["answers"])})


def prepare(
    sources: Sequence[tuple[str, str]],
    out: str | Path,
    skipped: list[str] | None = None,
    triples: TripleOptions = TripleOptions(),
) -> PreparedQuestions:
    """Writes the questions of `sources`, (name, location) pairs, into the directory `out`, completely or not at all.

    Args:
      skipped: receives one line per bad row; without it the first bad row is an error.
      triples: how questions are made from locations triples:FILE.

    Raises:
      UserError: as `iter_questions`, for ids that two sources share, when there are no questions, and when `out` is
        already prepared.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    out = on_disk(out, "--out")
    if (out / _SUMMARY).exists():
        raise UserError(f"--out={out}: already holds prepared questions, accepted: a new directory")
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    fingerprint, counts, seen = hashlib.sha256(), Counter(), cast(Seen, {})
    writer = ArrayRecordWriter(str(out / _ROWS), "group_size:1")  # each row can be read on its own
    try:
        for name, location in sources:
            rows = _iter_location(location, name, skipped, seen, triples)
            for question in tqdm(rows, desc=name, unit="question", disable=None):
                writer.write(json.dumps(asdict(question), ensure_ascii=False).encode())
                fingerprint.update(question.contents)
                counts[question.source, question.kind] += 1
        if not seen:
            locations = ", ".join(location for _, location in sources)
            raise UserError(f"{locations}: no questions found, at least one is needed")
    except BaseException:
        writer.close()
        (out / _ROWS).unlink()
        if is_new:
            out.rmdir()
        raise
    writer.close()
    summary = {"questions": len(seen), "fingerprint": fingerprint.hexdigest()}
    summary["counts"] = [[source, kind, count] for (source, kind), count in counts.items()]
    write_atomically(out / _SUMMARY, json.dumps(summary) + "\n")  # last: a directory without it is not complete
    return PreparedQuestions(out)


def open_questions(
    location: str | Path, source: str | None = None, skipped: list[str] | None = None
) -> Sequence[Question]:
    """The questions at a location: a file, a prepared directory (`source` is ignored), tfds:BUILDER:SPLIT, or code.

    Raises:
      UserError: as `read_questions` and `PreparedQuestions`.
    """
    if str(location).startswith(TFDS_PREFIX) or is_own_code(str(location)):
        return list(_iter_location(str(location), source, skipped, {}))
    if locate(location).is_dir():
        return PreparedQuestions(location)
    return read_questions(location, source, skipped)


def count_kinds(questions: Sequence[Question]) -> Counter[Kind]:
    """The number of questions of each kind. A prepared directory knows it; other questions are all read."""
    if not isinstance(questions, PreparedQuestions):
        return Counter(question.kind for question in questions)
    counts: Counter[Kind] = Counter()
    for _, kind, count in questions.counts:
        counts[cast(Kind, kind)] += count
    return counts


def location_exists(location: str) -> bool:
    """Whether a location exists; for a TFDS dataset and a module always True, because only opening it can tell."""
    if is_own_code(location):
        source = location.rpartition(":")[0]
        return not source.endswith(".py") or locate(source).exists()
    return location.startswith(TFDS_PREFIX) or locate(location).exists()


def is_own_code(location: str) -> bool:
    """Whether a location is a function of a user's file or module."""
    return names_object(location) and not location.startswith(PREFIXES) and not locate(location).exists()


def find_overlap(questions: Iterable[Question], training: Iterable[Question]) -> list[Question]:
    """Those of `questions` whose normalised text is also a training question's, and so leak into the result."""
    questions = list(questions)
    texts = {normalise(question.text) for question in questions}
    known = texts & {normalise(question.text) for question in training}
    return [question for question in questions if normalise(question.text) in known]


def _iter_location(
    location: str, source: str | None, skipped: list[str] | None, seen: Seen, options: TripleOptions = TripleOptions()
) -> Iterator[Question]:
    if location.startswith(TFDS_PREFIX):
        name = location.removeprefix(TFDS_PREFIX)
        yield from convert_rows(_tfds_rows(location), source or name, skipped, seen)
    elif location.startswith(TRIPLES_PREFIX):
        triples, source = read_triples(location.removeprefix(TRIPLES_PREFIX), skipped), source or "triples"
        if options.exclude is not None:
            kept = without_entities_of(triples, read_triples(options.exclude, skipped))
            log.info("%s: %d of %d triples have other entities", location, len(kept), len(triples))
            triples = kept
        if options.corpus is not None:
            stated = select_stated(triples, options.corpus)
            log.info("%s: passages about their entity state %d of %d triples", location, len(stated), len(triples))
            triples = stated
        chosen = {"sizes": options.sizes, "forms": options.forms, "pairs": options.pairs}
        for question in make_questions(triples, seed=options.seed, count=options.count, source=source, **chosen):
            add_to_seen(question, location, seen)
            yield question
    elif is_own_code(location):
        rows = call_object(location, "questions")
        named = ((f"{location}: row {i}", dict(row)) for i, row in enumerate(rows, 1))
        yield from convert_rows(named, source or location.rpartition(":")[2], skipped, seen)
    else:
        yield from iter_questions(location, source, skipped, seen)


def _tfds_rows(location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a dataset such as tfds:natural_questions_open:train, or of a directory prepared by TFDS.

    Supported: `question` with `answer` or `answers`, a list of strings or TriviaQA's record of value and aliases.
    """
    import tensorflow_datasets as tfds  # does not load TensorFlow, but takes seconds to import

    name, colon, split = location.removeprefix(TFDS_PREFIX).rpartition(":")
    if not colon or not name or not split:
        raise UserError(f"{location}: accepted: tfds:BUILDER:SPLIT, or tfds:DIRECTORY:SPLIT")
    try:
        if Path(name).is_dir():
            rows: Any = tfds.builder_from_directory(name).as_data_source(split=split)
        else:
            rows = tfds.data_source(name, split=split)
    except Exception as error:  # unknown names, missing splits, no network, files of another format
        raise UserError(f"{location}: cannot be opened ({first_line(error)})") from None
    for index in range(len(rows)):
        row = json.loads(json.dumps(rows[index], default=_as_json))
        answer = row.get("answers", row.get("answer"))
        if isinstance(answer, dict):
            answer = list(dict.fromkeys([answer.get("value"), *answer.get("aliases", [])]))
        identifier = row.get("question_id", row.get("id", index))
        yield f"{location}: row {index + 1}", {**row, "id": identifier, "golden_answers": answer}


def _as_json(value: Any) -> Any:
    """TFDS's bytes, arrays and numbers as JSON values."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value.tolist()
