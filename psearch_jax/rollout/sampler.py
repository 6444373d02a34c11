"""The on-device sampler: many rows decode together, and each stops at the token that completes a tag.

It handles token ids and no text. The life of a row, in calls by the host:

    prefill --admit--> running --generate--> search --extend--> running --generate--> answer --admit--> (next rollout)

Invariant of every row: `length` tokens are known and the cache holds `length - 1` of them, because the last known
token is always the next model input. So no logits are stored, and new, parked and refilled rows are treated alike.

`generate` stops when no row is running, when each row got the requested number of tokens, or when enough rows wait:
parked at `</search>` or at the end of a full turn, or finished while other rollouts wait for a slot.
`admit` and `extend` change only a few rows per call, `rows` [R] as in models/kv_cache.py. Their cost grows with R, so
a row need not wait until many rows are ready.
Letters: B rows, R of them in one call, S positions, C forced tokens in one call, P prompts, V vocabulary rows (others
in models/decoder.py).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from psearch_jax.config import DecoderConfig, Lora
from psearch_jax.models import decoder, int8, kv_cache, lora, ragged
from psearch_jax.models.attention import implementation_for
from psearch_jax.models.decoder import NEG_INF
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.models.unstacked import Unstacked
from psearch_jax.rollout import boundary, sampling
from psearch_jax.rollout.boundary import BoundaryTables
from psearch_jax.rollout.sampler_state import SamplerState, Status, Widths
from psearch_jax.runtime import platforms
from psearch_jax.sharding import (
    ROWS,
    SAMPLING,
    is_one_cpu,
    param_shardings,
    placed,
    put_rows,
    replicated,
    rows_sharding,
    sampling_cast,
    spec,
    take_rows,
)

FOREVER = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tables:
    """Decide where a row stops. A automaton states, and one absorbing state for rows with a complete answer."""

    next: jax.Array  # [A + 1, V] int
    hit: jax.Array  # [A + 1, V] int
    stop: jax.Array  # [V] bool


class Sampler:
    """The device programs, compiled once per shape.

    Args:
      graph: the model's static half (computes in the sampling dtype).
      config: the model's shape.
      tables: boundary tables over V columns.
      n_ids: number of token ids of the tokenizer; columns from there on are never sampled.
      stop_ids: token ids that end a message.
      mesh: rows are split over (data, fsdp), heads over tensor.
      dtype: of the weights, except int8 kernels, and of the KV cache, which on a CPU is float32 instead.
      top_k, top_p: sampling filters; the recorded log-probs are those before the filter.
      max_tokens_after_answer: tokens sampled after `</answer>` while waiting for a stop token.
      yield_share: `generate` yields when this share of the live rows waits.
      adapters: of the graph, if it has any; `params` below then holds weights and adapters.
      int8_weights: the graph's kernels are in int8.
      int8_cache: cached keys and values are in int8.
      unstacked: `generate` first copies each layer's weights into separate arrays (models/unstacked.py), unless it
        gets such a copy.

    Attributes:
      by_length: decoding reads each row's cache only up to the row's length, so a smaller `span` saves nothing.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        config: DecoderConfig,
        tables: BoundaryTables,
        n_ids: int,
        stop_ids: Sequence[int],
        mesh: Mesh,
        dtype: Any = jnp.float32,
        top_k: int = 0,
        top_p: float = 1.0,
        max_tokens_after_answer: int = 4,
        yield_share: float = 1.0,
        adapters: Lora | None = None,
        int8_weights: bool = False,
        int8_cache: bool = False,
        unstacked: bool = False,
    ):
        self.config, self.mesh, self.dtype = config, mesh, dtype
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        activations = jnp.float32 if on_cpu else dtype  # see models/products.py
        self._int8_weights, self._cached = int8_weights, jnp.int8 if int8_cache else activations
        self._keys_across = on_cpu
        self.by_length = ragged.applies(implementation_for(mesh, dtype), self._keys_across, config, mesh)
        self._unstacked = unstacked
        self._graph, self._n_ids, self._lora = graph, n_ids, adapters
        self._top_k, self._top_p = top_k, top_p
        self._after_answer, self._yield_share = max_tokens_after_answer, yield_share
        states = tables.next.shape[0]
        self._answered = states  # an extra, absorbing state that completes no tag
        stop = np.zeros(tables.next.shape[1], bool)
        stop[list(stop_ids)] = True
        self._host_tables = _Tables(
            np.pad(tables.next, ((0, 1), (0, 0)), constant_values=states), np.pad(tables.hit, ((0, 1), (0, 0))), stop
        )
        shardings = self._shardings()
        self._prefill = jax.jit(self._prefill_program, out_shardings=shardings)
        self._admit = jax.jit(self._admit_program, donate_argnames="state", out_shardings=shardings)
        self._extend = jax.jit(self._extend_program, donate_argnames="state", out_shardings=shardings)
        self._generate = jax.jit(
            self._generate_program, donate_argnames="state", static_argnames="span", out_shardings=shardings
        )
        self._new = jax.jit(self._new_program, static_argnums=(0, 1), out_shardings=shardings)
        self._on_one_cpu = is_one_cpu(mesh)
        # Int8 kernels are converted at each step whatever their layout, so they are not transposed.
        narrow = int8_weights or (dtype != jnp.float32 and platforms.cpu_multiplies(dtype))
        self._across = self._on_one_cpu and not narrow
        self._unstack = jax.jit(lambda params: nnx.merge(self._graph, params).unstack(self._across))
        self._run = _call

    # ---- the five calls ----

    def new_state(self, rows: int, positions: int) -> SamplerState:
        """B empty slots of S positions."""
        with jax.set_mesh(self.mesh):
            return self._run(self._new, rows, positions)

    def prefill(self, params: nnx.State, ids: np.ndarray, n: np.ndarray) -> SamplerState:
        """Computes a pool of P prompts and their caches. ids [P, C] int32, n [P] int32 (0: an unused row)."""
        with jax.set_mesh(self.mesh):
            return self._run(self._prefill, params, ids, n)

    def admit(
        self,
        state: SamplerState,
        pool: SamplerState,
        source: np.ndarray,
        keys: np.ndarray,
        turn_tokens: int | np.ndarray,
        budget_end: int,
        rows: np.ndarray | None = None,
    ) -> SamplerState:
        """Copies prompt `source[r]` of the pool into slot `rows[r]`; -1 leaves the slot as it is, -2 empties it.

        Args:
          source: [R] int32.
          keys: [R, 2] uint32, used where a prompt is admitted.
          turn_tokens: maximum tokens of the first turn; one number, or [R].
          rows: [R] int32, -1 for none; default: all slots in order.
        """
        rows = np.arange(len(source), dtype=np.int32) if rows is None else rows
        with jax.set_mesh(self.mesh):
            turns = _per_row(turn_tokens, source)
            return self._run(self._admit, state, pool, rows, source, keys, turns, np.int32(budget_end))

    def extend(
        self,
        params: nnx.State,
        state: SamplerState,
        ids: np.ndarray,
        n: np.ndarray,
        turn_tokens: int | np.ndarray,
        rows: np.ndarray | None = None,
    ) -> SamplerState:
        """Appends `n[r]` forced tokens to row `rows[r]` (mask 0) and starts its next turn; n = 0 leaves it as it is.

        Tokens that do not fit into S are dropped, and the row ends with CONTEXT_FULL.

        Args:
          ids: [R, C] int32.
          n: [R] int32.
          turn_tokens: maximum tokens of the next turn; one number, or [R].
          rows: [R] int32, -1 for none; default: all slots in order.
        """
        rows = np.arange(len(n), dtype=np.int32) if rows is None else rows
        with jax.set_mesh(self.mesh):
            return self._run(self._extend, params, state, rows, ids, n, _per_row(turn_tokens, n))

    def generate(
        self,
        params: nnx.State,
        state: SamplerState,
        temperature: float | np.ndarray,
        span: int | None = None,
        refill: bool = False,
        away: int = 0,
        most: int = FOREVER,
        unstacked: Unstacked | None = None,
    ) -> SamplerState:
        """Samples until no row is running or enough rows wait. Temperature 0 is greedy (log-probs at temperature 1).

        Args:
          temperature: one for all rows, or one per row: [B] float32.
          span: an upper bound, at most S, on the length that running rows reach in this call; the cache past it is
            not read.
          refill: rollouts wait for a slot, so finished rows count as waiting, like parked rows.
          away: number of parked rows for which a yield could do nothing; they do not count as waiting.
          most: maximum tokens per row in this call, for streaming.
          unstacked: `unstack(params)`.
        """
        rows, positions = state.ids.shape
        with jax.set_mesh(self.mesh):
            return self._run(
                self._generate,
                params,
                self._tables,
                state,
                np.full(rows, temperature, np.float32),
                np.bool_(refill),
                np.int32(away),
                np.int32(most),
                unstacked,
                span=span or positions,
            )

    def unstack(self, params: nnx.State) -> Unstacked | None:
        """A copy of all layers for many calls of `generate`; None if each call copies, or reads the stacked layers."""
        if not (self._unstacked and self._on_one_cpu):
            return None
        with jax.set_mesh(self.mesh):
            return self._unstack(params)

    def compile_only(self) -> Sampler:
        """A sampler whose calls compile this one's programs without running them, in any thread. They return None, so
        states for their arguments come from this sampler's `new_state`."""
        other = copy.copy(self)
        other._run = _compile
        return other

    @functools.cached_property
    def _tables(self) -> _Tables:
        return jax.device_put(self._host_tables, replicated(self.mesh))

    def compilations(self) -> dict[str, int]:
        """The number of shapes that each program was compiled for."""
        names = ("prefill", "admit", "extend", "generate")
        return {name: getattr(self, f"_{name}")._cache_size() for name in names}

    def abstract_params(self) -> nnx.State:
        """`params` as ShapeDtypeStructs with shardings: weights, and adapters if the graph has any."""
        _, abstract = decoder.abstract_params(self.config)
        if self._lora:
            abstract = lora.join_adapters(abstract, lora.abstract_adapters(self.config, self._lora))
        rounding = int8.with_kernels if self._int8_weights else None
        params = jax.eval_shape(sampling_cast(abstract, self.dtype, self.mesh, rounding), abstract)
        return placed(params, param_shardings(params, SAMPLING, self.mesh))

    def traced(
        self, rows: int, positions: int, pool_rows: int, piece_rows: int, widths: Widths
    ) -> tuple[SamplerState, SamplerState, dict[str, dict[int, Callable[[], jax.stages.Traced]]]]:
        """The state, the largest pool, and every program by its width, all without arrays: they compile on a machine
        without the devices (planning/plan.py). `piece_rows` is R of `admit` and `extend`."""
        mesh, shardings = self.mesh, self._shardings()
        params = self.abstract_params()
        state = placed(jax.eval_shape(lambda: self._new_program(rows, positions)), shardings)
        pools = {
            width: placed(jax.eval_shape(functools.partial(self._new_program, pool_rows, width)), shardings)
            for width in widths.prompts
        }
        tables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), self._host_tables
        )
        rows_2d, rows_1d, copied = rows_sharding(mesh, 2), rows_sharding(mesh, 1), replicated(mesh)
        count, prompts = (jax.ShapeDtypeStruct((n,), jnp.int32, sharding=rows_1d) for n in (piece_rows, pool_rows))
        number, flag = (jax.ShapeDtypeStruct((), kind, sharding=copied) for kind in (jnp.int32, jnp.bool_))
        temperature = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=rows_1d)
        keys = jax.ShapeDtypeStruct((piece_rows, 2), jnp.uint32, sharding=rows_2d)

        def ids(n: int, width: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((n, width), jnp.int32, sharding=rows_2d)

        def prefill(width: int) -> jax.stages.Traced:
            return self._prefill.trace(params, ids(pool_rows, width), prompts)

        def admit(width: int) -> jax.stages.Traced:
            return self._admit.trace(state, pools[width], count, count, keys, count, number)

        def extend(width: int) -> jax.stages.Traced:
            return self._extend.trace(params, state, count, ids(piece_rows, width), count, count)

        def generate(span: int) -> jax.stages.Traced:
            return self._generate.trace(params, tables, state, temperature, flag, number, number, span=span)

        def by_width(program: Callable[[int], jax.stages.Traced], widths: Sequence[int]):
            return {width: functools.partial(program, width) for width in widths}

        programs = {
            "prefill": by_width(prefill, widths.prompts),
            "admit": by_width(admit, widths.prompts),
            "extend": by_width(extend, widths.observations),
            "generate": by_width(generate, widths.spans),
        }
        return state, pools[widths.prompts[-1]], programs

    # ---- the programs ----

    def _shardings(self) -> SamplerState:
        mesh = self.mesh
        row1, row2 = rows_sharding(mesh, 1), rows_sharding(mesh, 2)
        # `spec` checks whether the mesh divides the heads; the caller ensures that it divides the rows.
        heads = spec(("kv_heads",), SAMPLING, mesh, (self.config.kv_heads,))[0]
        place = NamedSharding(mesh, jax.sharding.PartitionSpec(None, ROWS, heads))
        scales = (place, place) if self._cached == jnp.int8 else ()
        cache = KVCache(place, place, self._keys_across, *scales)
        return SamplerState(row2, row2, row2, cache, row1, row1, row1, row1, row1, row2, replicated(mesh))

    def _new_program(self, rows: int, positions: int) -> SamplerState:
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        return SamplerState(
            ids=zeros((rows, positions)),
            mask=jnp.zeros((rows, positions), bool),
            logprobs=jnp.zeros((rows, positions), jnp.float32),
            cache=KVCache.zeros(self.config, rows, positions, self._cached, self._keys_across),
            length=zeros(rows),
            turn_left=zeros(rows),
            budget_end=jnp.full(rows, positions, jnp.int32),
            automaton=zeros(rows),
            status=zeros(rows),
            key=jnp.zeros((rows, 2), jnp.uint32),
            steps=jnp.int32(0),
        )

    def _prefill_program(self, params, ids, n) -> SamplerState:
        model = nnx.merge(self._graph, params)
        _, (k, v) = model.hidden(ids, keep_kv=True)
        pool = self._new_program(*ids.shape)
        # Keys and values of pads may not be finite, and `admit` copies them past the prompt: replace them by zeros.
        real = (jnp.arange(ids.shape[1]) < n[:, None])[:, None, :, None]
        cache = KVCache.of(*(jnp.where(real, x, 0) for x in (k, v)), self._cached, self._keys_across)
        return replace(pool, ids=ids, length=n, cache=cache)

    def _admit_program(
        self, state: SamplerState, pool: SamplerState, rows, source, keys, turn_tokens, budget_end
    ) -> SamplerState:
        S, width = state.ids.shape[1], pool.ids.shape[1]
        index = jnp.maximum(source, 0)
        taken = jnp.where(source >= 0, rows, -1)
        prompt = jnp.pad(jnp.take(pool.ids, index, axis=0), ((0, 0), (0, S - width)))
        length = jnp.take(pool.length, index)
        status = jnp.where(length < budget_end, Status.RUNNING, Status.CONTEXT_FULL)
        status = jnp.where(source == -2, Status.EMPTY, status)

        def put(name: str, values: Any) -> jax.Array:
            old = getattr(state, name)
            return put_rows(old, taken, jnp.broadcast_to(values, (rows.shape[0], *old.shape[1:])))

        return SamplerState(
            ids=put("ids", prompt),
            mask=put("mask", False),
            logprobs=put("logprobs", 0.0),
            cache=kv_cache.copy_rows(state.cache, pool.cache, index, taken),
            length=put("length", length),
            turn_left=put("turn_left", turn_tokens),
            budget_end=put("budget_end", budget_end),
            automaton=put("automaton", boundary.ROOT),
            status=put_rows(state.status, jnp.where(source == -1, -1, rows), status),
            key=put("key", keys),
            steps=state.steps,
        )

    def _extend_program(self, params, state: SamplerState, rows, ids, n, turn_tokens) -> SamplerState:
        model = nnx.merge(self._graph, params)
        S = state.ids.shape[1]
        R, C = ids.shape
        offset = jnp.arange(C)
        n = jnp.where(rows < 0, 0, n)
        known, length, end = (take_rows(x, rows) for x in (state.ids, state.length, state.budget_end))
        room = jnp.clip(n, 0, S - length)
        target = jnp.where(offset < room[:, None], length[:, None] + offset, S)
        known = known.at[jnp.arange(R)[:, None], target].set(ids, mode="drop")
        # The model's input runs from the last known token to the second to last new one.
        start = jnp.where(room > 0, jnp.maximum(length - 1, 0), 0)
        count = jnp.where(room > 0, length + room - 1 - start, 0)
        inputs = jnp.take_along_axis(known, jnp.minimum(start[:, None] + offset, S - 1), axis=1)
        _, (k, v) = model.hidden(inputs, state.cache, start, keep_kv=True, rows=rows)
        length = length + room
        touched = jnp.where(n > 0, rows, -1)
        status = jnp.where(length >= end, Status.CONTEXT_FULL, Status.RUNNING)
        return replace(
            state,
            ids=put_rows(state.ids, touched, known),
            cache=kv_cache.write(state.cache, k, v, start, count, touched),
            length=put_rows(state.length, touched, length),
            turn_left=put_rows(state.turn_left, touched, turn_tokens),
            automaton=put_rows(state.automaton, touched, jnp.full_like(n, boundary.ROOT)),
            status=put_rows(state.status, touched, status),
        )

    def _generate_program(
        self, params, tables: _Tables, state: SamplerState, temperature, refill, away, most, unstacked=None, *, span
    ) -> SamplerState:
        model = nnx.merge(self._graph, params)
        unstacked = model.unstack(self._across) if unstacked is None and self._unstacked else unstacked
        begun = state.steps

        def go_on(state: SamplerState) -> jax.Array:
            running = jnp.sum(state.status == Status.RUNNING)
            parked = (state.status == Status.SEARCH) | (state.status == Status.TURN_FULL)
            waiting = jnp.sum(parked) - away + refill * jnp.sum((state.status > Status.SEARCH) & ~parked)
            enough = waiting >= self._yield_share * (running + waiting)
            return (running > 0) & ~enough & (state.steps - begun < most)

        decode = functools.partial(self._decode, model, unstacked, tables, temperature, span)
        return jax.lax.while_loop(go_on, decode, state)

    def _decode(
        self,
        model: Any,
        unstacked: Unstacked | None,
        tables: _Tables,
        temperature: jax.Array,  # [B]
        span: int,
        state: SamplerState,
    ) -> SamplerState:
        """Samples one token for every running row."""
        B, S = state.ids.shape
        rows = jnp.arange(B)
        running = state.status == Status.RUNNING
        # A waiting row gets position 0: it attends to no cached position, and by-length decoding skips its cache.
        at = jnp.maximum(jnp.where(running, state.length, 0) - 1, 0)
        inputs = jnp.take_along_axis(state.ids, at[:, None], axis=1)
        hidden, (k, v) = model.hidden(inputs, state.cache, at, keep_kv=True, span=span, unstacked=unstacked)
        greedy = temperature == 0
        logits = model.logits(hidden[:, 0], 1.0, self._n_ids, unstacked)
        finite = jnp.all(jnp.isfinite(logits), axis=-1)
        sampled = running & finite
        logits = logits / jnp.where(greedy, 1.0, temperature)[:, None]
        logits = jnp.maximum(logits, NEG_INF)  # the division may have turned the mask into -inf
        choice = sampling.choose(
            sampling.filter_logits(logits, self._top_k, self._top_p), sampling.uniforms(state.key, state.length)
        )
        token = jnp.where(greedy, jnp.argmax(logits, axis=-1), choice).astype(jnp.int32)
        logprob = sampling.log_probability(logits, token)

        write_at = jnp.where(sampled, state.length, S)
        length = state.length + sampled
        hit = tables.hit[state.automaton, token]
        was_answered = state.automaton == self._answered
        answered = was_answered | (hit == boundary.HIT_ANSWER)
        turn_left = state.turn_left - sampled
        turn_left = jnp.where(answered & ~was_answered, self._after_answer, turn_left)
        full = length >= state.budget_end
        # The first condition that holds wins: tags before stop tokens before budgets.
        ended = [
            (hit == boundary.HIT_SEARCH, Status.SEARCH),
            (answered & (tables.stop[token] | (turn_left <= 0) | full), Status.ANSWER),
            (~answered & tables.stop[token], Status.EOS),
            (~answered & full, Status.CONTEXT_FULL),
            (~answered & (turn_left <= 0), Status.TURN_FULL),
        ]
        status = jnp.select([c for c, _ in ended], [jnp.int32(s) for _, s in ended], jnp.int32(Status.RUNNING))
        automaton = jnp.where(answered, self._answered, tables.next[state.automaton, token].astype(jnp.int32))
        status = jnp.where(finite, status, Status.NOT_FINITE)
        return replace(
            state,
            ids=state.ids.at[rows, write_at].set(token, mode="drop"),
            mask=state.mask.at[rows, write_at].set(True, mode="drop"),
            logprobs=state.logprobs.at[rows, write_at].set(logprob, mode="drop"),
            cache=kv_cache.write(state.cache, k, v, at, sampled.astype(jnp.int32)),
            length=length,
            turn_left=jnp.where(sampled, turn_left, state.turn_left),
            automaton=jnp.where(sampled, automaton, state.automaton),
            status=jnp.where(running, status, state.status),
            steps=state.steps + 1,
        )


def _call(program: Callable, *args: Any, **kwargs: Any) -> Any:
    return program(*args, **kwargs)


def _compile(program: Callable, *args: Any, **kwargs: Any) -> None:
    """Compiles a program for these arguments; a later call with them reuses it."""
    program.lower(*args, **kwargs).compile()


def _per_row(number: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One number, or one per row [R], as [R] int32: a single shape, so that a program is compiled once."""
    return np.full(rows.shape, number, np.int32)
