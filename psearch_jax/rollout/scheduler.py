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

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.models.buckets import pick
from psearch_jax.rollout import sampling
from psearch_jax.rollout.queued import Suspended, Waiting, sampler_rows
from psearch_jax.rollout.sampler import NO_STEP_LIMIT, Sampler
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.sampler_state import SamplerState, Status, Widths
from psearch_jax.rollout.search import Passages, Queries, SearchPolicy
from psearch_jax.rollout.turns import ParseTurn, Rollout
from psearch_jax.rollout.usage import Usage
from psearch_jax.runtime import processes
from psearch_jax.text import tags
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import EndStatus, Question, Trajectory, Turn
from retrieval.protocol import Passage, Retriever

Progress = Callable[[int, int], None]  # (trajectories done, trajectories in total), of this process


@dataclass(frozen=True)
class Parts:
    """The components, settings and sizes that rollouts use."""

    sampler: Sampler
    tokenizer: Tokenizer
    retriever: Retriever | None
    rollout: RolloutSection
    retrieval: RetrievalSection
    parse_turn: ParseTurn
    widths: Widths
    pool_rows: int  # prompts prefilled at once
    rows_per_call: int  # R, slots per call of `admit` or `extend`


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
    awaiting_search: int = 0  # slots that wait for a search while others decode


class RolloutScheduler:
    """Runs rollouts from question to trajectory; more questions may be added at any time.

    Args:
      search: a new policy, for this scheduler only.
      samples: R, rollouts per question.
      seed: part of every rollout's random key.

    Attributes:
      live: slot -> rollout, for this process's slots that are decoding, parked or waiting for a search.
      results: order -> trajectory; the caller may remove what it takes.
      usage: the cost so far, except what `state` counts: `decode_steps` and `row_steps`.
    """

    def __init__(
        self,
        parts: Parts,
        search: SearchPolicy,
        *,
        samples: int,
        seed: int,
    ):
        self.parts, self.search, self.samples = parts, search, samples
        self.settings, self.sampler = parts.rollout, parts.sampler
        self.rows = self.settings.slots
        share, me = self.rows // jax.process_count(), jax.process_index()
        self.own = range(me * share, (me + 1) * share)
        self.usage = Usage(share)
        self.live: dict[int, Rollout] = {}
        self.results: dict[int, Trajectory] = {}
        self.added = 0
        self.seed = seed
        # If the model ended its reply, the correction is the next user message; otherwise it continues the reply.
        obs_tokens, tokenizer, message = self.settings.obs_tokens, parts.tokenizer, tags.CORRECTIVE_MESSAGE
        self._corrective = tokenizer.encode_foreign(message)[:obs_tokens]
        self._corrective_after_eos = tokenizer.next_user_message(message.strip(), obs_tokens)
        self.waiting: deque[Waiting] = deque()
        self._dropped: set[int] = set()  # orders of rollouts that still have to be ended
        self.starts: dict[int, int] = {}  # slot -> start of its turn, for live slots of all processes
        self._pool: SamplerState | None = None
        self._pool_rows: dict[int, int] = {}  # index of a question -> row of the pool
        self._ended: set[int] = set()  # own slots whose rollout has ended but whose row is not emptied yet
        self._refill = False  # some process has rollouts that wait for a slot
        self._awaiting_search = 0  # rows of all processes that wait for a search while others decode

    def resume(
        self,
        weights: SamplingWeights,
        version: int = 0,
        suspended: Sequence[Suspended] = (),
    ) -> None:
        """Opens the slots with a policy, and continues suspended rollouts in them.

        Their keys and values are computed again: from here on the policy conditions on its own.

        Args:
          weights: of the policy.
          version: recorded with every token that this policy samples.
          suspended: of this process, no more than it has slots.
        """
        self.weights, self.version = weights, version
        self.usage = Usage(len(self.own))
        self.state = self.sampler.new_state(self.rows, self.settings.context_tokens)
        own = dict(zip(self.own, suspended, strict=False))
        placed = {slot: one for part in processes.allgather(lambda: own) for slot, one in part.items()}
        if not placed:
            return
        self.starts = {slot: one.rollout.turn_start for slot, one in placed.items()}
        for slot, one in own.items():
            rollout = replace(one.rollout, turns=list(one.rollout.turns), versions=list(one.rollout.versions))
            rollout.sampled_from(len(one.ids), version)
            self.live[slot] = rollout
        self.place(placed)
        for rows in self._row_batches(sorted(placed, key=lambda b: len(placed[b].ids))):
            self.refresh(rows, max(len(placed[b].ids) for b in rows.tolist() if b >= 0) - 1)

    def place(self, placed: Mapping[int, Suspended]) -> None:
        """Puts suspended rollouts into slots, without their keys and values; the other slots are empty."""
        self.state = self.sampler.place(self.state, sampler_rows(placed, self.rows, self.settings.context_tokens))

    def refresh(self, rows: np.ndarray, positions: int) -> None:
        """Computes the first `positions` keys and values of rows [R] (-1: none) with the current weights."""
        width = self.parts.widths.observations[-1]
        for start in range(0, positions, width):
            self.state = self.sampler.refresh(self.weights, self.state, rows, start, width)
            self._count(refreshed=rows.size * width)

    def suspend(self) -> list[Suspended]:
        """Takes all rollouts out of their slots, in the middle of a turn, and frees the slots' memory.

        Searches in progress are completed first.
        """
        while self._awaiting_search:
            self.advance_stopped_rows()
        suspended = []
        if self.starts:
            names = ("ids", "mask", "logprobs", "length", "key", "turn_left", "automaton")
            of = processes.fetch({name: getattr(self.state, name) for name in names})
            for b, rollout in self.live.items():
                known = [of[name][b, : of["length"][b]].copy() for name in ("ids", "mask", "logprobs")]
                left = of["key"][b].copy(), int(of["turn_left"][b]), int(of["automaton"][b])
                suspended.append(Suspended(rollout, *known, *left))
        self.live, self.starts, self._pool_rows = {}, {}, {}
        self._ended.clear()
        del self.state, self.weights
        self._pool = None
        return suspended

    def add(self, questions: Sequence[Question], prompts: Sequence[list[int]], step: int) -> None:
        """Queues every sample of this process's `questions`; one whose prompt is too long ends as `truncated`.

        Args:
          step: part of the random key of these rollouts.
        """
        new: list[tuple[int, Question, int, list[int]]] = []
        for question, prompt in zip(questions, prompts, strict=True):
            cut = np.asarray(prompt[: self.settings.prompt_tokens], np.int32)
            for sample in range(self.samples):
                order, self.added = self.added, self.added + 1
                if len(cut) == len(prompt):
                    new.append((order, question, sample, prompt))
                else:
                    rollout = Rollout(order, question, sample, len(cut), len(cut))
                    self._finish(rollout, "truncated", cut, np.zeros(len(cut), bool), np.zeros(len(cut), np.float32))
        if new:
            words = [sampling.id_words(question.source, question.id) for _, question, _, _ in new]
            keys = sampling.row_keys(self.seed, step, words, [sample for _, _, sample, _ in new])
            self.waiting.extend(Waiting(*one, key) for one, key in zip(new, keys, strict=True))

    def drop(self, order: int) -> None:
        """Cancels a rollout that nobody waits for any more; it gets no result. For a single process only."""
        self._dropped.add(order)

    @property
    def decodes(self) -> bool:
        """Whether a row of this process would decode, rather than wait for a search."""
        return any(rollout.order not in self.search.pending for rollout in self.live.values())

    # ---- refill ----

    def refill(self, check: Callable[[], None] | None = None) -> bool:
        """Admits waiting rollouts to free slots; prefills each prompt once for its group.

        Args:
          check: called first; what it raises in one process is raised in every process.

        Returns:
          Whether any process has a live row.
        """
        admitted: list[int] = []
        while True:
            admissions = processes.allgather(lambda: self._next_admissions(check))
            source = {slot: row for a in admissions for slot, row in a.source.items()}
            if source:
                self._admit(source, {slot: key for a in admissions for slot, key in a.keys.items()})
            for a in admissions:
                self.starts |= a.starts
            admitted += [slot for a in admissions for slot in a.starts]
            self._refill = any(a.more for a in admissions)
            if not any(a.lacking for a in admissions):
                break
            self._prefill()
        if admitted and self.settings.initial_search:
            self._initial_search([slot for slot in admitted if slot in self.live])
        return bool(self.starts)

    def _next_admissions(self, check: Callable[[], None] | None) -> _Admissions:
        """Fills own free slots from the pool as far as possible and empties the other ended ones, which `generate`
        would otherwise count as waiting forever."""
        if check:
            check()
        self._end_dropped()
        admissions = _Admissions(dict.fromkeys(self._ended, -2), {}, {}, False, False)
        self._ended.clear()
        free = [b for b in self.own if b not in self.live]
        while free and self.waiting and self.waiting[0].order // self.samples in self._pool_rows:
            one, slot = self.waiting.popleft(), free.pop(0)
            length = len(one.prompt)
            admissions.source[slot] = self._pool_rows[one.order // self.samples]
            admissions.keys[slot], admissions.starts[slot] = one.key, length
            rollout = self.live[slot] = Rollout(one.order, one.question, one.sample, length, length)
            rollout.sampled_from(length, self.version)
        return replace(admissions, lacking=bool(free and self.waiting), more=bool(self.waiting))

    def _end_dropped(self) -> None:
        """Ends dropped rollouts; rows that wait for a search end once their passages have arrived."""
        if not self._dropped:
            return
        self.waiting = deque(one for one in self.waiting if one.order not in self._dropped)
        pending = self._dropped & set(self.search.pending)
        for b in [b for b, rollout in self.live.items() if rollout.order in self._dropped - pending]:
            del self.live[b], self.starts[b]
            self._ended.add(b)
        self._dropped = pending

    def _prefill(self) -> None:
        """Fills every process's share of the pool with its next prompts."""
        rows = self.parts.pool_rows
        share = rows // jax.process_count()
        own = dict(list({one.order // self.samples: one.prompt for one in self.waiting}.items())[:share])
        prompts = processes.allgather(lambda: list(own.values()))
        width = pick(self.parts.widths.prompts, max(len(prompt) for part in prompts for prompt in part))
        ids, n = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for process, part in enumerate(prompts):
            for row, prompt in enumerate(part, process * share):
                n[row] = len(prompt)
                ids[row, : n[row]] = prompt
        self._pool = None  # free the old pool before the next one is computed
        self._pool = self.sampler.prefill(self.weights, ids, n)
        self._count(prefilled=ids.size)
        self._pool_rows = {group: row for row, group in enumerate(own, jax.process_index() * share)}

    def _admit(self, source: dict[int, int], keys: dict[int, np.ndarray]) -> None:
        if self._pool is None:  # slots are emptied before the first prompt is prefilled
            self._pool = self.sampler.new_state(self.parts.pool_rows, self.parts.widths.prompts[0])
        for rows in self._row_batches(source):
            picked = np.array([source.get(b, -1) for b in rows], np.int32)
            row_keys = np.stack([keys.get(b, np.zeros(2, np.uint32)) for b in rows])
            turn, end = self.settings.turn_tokens, self.settings.context_tokens
            self.state = self.sampler.admit(self.state, self._pool, picked, row_keys, turn, end, rows)

    def _row_batches(self, slots: Iterable[int]) -> list[np.ndarray]:
        """Batches of R slots (of all processes) in the given order, each slot in its device's part, padded with -1."""
        devices = self.sampler.mesh.shape["data"] * self.sampler.mesh.shape["fsdp"]
        share, part = self.rows // devices, self.parts.rows_per_call // devices
        queues: list[list[int]] = [[] for _ in range(devices)]
        for slot in slots:
            queues[slot // share].append(slot)
        batches = np.full((math.ceil(max(map(len, queues)) / part), devices, part), -1, np.int32)
        for device, queue in enumerate(queues):
            for i, slot in enumerate(queue):
                batches[i // part, device, i % part] = slot
        return list(batches.reshape(len(batches), -1))

    def _initial_search(self, slots: list[int]) -> None:
        """The classic baseline: searches the question itself before the first sampled token."""

        def search_questions() -> _Continuations:
            queries = {self.live[b].order: (self.live[b].question.query,) for b in slots}
            began = time.monotonic()
            passages = self.search.search(queries)
            self._count(search_s=time.monotonic() - began)
            chunks = {}
            for b in slots:
                rollout = self.live[b]
                if rollout.order in passages:
                    asked, retrieved = queries[rollout.order], passages[rollout.order]
                    rollout.turns.append(Turn("", "search", True, asked, retrieved))
                    chunks[b] = self._observation(asked, retrieved, rollout.prompt_length)
            return _Continuations(chunks, set())

        self._append(processes.allgather(search_questions), self.starts)

    # ---- decode ----

    def decode(self, temperature: float | np.ndarray, max_steps: int = NO_STEP_LIMIT) -> None:
        """Samples until enough rows wait, or for `max_steps`; one temperature for all slots, or one per slot."""
        self.state = self.sampler.generate(
            self.weights,
            self.state,
            temperature,
            self._span(),
            refill=self._refill,
            awaiting_search=self._awaiting_search,
            max_steps=max_steps,
        )

    def _span(self) -> int:
        """An upper bound on every live row's length at the end of its current turn, rounded up to a bucket."""
        turn = self.settings.turn_tokens + self.settings.max_tokens_after_answer
        return pick(self.parts.widths.spans, min(max(self.starts.values()) + turn, self.settings.context_tokens))

    # ---- read ----

    def advance_stopped_rows(self) -> None:
        """Parses what each stopped row sampled; then ends its rollout, or searches and extends the row."""
        status, length = processes.fetch((self.state.status, self.state.length))  # waits for the device
        began, searched = time.monotonic(), self.usage.search_s
        self._count(yields=1)
        if all(status[b] == Status.RUNNING for b in self.starts):
            return
        ids, mask, logprobs = processes.fetch((self.state.ids, self.state.mask, self.state.logprobs))

        def end(b: int, how: EndStatus) -> None:
            n, rollout = length[b], self.live.pop(b)
            self._ended.add(b)
            self._finish(rollout, how, ids[b, :n].copy(), mask[b, :n].copy(), logprobs[b, :n].copy())

        def parse_and_search() -> _Continuations:
            before = set(self.live)
            queries: dict[int, tuple[str, ...]] = {}  # by rollout
            chunks: dict[int, list[int]] = {}
            pending = self.search.pending
            stopped = [b for b in self.live if status[b] != Status.RUNNING and self.live[b].order not in pending]
            for b in stopped:
                rollout = self.live[b]
                turn = self.parts.parse_turn(rollout, ids[b, rollout.turn_start : length[b]], Status(status[b]))
                how = self._end_status(rollout, turn, Status(status[b]))
                if how is not None:  # a search of this turn is not run: record no queries
                    rollout.turns.append(replace(turn, queries=(), passages=()))
                    end(b, how)
                    continue
                rollout.turns.append(turn)
                if turn.action == "search":
                    queries[rollout.order] = turn.queries
                else:
                    ended_reply = int(ids[b, length[b] - 1]) in self.parts.tokenizer.stop_ids
                    chunks[b] = list(self._corrective_after_eos if ended_reply else self._corrective)
            slots = {rollout.order: b for b, rollout in self.live.items()}
            for order, passages in self._exchange(queries).items():
                b, rollout = slots[order], self.live[slots[order]]
                rollout.turns[-1] = replace(rollout.turns[-1], passages=passages)
                chunks[b] = self._observation(rollout.turns[-1].queries, passages, int(length[b]))
            for b in [b for b, chunk in chunks.items() if length[b] + len(chunk) >= self.settings.context_tokens]:
                del chunks[b]
                end(b, "truncated")
            return _Continuations(chunks, before - set(self.live), len(self.search.pending))

        continuations = processes.allgather(parse_and_search)
        self._awaiting_search = sum(c.awaiting_search for c in continuations)
        for b in [b for c in continuations for b in c.ended]:
            del self.starts[b]
        self._append(continuations, length)
        self._count(host_s=time.monotonic() - began - (self.usage.search_s - searched))

    def _exchange(self, queries: Queries) -> Passages:
        began, searching = time.monotonic(), {*queries, *self.search.pending}
        idle = all(rollout.order in searching for rollout in self.live.values())
        passages = self.search.exchange(queries, idle=idle)
        self._count(search_s=time.monotonic() - began)
        return passages

    def _end_status(self, rollout: Rollout, turn: Turn, status: Status) -> EndStatus | None:
        """How the rollout ends with this turn; None if it continues."""
        if status == Status.ANSWER and turn.action == "answer":
            return "answered"
        if status in (Status.ANSWER, Status.EOS) and self.settings.after_eos == "end":
            return "eos"  # also for `</answer>` without an opening tag: the reply ends without an answer
        if status == Status.CONTEXT_FULL:
            return "truncated"
        if status == Status.NOT_FINITE:
            return "not_finite"
        return "out_of_turns" if rollout.model_calls == self.settings.search_turns else None

    def _observation(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]], length: int) -> list[int]:
        room = self.settings.context_tokens - length - 1
        budget = max(tags.MIN_OBSERVATION_TOKENS, min(self.settings.obs_tokens, room))
        return tags.render_observation(queries, passages, self.parts.tokenizer.encode_foreign, budget)

    def _append(self, continuations: Sequence[_Continuations], lengths: Mapping[int, int] | np.ndarray) -> None:
        """Appends every process's chunks to their rows, which hold `lengths` tokens, and starts their next turns."""
        chunks = {b: chunk for c in continuations for b, chunk in c.chunks.items()}
        if not chunks:
            return
        for rows in self._row_batches(sorted(chunks, key=lambda b: len(chunks[b]))):  # similar lengths: less padding
            real = [b for b in rows.tolist() if b >= 0]
            width = pick(self.parts.widths.observations, max(len(chunks[b]) for b in real))
            ids, n = np.zeros((len(rows), width), np.int32), np.zeros(len(rows), np.int32)
            for r, b in enumerate(rows.tolist()):
                if b >= 0:
                    n[r] = len(chunks[b])
                    ids[r, : n[r]] = chunks[b]
            turn = self.settings.turn_tokens
            self.state = self.sampler.extend(self.weights, self.state, ids, n, turn, rows)
            self._count(extended=ids.size, forced=int(n.sum()))
        for b, chunk in chunks.items():
            self.starts[b] = int(lengths[b]) + len(chunk)
            if b in self.live:
                self.live[b].turn_start = self.starts[b]

    def _count(self, **more: float) -> None:
        self.usage = replace(self.usage, **{name: getattr(self.usage, name) + n for name, n in more.items()})

    def _finish(self, rollout: Rollout, status: EndStatus, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray):
        if rollout.order in self._dropped:
            return
        turns, versions = tuple(rollout.turns), tuple(rollout.versions)
        self.results[rollout.order] = Trajectory(
            rollout.question, rollout.sample, status, turns, ids, mask, logprobs, rollout.prompt_length, versions
        )
