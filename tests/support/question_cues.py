"""What closed-world questions reveal without a policy: to one search, and to classifiers that see only their words."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import numpy as np
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from psearch_jax.closed_world.encyclopedia import ClosedWorld, fact_sentence
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.closed_world.scripted import Step, conclude, first_thought, word_query
from psearch_jax.closed_world.wordings import FORMS, PAIRED, words_of_wordings
from psearch_jax.types import Question
from retrieval.protocol import Retriever

PAIRS = "minimal pairs"
WORD = r"'s|\w+|[^\w\s]"
# An attribute of an attribute: `of the teacher of A`, `of A's teacher`, `A's teacher's`, `the year A's teacher was`.
NESTED = re.compile(r"of the [a-z ]+ of|of (Name )*Name's|'s [a-z ]+'s|year (the [a-z ]+ of|(Name )*Name's)")


def facts_of(question: Question) -> list[list[str]]:
    """[attribute, subject, value] of every look-up of a question."""
    return [lookup for r in question.metadata["rounds"] for lookup in r]


def oracle(question: Question) -> list[Step]:
    """Optimal turns: one search per round with all of its queries, then the right answer."""
    steps, thought = [], first_thought(question)
    for r in question.metadata["rounds"]:
        steps.append(Step(thought, tuple(map(word_query, r))))
        thought = f"found {' ; '.join(value for _, _, value in r)} next"
    return [*steps, Step(conclude(question), answer=question.answers[0])]


def find_all(passages: Sequence, facts: Sequence[Sequence[str]]) -> bool:
    """Whether the passages state every fact."""
    texts = {passage.text for passage in passages}
    return all(fact_sentence(*fact) in texts for fact in facts)


def measure_searches(world: ClosedWorld, retriever: Retriever, count: int) -> dict[str, dict[str, float]]:
    """By form of question: the share of facts that their sub-query finds among 1 and 3 passages, and the share of
    questions of which one search for the question finds all facts among 2."""
    figures = {}
    for name, form in FORMS.items():
        asked = questions(world, "eval", form.kind, count, 1, forms=[name])
        facts = [fact for q in asked for fact in facts_of(q)]
        by_fact = list(zip(retriever.search(list(map(word_query, facts)), 3), facts, strict=True))
        by_question = zip(retriever.search([q.text for q in asked], 2), asked, strict=True)
        figures[name] = {f"sub-query@{k}": np.mean([find_all(r[:k], [fact]) for r, fact in by_fact]) for k in (1, 3)}
        figures[name]["question@2"] = np.mean([find_all(r, facts_of(q)) for r, q in by_question])
    return figures


def replace_names(text: str) -> str:
    kept = words_of_wordings()
    return re.sub(r"[A-Z][a-z]+", lambda match: match[0] if match[0] in kept else "Name", text)


def worded(question: Question) -> str:
    return replace_names(question.text)


def classifiers() -> dict[str, Callable[[], Pipeline]]:
    """By the features that they see. All names are replaced by one word, so nothing can be learned from names."""
    count = functools.partial(CountVectorizer, token_pattern=WORD, lowercase=False, preprocessor=worded)
    linear = functools.partial(LogisticRegression, max_iter=3000)
    forest = functools.partial(RandomForestClassifier, 100, random_state=0)
    thought = functools.partial(count, preprocessor=lambda question: replace_names(first_thought(question)))

    def opening(question: Question) -> str:
        return " ".join(re.findall(WORD, worded(question))[:3])

    return {
        "first three words": lambda: make_pipeline(count(ngram_range=(3, 3), preprocessor=opening), linear()),
        "bag of words, linear": lambda: make_pipeline(count(), linear()),
        "bag of words, random forest": lambda: make_pipeline(count(), forest()),
        "first thought, random forest": lambda: make_pipeline(thought(), forest()),
        "word bigrams": lambda: make_pipeline(count(ngram_range=(2, 2)), linear()),
    }


def measure_cues(world: ClosedWorld, count: int) -> dict[str, dict[str, float]]:
    """Accuracy of classifying parallel against sequential, by features and by question set; chance level is .5."""

    def examples(split: str, n: int, held_out: bool, pairs: Sequence = ()) -> tuple[list[Question], list[str]]:
        asked = []
        for i, kind in enumerate(("parallel", "sequential")):
            asked += questions(world, split, kind, n, 5, [pair[i] for pair in pairs], held_out_wordings=held_out)
        return asked, [q.kind for q in asked]

    test_sets = {
        "known wordings": examples("eval", count // 2, False),
        "held-out wordings": examples("eval", count // 2, True),
        PAIRS: examples("eval", count // 2, True, PAIRED),
    }
    train, train_pairs = examples("train", count, False), examples("train", count, False, PAIRED)
    cues: dict[str, dict[str, float]] = {}
    for features, make in classifiers().items():
        model, pair_model = make().fit(*train), make().fit(*train_pairs)
        cues[features] = {name: float(model.score(*test)) for name, test in test_sets.items()}
        cues[features][f"{PAIRS}, trained on {PAIRS} only"] = float(pair_model.score(*test_sets[PAIRS]))
    asked, _ = test_sets[PAIRS]
    rule = [bool(NESTED.search(worded(q))) == (q.kind == "sequential") for q in asked]
    return cues | {"one rule: an attribute of an attribute": {PAIRS: float(np.mean(rule))}}
