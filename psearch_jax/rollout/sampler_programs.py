"""What the sampler computes on the device: new slots, prompts, copies into slots, forced tokens, decoding.

These are pure functions of arrays; `Sampler` compiles and calls them. Letters as in rollout/sampler.py.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora
from psearch_jax.models import kv_cache
from psearch_jax.models.attention.scores import NEG_INF
from psearch_jax.models.backend import Backend
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.models.workarounds import Unstacked
from psearch_jax.rollout import boundary, sampling
from psearch_jax.sharding import put_rows, take_rows

GREEDY_BELOW = 1e-6  # below this temperature decoding is greedy: the division of logits would overflow float32


class Status(enum.IntEnum):
    """What a row is doing, or why it stopped."""

    EMPTY = 0  # the slot holds no rollout
    RUNNING = 1  # being sampled
    SEARCH = 2  # a search tag is complete: waits for its passages
    ANSWER = 3  # a closing answer tag is complete, opened or not, and so are the tokens sampled after it
    EOS = 4  # a stop token without an answer
    TURN_FULL = 5  # the turn's token budget is spent
    CONTEXT_FULL = 6  # no room for another token
    NOT_FINITE = 7  # a logit of the next token was NaN or infinite: nothing was sampled from it


PARKED = np.array([Status.SEARCH, Status.TURN_FULL, Status.EOS])  # the row continues after tokens are appended


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """The state of all slots between two calls. B slots of S positions."""

    ids: jax.Array  # [B, S] int32 token ids; 0 past `length`
    mask: jax.Array  # [B, S] bool, True where the token was sampled (the loss mask)
    logprobs: jax.Array  # [B, S] float32, of the sampled tokens; 0 elsewhere
    cache: KVCache  # its layout depends on the device
    length: jax.Array  # [B] int32, number of known tokens
    turn_left: jax.Array  # [B] int32, tokens that may still be sampled in this turn
    automaton: jax.Array  # [B] int32, state of the tag automaton; its last state means that an answer is complete
    status: jax.Array  # [B] int32, a `Status`
    key: jax.Array  # [B], the rollout's own random key
    steps: jax.Array  # [] int32, decode steps so far, each of which samples a token for every running row
    row_steps: jax.Array  # [B] int32, of these, the steps in which the slot's row was running


ChooseTokens = Callable[[jax.Array, SamplerState], jax.Array]  # from logits [B, V] and the state to tokens [B] int32


def choose_at_random(logits: jax.Array, state: SamplerState) -> jax.Array:
    """Samples a token per row from the softmax of `logits` [B, V], by the row's own random key."""
    return sampling.choose(logits, sampling.uniforms(state.key, state.length))


@dataclass(frozen=True)
class SamplerOptions:
    """The settings of a sampler.

    Attributes:
      dtype: of the weights, and of the KV cache, which on a CPU is float32 instead.
      top_k, top_p: sampling filters; the recorded log-probs are those before the filter.
      yield_share: `generate` yields when this share of the live rows waits.
      lora: the adapters of the graph, if it has any; `params` then holds weights and adapters.
    """

    dtype: Any = jnp.float32
    top_k: int = 0
    top_p: float = 1.0
    yield_share: float = 0.125
    lora: Lora | None = None


class RowArrays(NamedTuple):
    """What continues R rollouts in other slots, apart from their keys and caches.

    Attributes:
      ids, mask, logprobs: [R, S], as in `SamplerState`.
      turn_left, automaton: [R] int32.
    """

    ids: Any
    mask: Any
    logprobs: Any
    turn_left: Any
    automaton: Any


class SamplingWeights(NamedTuple):
    """The policy as the programs read it, from `Sampler.weights`.

    Attributes:
      params: the sampling copy: weights, and adapters if the graph has any.
      unstacked: the layers of `params` once more, as decoding on one CPU reads them; None elsewhere.
    """

    params: nnx.State
    unstacked: Unstacked | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StopTables:
    """Decide where a row stops. Of the A + 1 states the last one is absorbing, for rows with a complete answer."""

    next: jax.Array  # [A + 1, V] int
    hit: jax.Array  # [A + 1, V] int
    stop: jax.Array  # [V] bool


@dataclass(frozen=True, eq=False)
class SamplerPrograms:
    """The programs, as methods over the settings that they are compiled with.

    Attributes:
      graph: the model's static half.
      n_ids: number of token ids that may be sampled.
      answered_state: the automaton state of rows with a complete answer.
      backend: the graph's.
      choose: samples the next tokens.
    """

    graph: nnx.GraphDef
    config: DecoderConfig
    options: SamplerOptions
    n_ids: int
    answered_state: int
    backend: Backend
    choose: ChooseTokens

    @property
    def cache_dtype(self) -> Any:
        return self.backend.activations(self.options.dtype)

    def new_state(self, rows: int, positions: int) -> SamplerState:
        """B empty slots of S positions."""
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        return SamplerState(
            ids=zeros((rows, positions)),
            mask=jnp.zeros((rows, positions), bool),
            logprobs=jnp.zeros((rows, positions), jnp.float32),
            cache=KVCache.zeros(self.config, rows, positions, self.cache_dtype),
            length=zeros(rows),
            turn_left=zeros(rows),
            automaton=zeros(rows),
            status=zeros(rows),
            key=jax.random.wrap_key_data(jnp.zeros((rows, 2), jnp.uint32)),
            steps=jnp.int32(0),
            row_steps=zeros(rows),
        )

    def unstack(self, params: nnx.State) -> Unstacked:
        return nnx.merge(self.graph, params).unstack()

    def prefill(self, weights: SamplingWeights, ids: jax.Array, n: jax.Array) -> SamplerState:
        """Computes a pool of P prompts and their caches.

        Args:
          ids: [P, width] int32.
          n: [P] int32 (0: an unused row).
        """
        k, v = self._keys_and_values(weights, ids)
        pool = self.new_state(*ids.shape)
        # Keys and values of pads can be NaN or infinite, and `admit` copies them past the prompt: they become zeros.
        real = (jnp.arange(ids.shape[1]) < n[:, None])[:, None, :, None]
        cache = KVCache.of(*(jnp.where(real, x, 0) for x in (k, v)), self.cache_dtype)
        return replace(pool, ids=ids, length=n, cache=cache)

    def admit(
        self,
        state: SamplerState,
        pool: SamplerState,
        slots: jax.Array,
        source: jax.Array,
        keys: jax.Array,
        turn_tokens: jax.Array,
    ) -> SamplerState:
        """Copies prompt `source[r]` of the pool into slot `slots[r]`; -1 leaves the slot as it is, -2 empties it.

        Args:
          slots: [R] int32, -1 for none.
          source: [R] int32.
          keys: [R, 2] uint32 key data, used where a prompt is admitted.
          turn_tokens: [R] int32, maximum tokens of the first turn.
        """
        S, width = state.ids.shape[1], pool.ids.shape[1]
        index = jnp.maximum(source, 0)
        filled = jnp.where(source >= 0, slots, -1)
        prompt = jnp.pad(jnp.take(pool.ids, index, axis=0), ((0, 0), (0, S - width)))
        length = jnp.take(pool.length, index)
        status = jnp.where(length < S, Status.RUNNING, Status.CONTEXT_FULL)
        status = jnp.where(source == -2, Status.EMPTY, status)

        def fill(name: str, values: Any) -> jax.Array:
            old = getattr(state, name)
            return put_rows(old, filled, jnp.broadcast_to(values, (slots.shape[0], *old.shape[1:])))

        return replace(
            state,
            ids=fill("ids", prompt),
            mask=fill("mask", False),
            logprobs=fill("logprobs", 0.0),
            cache=kv_cache.copy_rows(state.cache, pool.cache, index, filled),
            length=fill("length", length),
            turn_left=fill("turn_left", turn_tokens),
            automaton=fill("automaton", boundary.ROOT),
            status=put_rows(state.status, jnp.where(source == -1, -1, slots), status),
            key=fill("key", jax.random.wrap_key_data(keys)),
        )

    def extend(
        self,
        weights: SamplingWeights,
        state: SamplerState,
        slots: jax.Array,
        ids: jax.Array,
        n: jax.Array,
        turn_tokens: jax.Array,
    ) -> SamplerState:
        """Appends `n[r]` forced tokens to the row in `slots[r]` (mask 0) and starts its next turn; n = 0: no change.

        Tokens that do not fit into S are dropped, and the row ends with CONTEXT_FULL.

        Args:
          slots: [R] int32, -1 for none.
          ids: [R, C] int32.
          n: [R] int32.
          turn_tokens: [R] int32, maximum tokens of the next turn.
        """
        S = state.ids.shape[1]
        R, C = ids.shape
        offset = jnp.arange(C)
        n = jnp.where(slots < 0, 0, n)
        known, length = (take_rows(x, slots) for x in (state.ids, state.length))
        room = jnp.clip(n, 0, S - length)
        target = jnp.where(offset < room[:, None], length[:, None] + offset, S)
        known = known.at[jnp.arange(R)[:, None], target].set(ids, mode="drop")
        # The model's input runs from the last known token to the second to last new one.
        start = jnp.where(room > 0, jnp.maximum(length - 1, 0), 0)
        count = jnp.where(room > 0, length + room - 1 - start, 0)
        inputs = jnp.take_along_axis(known, jnp.minimum(start[:, None] + offset, S - 1), axis=1)
        k, v = self._keys_and_values(weights, inputs, state.cache, start, rows=slots)
        length = length + room
        touched = jnp.where(n > 0, slots, -1)
        status = jnp.where(length >= S, Status.CONTEXT_FULL, Status.RUNNING)
        return replace(
            state,
            ids=put_rows(state.ids, touched, known),
            cache=kv_cache.write(state.cache, k, v, start, count, touched),
            length=put_rows(state.length, touched, length),
            turn_left=put_rows(state.turn_left, touched, turn_tokens),
            automaton=put_rows(state.automaton, touched, jnp.full_like(n, boundary.ROOT)),
            status=put_rows(state.status, touched, status),
        )

    def read(self, state: SamplerState, slots: jax.Array) -> RowArrays:
        """The rows in `slots` [R] int32, on every device; at -1 an arbitrary row."""
        return RowArrays(*(take_rows(getattr(state, name), slots) for name in RowArrays._fields))

    def restore(self, state: SamplerState, rows: RowArrays, keys: jax.Array, length: jax.Array) -> SamplerState:
        """Puts a row into every slot. The caches are then wrong until `refresh`.

        Args:
          rows: B rows.
          keys: [B, 2] uint32 key data.
          length: [B] int32; a slot with 0 is empty.
        """
        status = jnp.where(length > 0, jnp.int32(Status.RUNNING), Status.EMPTY)
        return replace(state, **rows._asdict(), key=jax.random.wrap_key_data(keys), length=length, status=status)

    def refresh(
        self, weights: SamplingWeights, state: SamplerState, slots: jax.Array, start: jax.Array, width: int
    ) -> SamplerState:
        """Computes the cached keys and values of rows again, with other weights, at `width` positions from `start`.

        Call it from position 0 on, in steps of `width`: later positions attend to the cache of earlier ones.

        Args:
          slots: [R] int32, -1 for none.
          start: [] int32.
        """
        S = state.ids.shape[1]
        known, length = (take_rows(x, slots) for x in (state.ids, state.length))
        # The last known token is the next decode step's input.
        count = jnp.where(slots < 0, 0, jnp.clip(length - 1 - start, 0, width))
        begin = jnp.where(count > 0, start, 0)
        inputs = jnp.take_along_axis(known, jnp.minimum(begin[:, None] + jnp.arange(width), S - 1), axis=1)
        k, v = self._keys_and_values(weights, inputs, state.cache, begin, rows=slots)
        touched = jnp.where(count > 0, slots, -1)
        return replace(state, cache=kv_cache.write(state.cache, k, v, begin, count, touched))

    def _keys_and_values(self, weights: SamplingWeights, *inputs: Any, **rows: Any) -> tuple[jax.Array, jax.Array]:
        """Of several positions of each row; arguments as those of `Decoder.hidden`."""
        # XLA for CPUs cannot slice 16 bits: in every call it would convert the stacks of all layers to float32.
        unstacked = weights.unstacked if self.options.dtype != jnp.float32 else None
        model = nnx.merge(self.graph, weights.params)
        return model.hidden(*inputs, keep_kv=True, unstacked=unstacked, **rows)[1]

    def generate(
        self,
        weights: SamplingWeights,
        tables: StopTables,
        state: SamplerState,
        temperature: jax.Array,
        refill: jax.Array,
        awaiting_search: jax.Array,
        max_steps: jax.Array,
        span: int,
    ) -> SamplerState:
        """As `Sampler.generate`, with a temperature per row, [B] float32, and `awaiting_search` as [B] bool."""
        model, unstacked = nnx.merge(self.graph, weights.params), weights.unstacked
        if self.backend.unstack == "per_call":
            unstacked = model.unstack()
        first_step = state.steps

        def keep_decoding(state: SamplerState) -> jax.Array:
            running = jnp.sum(state.status == Status.RUNNING)
            parked = jnp.isin(state.status, PARKED)
            finished = (state.status != Status.EMPTY) & (state.status != Status.RUNNING) & ~parked
            waiting = jnp.sum((parked | (refill & finished)) & ~awaiting_search)
            enough = waiting >= self.options.yield_share * (running + waiting)
            return (running > 0) & ~enough & (state.steps - first_step < max_steps)

        def decode(state: SamplerState) -> SamplerState:
            return self._decode(model, unstacked, tables, temperature, span, state)

        return jax.lax.while_loop(keep_decoding, decode, state)

    def _decode(
        self,
        model: Any,
        unstacked: Unstacked | None,
        tables: StopTables,
        temperature: jax.Array,
        span: int,
        state: SamplerState,
    ) -> SamplerState:
        """Samples a token for every running row."""
        running = state.status == Status.RUNNING
        # A waiting row gets position 0: it attends to no cached position, and by-length decoding skips its cache.
        at = jnp.maximum(jnp.where(running, state.length, 0) - 1, 0)
        inputs = jnp.take_along_axis(state.ids, at[:, None], axis=1)
        hidden, (k, v) = model.hidden(inputs, state.cache, at, keep_kv=True, span=span, unstacked=unstacked)
        logits = model.logits(hidden, 1.0, self.n_ids, unstacked)[:, 0]
        sampled = self._sample(tables, temperature, logits, state)
        return replace(
            sampled,
            cache=kv_cache.write(state.cache, k, v, at, sampled.length - state.length),
            steps=state.steps + 1,
            row_steps=state.row_steps + running,
        )

    def _sample(
        self, tables: StopTables, temperature: jax.Array, logits: jax.Array, state: SamplerState
    ) -> SamplerState:
        """Appends one token to every running row, sampled from its logits [B, V]."""
        B, S = state.ids.shape
        rows = jnp.arange(B)
        greedy = temperature < GREEDY_BELOW
        finite = jnp.all(jnp.isfinite(logits), axis=-1)
        running = state.status == Status.RUNNING
        sampled = running & finite
        logits = logits / jnp.where(greedy, 1.0, temperature)[:, None]
        logits = jnp.maximum(logits, NEG_INF)  # the division may have turned the mask into -inf
        choice = self.choose(sampling.filter_logits(logits, self.options.top_k, self.options.top_p), state)
        token = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), choice)
        logprob = sampling.log_probability(logits, token)

        write_at = jnp.where(sampled, state.length, S)
        length = state.length + sampled
        hit = tables.hit[state.automaton, token]
        was_answered = state.automaton == self.answered_state
        answered = was_answered | (hit == boundary.HIT_ANSWER)
        turn_left = state.turn_left - sampled
        turn_left = jnp.where(answered & ~was_answered, boundary.TOKENS_AFTER_ANSWER, turn_left)
        full = length >= S
        # The first condition that holds wins: tags before stop tokens before budgets.
        ended = [
            (hit == boundary.HIT_SEARCH, Status.SEARCH),
            (answered & (tables.stop[token] | (turn_left <= 0) | full), Status.ANSWER),
            (~answered & tables.stop[token], Status.EOS),
            (~answered & full, Status.CONTEXT_FULL),
            (~answered & (turn_left <= 0), Status.TURN_FULL),
        ]
        status = jnp.select([c for c, _ in ended], [jnp.int32(s) for _, s in ended], jnp.int32(Status.RUNNING))
        automaton = jnp.where(answered, self.answered_state, tables.next[state.automaton, token].astype(jnp.int32))
        status = jnp.where(finite, status, Status.NOT_FINITE)
        return replace(
            state,
            ids=state.ids.at[rows, write_at].set(token, mode="drop"),
            mask=state.mask.at[rows, write_at].set(True, mode="drop"),
            logprobs=state.logprobs.at[rows, write_at].set(logprob, mode="drop"),
            length=length,
            turn_left=jnp.where(sampled, turn_left, state.turn_left),
            automaton=jnp.where(sampled, automaton, state.automaton),
            status=jnp.where(running, status, state.status),
        )
