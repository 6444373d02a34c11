"""The on-device sampler: many rows decode together, and each stops at the token that completes a tag.

It handles token ids and no text. The life of a row, in calls by the host:

    prefill --admit--> running --generate--> search --extend--> running --generate--> answer --admit--> (next rollout)

Invariant of every row: `length` tokens are known and the cache holds `length - 1` of them, because the last known
token is always the next model input. So no logits are stored, and new, parked and refilled rows are treated alike.

`generate` stops when no row is running, after the requested number of decode steps, or when enough rows wait:
parked at `</search>`, at the end of a full turn or, with `eos_continues`, at a stop token without an answer, or
finished while other rollouts wait for a slot.
`admit` and `extend` change only a few rows per call: those of `slots` [R], where -1 means none. Their cost grows with
R, so a row need not wait until many rows are ready. On a mesh `slots` is split like the rows, and each device's part
names slots of that device.
Letters: B rows, R of them in one call, S positions, C forced tokens in one call, P prompts, V vocabulary rows (others
in models/decoder.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from psearch_jax.config import DecoderConfig, RolloutSection
from psearch_jax.models import decoder, lora
from psearch_jax.models.backend import Backend
from psearch_jax.models.buckets import buckets
from psearch_jax.rollout.boundary import BoundaryTables
from psearch_jax.rollout.copy import make_cast
from psearch_jax.rollout.sampler_programs import (
    ChooseTokens,
    RowArrays,
    SamplerOptions,
    SamplerPrograms,
    SamplerState,
    SamplingWeights,
    StopTables,
    YieldLimits,
    choose_at_random,
)
from psearch_jax.runtime.compiling import Program, abstract
from psearch_jax.sharding import (
    ROWS,
    SAMPLING,
    param_shardings,
    placed,
    put,
    replicated,
    rows_sharding,
    spec,
)

NO_STEP_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class SamplerShapes:
    """The sizes that the programs are compiled for; the widths are ascending."""

    slots: int  # B
    positions: int  # S
    pool_rows: int  # P, prompts of one `prefill`
    slots_per_call: int  # R, of `admit`, `extend`, `read` and `refresh`
    prompts: tuple[int, ...]  # widths of `prefill`
    observations: tuple[int, ...]  # widths of `extend`
    spans: tuple[int, ...]  # of `generate`

    @classmethod
    def of(cls, rollout: RolloutSection, mesh: Mesh, by_length: bool = False) -> SamplerShapes:
        """The shapes of a config.

        The pool has the prompts of all slots, and R is an eighth of the slots, both rounded up to equal shares per
        device and process. A sampler that decodes `by_length` needs only one span.
        """
        devices = mesh.shape["data"] * mesh.shape["fsdp"]
        unit = math.lcm(devices, jax.process_count())
        return cls(
            slots=rollout.slots,
            positions=rollout.context_tokens,
            pool_rows=-(-math.ceil(rollout.slots / rollout.samples) // unit) * unit,
            slots_per_call=devices * math.ceil(rollout.slots / devices / 8),
            prompts=buckets(rollout.prompt_tokens, rollout.num_buckets),
            observations=buckets(rollout.obs_tokens, rollout.num_buckets),
            spans=buckets(rollout.context_tokens, 1 if by_length else rollout.num_buckets),
        )


class Sampler:
    """The device programs (rollout/sampler_programs.py), compiled once per shape.

    Args:
      graph: the model's static half (computes in the sampling dtype).
      config: the model's shape.
      tables: boundary tables over V columns.
      n_ids: number of token ids of the tokenizer; columns from there on are never sampled.
      stop_ids: token ids that end a message.
      mesh: rows are split over (data, fsdp), heads over tensor.
      backend: the graph's.
      choose: samples the next token of every row; traced into `generate`.

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
        backend: Backend,
        options: SamplerOptions = SamplerOptions(),  # noqa: B008 (frozen)
        choose: ChooseTokens = choose_at_random,
    ):
        self.config, self.mesh, self.options, self._backend = config, mesh, options, backend
        states, columns = tables.next.shape
        self._programs = programs = SamplerPrograms(
            graph=graph,
            config=config,
            options=options,
            n_ids=n_ids,
            answered_state=states,  # an extra, absorbing state that completes no tag
            backend=backend,
            choose=choose,
        )
        self.by_length = backend.cache != "span"
        stop = np.zeros(columns, bool)
        stop[list(stop_ids)] = True
        self._host_tables = StopTables(
            np.pad(tables.next, ((0, 1), (0, 0)), constant_values=states), np.pad(tables.hit, ((0, 1), (0, 0))), stop
        )
        self._shardings = shardings = self._state_shardings()

        def jit(function: Any, **options: Any) -> Any:
            return jax.jit(function, out_shardings=shardings, **options)

        self._new = jit(programs.new_state, static_argnums=(0, 1))
        self._prefill = jit(programs.prefill)
        self._admit = jit(programs.admit, donate_argnames="state")
        self._extend = jit(programs.extend, donate_argnames="state")
        self._read = jax.jit(programs.read, out_shardings=replicated(mesh))
        self._restore = jit(programs.restore, donate_argnames="state")
        self._refresh = jit(programs.refresh, donate_argnames="state", static_argnames="width")
        self._generate = jit(programs.generate, donate_argnames="state", static_argnames="span")
        self._unstack = jax.jit(programs.unstack)

    def weights(self, params: nnx.State) -> SamplingWeights:
        """The sampling copy of a policy in the form that every call takes.

        On one CPU the layers are unstacked here, once for many calls. On a GPU each call of `generate` does it.
        """
        if self._backend.unstack != "once":
            return SamplingWeights(params, None)
        with jax.set_mesh(self.mesh):
            return SamplingWeights(params, self._unstack(params))

    # ---- the calls. Arguments are positional, as in `programs`: another way to pass them would compile again. ----

    def new_state(self, rows: int, positions: int) -> SamplerState:
        """B empty slots of S positions."""
        with jax.set_mesh(self.mesh):
            return self._new(rows, positions)

    def prefill(self, weights: SamplingWeights, ids: np.ndarray, n: np.ndarray) -> SamplerState:
        """Computes a pool of P prompts and their caches.

        Args:
          ids: [P, width] int32.
          n: [P] int32 (0: an unused row).
        """
        with jax.set_mesh(self.mesh):
            return self._prefill(weights, ids, n)

    def admit(
        self,
        state: SamplerState,
        pool: SamplerState,
        source: np.ndarray,
        keys: np.ndarray,
        turn_tokens: int | np.ndarray,
        budget_end: int,
        slots: np.ndarray | None = None,
    ) -> SamplerState:
        """Copies prompt `source[r]` of the pool into slot `slots[r]`; -1 leaves the slot as it is, -2 empties it.

        Args:
          source: [R] int32.
          keys: [R, 2] uint32 key data, used where a prompt is admitted.
          turn_tokens: maximum tokens of the first turn; one number, or [R].
          slots: [R] int32, -1 for none; default: all in order.
        """
        slots = np.arange(len(source), dtype=np.int32) if slots is None else slots
        with jax.set_mesh(self.mesh):
            return self._admit(state, pool, slots, source, keys, _per_row(turn_tokens, source), np.int32(budget_end))

    def extend(
        self,
        weights: SamplingWeights,
        state: SamplerState,
        ids: np.ndarray,
        n: np.ndarray,
        turn_tokens: int | np.ndarray,
        slots: np.ndarray | None = None,
    ) -> SamplerState:
        """Appends `n[r]` forced tokens to the row in `slots[r]` (mask 0) and starts its next turn; n = 0: no change.

        Tokens that do not fit into S are dropped, and the row ends with CONTEXT_FULL.

        Args:
          ids: [R, C] int32.
          n: [R] int32.
          turn_tokens: maximum tokens of the next turn; one number, or [R].
          slots: [R] int32, -1 for none; default: all in order.
        """
        slots = np.arange(len(n), dtype=np.int32) if slots is None else slots
        with jax.set_mesh(self.mesh):
            return self._extend(weights, state, slots, ids, n, _per_row(turn_tokens, n))

    def read(self, state: SamplerState, slots: np.ndarray) -> RowArrays:
        """The rows in R slots, on every device; at -1 an arbitrary row.

        Args:
          slots: [R] int32.
        """
        with jax.set_mesh(self.mesh):
            return self._read(state, slots)

    def restore(self, state: SamplerState, rows: RowArrays, length: np.ndarray) -> SamplerState:
        """Puts a row into every slot. The caches are then wrong until `refresh`.

        Args:
          rows: NumPy arrays of B rows.
          length: [B] int32; a slot with 0 is empty.
        """
        with jax.set_mesh(self.mesh):
            return self._restore(state, rows, length)

    def refresh(
        self, weights: SamplingWeights, state: SamplerState, slots: np.ndarray, start: int, width: int
    ) -> SamplerState:
        """Computes the cached keys and values of rows again, with other weights, at `width` positions from `start`.

        Call it from position 0 on, in steps of `width`: later positions attend to the cache of earlier ones.

        Args:
          slots: [R] int32, -1 for none.
        """
        with jax.set_mesh(self.mesh):
            return self._refresh(weights, state, slots, np.int32(start), width)

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
        temperatures = np.full(rows, temperature, np.float32)
        limits = YieldLimits(np.bool_(refill), np.int32(awaiting_search), np.int32(max_steps))
        with jax.set_mesh(self.mesh):
            return self._generate(weights, self._tables, state, temperatures, limits, span or positions)

    # ---- the same calls without arrays ----

    def programs(
        self, shapes: SamplerShapes, weights: SamplingWeights | None = None, suspends: bool = False
    ) -> list[Program]:
        """Every program that rollouts of these shapes call.

        Args:
          weights: those of the calls; default: as `abstract_params` without unstacked layers, to compile for devices
            that are not present.
          suspends: adds those that only suspended rollouts need.
        """
        if weights is None:
            weights = SamplingWeights(self.abstract_params(), None)
        weights = jax.tree.map(abstract, weights)
        state = self.abstract_state(shapes.slots, shapes.positions)
        tables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(self.mesh)), self._host_tables
        )
        B, S, P, R = shapes.slots, shapes.positions, shapes.pool_rows, shapes.slots_per_call
        slots = number_per_slot = _numbers(R)
        rows = RowArrays(
            _numbers(B, S), _array(bool, B, S), _array(np.float32, B, S), _keys(B), _numbers(B), _numbers(B)
        )
        limits = YieldLimits(_array(bool), _numbers(), _numbers())

        def program(name: str, function: Any, arguments: Any, widths: tuple[int, ...] = (0,)) -> Program:
            return Program(name, function, arguments, self.mesh, widths)

        def prefill(width: int) -> tuple[Any, ...]:
            return weights, _numbers(P, width), _numbers(P)

        def admit(width: int) -> tuple[Any, ...]:
            return state, self.abstract_state(P, width), slots, number_per_slot, _keys(R), number_per_slot, _numbers()

        def extend(width: int) -> tuple[Any, ...]:
            return weights, state, slots, _numbers(R, width), number_per_slot, number_per_slot

        def generate(span: int) -> tuple[Any, ...]:
            return weights, tables, state, _array(np.float32, B), limits, span

        def refresh(width: int) -> tuple[Any, ...]:
            return weights, state, slots, _numbers(), width

        programs = [
            program("generate", self._generate, generate, shapes.spans),
            program("prefill", self._prefill, prefill, shapes.prompts),
            program("admit", self._admit, admit, shapes.prompts),
            program("extend", self._extend, extend, shapes.observations),
            program("read", self._read, lambda _: (state, slots)),
            program("new_state", self._new, lambda _: (B, S)),
            program("new_pool", self._new, lambda width: (P, width), shapes.prompts[:1]),
        ]
        if suspends:
            programs += [
                program("restore", self._restore, lambda _: (state, rows, _numbers(B))),
                program("refresh", self._refresh, refresh, shapes.observations[-1:]),
            ]
        return programs

    def compilations(self) -> dict[str, int]:
        """The number of shapes that each program was called with."""
        names = ("prefill", "admit", "extend", "refresh", "generate")
        return {name: getattr(self, f"_{name}")._cache_size() for name in names}

    def abstract_state(self, rows: int, positions: int) -> SamplerState:
        """`new_state` as ShapeDtypeStructs with shardings."""
        return placed(jax.eval_shape(lambda: self._programs.new_state(rows, positions)), self._shardings)

    def abstract_params(self) -> nnx.State:
        """`params` as ShapeDtypeStructs with shardings: weights, and adapters if the graph has any."""
        _, abstract = decoder.abstract_params(self.config)
        if self.options.lora:
            abstract = lora.join_adapters(abstract, lora.abstract_adapters(self.config, self.options.lora))
        params = jax.eval_shape(make_cast(abstract, self.options.dtype, self.mesh), abstract)
        return placed(params, param_shardings(params, SAMPLING, self.mesh))

    @functools.cached_property
    def _tables(self) -> StopTables:
        return put(self._host_tables, replicated(self.mesh))

    def _state_shardings(self) -> SamplerState:
        """Rows are split over (data, fsdp), kv heads over tensor; only the count of steps is replicated."""
        state = jax.eval_shape(lambda: self._programs.new_state(1, 1))
        # `spec` checks whether the mesh divides the heads; the caller ensures that it divides the rows.
        heads = spec(("kv_heads",), SAMPLING, self.mesh, (self.config.kv_heads,))[0]
        in_cache = NamedSharding(self.mesh, PartitionSpec(None, ROWS, heads))

        def of(path: Any, x: jax.ShapeDtypeStruct) -> NamedSharding:
            if path[0].name == "cache":
                return in_cache
            return rows_sharding(self.mesh, x.ndim) if x.ndim else replicated(self.mesh)

        return jax.tree_util.tree_map_with_path(of, state)


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _numbers(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(np.int32, *shape)


def _keys(rows: int) -> jax.ShapeDtypeStruct:
    return _array(np.uint32, rows, 2)


def _per_row(number: int | np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One number, or one per row [R], as [R] int32: a single shape, so that a program is compiled once."""
    return np.full(rows.shape, number, np.int32)
