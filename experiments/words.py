"""A control without a model for the decision to split: a classifier by the words of the question."""

import functools
from pathlib import Path

from psearch_jax.data.prepared import open_questions


@functools.cache
def accuracy_by_words(training: Path, asked: str) -> float | None:
    """Decomposition accuracy of logistic regression on words and word bigrams, fitted to the training questions.

    Mixed questions do not count, as in `judge_splitting`. None without questions of both labels, or if none is asked.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    fitted, tested = ([q for q in open_questions(place) if q.kind != "mixed"] for place in (training, asked))
    labels, expected = ([q.kind == "parallel" for q in questions] for questions in (fitted, tested))
    if len(set(labels)) < 2 or not tested:
        return None
    words = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", binary=True)
    model = make_pipeline(words, LogisticRegression(max_iter=1000)).fit([q.text for q in fitted], labels)
    return round(float(model.score([q.text for q in tested], expected)), 6)
