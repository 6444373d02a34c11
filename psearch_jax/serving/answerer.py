"""Answers concurrent questions by continuous batching, and streams text, queries and passages as events.

One thread decodes for all clients: a question takes a free slot and leaves it with its answer, as rollouts do. Every
question has its own random key, so its answer does not depend on the other questions in the batch.
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

from psearch_jax.limits import MAX_TEMPERATURE
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.rollouts import NO_LIMITS, RolloutLimits
from psearch_jax.rollout.sampler_programs import SamplingWeights, Status
from psearch_jax.rollout.scheduler import RolloutScheduler
from psearch_jax.runtime import processes
from psearch_jax.serving.search import ServingSearch
from psearch_jax.types import SEARCH, Call, Question, Trajectory, Turn, UserError
from retrieval.protocol import Passage, in_background

log = logging.getLogger("psearch_jax")
EVERY = 8  # decode steps between two event updates
RETRY_S = 1.0  # pause after a failure
FAILED = "the answer failed; see the server's log for the cause"  # the cause itself may contain paths and texts


@dataclass(frozen=True)
class Event:
    """An event of one question.

    Kinds: `text` the model wrote, the calls of a `search` turn, the `passages` returned for them, a `note` (the host's
    reply to a turn without an action), and last either `end` with the trajectory or `error`. `seconds` is the time
    since the previous event that is not a text; texts have none.
    """

    kind: Literal["text", "search", "passages", "note", "end", "error"]
    text: str = ""
    calls: tuple[Call, ...] = ()
    passages: tuple[tuple[Passage, ...], ...] = ()  # of each call
    trajectory: Trajectory | None = None
    seconds: float = 0.0

    @property
    def queries(self) -> tuple[str, ...]:
        """The queries of searches; other calls with the name of their tool."""
        return tuple(call.text if call.tool == SEARCH else f"{call.tool} {call.text}" for call in self.calls)


Listener = Callable[[Event], None]


@dataclass(eq=False)
class _Pending:
    """A question that waits for its answer."""

    question: Question
    prompt: list[int]
    temperature: float
    listen: Listener
    last_event_s: float  # time of the last timed event, on the monotonic clock
    limits: RolloutLimits = NO_LIMITS
    sent_turns: int = 0  # turns that were sent completely
    sent_chars: int = 0  # characters of the next turn that were sent
    searching: bool = False  # the queries of the next turn were sent, its passages not yet
    cancelled: bool = False


class Answerer:
    """Answers questions with a policy and its retriever.

    Args:
      collector: its budgets apply to every question.
      weights: of the policy.
      seed: combined with each question's own seed.
      every: decode steps between two event updates: fewer stream more smoothly and cost a little more.

    Attributes:
      dialect: of the policy.
    """

    def __init__(self, collector: Collector, weights: SamplingWeights, seed: int = 0, every: int = EVERY):
        self._collector, self._weights, self._seed, self._every = collector, weights, seed, every
        self.dialect = collector.dialect
        self._arrived: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._pending: dict[int, _Pending] = {}  # by rollout order
        self._failing, self._closed = False, False
        self._probe = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether questions are answered, as far as is known. After a failure, reading it starts a trial search."""
        if self._closed or not self._thread.is_alive():
            return False
        if self._failing and (self._probe is None or self._probe.done()):
            self._probe = in_background(self._try_search)
        return not self._failing

    def _try_search(self) -> None:
        if self._collector.retriever is not None:
            # A new query, so that no cache answers it.
            self._collector.retriever.search([f"health {time.monotonic()}"], 1)
        self._failing = False

    def ask(
        self,
        text: str,
        listen: Listener,
        temperature: float = 0.0,
        seed: int = 0,
        prompt: list[int] | None = None,
        max_tokens: int | None = None,
    ) -> Callable[[], None]:
        """Queues a question. Another thread calls `listen`, the last time with an `end` or an `error`.

        Args:
          temperature: 0 is greedy.
          seed: the same question with the same seed gets the same answer.
          prompt: token ids instead of the question in the prompt template; only one turn follows, and its calls are
            not run.
          max_tokens: that the policy may sample, in all turns.

        Returns:
          A function that cancels the question; it gets no more events.

        Raises:
          UserError: no text, a temperature outside of 0 to 2, or a prompt that is too long with this question.
        """
        if not text.strip() or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UserError(f"question: found {text[:40]!r}, accepted: text")
        if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
            raise UserError(f"temperature: found {temperature}, accepted: 0 to {MAX_TEMPERATURE:g}")
        question = Question("asked", f"{seed} {text}", text, (), "single")
        most = self._collector.rollout.prompt_tokens
        limits = RolloutLimits(None if prompt is None else 0, max_tokens)
        prompt = self._collector.render(question) if prompt is None else prompt
        if len(prompt) > most:
            raise UserError(f"question: found {len(prompt)} tokens with the prompt template, accepted: at most {most}")
        pending = _Pending(question, prompt, temperature, listen, time.monotonic(), limits)
        self._arrived.put(pending)
        if self._closed or not self._thread.is_alive():
            self._fail()

        def cancel() -> None:
            pending.cancelled = True

        return cancel

    def answer(self, text: str, temperature: float = 0.0, seed: int = 0) -> Iterator[Event]:
        """Yields the events of one question as they arrive. Raises like `ask`, before the first event."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        cancel = self.ask(text, events.put, temperature, seed)

        def stream() -> Iterator[Event]:
            try:
                while True:
                    event = events.get()
                    yield event
                    if event.kind in ("end", "error"):
                        return
            finally:
                cancel()

        return stream()

    def close(self) -> None:
        """Stops after the decode call in progress; waiting and later questions get an `error`."""
        self._closed = True
        self._arrived.put(None)
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        while not self._closed:
            try:
                self._serve()
            except BaseException:  # the active questions get an error; later ones are answered
                log.exception("%d questions could not be answered", len(self._pending))
                self._failing = True
            self._fail()
            gc.collect()  # frees the failed scheduler's KV cache; two may not fit in memory
            if self._failing:
                time.sleep(RETRY_S)
        self._fail()

    def _serve(self) -> None:
        """Answers questions until `close`."""
        search = ServingSearch(self._collector.toolbox())
        scheduler = RolloutScheduler(self._collector, search, samples=1, seed=self._seed)
        scheduler.resume(self._weights)
        self._failing = False
        while True:
            self._admit_questions(scheduler)
            if self._closed:
                return
            self._decode(scheduler, search)
            self._send_turns(scheduler)
            self._send_failures(scheduler, search)

    def _fail(self) -> None:
        """Sends an error to every waiting question, queued ones included."""
        waiting: list[_Pending | None] = [*self._pending.values()]
        self._pending = {}
        with suppress(queue.Empty):
            while True:
                waiting.append(self._arrived.get_nowait())
        for pending in filter(None, waiting):
            _send(pending, Event("error", FAILED))

    def _admit_questions(self, scheduler: RolloutScheduler) -> None:
        """Adds the questions that have arrived and drops the cancelled ones; blocks while there is no question."""
        with suppress(queue.Empty):
            while (pending := self._arrived.get(block=not self._pending)) is not None:
                if not pending.cancelled:
                    self._pending[scheduler.added] = pending
                    scheduler.add([pending.question], [pending.prompt], 0, pending.limits)
        for order in [order for order, pending in self._pending.items() if pending.cancelled]:
            scheduler.drop(order)
            del self._pending[order]

    def _decode(self, scheduler: RolloutScheduler, search: ServingSearch) -> None:
        """Decodes a few tokens for all rows, and searches."""
        if not scheduler.refill():
            return
        self._send_failures(scheduler, search)  # of initial searches: their rows would answer without passages
        if scheduler.decodes:
            temperatures = np.zeros(scheduler.rows, np.float32)
            for slot, rollout in scheduler.live.items():
                if rollout.order in self._pending:
                    temperatures[slot] = self._pending[rollout.order].temperature
            scheduler.decode(temperatures, self._every)
            self._send_new_text(scheduler)
        scheduler.advance_stopped_rows()

    def _send_new_text(self, scheduler: RolloutScheduler) -> None:
        """Sends the new text of rows that are still decoding."""
        state = scheduler.state
        status, length, ids = processes.fetch((state.status, state.length, state.ids))
        for slot, rollout in scheduler.live.items():
            pending = self._pending.get(rollout.order)
            if pending is None or status[slot] != Status.RUNNING or pending.sent_turns < len(rollout.turns):
                continue
            written = self._collector.tokenizer.decode(ids[slot, rollout.turn_start : length[slot]], control=True)
            _send_text(pending, written.rstrip("\ufffd"))  # the bytes of an incomplete character

    def _send_turns(self, scheduler: RolloutScheduler) -> None:
        """Sends the events of every row that stopped."""
        turns_by_order = {rollout.order: rollout.turns for rollout in scheduler.live.values()}
        for order, pending in list(self._pending.items()):
            trajectory = scheduler.results.pop(order, None)
            turns = trajectory.turns if trajectory else turns_by_order.get(order, ())
            _send_turns(pending, turns, len(turns) - bool(trajectory), self._collector.dialect.corrective)
            if trajectory:
                _send(pending, Event("end", trajectory=trajectory))
                del self._pending[order]

    def _send_failures(self, scheduler: RolloutScheduler, search: ServingSearch) -> None:
        """Sends an error to every question whose search failed."""
        if search.all_failed is not None:
            self._failing, search.all_failed = search.all_failed, None
        for order, reason in search.failures.items():
            scheduler.drop(order)
            if order in self._pending:
                _send(self._pending.pop(order), Event("error", reason))
        search.failures.clear()


def _send_turns(pending: _Pending, turns: Sequence[Turn], corrected: int, note: str) -> None:
    """Sends the new events of `turns`, with the host's `note` to those of the first `corrected` without an action."""
    for index, turn in enumerate(turns[pending.sent_turns :], pending.sent_turns):
        if not pending.searching:
            _send_text(pending, turn.text)
            if turn.queries:
                _send(pending, Event("search", calls=turn.calls))
                pending.searching = True
        if pending.searching:
            if not turn.passages:
                return
            _send(pending, Event("passages", calls=turn.calls, passages=turn.passages))
        elif index < corrected:
            _send(pending, Event("note", note))
        pending.sent_turns, pending.sent_chars, pending.searching = pending.sent_turns + 1, 0, False


def _send_text(pending: _Pending, text: str) -> None:
    """Sends the new part of the current turn's text."""
    if len(text) > pending.sent_chars:
        _call_listener(pending, Event("text", text[pending.sent_chars :]))
        pending.sent_chars = len(text)


def _send(pending: _Pending, event: Event) -> None:
    """Sends an event with the seconds since the previous one."""
    now = time.monotonic()
    _call_listener(pending, replace(event, seconds=now - pending.last_event_s))
    pending.last_event_s = now


def _call_listener(pending: _Pending, event: Event) -> None:
    """A listener that fails counts as gone, so that it does not end the answers of others."""
    if not pending.cancelled:
        try:
            pending.listen(event)
        except Exception:
            pending.cancelled = True
