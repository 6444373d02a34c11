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

from psearch_jax.models.buckets import pick
from psearch_jax.rollout import sampling
from psearch_jax.rollout.boundary import TOKENS_AFTER_ANSWER
from psearch_jax.rollout.rollouts import NO_LIMITS, Parts, Rollout, RolloutLimits, Row, Usage, stack_rows
from psearch_jax.rollout.sampler import NO_STEP_LIMIT
from psearch_jax.rollout.sampler_programs import SamplerState, SamplingWeights, Status
from psearch_jax.rollout.search import SearchPolicy
from psearch_jax.rollout.tools import Calls, Passages
from psearch_jax.rollout.turns import End, Search, decide
from psearch_jax.runtime import processes
from psearch_jax.types import TOOL_ERROR, TOOL_TIMEOUT, Call, EndStatus, Question, Trajectory, Turn
from retrieval.protocol import Passage


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
    awaiting_search: set[int]  # slots that wait for a search while others decode


class RolloutScheduler:
    """Runs rollouts from question to trajectory; more questions may be added at any time.

    Args:
      search: a new policy, for this scheduler only.
      samples: R, rollouts per question.
      seed: part of every rollout's random key.
      added, waiting, results: of a scheduler whose rollouts this one continues.

    Attributes:
      live: slot -> rollout, for this process's slots that are decoding, parked or waiting for a search.
      results: order -> trajectory; the caller may remove what it takes.
      usage: the cost so far; the caller may replace it. Decode steps are counted by `suspend`.
    """

    def __init__(
        self,
        parts: Parts,
        search: SearchPolicy,
        *,
        samples: int,
        seed: int,
        added: int = 0,
        waiting: Iterable[Rollout] = (),
        results: Mapping[int, Trajectory] | None = None,
    ):
        self.parts, self.search, self.samples = parts, search, samples
        self.settings, self.sampler = parts.rollout, parts.sampler
        self.rows = self.settings.slots
        share, me = self.rows // jax.process_count(), jax.process_index()
        self.local_slots = range(me * share, (me + 1) * share)
        self.usage = Usage(share)
        self.live: dict[int, Rollout] = {}
        self.results: dict[int, Trajectory] = dict(results or {})
        self.added = added
        self.seed = seed
        self.waiting: deque[Rollout] = deque(waiting)
        self._dropped: set[int] = set()  # orders of rollouts that still have to be ended
        self.starts: dict[int, int] = {}  # slot -> start of its turn, for live slots of all processes
        self._pool: SamplerState | None = None
        self._pool_rows: dict[int, int] = {}  # index of a question -> row of the pool
        self._ended: set[int] = set()  # local slots whose rollout has ended but whose row is not emptied yet
        self._refill = False  # some process has rollouts that wait for a slot
        self._awaiting_search: set[int] = set()  # slots of all processes that wait for a search while others decode

    def resume(self, weights: SamplingWeights, version: int = 0, suspended: Sequence[Rollout] = ()) -> None:
        """Opens the slots with a policy, and continues suspended rollouts in them.

        Their keys and values are computed again: from here on the policy conditions on its own. Rollouts for which
        there is no slot start again from their prompts.

        Args:
          weights: of the policy.
          version: recorded with every token that this policy samples.
          suspended: of this process.
        """
        self.weights, self.version = weights, version
        self.state = self.sampler.new_state(self.rows, self.settings.context_tokens)
        local = dict(zip(self.local_slots, suspended, strict=False))
        self.waiting.extendleft(reversed(suspended[len(local) :]))
        restored = {slot: rollout for part in processes.allgather(lambda: local) for slot, rollout in part.items()}
        if not restored:
            return
        self.starts = {slot: rollout.turn_start for slot, rollout in restored.items()}
        for slot, rollout in local.items():
            versions = list(rollout.versions)
            self.live[slot] = replace(rollout, turns=list(rollout.turns), versions=versions, row=None)
            self.live[slot].sample_from(len(rollout.read_row().ids), version)
        rows, keys, length = stack_rows(restored, self.rows, self.settings.context_tokens)
        self.state = self.sampler.restore(self.state, rows, keys, length)
        width = self.parts.shapes.observations[-1]
        for slots in self._slot_batches(sorted(restored, key=lambda b: length[b])):
            for start in range(0, max(length[b] for b in slots if b >= 0) - 1, width):
                self.state = self.sampler.refresh(self.weights, self.state, slots, np.int32(start), width)
                self.usage.refreshed += slots.size * width

    def suspend(self) -> list[Rollout]:
        """Takes all rollouts out of their slots, in the middle of a turn, and frees the slots' memory.

        Searches in progress are completed first.
        """
        while self._awaiting_search:
            self.advance_stopped_rows()
        steps, row_steps, length = processes.fetch((self.state.steps, self.state.row_steps, self.state.length))
        self.usage.decode_steps += int(steps)
        self.usage.row_steps += int(row_steps[list(self.local_slots)].sum())
        rows = self._read(sorted(self.starts), length)
        suspended = [replace(rollout, row=rows[b]) for b, rollout in self.live.items()]
        self.live, self.starts, self._pool_rows, self._ended = {}, {}, {}, set()
        del self.state, self.weights
        self._pool = None
        return suspended

    def add(
        self, questions: Sequence[Question], prompts: Sequence[list[int]], step: int, limits: RolloutLimits = NO_LIMITS
    ) -> None:
        """Queues every sample of this process's `questions`; one whose prompt is too long ends as `truncated`.

        Args:
          step: part of the random key of these rollouts.
          limits: of each of these rollouts.
        """
        if not questions:
            return
        words = [sampling.id_words(q.source, q.id) for q in questions for _ in range(self.samples)]
        samples = [*range(self.samples)] * len(questions)
        keys = iter(sampling.row_keys(self.seed, step, words, samples))
        for question, prompt in zip(questions, prompts, strict=True):
            cut = prompt[: self.settings.prompt_tokens]
            for sample in range(self.samples):
                rollout = Rollout(self.added, question, sample, cut, next(keys), limits)
                self.added += 1
                if len(cut) == len(prompt):
                    self.waiting.append(rollout)
                else:
                    ids, n = np.asarray(cut, np.int32), len(cut)
                    rollout.row = Row(ids, np.zeros(n, bool), np.zeros(n, np.float32))
                    self._finish(rollout, "truncated")

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
        """Fills free local slots from the pool as far as possible and empties the other ended ones, which `generate`
        would otherwise count as waiting forever."""
        if check:
            check()
        self._end_dropped()
        admissions = _Admissions(dict.fromkeys(self._ended, -2), {}, {}, False, False)
        self._ended.clear()
        free = [b for b in self.local_slots if b not in self.live]
        while free and self.waiting and self.waiting[0].order // self.samples in self._pool_rows:
            rollout, slot = self.waiting.popleft().from_prompt(), free.pop(0)
            rollout.sample_from(rollout.turn_start, self.version)
            self.live[slot] = rollout
            admissions.source[slot] = self._pool_rows[rollout.order // self.samples]
            admissions.keys[slot], admissions.starts[slot] = rollout.key, rollout.turn_start
        return replace(admissions, lacking=bool(free and self.waiting), more=bool(self.waiting))

    def _end_dropped(self) -> None:
        """Ends dropped rollouts; rows that wait for a search end once their passages have arrived."""
        if not self._dropped:
            return
        self.waiting = deque(rollout for rollout in self.waiting if rollout.order not in self._dropped)
        pending = self._dropped & set(self.search.pending)
        for b in [b for b, rollout in self.live.items() if rollout.order in self._dropped - pending]:
            del self.live[b], self.starts[b]
            self._ended.add(b)
        self._dropped = pending

    def _prefill(self) -> None:
        """Fills every process's share of the pool with its next prompts."""
        rows = self.parts.shapes.pool_rows
        share = rows // jax.process_count()
        local = dict(list({r.order // self.samples: r.prompt for r in self.waiting}.items())[:share])
        prompts = processes.allgather(lambda: list(local.values()))
        width = pick(self.parts.shapes.prompts, max(len(prompt) for part in prompts for prompt in part))
        ids, n = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for process, part in enumerate(prompts):
            for row, prompt in enumerate(part, process * share):
                n[row] = len(prompt)
                ids[row, : n[row]] = prompt
        self._pool = None  # free the old pool before the next one is computed
        self._pool = self.sampler.prefill(self.weights, ids, n)
        self.usage.prefilled += ids.size
        self._pool_rows = {group: row for row, group in enumerate(local, jax.process_index() * share)}

    def _admit(self, source: dict[int, int], keys: dict[int, np.ndarray]) -> None:
        if self._pool is None:  # slots are emptied before the first prompt is prefilled
            self._pool = self.sampler.new_state(self.parts.shapes.pool_rows, self.parts.shapes.prompts[0])
        for slots in self._slot_batches(source):
            rows = np.array([source.get(b, -1) for b in slots], np.int32)
            row_keys = np.stack([keys.get(b, np.zeros(2, np.uint32)) for b in slots])
            self.state = self.sampler.admit(self.state, self._pool, slots, rows, row_keys, self._turn_budgets(slots))

    def _turn_budgets(self, slots: np.ndarray) -> np.ndarray:
        """[R] int32, the maximum tokens of the turns that begin in `slots`."""
        left = [self.live[b].tokens_left if b in self.live else math.inf for b in slots.tolist()]
        return np.minimum(left, self.settings.turn_tokens).astype(np.int32)

    def _slot_batches(self, slots: Iterable[int]) -> list[np.ndarray]:
        """Batches of R slots (of all processes) in the given order, each slot in its device's part, padded with -1."""
        devices = self.sampler.mesh.shape["data"] * self.sampler.mesh.shape["fsdp"]
        share, part = self.rows // devices, self.parts.shapes.slots_per_call // devices
        queues: list[list[int]] = [[] for _ in range(devices)]
        for slot in slots:
            queues[slot // share].append(slot)
        batches = np.full((math.ceil(max(map(len, queues)) / part), devices, part), -1, np.int32)
        for device, queue in enumerate(queues):
            for i, slot in enumerate(queue):
                batches[i // part, device, i % part] = slot
        return list(batches.reshape(len(batches), devices * part))

    def _initial_search(self, slots: list[int]) -> None:
        """The classic baseline: searches the question itself before the first sampled token."""

        def search_questions() -> _Continuations:
            asked = {b: Turn("", "search", True, (self.live[b].question.query,)) for b in slots}
            began = time.monotonic()
            passages = self.search.search({self.live[b].order: turn.calls for b, turn in asked.items()})
            self.usage.search_s += time.monotonic() - began
            chunks = {}
            for b in slots:
                rollout = self.live[b]
                if rollout.order in passages:
                    rollout.turns.append(asked[b])
                    chunks[b] = self._observe(rollout, passages[rollout.order], len(rollout.prompt), ended=False)
            return _Continuations(chunks, set(), set())

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
        turn = self.settings.turn_tokens + TOKENS_AFTER_ANSWER
        return pick(self.parts.shapes.spans, min(max(self.starts.values()) + turn, self.settings.context_tokens))

    # ---- read, parse, search ----

    def advance_stopped_rows(self) -> None:
        """Parses what each stopped row sampled; then ends its rollout, or searches and extends the row."""
        status, length = processes.fetch((self.state.status, self.state.length))  # waits for the device
        began, searched = time.monotonic(), self.usage.search_s
        self.usage.yields += 1
        if all(status[b] == Status.RUNNING for b in self.starts):
            return
        stopped = [b for b in self.starts if status[b] != Status.RUNNING and b not in self._awaiting_search]
        rows = self._read(sorted(stopped), length)
        continuations = processes.allgather(lambda: self._advance(rows, status))
        self._awaiting_search = {b for c in continuations for b in c.awaiting_search}
        for b in [b for c in continuations for b in c.ended]:
            del self.starts[b]
        self._append(continuations, length)
        self.usage.host_s += time.monotonic() - began - (self.usage.search_s - searched)

    def _read(self, slots: Sequence[int], length: np.ndarray) -> dict[int, Row]:
        """The rows in slots of all processes."""
        rows: dict[int, Row] = {}
        for batch in self._slot_batches(slots):
            arrays = jax.device_get(self.sampler.read(self.state, batch))
            for r, b in enumerate(batch.tolist()):
                if b >= 0:  # copies, so that a row does not keep the others in memory
                    ids, mask, logprobs = (x[r, : length[b]].copy() for x in arrays[:3])
                    rows[b] = Row(ids, mask, logprobs, int(arrays.turn_left[r]), int(arrays.automaton[r]))
        return rows

    def _advance(self, rows: Mapping[int, Row], status: np.ndarray) -> _Continuations:
        """Decides how this process's stopped rows continue, and searches for those that asked to."""
        before = set(self.live)
        calls: dict[int, tuple[Call, ...]] = {}  # by rollout
        chunks: dict[int, list[int]] = {}
        for b in [b for b in self.live if b in rows]:
            rollout, row, how = self.live[b], rows[b], Status(status[b])
            rollout.row = row
            turn = self.parts.parse_turn(rollout, row.ids[rollout.turn_start :], how)
            own = rollout.limits.search_turns
            limit = self.settings.search_turns if own is None else own
            spent = rollout.tokens_left <= turn.n_sampled
            decision = decide(turn, how, rollout.model_calls, limit, spent)
            ends = isinstance(decision, End)
            rollout.turns.append(replace(turn, queries=(), passages=(), tools=()) if ends else turn)
            if isinstance(decision, End):
                self._end(b, decision.status)
            elif isinstance(decision, Search):
                calls[rollout.order] = rollout.number_calls(decision.calls)
            else:
                chunks[b] = self.parts.dialect.correct(self._ended_reply(row))
        slots = {rollout.order: b for b, rollout in self.live.items()}
        for order, passages in self._exchange(calls).items():
            row = self.live[slots[order]].read_row()
            ended, length = self._ended_reply(row), len(row.ids)
            chunks[slots[order]] = self._observe(self.live[slots[order]], passages, length, ended)
        limit = self.settings.context_tokens
        for b in [b for b, chunk in chunks.items() if len(self.live[b].read_row().ids) + len(chunk) >= limit]:
            del chunks[b]
            self._end(b, "truncated")
        for b in chunks:
            self.live[b].row = None
        pending = {slots[order] for order in self.search.pending}
        return _Continuations(chunks, before - set(self.live), pending)

    def _end(self, b: int, status: EndStatus) -> None:
        self._ended.add(b)
        self._finish(self.live.pop(b), status)

    def _ended_reply(self, row: Row) -> bool:
        """Whether the model ended its reply with a stop token."""
        return int(row.ids[-1]) in self.parts.tokenizer.stop_ids

    def _exchange(self, calls: Calls) -> Passages:
        began, searching = time.monotonic(), {*calls, *self.search.pending}
        idle = all(rollout.order in searching for rollout in self.live.values())
        passages = self.search.exchange(calls, idle=idle)
        self.usage.search_s += time.monotonic() - began
        return passages

    def _observe(
        self, rollout: Rollout, passages: tuple[tuple[Passage, ...], ...], length: int, ended: bool
    ) -> list[int]:
        """Records the passages of the last turn and what is shown of them; returns the tokens to append to the row.

        Args:
          length: of the row.
          ended: whether the model ended its reply with a stop token.
        """
        turn, room = rollout.turns[-1], self.settings.context_tokens - length - 1
        failed = [p.id for ranking in passages for p in ranking if p.id in (TOOL_ERROR, TOOL_TIMEOUT)]
        self.usage.tool_errors += len(failed)
        self.usage.tool_timeouts += failed.count(TOOL_TIMEOUT)
        budget = max(self.parts.dialect.min_budget, min(self.settings.obs_tokens, room))
        observation = self.parts.dialect.observe(turn.calls, passages, budget, ended)
        shown = observation.shown if len(observation.ids) <= room else ()  # else the rollout ends without them
        rollout.turns[-1] = replace(turn, passages=passages, shown=shown)
        return observation.ids

    def _append(self, continuations: Sequence[_Continuations], lengths: Mapping[int, int] | np.ndarray) -> None:
        """Appends every process's chunks to their rows, which hold `lengths` tokens, and starts their next turns."""
        chunks = {b: chunk for c in continuations for b, chunk in c.chunks.items()}
        if not chunks:
            return
        for slots in self._slot_batches(sorted(chunks, key=lambda b: len(chunks[b]))):  # similar lengths: less padding
            real = [b for b in slots.tolist() if b >= 0]
            width = pick(self.parts.shapes.observations, max(len(chunks[b]) for b in real))
            ids, n = np.zeros((len(slots), width), np.int32), np.zeros(len(slots), np.int32)
            for r, b in enumerate(slots.tolist()):
                if b >= 0:
                    n[r] = len(chunks[b])
                    ids[r, : n[r]] = chunks[b]
            self.state = self.sampler.extend(self.weights, self.state, slots, ids, n, self._turn_budgets(slots))
            self.usage.extended += ids.size
            self.usage.forced += int(n.sum())
        for b, chunk in chunks.items():
            self.starts[b] = int(lengths[b]) + len(chunk)
            if b in self.live:
                self.live[b].turn_start = self.starts[b]

    def _finish(self, rollout: Rollout, status: EndStatus) -> None:
        if rollout.order not in self._dropped:
            turns, versions, row = tuple(rollout.turns), tuple(rollout.versions), rollout.read_row()
            known, n = (row.ids, row.mask, row.logprobs), len(rollout.prompt)
            self.results[rollout.order] = Trajectory(
                rollout.question, rollout.sample, status, turns, *known, n, versions
            )
