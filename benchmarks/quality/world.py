"""`launch/bench.py world`: what closed-world questions reveal without a policy.

For every form of question: how often the sub-query of a fact retrieves it, how often the question as a single search
retrieves all of its facts, and the random-guess EM. For the decision to split: the accuracy of classifiers on held-out
questions that see only the first words, the bag of words (linear, and a random forest), the unordered pair of
attributes, the scripted first thought of the cold start (its word bigrams, and its bag of words), or word bigrams; and
of one rule about the order of words that decides every question.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, ClosedWorld, fact_sentence
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.closed_world.scripted import first_thought, query
from psearch_jax.closed_world.wordings import FORMS, PAIRED, words_of_wordings
from psearch_jax.eval.benchmarks import PAIRS as EVALUATED_SET
from psearch_jax.eval.benchmarks import closed_world_benchmark
from psearch_jax.eval.tables import table
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.types import Question
from retrieval.protocol import Retriever
from retrieval.service import RetrievalService

TOPK = (1, 2, 3)
PAIRS = "minimal pairs"
EVALUATED = "evaluated pairs"  # those of launch/eval.py and the experiments
WORD = r"'s|\w+|[^\w\s]"
# An attribute of an attribute: `of the teacher of A`, `of A's teacher`, `A's teacher's`, `the year A's teacher was`.
NESTED = re.compile(r"of the [a-z ]+ of|of (Name )*Name's|'s [a-z ]+'s|year (the [a-z ]+ of|(Name )*Name's)")
TREES = 300
_ATTRIBUTE = re.compile("|".join(sorted({a for of in ATTRIBUTES.values() for a in of}, key=len, reverse=True)))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench world", description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="questions per form")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    world = ClosedWorld.make(0)
    figures = retrieval(world, RetrievalService.from_corpus(world.passages), flags.count)
    cues = surface_cues(world, 4 * flags.count)
    print(retrieval_table(figures), cue_table(cues), sep="\n\n")
    if flags.json:
        write_atomically(flags.json, json.dumps({"retrieval": figures, "cues": cues}, indent=2) + "\n")


def facts_of(question: Question) -> list[list[str]]:
    """[attribute, subject, value] of every lookup of a question."""
    return [lookup for r in question.metadata["rounds"] for lookup in r]


def finds_all(passages: Sequence, facts: Sequence[Sequence[str]]) -> bool:
    """Whether the passages state every fact."""
    texts = {passage.text for passage in passages}
    return all(fact_sentence(*fact) in texts for fact in facts)


def retrieval(world: ClosedWorld, retriever: Retriever, count: int) -> dict[str, dict[str, Any]]:
    """Figures by form, over `count` held-out questions in known wordings."""
    out = {}
    for name, form in FORMS.items():
        asked = questions(world, "eval", form.kind, count, 1, forms=[name])
        facts = [fact for q in asked for fact in facts_of(q)]
        own = retriever.search(list(map(query, facts)), max(TOPK))
        by_question = retriever.search([q.text for q in asked], max(TOPK))
        figures: dict[str, Any] = {
            "kind": form.kind,
            "chance level": float(np.mean([q.metadata["chance"] for q in asked])),
        }
        figures["look-ups"] = len(facts) / len(asked)
        for k in TOPK:
            hits = [finds_all(ranking[:k], [fact]) for ranking, fact in zip(own, facts, strict=True)]
            every = [finds_all(r[:k], facts_of(q)) for r, q in zip(by_question, asked, strict=True)]
            figures |= {f"sub-query@{k}": float(np.mean(hits)), f"question@{k}": float(np.mean(every))}
        out[name] = figures
    return out


def surface_cues(world: ClosedWorld, count: int) -> dict[str, dict[str, float]]:
    """Accuracy of classifying parallel against sequential, by features and by question set; chance level is .5.

    Trained on the training split's questions and wordings. All names are replaced by one word, so nothing can be
    learned from names.
    """
    test_sets = {
        "known wordings": _examples(world, "eval", count // 2, False),
        "held-out wordings": _examples(world, "eval", count // 2, True),
        PAIRS: _examples(world, "eval", count // 2, True, PAIRED),
        EVALUATED: (asked := closed_world_benchmark(world, EVALUATED_SET, 200), [q.kind for q in asked]),
    }
    train, train_pairs = _examples(world, "train", count, False), _examples(world, "train", count, False, PAIRED)
    out: dict[str, dict[str, float]] = {}
    for features, made in CLASSIFIERS.items():
        model = made().fit(*train)
        out[features] = {name: float(model.score(*examples)) for name, examples in test_sets.items()}
        own = made().fit(*train_pairs)
        out[features][f"{PAIRS}, trained on {PAIRS} only"] = float(own.score(*test_sets[PAIRS]))
    out["one rule: an attribute of an attribute"] = {
        name: float(np.mean([bool(NESTED.search(_nameless(q.text))) == (q.kind == "sequential") for q in asked]))
        for name, (asked, _) in test_sets.items()
    }
    return out


def _attributes(question: Question) -> list[str]:
    """The attributes that a question names, as one feature without their order."""
    return [" | ".join(sorted(_ATTRIBUTE.findall(question.text)))]


def _examples(
    world: ClosedWorld, split: str, count: int, held_out: bool, pairs: Sequence[tuple[str, str]] = ()
) -> tuple[list[Question], list[str]]:
    """`count` parallel and `count` sequential questions, and their kinds."""
    asked = []
    for i, kind in enumerate(("parallel", "sequential")):
        asked += questions(world, split, kind, count, 5, [pair[i] for pair in pairs], held_out_wordings=held_out)
    return asked, [q.kind for q in asked]


def _worded(question: Question) -> str:
    return _nameless(question.text)


def _thought(question: Question) -> str:
    return _nameless(first_thought(question))


def _nameless(text: str) -> str:
    kept = words_of_wordings()
    return re.sub(r"[A-Z][a-z]+", lambda match: match[0] if match[0] in kept else "Name", text)


def _opening(question: Question) -> str:
    return " ".join(re.findall(WORD, _worded(question))[:3])


_counts = functools.partial(CountVectorizer, token_pattern=WORD, lowercase=False, preprocessor=_worded)
_linear = functools.partial(LogisticRegression, max_iter=3000)
_forest = functools.partial(RandomForestClassifier, TREES, random_state=0)
_of_thought = functools.partial(_counts, preprocessor=_thought)
CLASSIFIERS: dict[str, Callable[[], Pipeline]] = {  # by the features that they see
    "first three words": lambda: make_pipeline(_counts(ngram_range=(3, 3), preprocessor=_opening), _linear()),
    "unordered attributes": lambda: make_pipeline(CountVectorizer(analyzer=_attributes), _linear()),
    "bag of words, linear": lambda: make_pipeline(_counts(), _linear()),
    "bag of words, random forest": lambda: make_pipeline(_counts(), _forest()),
    "first thought, word bigrams": lambda: make_pipeline(_of_thought(ngram_range=(1, 2)), _linear()),
    "first thought, random forest": lambda: make_pipeline(_of_thought(), _forest()),
    "word bigrams": lambda: make_pipeline(_counts(ngram_range=(2, 2)), _linear()),
}


def retrieval_table(figures: dict[str, dict[str, Any]]) -> str:
    columns = ["look-ups", "chance level", *(f"{what}@{k}" for what in ("sub-query", "question") for k in TOPK)]
    rows = [[name, f["kind"], *(f"{f[column]:.2f}" for column in columns)] for name, f in figures.items()]
    return table([["form", "question type", *columns], *rows])


def cue_table(cues: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(cues.values())))
    rows = [
        [name, *(f"{figures[column]:.2f}" if column in figures else "" for column in columns)]
        for name, figures in cues.items()
    ]
    return table([["features", *columns], *rows])
