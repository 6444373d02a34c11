"""Scoring of short answers: SQuAD's normalisation (arXiv 1606.05250), exact match and token F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-cases, removes ASCII punctuation and English articles, and collapses white space."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str | None, golds: Sequence[str]) -> bool:
    """Whether the normalised prediction equals one of the normalised gold answers; None matches nothing."""
    return prediction is not None and normalise(prediction) in {normalise(gold) for gold in golds}


def f1(prediction: str | None, golds: Sequence[str]) -> float:
    """The best token F1 of the prediction against the gold answers, in [0, 1]; None scores 0."""
    if prediction is None:
        return 0.0
    return max((_token_f1(normalise(prediction).split(), normalise(gold).split()) for gold in golds), default=0.0)


def contains_words(text: str, words: str) -> bool:
    """Whether `words` occur next to each other in `text`, as complete words; both normalised. No words: False."""
    return bool(words) and f" {words} " in f" {text} "


def _token_f1(prediction: list[str], gold: list[str]) -> float:
    if not prediction or not gold:
        return float(prediction == gold)
    common = (Counter(prediction) & Counter(gold)).total()
    return 2 * common / (len(prediction) + len(gold))
