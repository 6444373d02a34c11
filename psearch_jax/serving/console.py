"""Formats a streamed answer for the terminal, as plain text, and as JSON."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from psearch_jax.serving.answerer import Event
from psearch_jax.text import tags
from psearch_jax.text.answers import contains_words, normalise
from psearch_jax.text.evidence import find_support
from psearch_jax.types import SEARCH as SEARCH_TOOL
from psearch_jax.types import Trajectory
from retrieval.protocol import Passage

BRANCH, LAST = ("\u251c\u2500 ", "\u2502  "), ("\u2514\u2500 ", "   ")
ANSWER, SEARCH, DIM, DOUBT = "bold green", "bold cyan", "dim", "yellow"
_NAME = re.compile(r"(?<=\s)(?:[^\W\d_]*[A-Z]\w*|\d+)")  # with a capital letter, not the first word; or a number
_REPEATED = re.compile(r"(.{0,30}?[^\W\d_].{2,30}?)\1{4,}", re.DOTALL)
WITHOUT = {
    "truncated": "no answer: the context is full",
    "out_of_turns": "no answer: the last turn ended without one",
    "not_finite": "no answer: a logit was not finite",
}


@dataclass
class AnswerSummary:
    """The timings and the outcome of one question, accumulated from its events."""

    seconds: list[float] = field(default_factory=list)  # model time per turn
    search_seconds: list[float] = field(default_factory=list)  # time per search
    trajectory: Trajectory | None = None  # None until the end, and after an error
    error: str = ""
    first_text_seconds: float | None = None  # from the question to the model's first text
    _began: float = field(default_factory=time.monotonic)

    def add(self, event: Event) -> None:
        """Adds the next event."""
        if event.kind == "text" and self.first_text_seconds is None:
            self.first_text_seconds = time.monotonic() - self._began
        if event.kind == "passages":
            self.search_seconds.append(event.seconds)
        elif event.kind in ("search", "note", "end"):
            self.seconds.append(event.seconds)
        self.trajectory, self.error = event.trajectory, event.text if event.kind == "error" else ""

    @property
    def total(self) -> float:
        """Seconds from the question to the answer."""
        return sum(self.seconds) + sum(self.search_seconds)


class AnswerPrinter:
    """Prints the events of questions, one question after another.

    Model text and passages may contain anything, so control characters are printed as question marks. `recorded`
    keeps all the output with its styles.
    """

    def __init__(self, file: IO[str]):
        self.recorded = Text()
        self._console = Console(file=file, highlight=False, markup=False, soft_wrap=True)
        self._at_start = True  # of a line

    def show(self, event: Event) -> None:
        """Prints one event."""
        if event.kind == "text":
            for part in tags.TAG.split(event.text):
                self._write(part, SEARCH if tags.TAG.fullmatch(part) else DIM)
        elif event.kind == "search":
            searches = all(call.tool == SEARCH_TOOL for call in event.calls)
            one, several = ("search", "searches") if searches else ("call", "calls")
            many = len(event.calls) > 1
            self._line(f"  {len(event.calls)} {several} at once" if many else f"  one {one}", SEARCH)
        elif event.kind == "passages":
            for i, (query, ranking) in enumerate(zip(event.queries, event.passages, strict=True)):
                head, below = LAST if i == len(event.queries) - 1 else BRANCH
                self._line(f"  {head}{query}", SEARCH)
                for passage in ranking:
                    self._line(f"  {below}  {one_line(passage)}")
                if not ranking:
                    self._line(f"  {below}  {tags.NOTHING_FOUND}", DIM)
            self._line(f"  {event.seconds:.2f} s", DIM)
        elif event.kind == "note":
            self._line(f"  {event.text}")
        elif event.kind == "error":
            self._line(f"error: {event.text}", "bold red")

    def sum_up(self, summary: AnswerSummary) -> None:
        """Prints the answer, the passages that contain it, and the timings."""
        if summary.trajectory is None:
            return
        answered = summary.trajectory.status == "answered"
        self._line("")
        self._line(f"answer: {summary.trajectory.answer}" if answered else WITHOUT[summary.trajectory.status], ANSWER)
        support = find_answer(summary.trajectory)
        if support:
            self._line("mentioned in:")
        for passage in support:
            self._line(f"  {one_line(passage)}")
        for doubt in find_doubts(summary.trajectory, support):
            self._line(f"note: {doubt}", DOUBT)
        self._line(describe_time(summary), DIM)

    def line(self, text: str) -> None:
        """Prints a line of the program itself."""
        self._line(text)

    def record(self, text: str) -> None:
        """Adds a line to `recorded` that the terminal already shows."""
        self.recorded.append(f"{printable(text)}\n")

    def _line(self, text: str, style: str = "") -> None:
        self._write(text if self._at_start else f"\n{text}", style)
        self._write("\n", style)

    def _write(self, text: str, style: str) -> None:
        if text:
            shown = Text(printable(text), style=style)
            self._console.print(shown, end="")
            self.recorded.append_text(shown)
            self._at_start = text.endswith("\n")


def find_answer(trajectory: Trajectory) -> list[Passage]:
    """The passages that contain the answer."""
    return find_support(trajectory.turns, [trajectory.answer or ""])


def find_doubts(trajectory: Trajectory, support: Sequence[Passage]) -> list[str]:
    """What makes an answer doubtful: unrelated passages, none that contains it, or a text that repeats itself.

    Args:
      support: the passages that contain the answer.
    """
    doubts, answer = [], trajectory.answer or ""
    names = list(filter(None, map(normalise, _NAME.findall(trajectory.question.text))))
    found = [pair for t in trajectory.turns for pair in zip(t.calls, t.passages, strict=False)]
    passages = [normalise(f"{p.title} {p.text}") for call, of in found if call.tool == SEARCH_TOOL for p in of]
    if names and passages and not any(contains_words(text, name) for text in passages for name in names):
        doubts.append("no retrieved passage mentions a name from the question")
    named = contains_words(normalise(trajectory.question.text), normalise(answer))
    if normalise(answer) not in ("", "yes", "no") and not named and not support:
        doubts.append("neither the question nor a retrieved passage contains the answer")
    if any(_REPEATED.search(turn.text) for turn in trajectory.turns):
        doubts.append("the policy repeats itself; it may not have been trained on such questions")
    return doubts


def describe_time(summary: AnswerSummary) -> str:
    """One line with the counts of turns and searches, and the seconds."""
    trajectory = summary.trajectory
    assert trajectory is not None
    queries = sum(len(turn.queries) for turn in trajectory.executed)
    turns, searches = trajectory.model_calls, len(trajectory.executed)
    counted = f"{turns} turn{'s' * (turns != 1)}, {searches} search{'es' * (searches != 1)}"
    of = f" of {queries} queries" if queries != searches else ""
    model = " + ".join(f"{seconds:.2f}" for seconds in summary.seconds)
    return f"{counted}{of}, {summary.total:.2f} s (model {model}; searching {sum(summary.search_seconds):.2f})"


def as_json(question: str, summary: AnswerSummary) -> dict[str, Any]:
    """The object that `--json` prints for a question, and that an HTTP answer has as `psearch`."""
    trajectory = summary.trajectory
    if trajectory is None:
        return {"question": question, "error": summary.error}
    support = find_answer(trajectory)
    searching: Iterator[float] = iter(summary.search_seconds)
    model: Iterator[float] = iter(summary.seconds)
    turns = [
        {
            "text": turn.text,
            "queries": list(turn.queries),
            "passages": rankings(turn.passages),
            "seconds": round(next(model, 0.0), 4),
            "search_seconds": round(next(searching, 0.0), 4) if turn.queries else 0.0,
        }
        for turn in trajectory.turns
    ]
    return {
        "question": question,
        "answer": trajectory.answer,
        "status": trajectory.status,
        "turns": turns,
        "doubts": find_doubts(trajectory, support),
        "found_in": [passage.id for passage in support],
        "first_text_seconds": round(summary.first_text_seconds or summary.total, 4),
        "seconds": round(summary.total, 4),
    }


def rankings(passages: Sequence[Sequence[Passage]]) -> list[list[dict[str, Any]]]:
    """The passages of each query as JSON."""
    return [[{"id": p.id, "title": p.title, "text": p.text} for p in ranking] for ranking in passages]


def one_line(passage: Passage) -> str:
    """A passage on one line, with its title in front."""
    title, text = (" ".join(part.split()) for part in (passage.title, passage.text))
    return f"{title}: {text}" if title else text


def printable(text: str) -> str:
    """The text with a question mark in place of each control character."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.replace("\r\n", "\n").replace("\t", " "))
