"""The TensorFlow Datasets builder `psearch_qa`: questions from any source in one format. Needs no TensorFlow."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow_datasets as tfds

from psearch_jax.types import KINDS, Question


class PsearchQa(tfds.core.GeneratorBasedBuilder):
    """Questions with answers, kind and metadata, in array_record files.

    The dataset's metadata contains a hash of the questions in order, and the counts by source and kind.
    """

    name = "psearch_qa"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, questions: Callable[[], Iterator[Question]] | None = None, split: str = "train", **kwargs: Any):
        """`download_and_prepare` writes `questions` as `split`; reading needs neither."""
        self._questions, self._split = questions, split
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "source": tfds.features.Text(),
            "id": tfds.features.Text(),
            "question": tfds.features.Text(),
            "answers": tfds.features.Sequence(tfds.features.Text()),
            "kind": tfds.features.ClassLabel(names=KINDS),
            "metadata": tfds.features.Text(doc="A JSON object."),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Questions to search for, with the answers and what kind of splitting they allow.",
            features=tfds.features.FeaturesDict(features),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,  # keeps the order of the files; the loader shuffles
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {self._split: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        assert self._questions is not None and self.info.metadata is not None
        digest, counts = hashlib.sha256(), Counter()
        for place, question in enumerate(self._questions()):
            digest.update(question.contents)
            counts[question.source, question.kind] += 1
            yield place, to_example(question)
        self.info.metadata["fingerprint"] = digest.hexdigest()
        self.info.metadata["counts"] = [[source, kind, count] for (source, kind), count in counts.items()]


def to_example(question: Question) -> dict[str, Any]:
    """A question as an example of the builder."""
    return {
        "source": question.source,
        "id": question.id,
        "question": question.text,
        "answers": list(question.answers),
        "kind": question.kind,
        "metadata": json.dumps(question.metadata, ensure_ascii=False),
    }


def to_question(example: dict[str, Any]) -> Question:
    """The inverse of `to_example`, for rows of `as_data_source`."""
    return Question(
        source=example["source"].decode(),
        id=example["id"].decode(),
        text=example["question"].decode(),
        answers=tuple(answer.decode() for answer in example["answers"]),
        kind=KINDS[int(example["kind"])],
        metadata=json.loads(example["metadata"].decode()),
    )
