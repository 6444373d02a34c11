"""Answers questions as they come in, many at once, and tells what is written, searched and found while it happens.

One thread decodes for all who ask: a question takes a free slot and leaves it with its answer, as rollouts do. What
is asked alone and what is asked among others is answered alike: every question has random numbers of its own.
"""

from __future__ import annotations

import gc
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from flax import nnx

from psearch_jax import processes
from psearch_jax.limits import HOTTEST
from psearch_jax.models.apart import Apart
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.inflight import in_background
from psearch_jax.rollout.sampler_state import Status
from psearch_jax.serving.flight import Served
from psearch_jax.text import tags
from psearch_jax.text.answers import normalise
from psearch_jax.types import Question, Trajectory, Turn, UserError
from retrieval.protocol import Passage

log = logging.getLogger("psearch_jax")
EVERY = 8  # ids that a row gets between two looks at it
RETRY_S = 1.0  # after a failure, before others are answered
FAILED = "the answer failed; the log of the program says why"  # a cause may hold paths and texts


@dataclass(frozen=True)
class Event:
    """What happened to a question.

    `text` was written; `search` runs these queries; `passages` came back for them; `note` is what the host said to a
    turn without an action; `end` holds all of it; `error` is the last one as well. `seconds` passed since the event
    before it, but for texts, which have none.
    """

    kind: Literal["text", "search", "passages", "note", "end", "error"]
    text: str = ""
    queries: tuple[str, ...] = ()
    passages: tuple[tuple[Passage, ...], ...] = ()  # of each query
    trajectory: Trajectory | None = None
    seconds: float = 0.0


Listener = Callable[[Event], None]


@dataclass(eq=False)
class _Asked:
    """One who waits."""

    question: Question
    prompt: list[int]
    temperature: float
    listen: Listener
    since: float  # of the last event, on the monotonic clock
    turn: int = 0  # told of its turns
    said: int = 0  # characters told of that turn
    searching: bool = False  # its queries were told and its passages not
    unwanted: bool = False


class Answerer:
    """Answers by a policy and what it searches in.

    Args:
      collector: its budgets are those of every question.
      params: the sampling copy of the policy.
      seed: of all random numbers, with each question's own.
      every: ids that a row gets between two looks at it: fewer show more, and cost a little more.
      apart: of `params` by `Sampler.take_apart`, where it was made already.
    """

    def __init__(
        self,
        collector: Collector,
        params: nnx.State,
        seed: int = 0,
        every: int = EVERY,
        apart: Apart | None = None,
    ):
        parts = collector.parts
        # A search runs while the others decode, and shows its queries before it has its passages.
        self._parts = replace(parts, rollout=replace(parts.rollout, overlap_search=True))
        self._collector, self._params, self._seed, self._every = collector, params, seed, every
        self._apart = collector.sampler.take_apart(params) if apart is None else apart
        self._arrived: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._asked: dict[int, _Asked] = {}  # by order in the flight
        self._failing, self._closed = False, False
        self._probe = None
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether questions are answered, as far as is known; where they were not, it is tried by a search."""
        if self._closed or not self._thread.is_alive():
            return False
        if self._failing and (self._probe is None or self._probe.done()):
            self._probe = in_background(self._try)
        return not self._failing

    def _try(self) -> None:
        if self._parts.retriever is not None:
            self._parts.retriever.search([f"health {time.monotonic()}"], 1)  # new, or it would come out of a cache
        self._failing = False

    def ask(self, text: str, listen: Listener, temperature: float = 0.0, seed: int = 0) -> Callable[[], None]:
        """Puts a question in line. `listen` is called by another thread, last with an `end` or an `error`.

        Args:
          temperature: 0 is greedy.
          seed: the same question with the same seed is answered alike.

        Returns:
          What takes the question back; nothing is told of it from then on.

        Raises:
          UserError: no text, a temperature outside of 0 to 2, or a prompt that is too long with this question.
        """
        if not text.strip() or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UserError(f"question: found {text[:40]!r}, accepted: text")
        if not (math.isfinite(temperature) and 0 <= temperature <= HOTTEST):
            raise UserError(f"temperature: found {temperature}, accepted: 0 to {HOTTEST:g}")
        question = Question("asked", f"{seed} {text}", text, (), "single")
        prompt, most = self._collector.render(question), self._parts.rollout.prompt_tokens
        if len(prompt) > most:
            raise UserError(f"question: found {len(prompt)} ids with the prompt around it, accepted: at most {most}")
        asked = _Asked(question, prompt, temperature, listen, time.monotonic())
        self._arrived.put(asked)
        if self._closed or not self._thread.is_alive():
            self._fail()

        def take_back() -> None:
            asked.unwanted = True

        return take_back

    def answer(self, text: str, temperature: float = 0.0, seed: int = 0) -> Iterator[Event]:
        """The events of one question, as they come. Raises as `ask` does, before the first."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        take_back = self.ask(text, events.put, temperature, seed)

        def told() -> Iterator[Event]:
            try:
                while True:
                    event = events.get()
                    yield event
                    if event.kind in ("end", "error"):
                        return
            finally:
                take_back()

        return told()

    def close(self) -> None:
        """Ends with the ids that are being decoded; whoever waits, or asks from now on, is told an error."""
        self._closed = True
        self._arrived.put(None)
        self._thread.join()

    # ---- the thread ----

    def _work(self) -> None:
        while not self._closed:
            try:
                self._serve()
            except BaseException:  # those who were being answered are told, and the next ones are answered
                log.exception("%d questions could not be answered", len(self._asked))
                self._failing = True
            self._fail()
            gc.collect()  # what failed holds a cache, and the next one's may not fit beside it
            if self._failing:
                time.sleep(RETRY_S)
        self._fail()

    def _serve(self) -> None:
        flight = Served(self._parts, self._params, 1, self._seed, 0, self._apart)
        self._failing = False
        while self._next(flight):
            pass

    def _fail(self) -> None:
        """Tells everybody who waits, in line as well, that it came to nothing."""
        waiting, self._asked = list(self._asked.values()), {}
        with suppress(queue.Empty):
            while True:
                waiting.append(self._arrived.get_nowait())
        for asked in filter(None, waiting):
            _tell(asked, Event("error", FAILED))

    def _next(self, flight: Served) -> bool:
        """Decodes a few ids for all rows; waits where there are none. False when this is over."""
        self._join(flight)
        if self._closed:
            return False
        for order in [order for order, asked in self._asked.items() if asked.unwanted]:
            flight.drop(order)
            del self._asked[order]
        if flight.refill(None):
            if flight.decodes:
                temperatures = np.zeros(flight.rows, np.float32)
                for slot, live in flight.live.items():
                    if live.order in self._asked:
                        temperatures[slot] = self._asked[live.order].temperature
                flight.decode(temperatures, self._every)
                self._watch(flight)
            flight.read()
        self._report(flight)
        return True

    def _join(self, flight: Served) -> None:
        """Puts those in line who have come; waits for one where nobody is being answered."""
        while True:
            try:
                asked = self._arrived.get(block=not self._asked)
            except queue.Empty:
                return
            if asked is None:
                return
            if not asked.unwanted:
                self._asked[flight.added] = asked
                flight.add([asked.question], [asked.prompt])

    def _watch(self, flight: Served) -> None:
        """Tells what rows wrote that are still writing."""
        status, length, ids = processes.fetch((flight.state.status, flight.state.length, flight.state.ids))
        for slot, live in flight.live.items():
            asked = self._asked.get(live.order)
            if asked is None or status[slot] != Status.RUNNING or asked.turn < len(live.turns):
                continue
            written = self._parts.tokenizer.decode(ids[slot, live.turn_start : length[slot]], control=True)
            _say(asked, written.rstrip("\ufffd"))  # bytes of a letter that is not complete yet

    def _report(self, flight: Served) -> None:
        """Tells what became of every row that stopped."""
        live = {one.order: one.turns for one in flight.live.values()}
        for order, asked in list(self._asked.items()):
            trajectory = flight.results.pop(order, None)
            turns = trajectory.turns if trajectory else live.get(order, ())
            self._tell_turns(asked, turns, len(turns) - bool(trajectory))
            if trajectory:
                _tell(asked, Event("end", trajectory=trajectory))
                del self._asked[order]
        for order, why in flight.failed.items():
            flight.drop(order)
            if order in self._asked:
                _tell(self._asked.pop(order), Event("error", why))
        flight.failed.clear()
        if flight.searches_fail is not None:
            self._failing, flight.searches_fail = flight.searches_fail, None

    def _tell_turns(self, asked: _Asked, turns: Sequence[Turn], noted: int) -> None:
        """Tells what is new; of the first `noted` turns also what the host said to one without an action."""
        for place, turn in enumerate(turns[asked.turn :], asked.turn):
            if not asked.searching:
                _say(asked, turn.text)
                if turn.queries:
                    _tell(asked, Event("search", queries=turn.queries))
                    asked.searching = True
            if asked.searching:
                if not turn.passages:
                    return
                _tell(asked, Event("passages", queries=turn.queries, passages=turn.passages))
            elif place < noted:
                _tell(asked, Event("note", tags.CORRECTIVE_MESSAGE.strip()))
            asked.turn, asked.said, asked.searching = asked.turn + 1, 0, False


def support(trajectory: Trajectory) -> list[Passage]:
    """The passages that hold the answer, or what it is about: each once, in the order in which they were read."""
    answer = normalise(trajectory.answer or "")
    read = [passage for turn in trajectory.turns for ranking in turn.passages for passage in ranking]
    first: dict[str, Passage] = {}
    for passage in read:
        first.setdefault(passage.id, passage)
    return [p for p in first.values() if answer and f" {answer} " in f" {normalise(f'{p.title} {p.text}')} "]


def _say(asked: _Asked, text: str) -> None:
    """Tells what is new of the text of the current turn."""
    if len(text) > asked.said:
        _hear(asked, Event("text", text[asked.said :]))
        asked.said = len(text)


def _tell(asked: _Asked, event: Event) -> None:
    now = time.monotonic()
    _hear(asked, replace(event, seconds=now - asked.since))
    asked.since = now


def _hear(asked: _Asked, event: Event) -> None:
    """A listener that fails is one who has left: it must not end the answers of others."""
    if not asked.unwanted:
        try:
            asked.listen(event)
        except Exception:
            asked.unwanted = True
