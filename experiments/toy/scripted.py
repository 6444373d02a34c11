"""Scripted trajectories for the cold start: correct grammar, real passages, deliberately poor strategies.

The teacher's first thought lists the names and the attributes of the question in their order, in the same words for
every type of question: `named A ; B asked teacher ; hometown`. It does not say which attribute belongs to which name,
or whether one fact depends on another. The teacher then searches all at once or one fact at a time, whatever the
question's structure; reinforcement learning has to learn that choice. Searching all at once, it searches a fact whose
subject is not known yet for the first subject instead, which finds another fact or none. The last thought lists the
facts next to each other, and the answer follows from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, HAPPENED
from psearch_jax.closed_world.question_forms import CALCULATION, Lookup
from psearch_jax.data.transcripts import Row, TranscriptTurn, encode_transcript
from psearch_jax.rollout.calculator import CALCULATOR
from psearch_jax.rollout.tools import Toolbox
from psearch_jax.text.dialects import Dialect, Tags
from psearch_jax.text.prompts import load_template, render_prompt
from psearch_jax.types import SEARCH, Call, Question

OBSERVATION_TOKENS = 144  # as in configs/smoke.py
# The words of the teacher's thoughts, besides attributes, names and years.
SCRIPT_WORDS = tuple("named asked of next again found guess known vs least so yes no".split())
# What a question asks for: attributes, the events of years, and what is calculated.
_ASKED = re.compile("|".join([*(a for of in ATTRIBUTES.values() for a in of), *HAPPENED.values(), r"\d+ years|years"]))


@dataclass(frozen=True)
class Mixture:
    """Shares of the teacher's strategies."""

    split: float = 0.3  # questions of any kind for which all needed facts are searched at once
    recover: float = 0.6  # of the splits that could not find all facts, those that search the rest; the others guess
    hasty: float = 0.05  # one search, then a guess
    closed: float = 0.04  # a guess without any search
    guess: float = 0.1  # all facts are found, but the answer is a guess
    redundant: float = 0.06  # the last search is repeated
    forgotten: float = 0.04  # one turn has no reasoning


@dataclass(frozen=True)
class Step:
    """One scripted turn: the reasoning (None: left out), then the calls, or the answer if there are none."""

    thought: str | None
    calls: tuple[Call, ...] = ()
    answer: str = ""

    def write(self, dialect: Dialect) -> str:
        """The turn as the policy writes it, with a space after each tag: tokens include the space before them."""
        thought = "" if self.thought is None else f"<think> {self.thought} </think> "
        if not self.calls:
            return f"{thought}<answer> {self.answer} </answer>"
        if isinstance(dialect, Tags):
            return f"{thought}<search> {' ## '.join(call.text for call in self.calls)} </search>"
        return thought + dialect.write_calls(self.calls)


def first_thought(question: Question) -> str:
    """The names, then the attributes and events that a question mentions, each in the order of the question."""
    facts = question.metadata
    names = {subject for _, subject, _ in facts["rounds"][0]} | {*facts["options"], facts["sought"]} - {""}
    named = sorted((name for name in names if name in question.text), key=question.text.index)
    return f"named {' ; '.join(named)} asked {' ; '.join(_ASKED.findall(question.text))}"


def call_all_at_once(question: Question) -> tuple[Call, ...]:
    """The calls of a teacher that takes all facts for independent, one per look-up of the first round and per round.

    The first subject takes the place of subjects that are not known yet, also in a calculation.
    """
    first, *later = question.metadata["rounds"]
    calls = [word_call(lookup) for lookup in first]
    for (attribute, subject, value), *_ in later:
        if attribute == CALCULATION:
            for _, known, found in first:
                subject = subject.replace(found, known)
        else:
            subject = first[0][1]
        calls.append(word_call((attribute, subject, value)))
    return tuple(calls)


def word_call(lookup: Lookup | Sequence[str]) -> Call:
    """The call for one fact, from (attribute, subject, value)."""
    if lookup[0] == CALCULATION:
        return Call(CALCULATOR.name, json.dumps({"expression": f" {lookup[1]}"}))
    return Call(SEARCH, f"{lookup[0]} of {lookup[1]}")


def conclude(question: Question) -> str:
    """The last thought after all facts were found: the facts next to each other, and the conclusion."""
    form, options, sought = (question.metadata[key] for key in ("form", "options", "sought"))
    values = [value for _, _, value in question.metadata["rounds"][-1]]
    answer = question.answers[0]
    if form in ("first", "first_of"):
        return f"found {find_least(list(zip(options, values, strict=True)))} so {answer}"
    if form in ("has", "shares", "sum_which"):
        # The options in order, up to the one with the sought value.
        tried = options[: options.index(answer) + 1]
        compared = [f"{name} {value} {compare(value, sought)}" for name, value in zip(tried, values)]  # noqa: B905
        return f"found {' ; '.join(compared)} so {answer}"
    if sought:
        return f"found {values[0] if form != 'year_of' else values[-1]} {compare(values[0], sought)} so {answer}"
    return f"found {values[-1]} so {answer}"


def compare(value: str, sought: str) -> str:
    """`vs SOUGHT yes` if the value equals the sought one, else `vs SOUGHT no`."""
    return f"vs {sought} {'yes' if value == sought else 'no'}"


def find_least(dated: Sequence[tuple[str, str]]) -> str:
    """(name, year) pairs in order, each but the first followed by the earliest so far."""
    best, *rest = dated
    text = " ".join(best)
    for other in rest:
        best = min(best, other, key=lambda pair: pair[1])
        text += f" ; {' '.join(other)} least {' '.join(best)}"
    return text


def guess(question: Question, rng: np.random.Generator) -> Step:
    """A random answer of the right type."""
    choices = ["yes", "no"] if question.answers[0] in ("yes", "no") else question.metadata["options"]
    choices = choices or [question.metadata["rounds"][0][0][1]]
    answer = str(choices[rng.integers(len(choices))])
    return Step(f"guess {answer}", answer=answer)


def plan(question: Question, rng: np.random.Generator, mixture: Mixture, turns: int) -> list[Step]:
    """The teacher's turns for one closed-world question, with at most `turns` searches."""
    rounds = question.metadata["rounds"]
    if rng.random() < mixture.closed:
        return _forget_thought([guess(question, rng)], rng, mixture)
    end = Step(conclude(question), answer=question.answers[0])
    if rng.random() < mixture.guess:
        end = guess(question, rng)
    steps = [Step(first_thought(question), _first_calls(question, rng, mixture))]
    split = len(steps[0].calls) > 1
    if split and len(rounds) > 1 and rng.random() > mixture.recover:
        return _forget_thought([*steps, guess(question, rng)], rng, mixture)
    if not split:
        for (_, _, value), lookup in zip(rounds[0], rounds[0][1:]):  # noqa: B905
            steps.append(Step(f"found {value} next", (word_call(lookup),)))
    for before, after in zip(rounds, rounds[1:]):  # noqa: B905
        thought = f"found {' ; '.join(value for _, _, value in before)} next"
        if split:
            steps.append(Step(thought, tuple(map(word_call, after))))
            continue
        for i, lookup in enumerate(after):
            steps.append(Step(thought if i == 0 else f"found {after[i - 1][2]} next", (word_call(lookup),)))
    if rng.random() < mixture.hasty:
        steps, end = steps[:1], guess(question, rng)
    elif len(steps) < turns and rng.random() < mixture.redundant:
        steps.append(Step("again", steps[-1].calls))
    if len(steps) > turns:
        steps, end = steps[:turns], guess(question, rng)
    return _forget_thought([*steps, end], rng, mixture)


def _first_calls(question: Question, rng: np.random.Generator, mixture: Mixture) -> tuple[Call, ...]:
    """The calls of the first turn: all of them, or only the first."""
    calls = call_all_at_once(question)
    if rng.random() < mixture.split:
        # Questions that need a single fact are split just as blindly, with a second query about the same subject.
        return calls if len(calls) > 1 else (*calls, word_call(("rival", question.metadata["rounds"][0][0][1])))
    return calls[:1]


def _forget_thought(steps: list[Step], rng: np.random.Generator, mixture: Mixture) -> list[Step]:
    if rng.random() < mixture.forgotten:
        slip = int(rng.integers(len(steps)))
        steps[slip] = Step(None, steps[slip].calls, steps[slip].answer)
    return steps


def recall(question: Question) -> list[Step]:
    """A single turn that answers from memory."""
    return [Step(f"known {question.answers[0]}", answer=question.answers[0])]


def write_all(
    questions: Sequence[Question], plans: Sequence[Sequence[Step]], toolbox: Toolbox | None, dialect: Dialect
) -> list[Row]:
    """The rows of each question's plan with the results of its calls, which run in one batch per tool.

    Without a toolbox every call returns nothing; for plans without calls, and for first turns.
    """
    template = load_template("toy")
    calls = list(dict.fromkeys(call for steps in plans for step in steps[:-1] for call in step.calls))
    results = dict(zip(calls, toolbox.run({0: tuple(calls)})[0], strict=True)) if toolbox else {}
    rows = []
    for question, steps in zip(questions, plans, strict=True):
        turns = [
            TranscriptTurn(
                step.write(dialect),
                tuple(call.text for call in step.calls),
                tuple(results.get(call, ()) for call in step.calls),
                tools=tuple(call.tool for call in step.calls),
            )
            for step in steps
        ]
        rows.append(encode_transcript(dialect, render_prompt(dialect, template, question.text), turns))
    return rows
