"""The host side of rollouts in progress: scheduling, parsing and search. It handles text and knows no model.

    while a question waits or a slot is live, in any process:
        refill free slots      admit (and prefill the next prompts)
        decode                 until enough rows are parked or done
        read sampled tokens    parse each turn; ended rows become trajectories
        search                 ONE batch with the sub-queries of every parked row
        extend                 append the passages as forced tokens

Groups are admitted in the order in which they were added. Sampled tokens are the record: nothing is re-tokenised.

With several processes, each owns an equal, contiguous share of the slots and does the host work for them. Before every
device program the processes exchange its inputs, so that all make the same call.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.models.buckets import pick
from psearch_jax.models.unstacked import Unstacked
from psearch_jax.rollout import sampling
from psearch_jax.rollout.sampler import FOREVER, Sampler
from psearch_jax.rollout.sampler_state import SamplerState, Status, Widths
from psearch_jax.rollout.usage import Usage
from psearch_jax.runtime import processes
from psearch_jax.text import tags
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import EndStatus, Question, Trajectory, Turn
from retrieval.protocol import Passage, Retriever, as_utf8

Progress = Callable[[int, int], None]  # (trajectories done, trajectories in total), of this process
_Passages = dict[int, tuple[tuple[Passage, ...], ...]]  # slot -> passages of each of its sub-queries


@dataclass(frozen=True)
class Parts:
    """The components, settings and sizes that rollouts use."""

    sampler: Sampler
    tokenizer: Tokenizer
    retriever: Retriever | None
    rollout: RolloutSection
    retrieval: RetrievalSection
    widths: Widths
    pool_rows: int  # prompts prefilled at once
    piece_rows: int  # R, slots per call of `admit` or `extend`


@dataclass
class Rollout:
    """The rollout in a live slot."""

    order: int  # index among all rollouts that were added
    question: Question
    sample: int
    prompt_length: int
    turn_start: int  # position of the first token of the current turn
    turns: list[Turn] = field(default_factory=list)

    @property
    def model_calls(self) -> int:
        return sum(t.n_sampled > 0 for t in self.turns)


def in_background(f: Callable[[], Any]) -> Future:
    """Runs `f` in a daemon thread: the program can exit without waiting for it."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(f())
        except BaseException as error:  # re-raised by `future.result()`
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


@dataclass(frozen=True)
class _Admissions:
    """One process's part of the next `admit`; slots and pool rows are numbered over all processes."""

    source: dict[int, int]  # slot -> row of the pool, or -2 to empty the slot
    keys: dict[int, np.ndarray]  # slot -> key data
    starts: dict[int, int]  # slot -> length of its prompt
    lacking: bool  # a slot stays free because the pool lacks the next prompt
    more: bool  # more rollouts wait for a slot


@dataclass(frozen=True)
class _Continuations:
    """How the stopped rows of one process continue."""

    chunks: dict[int, list[int]]  # slot -> the tokens to append
    ended: set[int]  # slots whose rollout has ended
    away: int = 0  # slots that wait for a background search until the next yield


class RolloutScheduler:
    """Runs rollouts from question to trajectory; more questions may be added at any time.

    Args:
      params: the sampling copy of the policy.
      samples: R, rollouts per question.
      seed, step: parts of every rollout's random key.
      unstacked: `Sampler.unstack(params)`.

    Attributes:
      live: slot -> rollout, for this process's slots that are decoding, parked or waiting for a search.
      results: order -> trajectory; the caller may remove what it takes.
      usage: the cost so far, except `decode_steps`, which `state.steps` counts.
    """

    def __init__(
        self, parts: Parts, params: nnx.State, samples: int, seed: int, step: int, unstacked: Unstacked | None = None
    ):
        self.parts, self.params, self.samples = parts, params, samples
        self.rollout, self.sampler = parts.rollout, parts.sampler
        self.rows = self.rollout.slots
        share, me = self.rows // jax.process_count(), jax.process_index()
        self.own = range(me * share, (me + 1) * share)
        self.usage = Usage(share)
        self.live: dict[int, Rollout] = {}
        self.results: dict[int, Trajectory] = {}
        self.added = self.done = 0
        self._seed, self._step = seed, step
        # If the model ended its reply, the correction is the next user message; otherwise it continues the reply.
        obs_tokens, tokenizer, message = self.rollout.obs_tokens, parts.tokenizer, tags.CORRECTIVE_MESSAGE
        self._corrective = tokenizer.encode_foreign(message)[:obs_tokens]
        self._corrective_after_eos = tokenizer.next_user_message(message.strip(), obs_tokens)
        self._waiting: deque[tuple[int, Question, int]] = deque()  # order, question, sample
        self._prompts: dict[int, list[int]] = {}  # by group, the question's index: order // samples
        self._keys: dict[int, np.ndarray] = {}  # by order
        self._unwanted: set[int] = set()  # orders of dropped rollouts
        self.starts: dict[int, int] = {}  # slot -> start of its turn, for live slots of all processes
        self._pool: SamplerState | None = None
        self._pool_rows: dict[int, int] = {}  # group -> row of the pool
        self._over: set[int] = set()  # own slots whose rollout has ended but whose row is not emptied yet
        self._more = False  # some process has rollouts that wait for a slot
        self._away = 0  # rows of all processes that wait for a search while others decode
        self._searched_for: dict[int, tuple[str, ...]] = {}  # own rows among them: slot -> queries
        self._search_ahead: Future | None = None  # the background search for them
        self.unstacked = unstacked
        self.state = self.sampler.new_state(self.rows, self.rollout.context_tokens)

    def add(self, questions: Sequence[Question], prompts: Sequence[list[int]]) -> None:
        """Queues every sample of this process's `questions`; with a too long prompt it ends as `truncated`."""
        new: list[tuple[int, Question, int]] = []
        for question, prompt in zip(questions, prompts, strict=True):
            group, cut = self.added // self.samples, np.asarray(prompt[: self.rollout.prompt_tokens], np.int32)
            for sample in range(self.samples):
                order, self.added = self.added, self.added + 1
                if len(cut) == len(prompt):
                    new.append((order, question, sample))
                else:
                    live = Rollout(order, question, sample, len(cut), len(cut))
                    self._finish(live, "truncated", cut, np.zeros(len(cut), bool), np.zeros(len(cut), np.float32))
            if len(cut) == len(prompt):
                self._prompts[group] = prompt
        words = [sampling.id_words(question.source, question.id) for _, question, _ in new]
        keys = sampling.row_keys(self._seed, self._step, words, [s for _, _, s in new]) if words else []
        self._keys |= {order: key for (order, _, _), key in zip(new, keys, strict=True)}
        self._waiting.extend(new)

    def drop(self, order: int) -> None:
        """Cancels a rollout that nobody waits for any more; it gets no result. For a single process only."""
        self._unwanted.add(order)

    # ---- refill ----

    def refill(self, progress: Progress | None) -> bool:
        """Admits waiting rollouts to free slots; prefills each prompt once for its group.

        Returns:
          Whether any process has a live row.
        """
        admitted: list[int] = []
        while True:
            admissions = processes.together(lambda: self._next_admissions(progress))
            source = {slot: row for a in admissions for slot, row in a.source.items()}
            if source:
                self._admit(source, {slot: key for a in admissions for slot, key in a.keys.items()})
            for a in admissions:
                self.starts |= a.starts
            admitted += [slot for a in admissions for slot in a.starts]
            self._more = any(a.more for a in admissions)
            if not any(a.lacking for a in admissions):
                break
            self._prefill()
        if admitted and self.rollout.initial_search:
            self._initial_search([slot for slot in admitted if slot in self.live])
        return bool(self.starts)

    def _next_admissions(self, progress: Progress | None) -> _Admissions:
        """Fills own free slots from the pool as far as possible and empties the other ended ones, which `generate`
        would otherwise count as waiting forever."""
        if progress:
            progress(self.done, self.added)
        self._forget()
        admissions = _Admissions(dict.fromkeys(self._over, -2), {}, {}, False, False)
        self._over.clear()
        free = [b for b in self.own if b not in self.live]
        while free and self._waiting and self._waiting[0][0] // self.samples in self._pool_rows:
            order, question, sample = self._waiting.popleft()
            slot, group = free.pop(0), order // self.samples
            length = len(self._prompts[group])
            admissions.source[slot], admissions.keys[slot] = self._pool_rows[group], self._keys.pop(order)
            admissions.starts[slot] = length
            self.live[slot] = Rollout(order, question, sample, length, length)
            if sample == self.samples - 1:
                del self._prompts[group]
        return replace(admissions, lacking=bool(free and self._waiting), more=bool(self._waiting))

    def _forget(self) -> None:
        """Ends dropped rollouts; rows that wait for a search end once their passages have arrived."""
        if not self._unwanted:
            return
        self._waiting = deque(one for one in self._waiting if one[0] not in self._unwanted)
        waiting = {order: order // self.samples for order, _, _ in self._waiting}
        self._keys = {order: self._keys[order] for order in waiting}
        self._prompts = {group: self._prompts[group] for group in set(waiting.values())}
        searched = {b for b in self._searched_for if b in self.live and self.live[b].order in self._unwanted}
        for b in [b for b, live in self.live.items() if live.order in self._unwanted and b not in searched]:
            del self.live[b], self.starts[b]
            self._over.add(b)
        self._unwanted = {self.live[b].order for b in searched}

    def _prefill(self) -> None:
        """Fills every process's share of the pool with its next prompts."""
        rows = self.parts.pool_rows
        share = rows // jax.process_count()
        groups = list(dict.fromkeys(order // self.samples for order, _, _ in self._waiting))[:share]
        prompts = processes.together(lambda: [self._prompts[group] for group in groups])
        width = pick(self.parts.widths.prompts, max(len(prompt) for part in prompts for prompt in part))
        ids, n = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for process, part in enumerate(prompts):
            for row, prompt in enumerate(part, process * share):
                n[row] = len(prompt)
                ids[row, : n[row]] = prompt
        self._pool = None  # free the old pool before the next one is computed
        self._pool = self.sampler.prefill(self.params, ids, n)
        self._count(prefilled=ids.size)
        self._pool_rows = {group: row for row, group in enumerate(groups, jax.process_index() * share)}

    def _admit(self, source: dict[int, int], keys: dict[int, np.ndarray]) -> None:
        if self._pool is None:
            raise AssertionError("a slot can only end after a prompt was admitted")
        for rows in self._pieces(source):
            picked = np.array([source.get(b, -1) for b in rows], np.int32)
            row_keys = np.stack([keys.get(b, np.zeros(2, np.uint32)) for b in rows])
            turn, end = self.rollout.turn_tokens, self.rollout.context_tokens
            self.state = self.sampler.admit(self.state, self._pool, picked, row_keys, turn, end, rows)

    def _pieces(self, slots: Iterable[int]) -> list[np.ndarray]:
        """Batches of R slots (of all processes) in the given order, each slot in its device's part, padded with -1."""
        devices = self.sampler.mesh.shape["data"] * self.sampler.mesh.shape["fsdp"]
        share, part = self.rows // devices, self.parts.piece_rows // devices
        queues: list[list[int]] = [[] for _ in range(devices)]
        for slot in slots:
            queues[slot // share].append(slot)
        pieces = np.full((math.ceil(max(map(len, queues)) / part), devices, part), -1, np.int32)
        for device, queue in enumerate(queues):
            for i, slot in enumerate(queue):
                pieces[i // part, device, i % part] = slot
        return list(pieces.reshape(len(pieces), -1))

    def _initial_search(self, slots: list[int]) -> None:
        """The classic baseline: searches the question itself before the first sampled token."""

        def look_up() -> _Continuations:
            queries = {b: (self.live[b].question.query,) for b in slots}
            chunks = {}
            for b, passages in self._search(queries).items():
                live = self.live[b]
                live.turns.append(Turn("", "search", True, queries[b], passages))
                chunks[b] = self._observation(queries[b], passages, live.prompt_length)
            return _Continuations(chunks, set())

        self._go_on(processes.together(look_up), self.starts)

    # ---- decode ----

    def decode(self, temperature: float | np.ndarray, most: int = FOREVER) -> None:
        """Samples until enough rows wait, or `most` tokens per row; one temperature for all slots, or one per slot."""
        self.state = self.sampler.generate(
            self.params, self.state, temperature, self._span(), self._more, self._away, most, self.unstacked
        )

    def _span(self) -> int:
        """An upper bound on every live row's length at the end of its current turn, rounded up to a bucket."""
        turn = self.rollout.turn_tokens + self.rollout.max_tokens_after_answer
        return pick(self.parts.widths.spans, min(max(self.starts.values()) + turn, self.rollout.context_tokens))

    # ---- read ----

    def read(self) -> None:
        """Parses what each stopped row sampled; then ends its rollout, or searches and extends the row."""
        status, length = processes.fetch((self.state.status, self.state.length))  # waits for the device
        began, searched = time.monotonic(), self.usage.search_s
        self._count(yields=1)
        if all(status[b] == Status.RUNNING for b in self.starts):
            return
        ids, mask, logprobs = processes.fetch((self.state.ids, self.state.mask, self.state.logprobs))

        def end(b: int, how: EndStatus) -> None:
            n, live = length[b], self.live.pop(b)
            self._over.add(b)
            self._finish(live, how, ids[b, :n].copy(), mask[b, :n].copy(), logprobs[b, :n].copy())

        def look() -> _Continuations:
            before = set(self.live)
            queries: dict[int, tuple[str, ...]] = {}
            chunks: dict[int, list[int]] = {}
            for b in [b for b in self.live if status[b] != Status.RUNNING and b not in self._searched_for]:
                live = self.live[b]
                turn = self._turn(live, ids[b, live.turn_start : length[b]], Status(status[b]))
                how = self._end(live, turn, Status(status[b]))
                if how is not None:  # a search of this turn is not run: record no queries
                    live.turns.append(replace(turn, queries=(), passages=()))
                    end(b, how)
                    continue
                live.turns.append(turn)
                if turn.action == "search":
                    queries[b] = turn.queries
                else:
                    ended_reply = int(ids[b, length[b] - 1]) in self.parts.tokenizer.stop_ids
                    chunks[b] = list(self._corrective_after_eos if ended_reply else self._corrective)
            for b, passages in (self._exchange if self.rollout.overlap_search else self._search)(queries).items():
                live = self.live[b]
                live.turns[-1] = replace(live.turns[-1], passages=passages)
                chunks[b] = self._observation(live.turns[-1].queries, passages, int(length[b]))
            for b in [b for b, chunk in chunks.items() if length[b] + len(chunk) >= self.rollout.context_tokens]:
                del chunks[b]
                end(b, "truncated")
            return _Continuations(chunks, before - set(self.live), len(self._searched_for))

        continuations = processes.together(look)
        self._away = sum(f.away for f in continuations)
        for b in [b for f in continuations for b in f.ended]:
            del self.starts[b]
        self._go_on(continuations, length)
        self._count(host_s=time.monotonic() - began - (self.usage.search_s - searched))

    def _end(self, live: Rollout, turn: Turn, status: Status) -> EndStatus | None:
        """How the rollout ends with this turn; None if it continues."""
        if status == Status.ANSWER and turn.action == "answer":
            return "answered"
        if status in (Status.ANSWER, Status.EOS) and self.rollout.after_eos == "end":
            return "eos"  # also for `</answer>` without an opening tag: the reply ends without an answer
        if status == Status.CONTEXT_FULL:
            return "truncated"
        if status == Status.NOT_FINITE:
            return "not_finite"
        return "out_of_turns" if live.model_calls == self.rollout.search_turns else None

    def _turn(self, live: Rollout, sampled: np.ndarray, status: Status) -> Turn:
        tokenizer, tokens = self.parts.tokenizer, sampled
        if status == Status.NOT_FINITE:  # cut off at an arbitrary token: no search or answer counts
            return Turn(tokenizer.decode(tokens, control=True), "none", False, n_sampled=len(sampled))
        if len(tokens) and int(tokens[-1]) in tokenizer.stop_ids:
            tokens = tokens[:-1]
        # Write control tokens out: one inside a tag must break the tag for the parser, as it did for the automaton.
        text, tail_start = tokenizer.decode(tokens, control=True), None
        if status == Status.ANSWER:
            # The token that completes the tag is among the last few; its characters after the tag are not the tail.
            first = max(1, len(tokens) - self.rollout.max_tokens_after_answer - 1)
            prefixes = (tokenizer.decode(tokens[:n], control=True) for n in range(first, len(tokens) + 1))
            tail_start = next((len(prefix) for prefix in prefixes if tags.ANSWER_CLOSE in prefix), None)
        action = tags.parse_turn(text, self.parts.retrieval.max_sub_queries, tail_start)
        kind = action.kind
        return Turn(text, kind, action.well_formed, action.queries, (), action.answer, len(sampled))

    def _search(self, queries: dict[int, tuple[str, ...]]) -> _Passages:
        """Searches the queries of all rows in one batch and returns the passages by row."""
        began = time.monotonic()
        if self._search_ahead:
            self._search_ahead.exception()  # waits for it: one batch at a time
        passages = self._look_up(queries)
        self._count(search_s=time.monotonic() - began)
        return passages

    def _exchange(self, queries: dict[int, tuple[str, ...]]) -> _Passages:
        """Starts the search for these rows in the background and returns the passages of the last yield's rows.

        Which rows these are depends only on the yields, not on a clock, so that a run is reproducible.
        """
        began = time.monotonic()
        passages = self._search_ahead.result() if self._search_ahead else {}
        self._count(search_s=time.monotonic() - began)
        self._searched_for = queries
        self._search_ahead = in_background(functools.partial(self._look_up, queries)) if queries else None
        return passages

    def _look_up(self, queries: dict[int, tuple[str, ...]]) -> _Passages:
        """Calls the retriever once for all rows."""
        flat = [q for row in queries.values() for q in row]
        results = iter(self.parts.retriever.search(flat, self.parts.retrieval.topk) if flat else ())
        return {b: tuple(tuple(map(_in_utf8, next(results))) for _ in row) for b, row in queries.items()}

    def _observation(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]], length: int) -> list[int]:
        room = self.rollout.context_tokens - length - 1
        budget = max(tags.MIN_OBSERVATION_TOKENS, min(self.rollout.obs_tokens, room))
        encode, label = self.parts.tokenizer.encode_foreign, self.rollout.label_subqueries
        return tags.render_observation(queries, passages, encode, budget, label)

    def _go_on(self, found: Sequence[_Continuations], lengths: Mapping[int, int] | np.ndarray) -> None:
        """Appends every process's chunks to their rows, which hold `lengths` tokens, and starts their next turns."""
        chunks = {b: chunk for f in found for b, chunk in f.chunks.items()}
        if not chunks:
            return
        for rows in self._pieces(sorted(chunks, key=lambda b: len(chunks[b]))):  # similar lengths: less padding
            real = [b for b in rows.tolist() if b >= 0]
            width = pick(self.parts.widths.observations, max(len(chunks[b]) for b in real))
            ids, n = np.zeros((len(rows), width), np.int32), np.zeros(len(rows), np.int32)
            for r, b in enumerate(rows.tolist()):
                if b >= 0:
                    n[r] = len(chunks[b])
                    ids[r, : n[r]] = chunks[b]
            self.state = self.sampler.extend(self.params, self.state, ids, n, self.rollout.turn_tokens, rows)
            self._count(extended=ids.size, forced=int(n.sum()))
        for b, chunk in chunks.items():
            self.starts[b] = int(lengths[b]) + len(chunk)
            if b in self.live:
                self.live[b].turn_start = self.starts[b]

    def _count(self, **more: float) -> None:
        self.usage = replace(self.usage, **{name: getattr(self.usage, name) + n for name, n in more.items()})

    def _finish(self, live: Rollout, status: EndStatus, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray):
        if live.order in self._unwanted:
            return
        self.results[live.order] = Trajectory(
            live.question, live.sample, status, tuple(live.turns), ids, mask, logprobs, live.prompt_length
        )
        self.done += 1
        self._count(decoded=int(mask.sum()))


def _in_utf8(passage: Passage) -> Passage:
    """The passage in valid UTF-8: the JSON of a corpus may contain half a surrogate pair."""
    return Passage(as_utf8(passage.id), as_utf8(passage.title), as_utf8(passage.text), passage.score)
