"""The wordings of the closed world's questions.

Forms with different dependency graphs share their openings and their words: `Is the teacher of A the mayor of B?` has
two facts to look up at once, `Is A the mayor of the hometown of B?` two facts to look up one after the other. Only the
word order distinguishes them, so a policy has to understand the entire question.

A wording is a frame (`Which of {l} is <p>?`) with phrases: `{a:A}` stands for `the teacher of A`, `{A:a}` for
`A's teacher`. Every phrase is combined with every frame of a form. A few of the resulting wordings are held out for
evaluation: all their words are known, but training never combines them in that way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from psearch_jax.types import Kind


@dataclass(frozen=True)
class Form:
    """A question form: its kind, its share among the questions of its kind, and its wordings."""

    kind: Kind
    share: float
    wordings: tuple[str, ...]
    held_out: tuple[str, ...]  # those of `wordings` that no training question has
    trained: bool = True  # whether cold starts and training use it
    calculated: bool = False  # whether it needs the calculator; such questions are only asked where there is one

    @property
    def known(self) -> tuple[str, ...]:
        """The wordings of training questions."""
        return tuple(text for text in self.wordings if text not in self.held_out)


def combine(frames: Sequence[str], **phrases: Sequence[str]) -> tuple[str, ...]:
    """Every frame with every choice of phrases for its `<p>`, `<q>`, except those that would begin with a name."""
    texts = []
    for frame, *chosen in product(frames, *phrases.values()):
        for place, phrase in zip(phrases, chosen, strict=True):
            frame = frame.replace(f"<{place}>", phrase)
        texts.append(frame)
    return tuple(text for text in dict.fromkeys(texts) if not re.match(r"\{[A-Z]", text))


# Letters: A, B subjects; X a name in the question; a, b, c attributes; l a list of names; k the type of the answer;
# v, w the events of the years of A and B; Y a year, n a number of years.
ONE = ("{a:A}", "{A:a}")
TWO = ("{b:a:A}", "the {b} of {A:a}", "{A:a:b}")
THREE = ("{c:b:a:A}", "the {c} of the {b} of {A:a}", "the {c} of {A:a:b}", "{A:a:b:c}")
NAMED = ("Which is <p>?", "<p> is which?", "Which {k} is <p>?")
DATED = (
    "In which year was <p> {v}?",
    "Which is the year <p> was {v}?",
    "Which was the year <p> was {v}?",
    "The year <p> was {v} is which?",
    "The year <p> was {v} was which?",
)
CHOSEN = (
    "Which of {l} is <p>?",
    "Of {l}, which is <p>?",
    "Of {l}, <p> is which?",
    "<p> is which of {l}?",
    "Which is <p>, of {l}?",
)
OWNED = (
    "Which of {l} has <p> as the {a}?",
    "Of {l}, which has <p> as the {a}?",
    "Of {l}, the {a} of which is <p>?",
    "The {a} of which of {l} is <p>?",
    "Of {l}, <p> is the {a} of which?",
    "<p> is the {a} of which of {l}?",
    "As the {a}, which of {l} has <p>?",
)
EQUAL = ("Is <p> <q>?", "Is <p> also <q>?", "Are <p> and <q> the same?", "Is <p> the same as <q>?")
EQUAL_YEARS = (
    "Was <p> {v} in the year {B} was {w}?",
    "Was <p> {v} the year {B} was {w}?",
    "Is the year <p> was {v} the year {B} was {w}?",
    "Is the year <p> was {v} the same as the year {B} was {w}?",
    "In the year <p> was {v}, was {B} {w}?",
)

FORMS: dict[str, Form] = {
    # ------------------------------------------------------------------ all facts at once
    "first": Form(
        "parallel",
        0.15,
        (
            "Which of {l} was {v} first?",
            "Which of {l} was the first {v}?",
            "Which is the first {v} of {l}?",
            "Which was {v} first of {l}?",
            "Of {l}, which was {v} first?",
            "Of {l}, which is the first {v}?",
            "Of {l}, the first {v} is which?",
            "The first {v} of {l} is which?",
        ),
        held_out=("Which is the first {v} of {l}?",),
    ),
    "has": Form("parallel", 0.2, combine(OWNED, p=("{X}",)), held_out=("Of {l}, {X} is the {a} of which?",)),
    "shares": Form(
        "parallel",
        0.3,
        combine(OWNED, p=("{b:B}", "{B:b}")),
        held_out=("The {a} of which of {l} is {b:B}?", "Of {l}, the {a} of which is {B:b}?"),
    ),
    "same": Form(
        "parallel",
        0.25,
        combine(EQUAL, p=ONE, q=("{b:B}", "{B:b}")),
        held_out=("Is {A:a} {B:b}?", "Are {a:A} and {B:b} the same?"),
    ),
    "same_year": Form(
        "parallel", 0.1, combine(EQUAL_YEARS, p=("{A}",)), held_out=("Was {A} {v} the year {B} was {w}?",)
    ),
    # ------------------------------------------------------------------ one fact after another
    "bridge_name": Form(
        "sequential",
        0.15,
        (*combine(NAMED, p=TWO), *combine(("Which {k} does <p> have as the {b}?",), p=ONE)),
        held_out=("{b:a:A} is which?", "Which {k} is {b:a:A}?"),
    ),
    "bridge_year": Form(
        "sequential",
        0.1,
        combine(DATED, p=ONE),
        held_out=("Which is the year {a:A} was {v}?", "The year {A:a} was {v} is which?"),
    ),
    "bridge_which": Form(
        "sequential",
        0.35,
        combine(CHOSEN, p=TWO),
        held_out=("Of {l}, which is the {b} of {A:a}?", "{b:a:A} is which of {l}?"),
    ),
    "bridge_is": Form(
        "sequential",
        0.3,
        (*combine(EQUAL, p=TWO, q=("{X}",)), *combine(EQUAL, p=("{X}",), q=TWO)),
        held_out=("Is {A:a:b} {X}?", "Are the {b} of {A:a} and {X} the same?"),
    ),
    "chain": Form("sequential", 0.1, combine(NAMED, p=THREE), held_out=("the {c} of the {b} of {A:a} is which?",)),
    # ------------------------------------------------------------------ one fact
    "name": Form(
        "single",
        0.3,
        (*combine(NAMED, p=ONE), "Which {k} does {A} have as the {a}?"),
        held_out=("Which {k} is {a:A}?", "Which is {A:a}?"),
    ),
    "year": Form("single", 0.2, combine(DATED, p=("{A}",)), held_out=("Which was the year {A} was {v}?",)),
    "which": Form("single", 0.3, combine(CHOSEN, p=ONE), held_out=("Of {l}, which is {A:a}?",)),
    "is": Form(
        "single",
        0.2,
        (*combine(EQUAL, p=ONE, q=("{X}",)), *combine(EQUAL, p=("{X}",), q=ONE)),
        held_out=("Is {X} also {a:A}?",),
    ),
    # ------------------------------------------------------------------ both shapes in one question
    "first_of": Form(
        "mixed",
        0.5,
        (
            "Which of {l} has the {a} {v} first?",
            "Of {l}, which has the {a} {v} first?",
            "Of {l}, the {a} of which was {v} first?",
            "The {a} of which of {l} was {v} first?",
        ),
        held_out=("The {a} of which of {l} was {v} first?",),
    ),
    "year_of": Form(
        "mixed",
        0.5,
        combine(EQUAL_YEARS, p=ONE),
        held_out=("Is the year {a:A} was {v} the year {B} was {w}?",),
        trained=False,
    ),
    # ------------------------------------------------------------------ a fact and a sum, at once or one after another
    "sum_is": Form(
        "parallel",
        0.5,
        (
            "Was {A} {v} in the year {n} years after {Y}?",
            "Was {A} {v} the year {n} years after {Y}?",
            "Is the year {A} was {v} the year {n} years after {Y}?",
            "Is the year {n} years after {Y} the year {A} was {v}?",
        ),
        held_out=("Was {A} {v} the year {n} years after {Y}?",),
        calculated=True,
    ),
    "sum_which": Form(
        "parallel",
        0.5,
        (
            "Which of {l} was {v} {n} years after {Y}?",
            "Which was {v} {n} years after {Y}, of {l}?",
            "Of {l}, which was {v} {n} years after {Y}?",
            "Of {l}, which was {v} the year {n} years after {Y}?",
        ),
        held_out=("Of {l}, which was {v} the year {n} years after {Y}?",),
        calculated=True,
    ),
    "after": Form(
        "sequential",
        0.5,
        (
            "Which is the year {n} years after {A} was {v}?",
            "Which was the year {n} years after {A} was {v}?",
            "The year {n} years after {A} was {v} is which?",
            "Which is the year {n} years after the year {A} was {v}?",
        ),
        held_out=("Which was the year {n} years after {A} was {v}?",),
        calculated=True,
    ),
    "until": Form(
        "sequential",
        0.5,
        (
            "{Y} was which number of years after {A} was {v}?",
            "Which number of years after {A} was {v} is {Y}?",
            "Which number of years after {A} was {v} was {Y}?",
            "Which is the number of years after {A} was {v}, in {Y}?",
        ),
        held_out=("Which number of years after {A} was {v} was {Y}?",),
        calculated=True,
    ),
    "between": Form(
        "mixed",
        1.0,
        (
            "Which number of years before {B} was {w} was {A} {v}?",
            "Which is the number of years before {B} was {w} that {A} was {v}?",
            "{A} was {v} which number of years before {B} was {w}?",
        ),
        held_out=("{A} was {v} which number of years before {B} was {w}?",),
        calculated=True,
    ),
}
# Pairs of forms with the same words but different graphs, for evaluation in held-out wordings.
PAIRED: tuple[tuple[str, str], ...] = (("shares", "bridge_which"), ("same", "bridge_is"))


def join_names(names: Sequence[str]) -> str:
    """`A and B`, `A, B and C`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def fill_wording(wording: str, values: Mapping[str, str]) -> str:
    """A wording with its letters filled in; `{b:a:A}` is `the b of the a of A`, `{A:a:b}` is `A's a's b`."""

    def phrase(match: re.Match) -> str:
        letters = match[1].split(":")
        if len(letters) == 1:
            return values[letters[0]]
        if letters[0].isupper():
            return values[letters[0]] + "".join(f"'s {values[letter]}" for letter in letters[1:])
        return "".join(f"the {values[letter]} of " for letter in letters[:-1]) + values[letters[-1]]

    text = re.sub(r"\{([A-Za-z:]+)\}", phrase, wording)
    return text[0].upper() + text[1:]


def words_of_wordings(calculated: bool) -> set[str]:
    """Every word in the wordings' own text; `calculated`: also of the forms that need the calculator."""
    texts = [text for form in FORMS.values() if calculated or not form.calculated for text in form.wordings]
    words = {word for text in texts for word in re.findall(r"[A-Za-z]+", re.sub(r"\{[^}]*\}", " ", text))}
    return words | {"the", "The"}
