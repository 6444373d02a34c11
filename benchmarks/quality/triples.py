"""`launch/bench.py triples`: how well surface cues reveal the kind of questions made from evidence triples.

    python launch/bench.py triples --triples=FILE --corpus=FILE [--test=FILE]

It prints the counts by form, and how well simple classifiers separate parallel from sequential questions. They are
cross-validated in five folds; both members of a minimal pair are in one fold, and so are all other questions about one
first entity. With --test it also counts the questions and entities of that file among the questions made.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from psearch_jax.data.evidence.facts import key
from psearch_jax.data.evidence.triples import make_questions, read_triples, signature
from psearch_jax.data.prepared import overlap
from psearch_jax.data.sources import read_questions
from psearch_jax.eval.tables import table
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.types import KINDS, Question
from retrieval.corpus import MemoryMappedCorpus

FOLDS = 5
RELATION_WORDS = (
    "direct perform compos produc father mother spouse birth born death die buri burial citizen origin made country "
    "release found date place"
).split()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench triples", description=__doc__)
    parser.add_argument("--triples", required=True, help="jsonl with metadata.evidences, or of bare triples")
    parser.add_argument("--corpus", help="passages that have to state the facts")
    parser.add_argument("--test", help="jsonl with metadata.evidences that must share no entity")
    parser.add_argument("--questions", type=int, default=2000, help="number of questions to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    corpus = MemoryMappedCorpus(flags.corpus) if flags.corpus else None
    triples = read_triples(flags.triples)
    made = make_questions(triples, seed=flags.seed, count=flags.questions, corpus=corpus, source="triples")
    counts, cues = Counter((q.kind, q.metadata["form"]) for q in made), surface_cues(made)
    rows = [
        [kind, form, str(n)] for (kind, form), n in sorted(counts.items(), key=lambda c: (KINDS.index(c[0][0]), c))
    ]
    print(table([["kind", "form", "questions"], *rows]), cue_table(cues), sep="\n\n")
    figures = {"counts": {f"{kind}/{form}": n for (kind, form), n in counts.items()}, "cues": cues}
    if flags.test:
        figures["test"] = shared_with(flags.test, made)
        print("", *(f"{name}: {n}" for name, n in figures["test"].items()), sep="\n")
    if flags.json:
        write_atomically(flags.json, json.dumps(figures, indent=2) + "\n")


def surface_features(text: str) -> str:
    """The first two words (a name is `*`) and those of or, and, both, either that occur, as one token each."""
    first, second, *connectives = signature(text)
    return " ".join([f"first={first}", f"second={second}", f"both_words={first}_{second}", *connectives])


def relation_features(text: str) -> str:
    """The relation words that occur, each once, without inflection."""
    lower = text.lower()
    return " ".join(word for word in RELATION_WORDS if re.search(rf"\b{word}", lower))


FEATURES: dict[str, Callable[[str], str]] = {
    "opening and connectives": surface_features,
    "first two words": lambda text: surface_features(text).split()[2],
    "relation words": relation_features,
}


def surface_cues(questions: Sequence[Question]) -> dict[str, dict[str, float]]:
    """Balanced accuracy of parallel against sequential by features, on all questions and on minimal pairs."""
    labelled = [q for q in questions if q.kind in ("parallel", "sequential")]
    pairs = [q for q in labelled if "pair" in q.metadata]
    return {
        name: {"all": _accuracy(labelled, features), "minimal pairs": _accuracy(pairs, features)}
        for name, features in FEATURES.items()
    }


def _accuracy(questions: Sequence[Question], features: Callable[[str], str]) -> float:
    labels = np.asarray([q.kind == "parallel" for q in questions])
    groups = [q.metadata.get("pair") or key(q.metadata["rounds"][0][0][1]) for q in questions]
    model = make_pipeline(
        CountVectorizer(token_pattern=r"\S+", binary=True, lowercase=False),
        LogisticRegression(max_iter=2000, class_weight="balanced"),
    )
    texts = [features(q.text) or "none" for q in questions]
    guessed = cross_val_predict(model, texts, labels, groups=groups, cv=GroupKFold(FOLDS))
    return float(np.mean([(guessed == labels)[labels == value].mean() for value in (True, False)]))


def cue_table(cues: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(cues.values())))
    rows = [[name, *(f"{figures[column]:.2f}" for column in columns)] for name, figures in cues.items()]
    return table([["features", *columns], *rows])


def shared_with(path: str, made: Sequence[Question]) -> dict[str, int]:
    """How many questions and entities of a test file are among the questions made."""
    test = {key(triple.entity) for triple in read_triples(path)}
    names = [name for q in made for facts in q.metadata["rounds"] for _, *pair in facts for name in pair]
    entities = {key(name) for name in (*names, *(option for q in made for option in q.metadata["options"]))}
    return {
        "test questions among those made": len(overlap(read_questions(path), made)),
        "test entities among the names of their facts and options": len(test & entities),
    }
