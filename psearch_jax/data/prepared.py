"""Questions from any location: a file, a directory made by launch/prepare_data.py, or a TFDS dataset.

A prepared directory is a TFDS dataset, `psearch_qa`, whose rows are read lazily: a million questions cost neither
memory nor start-up time.
"""

from __future__ import annotations

import io
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from psearch_jax.data.sources import Seen, collect_questions, from_json, iter_questions, read_questions
from psearch_jax.data.triple_questions import make_questions
from psearch_jax.data.triples import read_triples, select_stated
from psearch_jax.runtime.paths import locate, on_disk
from psearch_jax.text.answers import normalise
from psearch_jax.types import Kind, Question, UserError, first_line
from retrieval.protocol import Passage

log = logging.getLogger("psearch_jax")
TFDS_PREFIX = "tfds:"
TRIPLES_PREFIX = "triples:"
_DATASET = "psearch_qa"


@dataclass(frozen=True)
class TripleOptions:
    """How questions are made from triples. `corpus`: passages that must state the facts; None: no check."""

    count: int = 2000
    seed: int = 0
    corpus: Sequence[Passage] | None = None


class PreparedQuestions(Sequence[Question]):
    """The questions of a prepared directory, in the order in which they were written."""

    def __init__(self, directory: str | Path):
        """Raises `UserError` when `directory` is not a prepared directory, or when its dataset cannot be read."""
        import tensorflow_datasets as tfds  # does not load TensorFlow, but takes seconds to import

        versions = sorted((on_disk(directory, "questions") / _DATASET).glob("[0-9]*.[0-9]*.[0-9]*"))
        if not versions:
            raise UserError(f"{directory}: holds no {_DATASET}, accepted: a directory of launch/prepare_data.py")
        try:
            builder = tfds.builder_from_directory(versions[-1])
            (self.split,) = builder.info.splits
            self._rows: Any = builder.as_data_source(split=self.split)
            metadata = builder.info.metadata or {}
            self.fingerprint: str = metadata["fingerprint"]
            self.counts: list[tuple[str, str, int]] = [tuple(row) for row in metadata["counts"]]
            for end in np.cumsum(builder.info.splits[self.split].shard_lengths):
                self._rows[int(end) - 1]  # fails if a shard is truncated
        except Exception as error:  # damaged files make the readers raise various errors
            raise UserError(f"{versions[-1]}: cannot be read ({first_line(error)}); prepare it again") from None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        from psearch_jax.data.psearch_qa import to_question

        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return to_question(self._rows[int(index) % len(self)])


def prepare(
    sources: Sequence[tuple[str, str]],
    split: str,
    out: str | Path,
    skipped: list[str] | None = None,
    triples: TripleOptions = TripleOptions(),
) -> PreparedQuestions:
    """Writes the questions of `sources`, (name, location) pairs, as one dataset into `out`, completely or not at all.

    Args:
      split: the name of the TFDS split.
      skipped: receives one line per bad row; without it the first bad row is an error.
      triples: how questions are made from locations triples:FILE.

    Raises:
      UserError: as `iter_questions`, for ids that two sources share, when there are no questions, and when `out`
        already contains a dataset.
    """
    import tensorflow_datasets as tfds

    from psearch_jax.data.psearch_qa import PsearchQa

    out = on_disk(out, "--out")
    folder = out / _DATASET
    if list(folder.glob("[0-9]*")):
        raise UserError(f"--out={out}: already holds a prepared dataset, accepted: a new directory")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
    stopped: list[UserError] = []

    def questions() -> Iterator[Question]:
        seen: Seen = {}
        try:
            for name, location in sources:
                rows = _iter_location(location, name, skipped, seen, triples)
                yield from tqdm(rows, desc=name, unit="question", disable=None)
            if not seen:
                locations = ", ".join(location for _, location in sources)
                raise UserError(f"{locations}: no questions found, at least one is needed")
        except UserError as error:  # TFDS would wrap it in its own error
            stopped.append(error)
            raise

    fresh = not out.exists()
    tfds.disable_progress_bar()
    logging.getLogger("absl").setLevel(logging.WARNING)
    try:
        # TFDS prints about downloads and makes a folder for them, although there are none.
        with redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as nothing:
            PsearchQa(questions, split, data_dir=out).download_and_prepare(download_dir=nothing)
    except Exception:
        shutil.rmtree(out if fresh else folder, ignore_errors=True)
        if stopped:
            raise stopped[0] from None
        raise
    return PreparedQuestions(out)


def open_questions(
    location: str | Path, source: str | None = None, skipped: list[str] | None = None
) -> Sequence[Question]:
    """The questions at a location: a file, a prepared directory (`source` is ignored), or tfds:BUILDER:SPLIT.

    Raises:
      UserError: as `read_questions` and `PreparedQuestions`.
    """
    if str(location).startswith(TFDS_PREFIX):
        return list(_iter_location(str(location), source, skipped, {}))
    if locate(location).is_dir():
        return PreparedQuestions(location)
    return read_questions(location, source, skipped)


def kinds_of(questions: Sequence[Question]) -> Counter[Kind]:
    """The number of questions of each kind. A prepared directory knows it; other questions are all read."""
    if not isinstance(questions, PreparedQuestions):
        return Counter(question.kind for question in questions)
    counts: Counter[Kind] = Counter()
    for _, kind, count in questions.counts:
        counts[cast(Kind, kind)] += count
    return counts


def are_there(location: str) -> bool:
    """Whether a location exists; for a TFDS dataset always True, because only opening it can tell."""
    return location.startswith(TFDS_PREFIX) or locate(location).exists()


def overlap(questions: Iterable[Question], training: Iterable[Question]) -> list[Question]:
    """Those of `questions` whose normalised text is also a training question's, and so leak into the result."""
    questions = list(questions)
    texts = {normalise(question.text) for question in questions}
    known = {text for text in (normalise(question.text) for question in training) if text in texts}
    return [question for question in questions if normalise(question.text) in known]


def _iter_location(
    location: str, source: str | None, skipped: list[str] | None, seen: Seen, options: TripleOptions = TripleOptions()
) -> Iterator[Question]:
    if location.startswith(TFDS_PREFIX):
        name = location.removeprefix(TFDS_PREFIX)
        yield from collect_questions(_tfds_rows(location), from_json, source, name, skipped, seen)
    elif location.startswith(TRIPLES_PREFIX):
        triples, source = read_triples(location.removeprefix(TRIPLES_PREFIX), skipped), source or "triples"
        if options.corpus is not None:
            stated = select_stated(triples, options.corpus)
            log.info("%s: passages about their entity state %d of %d triples", location, len(stated), len(triples))
            triples = stated
        questions = make_questions(triples, seed=options.seed, count=options.count, source=source)
        rows = ((location, question) for question in questions)
        yield from collect_questions(rows, lambda question, *_: question, source, "", skipped, seen)
    else:
        yield from iter_questions(location, source, skipped, seen)


def _tfds_rows(location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a dataset such as tfds:natural_questions_open:train, or of a directory prepared by TFDS.

    Supported: `question` with `answer` or `answers`, a list of strings or TriviaQA's record of value and aliases.
    """
    import tensorflow_datasets as tfds

    name, colon, split = location.removeprefix(TFDS_PREFIX).rpartition(":")
    if not colon or not name or not split:
        raise UserError(f"{location}: accepted: tfds:BUILDER:SPLIT, or tfds:DIRECTORY:SPLIT")
    try:
        if Path(name).is_dir():
            builder = tfds.builder_from_directory(name)
            rows: Any = builder.as_data_source(split=split)
        else:
            rows = tfds.data_source(name, split=split)
    except Exception as error:  # unknown names, missing splits, no network, files of another format
        raise UserError(f"{location}: cannot be opened ({first_line(error)})") from None
    for index in range(len(rows)):
        row = _decode(rows[index])
        answer = row.get("answers", row.get("answer"))
        if isinstance(answer, dict):
            answer = list(dict.fromkeys([answer.get("value"), *answer.get("aliases", [])]))
        identifier = row.get("question_id", row.get("id", index))
        yield f"{location}: row {index + 1}", {**row, "id": identifier, "golden_answers": answer}


def _decode(value: Any) -> Any:
    """Converts TFDS's bytes to str and its arrays to lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict):
        return {name: _decode(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_decode(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
