"""How the closed world's questions are worded.

Forms whose graphs differ share their openings and their words: `Is the teacher of A the mayor of B?` has two facts to
look up at once, `Is A the mayor of the hometown of B?` one after the other. Which is which stands in the order of the
words alone, so a policy has to read the whole question.

A wording is a frame around noun phrases. `{a:A}` stands for `the teacher of A` and `{A:a}` for `A's teacher`; the
wordings kept for evaluation join frames and phrases that training questions hold, but never together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from psearch_jax.types import Kind


@dataclass(frozen=True)
class Form:
    """One shape of question: its kind, its share among the questions of its kind, its wordings."""

    kind: Kind
    share: float
    known: tuple[str, ...]
    held_out: tuple[str, ...]
    trained: bool = True  # whether cold starts and training ask it


# Letters: A, B subjects; X, Y names that are given; a, b, c attributes; l a list of names; k the kind of the answer;
# v, w what happened to A and B in their years.
FORMS: dict[str, Form] = {
    # ------------------------------------------------------------------ all facts at once
    "first": Form(
        "parallel",
        0.2,
        (
            "Which of {l} was {v} first?",
            "Which is the first {v} of {l}?",
            "Of {l}, which was {v} first?",
        ),
        ("Which was {v} first of {l}?",),
    ),
    "has": Form(
        "parallel",
        0.2,
        (
            "Which of {l} has {X} as the {a}?",
            "Of {l}, the {a} of which is {X}?",
            "Of {l}, which has {X} as the {a}?",
        ),
        ("The {a} of which of {l} is {X}?",),
    ),
    "shares": Form(
        "parallel",
        0.2,
        (
            "Of {l}, the {a} of which is {b:B}?",
            "The {a} of which of {l} is {B:b}?",
            "Which of {l} has {b:B} as the {a}?",
            "Of {l}, which has {B:b} as the {a}?",
        ),
        ("The {a} of which of {l} is {b:B}?", "Of {l}, the {a} of which is {B:b}?"),
    ),
    "same": Form(
        "parallel",
        0.3,
        ("Is {a:A} {b:B}?", "Is {A:a} {b:B}?", "Are {a:A} and {B:b} the same?"),
        ("Is {A:a} {B:b}?", "Is {a:A} {B:b}?"),
    ),
    "same_year": Form(
        "parallel",
        0.1,
        (
            "Was {A} {v} in the year {B} was {w}?",
            "Is the year {A} was {v} the year {B} was {w}?",
            "In the year {A} was {v}, was {B} {w}?",
        ),
        ("Was {A} {v} the year {B} was {w}?",),
    ),
    # ------------------------------------------------------------------ one fact after another
    "bridge_name": Form(
        "sequential",
        0.15,
        (
            "Which is {b:a:A}?",
            "The {b} of {A:a} is which?",
            "Which {k} is {A:a:b}?",
            "Which {k} does {a:A} have as the {b}?",
        ),
        ("The {b} of {a:A} is which?", "Which {k} is {b:a:A}?"),
    ),
    "bridge_year": Form(
        "sequential",
        0.1,
        (
            "In which year was {a:A} {v}?",
            "Which is the year {A:a} was {v}?",
            "The year {a:A} was {v} is which?",
        ),
        ("Which is the year {a:A} was {v}?", "The year {A:a} was {v} is which?"),
    ),
    "bridge_which": Form(
        "sequential",
        0.35,
        (
            "Which of {l} is {b:a:A}?",
            "Of {l}, which is {b:a:A}?",
            "Of {l}, {b:a:A} is which?",
            "The {b} of {A:a} is which of {l}?",
        ),
        ("Of {l}, which is the {b} of {A:a}?", "The {b} of {a:A} is which of {l}?"),
    ),
    "bridge_is": Form(
        "sequential",
        0.3,
        ("Is {X} {b:a:A}?", "Is {b:a:A} {X}?", "Is {A:a:b} {X}?", "Are {b:a:A} and {X} the same?"),
        ("Is the {b} of {A:a} {X}?", "Is {X} {A:a:b}?"),
    ),
    "chain": Form(
        "sequential",
        0.1,
        (
            "Which is the {c} of {b:a:A}?",
            "Which {k} is the {c} of {b:a:A}?",
            "The {c} of {A:a:b} is which?",
        ),
        ("The {c} of the {b} of {A:a} is which?",),
    ),
    # ------------------------------------------------------------------ one fact
    "name": Form(
        "single",
        0.3,
        ("Which is {a:A}?", "The {a} of {A} is which?", "Which {k} is {A:a}?", "Which {k} does {A} have as the {a}?"),
        ("Which {k} is {a:A}?", "Which is {A:a}?"),
    ),
    "year": Form(
        "single",
        0.2,
        ("In which year was {A} {v}?", "Which is the year {A} was {v}?", "The year {A} was {v} is which?"),
        ("Which was the year {A} was {v}?",),
    ),
    "which": Form(
        "single",
        0.3,
        ("Which of {l} is {a:A}?", "Of {l}, which is {A:a}?", "Of {l}, {a:A} is which?"),
        ("Of {l}, which is {a:A}?",),
    ),
    "is": Form(
        "single",
        0.2,
        ("Is {X} {a:A}?", "Is {X} {A:a}?", "Is {a:A} {X}?", "Are {a:A} and {X} the same?"),
        ("Is {A:a} {X}?",),
    ),
    # ------------------------------------------------------------------ both shapes in one question
    "first_of": Form(
        "mixed",
        0.5,
        (
            "Which of {l} has the {a} {v} first?",
            "Of {l}, which has the {a} {v} first?",
            "Of {l}, the {a} of which was {v} first?",
        ),
        ("The {a} of which of {l} was {v} first?",),
    ),
    "year_of": Form(
        "mixed",
        0.5,
        (
            "Was {a:A} {v} in the year {B} was {w}?",
            "Was {A:a} {v} in the year {B} was {w}?",
            "In the year {a:A} was {v}, was {B} {w}?",
        ),
        ("Is the year {a:A} was {v} the year {B} was {w}?",),
        trained=False,
    ),
}
# Forms of one bag of words and two graphs, for evaluation in held-out wordings.
PAIRED: tuple[tuple[str, str], ...] = (("shares", "bridge_which"), ("same", "bridge_is"))
# Forms whose answer is a judgement of what was read, with two or more answers to choose from.
JUDGED = ("first", "has", "shares", "same", "same_year", "bridge_which", "bridge_is", "which", "is")


def listed(names: tuple[str, ...] | list[str]) -> str:
    """`A and B`, `A, B and C`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def worded(wording: str, values: Mapping[str, str]) -> str:
    """A wording with its letters filled in; `{b:a:A}` is `the b of the a of A`, `{A:a:b}` is `A's a's b`."""

    def phrase(match: re.Match) -> str:
        letters = match[1].split(":")
        if len(letters) == 1:
            return values[letters[0]]
        if letters[0].isupper():
            return values[letters[0]] + "".join(f"'s {values[letter]}" for letter in letters[1:])
        return "".join(f"the {values[letter]} of " for letter in letters[:-1]) + values[letters[-1]]

    return re.sub(r"\{([A-Za-z:]+)\}", phrase, wording)


def words_of_wordings() -> set[str]:
    """Every word that stands in a wording itself."""
    texts = [text for form in FORMS.values() for text in (*form.known, *form.held_out)]
    return {word for text in texts for word in re.findall(r"[A-Za-z]+", re.sub(r"\{[^}]*\}", " ", text))} | {"the"}
