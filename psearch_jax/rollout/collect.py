"""The host's half of a rollout: turns, searches and observations. It knows words and no model.

    while a question waits or a slot is live:
        refill free slots      admit (and prefill the next prompts)
        generate               until rows are parked or done
        read what was sampled  parse each turn; ended rows become trajectories
        search                 ONE batch with the sub-queries of every parked row
        extend                 the passages, as forced ids

Groups are admitted in order and no rollout outlives the call. Sampled ids are the record: nothing is re-tokenised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from flax import nnx

from psearch_jax.buckets import buckets, pick
from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.rollout import sampling
from psearch_jax.rollout.sampler import Sampler, SamplerState, Status
from psearch_jax.text import tags
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import EndStatus, Question, Trajectory, Turn
from retrieval.protocol import Passage, Retriever

Progress = Callable[[int, int], None]  # (trajectories done, trajectories in all)


@dataclass
class _Rollout:
    """A live slot."""

    order: int  # place among all rollouts of the call
    question: Question
    sample: int
    prompt_length: int
    turn_start: int  # position of the first id of the current turn
    turns: list[Turn] = field(default_factory=list)

    @property
    def model_calls(self) -> int:
        return sum(t.n_sampled > 0 for t in self.turns)


class Collector:
    """Turns questions into trajectories.

    Args:
      sampler: the device programs.
      tokenizer: of the policy.
      retriever: answers one batch of sub-queries per yield; None when the budgets allow no search.
      render: the prompt's ids of a question.
      rollout, retrieval: budgets and options.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        render: Callable[[Question], list[int]],
        rollout: RolloutSection,
        retrieval: RetrievalSection,
    ):
        tags.check_observation_budget(rollout.obs_tokens, "config.rollout.obs_tokens")
        self.sampler, self.tokenizer = sampler, tokenizer
        self._retriever, self._render = retriever, render
        self._rollout, self._retrieval = rollout, retrieval
        self._prompt_widths = buckets(rollout.prompt_tokens)
        self._obs_widths = buckets(rollout.obs_tokens)
        self._spans = buckets(rollout.context_tokens)
        self._corrective = tokenizer.encode_foreign(tags.CORRECTIVE_MESSAGE)[: rollout.obs_tokens]

    def warm_up(self, params: nnx.State) -> None:
        """Compiles every shape that `collect` can ask for, so that no later step stops to compile."""
        rows = self._rollout.slots
        state = self.sampler.new_state(rows, self._rollout.context_tokens)
        nothing = np.zeros(rows, np.int32)
        for width in self._obs_widths:
            state = self.sampler.extend(params, state, np.zeros((rows, width), np.int32), nothing, 1)
        for width in self._prompt_widths:
            pool = self.sampler.prefill(params, np.zeros((rows, width), np.int32), nothing)
            state = self.sampler.admit(state, pool, nothing - 1, np.zeros((rows, 2), np.uint32), 1, 1)
        for span in self._spans:
            state = self.sampler.generate(params, state, 1.0, span)
        jax.block_until_ready(state)

    def collect(
        self,
        params: nnx.State,
        questions: Sequence[Question],
        samples: int,
        *,
        seed: int,
        step: int,
        temperature: float,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Rolls out `samples` trajectories for every question.

        Args:
          params: the sampling copy of the policy.
          seed, step: named parts of every rollout's key.

        Returns:
          Q x R trajectories, all samples of a question together, in the order of `questions`.
        """
        call = _Call(self, params, questions, samples, seed, step)
        while call.waiting or call.live:
            call.refill()
            call.state = self.sampler.generate(params, call.state, temperature, call.span())
            call.read()
            if progress:
                progress(call.done, len(call.results))
        return [t for t in call.results if t is not None]


class _Call:
    """The state of one `collect`."""

    def __init__(
        self, owner: Collector, params: nnx.State, questions: Sequence[Question], samples: int, seed: int, step: int
    ):
        self.owner, self.params = owner, params
        self.rollout, self.sampler = owner._rollout, owner.sampler
        self.rows = self.rollout.slots
        self.live: dict[int, _Rollout] = {}
        self.results: list[Trajectory | None] = [None] * (len(questions) * samples)
        self.done = 0
        self.waiting: deque[tuple[int, Question, int]] = deque()  # order, question, sample
        self._prompts: dict[int, list[int]] = {}  # by the question's place
        for q, question in enumerate(questions):
            prompt = owner._render(question)
            fits = len(prompt) <= self.rollout.prompt_tokens
            for sample in range(samples):
                order = q * samples + sample
                if fits:
                    self.waiting.append((order, question, sample))
                else:
                    cut = np.asarray(prompt[: self.rollout.prompt_tokens], np.int32)
                    live = _Rollout(order, question, sample, len(cut), len(cut))
                    self._finish(live, "truncated", cut, np.zeros(len(cut), bool), np.zeros(len(cut), np.float32))
            if fits:
                self._prompts[q] = prompt
        self.samples = samples
        words = [sampling.id_words(question.source, question.id) for _, question, _ in self.waiting]
        drawn = sampling.row_keys(seed, step, words, [s for _, _, s in self.waiting]) if words else []
        self._keys = {order: key for (order, _, _), key in zip(self.waiting, drawn, strict=True)}
        self._pool: SamplerState | None = None
        self._pool_rows: dict[int, int] = {}  # question's place -> row of the pool
        self.ended: set[int] = set()  # slots whose rollout is over but whose row still looks parked
        self.state = self.sampler.new_state(self.rows, self.rollout.context_tokens)

    # ---- refill ----

    def refill(self) -> None:
        """Admits waiting rollouts to free slots, prefilling each prompt once for its whole group."""
        free = [b for b in range(self.rows) if b not in self.live]
        admitted: list[int] = []
        while free and self.waiting:
            if self.waiting[0][0] // self.samples not in self._pool_rows:
                self._prefill()
            source = np.full(self.rows, -1, np.int32)
            source[list(self.ended)] = -2
            self.ended.clear()
            keys = np.zeros((self.rows, 2), np.uint32)
            while free and self.waiting and self.waiting[0][0] // self.samples in self._pool_rows:
                order, question, sample = self.waiting.popleft()
                slot, place = free.pop(0), order // self.samples
                source[slot], keys[slot] = self._pool_rows[place], self._keys[order]
                length = len(self._prompts[place])
                self.live[slot] = _Rollout(order, question, sample, length, length)
                admitted.append(slot)
            self._admit(source, keys)
        if self.ended:  # nothing left to admit there: a row that still waits would hold up `generate`
            source = np.full(self.rows, -1, np.int32)
            source[list(self.ended)] = -2
            self.ended.clear()
            self._admit(source, np.zeros((self.rows, 2), np.uint32))
        if admitted and self.rollout.initial_search:
            self._initial_search(admitted)

    def _prefill(self) -> None:
        places = list(dict.fromkeys(order // self.samples for order, _, _ in self.waiting))[: self.rows]
        width = pick(self.owner._prompt_widths, max(len(self._prompts[p]) for p in places))
        ids, n = np.zeros((self.rows, width), np.int32), np.zeros(self.rows, np.int32)
        for row, place in enumerate(places):
            n[row] = len(self._prompts[place])
            ids[row, : n[row]] = self._prompts[place]
        self._pool = self.sampler.prefill(self.params, ids, n)
        self._pool_rows = {place: row for row, place in enumerate(places)}

    def _admit(self, source: np.ndarray, keys: np.ndarray) -> None:
        if self._pool is None:
            raise AssertionError("a slot can only end after a prompt was admitted")
        self.state = self.sampler.admit(
            self.state, self._pool, source, keys, self.rollout.turn_tokens, self.rollout.context_tokens
        )

    def _initial_search(self, slots: list[int]) -> None:
        """The classic baseline: the question itself is searched before the first sampled id."""
        queries = {b: (" ".join(self.live[b].question.text.split()),) for b in slots}
        found = self._search(queries)
        for b in slots:
            turn = Turn("", "search", True, queries[b], found[b])
            self.live[b].turns.append(turn)
        lengths = {b: self.live[b].prompt_length for b in slots}
        self._extend({b: self._observation(queries[b], found[b], lengths[b]) for b in slots}, lengths)

    # ---- read ----

    def span(self) -> int:
        """The positions that no live row will outgrow in its current turn, rounded up to a bucket."""
        turn = self.rollout.turn_tokens + self.rollout.max_tokens_after_answer
        need = max(live.turn_start for live in self.live.values()) + turn if self.live else 1
        return pick(self.owner._spans, min(need, self.rollout.context_tokens))

    def read(self) -> None:
        """Parses what each stopped row sampled; ends it, or searches and extends it."""
        status, length = jax.device_get((self.state.status, self.state.length))
        stopped = [b for b in self.live if status[b] != Status.RUNNING]
        if not stopped:
            return
        ids = np.asarray(jax.device_get(self.state.ids))
        record: tuple[np.ndarray, np.ndarray] | None = None
        queries: dict[int, tuple[str, ...]] = {}
        corrected: list[int] = []
        for b in stopped:
            live = self.live[b]
            turn = self._turn(live, ids[b, live.turn_start : length[b]], Status(status[b]))
            last = live.model_calls == self.rollout.search_turns
            end: EndStatus | None = None
            if status[b] == Status.ANSWER and turn.action == "answer":
                end = "answered"
            elif status[b] in (Status.ANSWER, Status.EOS):  # an answer that was never opened is none
                end = "eos"
            elif status[b] == Status.CONTEXT_FULL:
                end = "truncated"
            elif last:
                end = "out_of_turns"
            elif turn.action == "search":
                queries[b] = turn.queries
            else:
                corrected.append(b)
            if end is None:
                live.turns.append(turn)
                continue
            # A search that never ran is not an executed one.
            live.turns.append(Turn(turn.text, turn.action, turn.well_formed, (), (), turn.answer, turn.n_sampled))
            if record is None:
                record = jax.device_get((self.state.mask, self.state.logprobs))
            n = length[b]
            del self.live[b]
            if status[b] == Status.SEARCH:
                self.ended.add(b)
            self._finish(live, end, ids[b, :n].copy(), record[0][b, :n].copy(), record[1][b, :n].copy())
        found = self._search(queries)
        chunks = {b: list(self.owner._corrective) for b in corrected}
        for b, passages in found.items():
            live = self.live[b]
            turn = live.turns[-1]
            live.turns[-1] = Turn(
                turn.text, turn.action, turn.well_formed, turn.queries, passages, None, turn.n_sampled
            )
            chunks[b] = self._observation(queries[b], passages, int(length[b]))
        for b in [b for b, chunk in chunks.items() if length[b] + len(chunk) >= self.rollout.context_tokens]:
            if record is None:
                record = jax.device_get((self.state.mask, self.state.logprobs))
            n, live = length[b], self.live.pop(b)
            del chunks[b]
            if status[b] == Status.SEARCH:
                self.ended.add(b)
            self._finish(live, "truncated", ids[b, :n].copy(), record[0][b, :n].copy(), record[1][b, :n].copy())
        self._extend(chunks, {b: int(length[b]) for b in chunks})

    def _turn(self, live: _Rollout, sampled: np.ndarray, status: Status) -> Turn:
        tokenizer, spoken = self.owner.tokenizer, sampled
        if len(spoken) and int(spoken[-1]) in tokenizer.stop_ids:
            spoken = spoken[:-1]
        # Control ids are written out: one inside a tag must break it for the parser as it did for the automaton.
        text, tail_start = tokenizer.decode(spoken, control=True), None
        if status == Status.ANSWER:
            # The completing token is among the last few; what it holds after the tag is not the tail.
            first = max(1, len(spoken) - self.rollout.max_tokens_after_answer - 1)
            heads = (tokenizer.decode(spoken[:n], control=True) for n in range(first, len(spoken) + 1))
            tail_start = next((len(head) for head in heads if tags.ANSWER_CLOSE in head), None)
        action = tags.parse_turn(text, self.owner._retrieval.max_sub_queries, tail_start)
        kind = action.kind
        return Turn(text, kind, action.well_formed, action.queries, (), action.answer, len(sampled))

    def _search(self, queries: dict[int, tuple[str, ...]]) -> dict[int, tuple[tuple[Passage, ...], ...]]:
        """One retrieval batch for all rows, folded back row by row."""
        flat = [q for row in queries.values() for q in row]
        if not flat:
            return {}
        results = iter(self.owner._retriever.search(flat, self.owner._retrieval.topk))
        return {b: tuple(tuple(next(results)) for _ in row) for b, row in queries.items()}

    def _observation(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]], length: int) -> list[int]:
        room = self.rollout.context_tokens - length - 1
        budget = max(tags.MIN_OBSERVATION_TOKENS, min(self.rollout.obs_tokens, room))
        encode, label = self.owner.tokenizer.encode_foreign, self.rollout.label_subqueries
        return tags.render_observation(queries, passages, encode, budget, label)

    def _extend(self, chunks: dict[int, list[int]], lengths: dict[int, int]) -> None:
        if not chunks:
            return
        width = pick(self.owner._obs_widths, max(len(c) for c in chunks.values()))
        ids, n = np.zeros((self.rows, width), np.int32), np.zeros(self.rows, np.int32)
        for b, chunk in chunks.items():
            n[b] = len(chunk)
            ids[b, : n[b]] = chunk
            self.live[b].turn_start = lengths[b] + len(chunk)
        self.state = self.sampler.extend(self.params, self.state, ids, n, self.rollout.turn_tokens)

    def _finish(self, live: _Rollout, status: EndStatus, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray):
        self.results[live.order] = Trajectory(
            live.question, live.sample, status, tuple(live.turns), ids, mask, logprobs, live.prompt_length
        )
        self.done += 1
