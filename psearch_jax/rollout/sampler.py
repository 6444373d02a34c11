"""The on-device sampler: many rows decode together, and each stops at the token that completes a tag.

It handles token ids and no text. The life of a row, in calls by the host:

    prefill --admit--> running --generate--> search --extend--> running --generate--> answer --admit--> (next rollout)

Invariant of every row: `length` tokens are known and the cache holds `length - 1` of them, because the last known
token is always the next model input. So no logits are stored, and new, parked and refilled rows are treated alike.

`generate` stops when no row is running, after the requested number of decode steps, or when enough rows wait:
parked at `</search>`, at the end of a full turn or at a stop token without an answer, or finished while other rollouts
wait for a slot.
`admit` and `extend` change only a few rows per call: those of `slots` [R], where -1 means none. Their cost grows with
R, so a row need not wait until many rows are ready. On a mesh `slots` is split like the rows, and each device's part
names slots of that device.
Letters: B rows, R of them in one call, S positions, C forced tokens in one call, P prompts, V vocabulary rows (others
in models/decoder.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
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
    choose_at_random,
)
from psearch_jax.runtime.compiling import Program, abstract
from psearch_jax.sharding import (
    ROWS,
    SAMPLING,
    attach_shardings,
    param_shardings,
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
      new_state, prefill, admit, extend, read, restore, refresh: the methods of `SamplerPrograms`.
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
        self._shardings = self._state_shardings()
        self._jitted: dict[str, Any] = {}
        compile_updating = functools.partial(self._compile, donate_argnames="state")
        self.new_state = self._compile(programs.new_state, static_argnums=(0, 1))
        self.prefill = self._compile(programs.prefill)
        self.admit = compile_updating(programs.admit)
        self.extend = compile_updating(programs.extend)
        self.read = self._compile(programs.read, out_shardings=replicated(mesh))
        self.restore = compile_updating(programs.restore)
        self.refresh = compile_updating(programs.refresh, static_argnames="width")
        self._generate = compile_updating(programs.generate, static_argnames="span")
        self._unstack = self._compile(programs.unstack, out_shardings=None)

    def _compile(self, program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The program with its mesh set, compiled once per shape. Arguments are positional: named ones would compile
        again."""
        jitted = self._jitted[program.__name__] = jax.jit(program, **{"out_shardings": self._shardings} | options)

        @functools.wraps(program)
        def call(*arguments: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return jitted(*arguments)

        return call

    def weights(self, params: nnx.State) -> SamplingWeights:
        """The sampling copy of a policy in the form that every call takes.

        On one CPU the layers are unstacked here, once for many calls. On a GPU each call of `generate` does it.
        """
        return SamplingWeights(params, self._unstack(params) if self._backend.unstack == "once" else None)

    def generate(
        self,
        weights: SamplingWeights,
        state: SamplerState,
        temperature: float | np.ndarray,
        span: int | None = None,
        *,
        refill: bool = False,
        awaiting_search: Iterable[int] = (),
        max_steps: int = NO_STEP_LIMIT,
    ) -> SamplerState:
        """Samples until no row is running or enough rows wait. Below temperature 1e-6 greedily (log-probs at 1).

        Args:
          temperature: one for all rows, or one per row: [B] float32.
          span: an upper bound, at most S, on the length that running rows reach in this call; the cache past it is
            not read.
          refill: rollouts wait for a slot, so finished rows count as waiting, like parked rows.
          awaiting_search: the rows for which a yield could do nothing; they do not count as waiting.
          max_steps: decode steps of this call, for streaming; each samples a token per row.
        """
        rows, positions = state.ids.shape
        temperatures = np.full(rows, temperature, np.float32)
        searching = np.zeros(rows, bool)
        searching[list(awaiting_search)] = True
        limits = (np.bool_(refill), searching, np.int32(max_steps))
        return self._generate(weights, self._tables, state, temperatures, *limits, span or positions)

    def programs(
        self, shapes: SamplerShapes, weights: SamplingWeights | None = None, suspends: bool = False
    ) -> list[Program]:
        """Every program that rollouts of these shapes call, with its abstract arguments.

        Args:
          weights: those of the calls; default: as `abstract_params` without unstacked layers, to compile for devices
            that are not present.
          suspends: adds those that only suspended rollouts need.
        """
        w = jax.tree.map(abstract, weights or SamplingWeights(self.abstract_params(), None))
        state = self.abstract_state(shapes.slots, shapes.positions)
        tables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(self.mesh)), self._host_tables
        )
        B, S, P, R = shapes.slots, shapes.positions, shapes.pool_rows, shapes.slots_per_call
        i32 = functools.partial(_array, np.int32)
        rows = RowArrays(i32(B, S), _array(bool, B, S), _array(np.float32, B, S), i32(B), i32(B))
        temperatures, limits = _array(np.float32, B), (_array(bool), _array(bool, B), i32())

        def pool(width: int) -> SamplerState:
            return self.abstract_state(P, width)

        calls: list[tuple[str, tuple[int, ...], Callable[[int], tuple[Any, ...]]]] = [
            ("generate", shapes.spans, lambda span: (w, tables, state, temperatures, *limits, span)),
            ("prefill", shapes.prompts, lambda width: (w, i32(P, width), i32(P))),
            ("admit", shapes.prompts, lambda width: (state, pool(width), i32(R), i32(R), _keys(R), i32(R))),
            ("extend", shapes.observations, lambda width: (w, state, i32(R), i32(R, width), i32(R), i32(R))),
            ("read", (0,), lambda _: (state, i32(R))),
            ("new_state", (0,), lambda _: (B, S)),
            ("new_state", shapes.prompts[:1], lambda width: (P, width)),  # an empty pool
        ]
        if suspends:
            calls += [
                ("restore", (0,), lambda _: (state, rows, _keys(B), i32(B))),
                ("refresh", shapes.observations[-1:], lambda width: (w, state, i32(R), i32(), width)),
            ]
        return [Program(name, self._jitted[name], arguments, self.mesh, widths) for name, widths, arguments in calls]

    def abstract_state(self, rows: int, positions: int) -> SamplerState:
        """`new_state` as ShapeDtypeStructs with shardings."""
        return attach_shardings(jax.eval_shape(lambda: self._programs.new_state(rows, positions)), self._shardings)

    def abstract_params(self) -> nnx.State:
        """`params` as ShapeDtypeStructs with shardings: weights, and adapters if the graph has any."""
        _, abstract = decoder.abstract_params(self.config)
        if self.options.lora:
            abstract = lora.join_adapters(abstract, lora.abstract_adapters(self.config, self.options.lora))
        params = jax.eval_shape(make_cast(abstract, self.options.dtype, self.mesh), abstract)
        return attach_shardings(params, param_shardings(params, SAMPLING, self.mesh))

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


def _keys(rows: int) -> jax.ShapeDtypeStruct:
    return _array(np.uint32, rows, 2)
