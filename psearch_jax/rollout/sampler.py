"""The on-device sampler: many rows decode together, and each stops at the token that completes a tag.

It handles token ids and no text. The life of a row, in calls by the host:

    prefill --admit--> running --generate--> search --extend--> running --generate--> answer --admit--> (next rollout)

Invariant of every row: `length` tokens are known and the cache holds `length - 1` of them, because the last known
token is always the next model input. So no logits are stored, and new, parked and refilled rows are treated alike.

`generate` stops when no row is running, after the requested number of decode steps, or when enough rows wait:
parked at `</search>`, at the end of a full turn or, with `eos_continues`, at a stop token without an answer, or
finished while other rollouts wait for a slot.
`admit` and `extend` change only a few rows per call, `rows` [R] as in models/kv_cache.py. Their cost grows with R, so
a row need not wait until many rows are ready.
Letters: B rows, R of them in one call, S positions, C forced tokens in one call, P prompts, V vocabulary rows (others
in models/decoder.py).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from psearch_jax.config import DecoderConfig
from psearch_jax.models import decoder, int8, lora, ragged
from psearch_jax.models.attention import implementation_for
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.rollout.boundary import BoundaryTables
from psearch_jax.rollout.copy import sampling_cast
from psearch_jax.rollout.sampler_programs import (
    Draw,
    SamplerOptions,
    SamplerPrograms,
    SamplingWeights,
    StopTables,
    YieldLimits,
    random_draw,
)
from psearch_jax.rollout.sampler_state import SamplerState, Widths
from psearch_jax.runtime import platforms
from psearch_jax.sharding import (
    ROWS,
    SAMPLING,
    is_one_cpu,
    on_cpus,
    param_shardings,
    placed,
    put,
    replicated,
    rows_sharding,
    spec,
)

NO_STEP_LIMIT = np.iinfo(np.int32).max


class Sampler:
    """The device programs (rollout/sampler_programs.py), compiled once per shape.

    Args:
      graph: the model's static half (computes in the sampling dtype).
      config: the model's shape.
      tables: boundary tables over V columns.
      n_ids: number of token ids of the tokenizer; columns from there on are never sampled.
      stop_ids: token ids that end a message.
      mesh: rows are split over (data, fsdp), heads over tensor.
      draw: samples the next token of every row; traced into `generate`.

    Attributes:
      by_length: decoding reads each row's cache only up to the row's length, so a smaller `span` saves nothing.
    """

    def __init__(
        self,
        *,
        graph: nnx.GraphDef,
        config: DecoderConfig,
        tables: BoundaryTables,
        n_ids: int,
        stop_ids: Sequence[int],
        mesh: Mesh,
        options: SamplerOptions = SamplerOptions(),  # noqa: B008 (frozen)
        draw: Draw = random_draw,
    ):
        self.config, self.mesh, self.options = config, mesh, options
        dtype = options.dtype
        activations = jnp.float32 if on_cpus(mesh) else dtype  # see models/products.py
        self._on_one_cpu = is_one_cpu(mesh)
        # Int8 kernels are converted at each step whatever their layout, so they are not transposed.
        multiplies_16_bits = dtype != jnp.float32 and platforms.cpu_multiplies(dtype)
        left_operands = self._on_one_cpu and not (options.int8_weights or multiplies_16_bits)
        states, columns = tables.next.shape
        self._programs = programs = SamplerPrograms(
            graph=graph,
            config=config,
            options=options,
            n_ids=n_ids,
            answered_state=states,  # an extra, absorbing state that completes no tag
            cache_dtype=jnp.int8 if options.int8_cache else activations,
            k_transposed=mesh.devices.flat[0].platform == "cpu",  # also of stand-ins: it follows the compiler
            left_operands=left_operands,
            # XLA for CPUs cannot slice 16 bits: in every call it would convert the stacks of all layers to float32.
            chunks_unstacked=self._on_one_cpu and dtype != jnp.float32 and not options.int8_weights,
            draw=draw,
        )
        self.by_length = ragged.applies(implementation_for(mesh, dtype), programs.k_transposed, config, mesh)
        stop = np.zeros(columns, bool)
        stop[list(stop_ids)] = True
        self._host_tables = StopTables(
            np.pad(tables.next, ((0, 1), (0, 0)), constant_values=states), np.pad(tables.hit, ((0, 1), (0, 0))), stop
        )
        shardings = self._shardings()
        self._new = jax.jit(programs.new_state, static_argnums=(0, 1), out_shardings=shardings)
        self._prefill = jax.jit(programs.prefill, out_shardings=shardings)
        self._admit = jax.jit(programs.admit, donate_argnames="state", out_shardings=shardings)
        self._extend = jax.jit(programs.extend, donate_argnames="state", out_shardings=shardings)
        self._place = jax.jit(programs.place, donate_argnames="state", out_shardings=shardings)
        self._refresh = jax.jit(
            programs.refresh, donate_argnames="state", static_argnames="width", out_shardings=shardings
        )
        self._generate = jax.jit(
            programs.generate, donate_argnames="state", static_argnames="span", out_shardings=shardings
        )
        self._unstack = jax.jit(programs.unstack)
        self._run = _call

    def weights(self, params: nnx.State) -> SamplingWeights:
        """The sampling copy of a policy in the form that every call takes.

        On one CPU the layers are unstacked here, once for many calls. On a GPU each call of `generate` does it.
        """
        if not (self.options.unstacked_decoding and self._on_one_cpu):
            return SamplingWeights(params, None)
        with jax.set_mesh(self.mesh):
            return SamplingWeights(params, self._unstack(params))

    # ---- the calls ----

    def new_state(self, rows: int, positions: int) -> SamplerState:
        """B empty slots of S positions."""
        with jax.set_mesh(self.mesh):
            return self._run(self._new, rows, positions)

    def prefill(self, weights: SamplingWeights, ids: np.ndarray, n: np.ndarray) -> SamplerState:
        """Computes a pool of P prompts and their caches.

        Args:
          ids: [P, width] int32.
          n: [P] int32 (0: an unused row).
        """
        with jax.set_mesh(self.mesh):
            return self._run(self._prefill, weights, ids, n)

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
        weights: SamplingWeights,
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
        turns = _per_row(turn_tokens, n)
        with jax.set_mesh(self.mesh):
            return self._run(self._extend, weights, state, rows, ids, n, turns)

    def place(self, state: SamplerState, rows: Mapping[str, np.ndarray]) -> SamplerState:
        """Replaces fields of the state, each for all slots. The cache of the rows is then wrong until `refresh`."""
        with jax.set_mesh(self.mesh):
            return self._run(self._place, state, dict(rows))

    def refresh(
        self, weights: SamplingWeights, state: SamplerState, rows: np.ndarray, start: int, width: int
    ) -> SamplerState:
        """Computes the cached keys and values of rows again, with other weights, at `width` positions from `start`.

        Call it from position 0 on, in steps of `width`: later positions attend to the cache of earlier ones.

        Args:
          rows: [R] int32, -1 for none.
        """
        with jax.set_mesh(self.mesh):
            return self._run(self._refresh, weights, state, rows, np.int32(start), width=width)

    def generate(
        self,
        weights: SamplingWeights,
        state: SamplerState,
        temperature: float | np.ndarray,
        span: int | None = None,
        *,
        refill: bool = False,
        awaiting_search: int = 0,
        max_steps: int = NO_STEP_LIMIT,
    ) -> SamplerState:
        """Samples until no row is running or enough rows wait. Below temperature 1e-6 greedily (log-probs at 1).

        Args:
          temperature: one for all rows, or one per row: [B] float32.
          span: an upper bound, at most S, on the length that running rows reach in this call; the cache past it is
            not read.
          refill: rollouts wait for a slot, so finished rows count as waiting, like parked rows.
          awaiting_search: number of parked rows for which a yield could do nothing; they do not count as waiting.
          max_steps: decode steps of this call, for streaming; each samples a token per row.
        """
        rows, positions = state.ids.shape
        with jax.set_mesh(self.mesh):
            return self._run(
                self._generate,
                weights,
                self._tables,
                state,
                np.full(rows, temperature, np.float32),
                YieldLimits(np.bool_(refill), np.int32(awaiting_search), np.int32(max_steps)),
                span=span or positions,
            )

    def compile_only(self) -> Sampler:
        """A sampler whose calls compile this one's programs without running them, in any thread. They return None, so
        states for their arguments come from this sampler's `new_state`."""
        other = copy.copy(self)
        other._run = _compile
        return other

    @functools.cached_property
    def _tables(self) -> StopTables:
        return put(self._host_tables, replicated(self.mesh))

    def compilations(self) -> dict[str, int]:
        """The number of shapes that each program was compiled for."""
        names = ("prefill", "admit", "extend", "refresh", "generate")
        return {name: getattr(self, f"_{name}")._cache_size() for name in names}

    def abstract_params(self) -> nnx.State:
        """`params` as ShapeDtypeStructs with shardings: weights, and adapters if the graph has any."""
        _, abstract = decoder.abstract_params(self.config)
        if self.options.lora:
            abstract = lora.join_adapters(abstract, lora.abstract_adapters(self.config, self.options.lora))
        rounding = int8.with_kernels if self.options.int8_weights else None
        params = jax.eval_shape(sampling_cast(abstract, self.options.dtype, self.mesh, rounding), abstract)
        return placed(params, param_shardings(params, SAMPLING, self.mesh))

    def traced(
        self, rows: int, positions: int, pool_rows: int, rows_per_call: int, widths: Widths, refreshes: bool = False
    ) -> tuple[SamplerState, SamplerState, dict[str, dict[int, Callable[[], jax.stages.Traced]]]]:
        """The state, the largest pool, and every program by its width, all without arrays: they compile on a machine
        without the devices (planning/plan.py). `rows_per_call` is R of `admit` and `extend`; `refreshes` adds the
        program `refresh`, which only continued rollouts need."""
        mesh, shardings = self.mesh, self._shardings()
        weights = SamplingWeights(self.abstract_params(), None)
        state = placed(jax.eval_shape(lambda: self._programs.new_state(rows, positions)), shardings)
        pools = {
            width: placed(jax.eval_shape(functools.partial(self._programs.new_state, pool_rows, width)), shardings)
            for width in widths.prompts
        }
        tables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), self._host_tables
        )
        rows_2d, rows_1d, copied = rows_sharding(mesh, 2), rows_sharding(mesh, 1), replicated(mesh)
        count, prompts = (jax.ShapeDtypeStruct((n,), jnp.int32, sharding=rows_1d) for n in (rows_per_call, pool_rows))
        number, flag = (jax.ShapeDtypeStruct((), kind, sharding=copied) for kind in (jnp.int32, jnp.bool_))
        limits = YieldLimits(flag, number, number)
        temperature = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=rows_1d)
        keys = jax.ShapeDtypeStruct((rows_per_call, 2), jnp.uint32, sharding=rows_2d)

        def ids(n: int, width: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((n, width), jnp.int32, sharding=rows_2d)

        def prefill(width: int) -> jax.stages.Traced:
            return self._prefill.trace(weights, ids(pool_rows, width), prompts)

        def admit(width: int) -> jax.stages.Traced:
            return self._admit.trace(state, pools[width], count, count, keys, count, number)

        def extend(width: int) -> jax.stages.Traced:
            return self._extend.trace(weights, state, count, ids(rows_per_call, width), count, count)

        def generate(span: int) -> jax.stages.Traced:
            return self._generate.trace(weights, tables, state, temperature, limits, span=span)

        def refresh(width: int) -> jax.stages.Traced:
            return self._refresh.trace(weights, state, count, number, width=width)

        def by_width(program: Callable[[int], jax.stages.Traced], widths: Sequence[int]):
            return {width: functools.partial(program, width) for width in widths}

        programs = {
            "prefill": by_width(prefill, widths.prompts),
            "admit": by_width(admit, widths.prompts),
            "extend": by_width(extend, widths.observations),
            "generate": by_width(generate, widths.spans),
            **({"refresh": by_width(refresh, widths.observations[-1:])} if refreshes else {}),
        }
        return state, pools[widths.prompts[-1]], programs

    def _shardings(self) -> SamplerState:
        mesh = self.mesh
        row1, row2 = rows_sharding(mesh, 1), rows_sharding(mesh, 2)
        # `spec` checks whether the mesh divides the heads; the caller ensures that it divides the rows.
        heads = spec(("kv_heads",), SAMPLING, mesh, (self.config.kv_heads,))[0]
        place = NamedSharding(mesh, jax.sharding.PartitionSpec(None, ROWS, heads))
        scales = (place, place) if self.options.int8_cache else ()
        cache = KVCache(place, place, self._programs.k_transposed, *scales)
        return SamplerState(row2, row2, row2, cache, row1, row1, row1, row1, row1, row2, replicated(mesh), row1)


def _call(program: Callable, *args: Any, **kwargs: Any) -> Any:
    return program(*args, **kwargs)


def _compile(program: Callable, *args: Any, **kwargs: Any) -> None:
    """Compiles a program for these arguments; a later call with them reuses it."""
    program.lower(*args, **kwargs).compile()


def _per_row(number: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One number, or one per row [R], as [R] int32: a single shape, so that a program is compiled once."""
    return np.full(rows.shape, number, np.int32)
