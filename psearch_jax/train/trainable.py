"""Device programs that train one set of parameters: score a batch, update on a mini-batch.

Policy (learner.py), critic (critic.py) and supervised fine-tuning share everything here; they differ in the loss and
the score that they pass in. A mini-batch is packed into micro-batches (rl/batch.py). `accumulate` adds the gradient
sums of one micro-batch and is compiled once per width; `apply` divides once and takes the optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import DecoderConfig, LearningSection, Lora, Remat
from psearch_jax.models import decoder
from psearch_jax.models import lora as adapters
from psearch_jax.models.backend import choose_backend
from psearch_jax.models.buckets import buckets, row_widths
from psearch_jax.rl.batch import Place, micro_batches, padding
from psearch_jax.runtime import progress
from psearch_jax.runtime.compiling import Program, compile_all
from psearch_jax.runtime.metrics import WEIGHT, Ratio
from psearch_jax.sharding import constrain, placed, replicated, rows_sharding
from psearch_jax.train.state import TrainState, abstract_state, learning_rate, state_shardings
from psearch_jax.types import MicroBatch, TrainBatch

jax.tree_util.register_dataclass(MicroBatch)  # here, because types.py needs no jax
LossFn = Callable[[decoder.Decoder, MicroBatch], tuple[Ratio, dict[str, Ratio]]]  # loss and metrics
ScoreFn = Callable[[decoder.Decoder, MicroBatch], jax.Array]  # [B, W] float32; 0 where the mask is 0
_INTEGERS = ("ids", "segments", "positions")  # int32 fields of a micro-batch; the others are float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What the micro-batches of a mini-batch add up to; nothing is divided yet."""

    grads: nnx.State
    loss: Ratio
    metrics: dict[str, Ratio]
    tokens: jax.Array  # [] float32, trained tokens


@dataclass(frozen=True)
class TrainingOptions:
    """How a set of parameters is trained.

    Attributes:
      context_tokens: S, the longest trajectory.
      dtype: of the computation.
      remat, shard_residual: as in `decoder.graphdef`.
      lora: train only adapters (and a value head), not the weights.
      widths: the number of widths that rows are padded to.
      pack: let trajectories share rows.
    """

    context_tokens: int
    dtype: Any = jnp.float32
    remat: Remat = "full"
    shard_residual: bool = False
    lora: Lora | None = None
    num_buckets: int = 4
    pack: bool = True


def never_stop() -> None:
    """The default for `check_stop`."""


def empty_micro_batch(rows: int, width: int, like: Callable[[tuple[int, int], Any], Any]) -> MicroBatch:
    """A micro-batch of `rows` empty rows; `like` makes an array from a shape and a dtype."""
    dtypes = {name: jnp.int32 if name in _INTEGERS else jnp.float32 for name in MicroBatch.__dataclass_fields__}
    return MicroBatch(**{name: like((rows, width), dtype) for name, dtype in dtypes.items()})


def merged(graph: nnx.GraphDef, params: nnx.State, base: nnx.State | None) -> decoder.Decoder:
    """The model with its arrays; `base` holds the weights that `params` lacks, or is None."""
    return nnx.merge(graph, params) if base is None else nnx.merge(graph, base, params)


def hidden_states(model: decoder.Decoder, micro_batch: MicroBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states [B, W, D] of packed rows, their token ids [B, W], and their mask as [B, W] bool."""
    ids, segments = constrain(micro_batch.ids, "rows", None), constrain(micro_batch.segments, "rows", None)
    hidden, _ = model.hidden(ids, positions=micro_batch.positions, segments=segments)
    return hidden, ids, constrain(micro_batch.mask, "rows", None) > 0


class Trainable:
    """Device programs for one set of parameters.

    Args:
      model: the architecture.
      learning: batch and optimizer settings.
      optimizer: an optax transformation.
      mesh: for parameters and rows.
      options: with `lora`, `params` below are the adapters'.
      loss_fn: the loss of a micro-batch and its metrics, one of which is `loss`.
      metrics: the names of these metrics.
      score_fn: the score of every token in the mask, such as its log-prob.
      score_name: the name of the `score` program, such as `logprobs`.
      update_name: the name of an update's progress.
      learning_rate_fn: the learning rate of the next update from a state; default: that of `make_optimizer`.
      base: with `lora`, the frozen weights in storage sharding. Without them nothing can be run, only traced.
      values: the model has a value head in place of the lm head.
    """

    def __init__(
        self,
        model: DecoderConfig,
        learning: LearningSection,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        options: TrainingOptions,
        *,
        loss_fn: LossFn,
        metrics: Sequence[str],
        score_fn: ScoreFn,
        score_name: str = "logprobs",
        update_name: str = "update",
        learning_rate_fn: Callable[[TrainState], jax.Array] | None = None,
        base: nnx.State | None = None,
        values: bool = False,
    ):
        self.metrics, self.score_name, self._update_name = tuple(metrics), score_name, update_name
        self._loss_fn, self._score_fn = loss_fn, score_fn
        self._learning_rate_fn = learning_rate_fn or functools.partial(learning_rate, learning=learning)
        dtype, lora = options.dtype, options.lora
        self._backend = backend = choose_backend(mesh, dtype, model)
        self._base, self._frozen_inputs = base, self._as_trained_on(base)
        self._graph = decoder.graphdef(
            model,
            dtype,
            options.remat,
            backend,
            options.shard_residual,
            lora=lora,
            values=values,
        )
        self._per_row = backend.max_segments if options.pack else 1
        self._widths = (buckets if self._per_row == 1 else row_widths)(options.context_tokens, options.num_buckets)
        self._learning, self._optimizer, self.mesh = learning, optimizer, mesh
        trained = adapters.abstract_trained(decoder.abstract_params(model, values)[1], model, lora)
        self._abstract = abstract_state(trained, optimizer)
        self._places = state_shardings(self._abstract, mesh)
        sums_places = Sums(self._places.params, *[replicated(mesh)] * 3)
        self._score_program = self._compile_score(self._graph)
        self._zero = jax.jit(self._zero_program, out_shardings=sums_places)
        self._accumulate = jax.jit(
            self._accumulate_program, donate_argnames="sums", out_shardings=(sums_places, replicated(mesh))
        )
        self._apply = jax.jit(
            self._apply_program, donate_argnames="state", out_shardings=(self._places, replicated(mesh))
        )
        self._names = [".".join(path) for path, _ in nnx.to_flat_state(trained)]

    @property
    def base(self) -> nnx.State | None:
        """With `lora`, the frozen weights in storage sharding."""
        return self._base

    def _as_trained_on(self, weights: nnx.State | None) -> nnx.State | None:
        """The frozen weights as the programs take them; one CPU would convert them again for every micro-batch."""
        return jax.tree.map(lambda x: x.astype(jnp.float32), weights) if self._backend.widens_frozen else weights

    def score(self, params: nnx.State, batch: TrainBatch, check_stop: Callable[[], None] = never_stop) -> np.ndarray:
        """The score of every token in the batch's mask; 0 elsewhere. [N, S] float32.

        `check_stop` is called before every micro-batch, while at most one is running, and may raise.
        """
        return self._over_batch(
            lambda micro_batch: self._score_program(params, self._frozen_inputs, micro_batch), batch, check_stop
        )

    def update(
        self, state: TrainState, batch: TrainBatch, check_stop: Callable[[], None] = never_stop
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on one mini-batch, in micro-batches of `micro_batch_rows`. Donates `state`.

        The metrics include `update_padding`, the padded share of the micro-batches' positions. `check_stop` is called
        before every micro-batch, while at most one runs; if it raises, `state` is intact. If loss or gradient is not
        finite, or no token is trained, parameters and optimizer state stay unchanged and `skipped` is 1. Means without
        anything to count are NaN.
        """
        packed = self._packed(batch)
        state, metrics = self.update_micro_batches(state, [micro_batch for _, micro_batch in packed], check_stop)
        return state, metrics | {"update_padding": padding(packed)}

    def update_micro_batches(
        self, state: TrainState, micro_batches: Sequence[MicroBatch], check_stop: Callable[[], None] = never_stop
    ) -> tuple[TrainState, dict[str, float]]:
        """`update` on micro-batches that the caller has packed. Each distinct shape is compiled once."""
        sums = self._sums(state.params, micro_batches, check_stop)
        with jax.set_mesh(self.mesh):
            state, metrics = self._apply(state, sums)
        return state, {k: float(v) for k, v in jax.device_get(metrics).items()}

    def gradients(self, params: nnx.State, batch: TrainBatch) -> nnx.State:
        """The gradients that `update` would use, before clipping."""
        sums = self._sums(params, [micro_batch for _, micro_batch in self._packed(batch)], never_stop)
        return _mean_gradients(sums)

    def nonfinite_cause(self, metrics: Mapping[str, float]) -> str:
        """What was not finite in the update that produced `metrics`, for messages."""
        index = int(metrics["nonfinite_param"])
        return f"first in the gradient of {self._names[index]}" if index >= 0 else "in the loss or the gradient's norm"

    def warm_up(self, params: nnx.State) -> None:
        """Compiles `accumulate` and `score` at every width; the first update compiles `apply`."""
        frozen, batches = self._frozen_inputs, self._empty_batches()
        with jax.set_mesh(self.mesh):
            sums = self._zero(params)
            self._compile(self._accumulate, [(params, frozen, sums, batch) for batch in batches])
            for batch in batches:
                sums, _ = self._accumulate(params, frozen, sums, batch)
            jax.block_until_ready(sums)
            if self.needs_score:
                self._compile(self._score_program, calls := [(params, frozen, batch) for batch in batches])
                for call in calls:
                    jax.block_until_ready(self._score_program(*call))

    def _empty_batches(self) -> list[MicroBatch]:
        """A micro-batch of padding for every width."""
        rows = self._learning.micro_batch_rows
        return [empty_micro_batch(rows, width, np.zeros) for width in self._widths]

    def _compile(self, program: Any, calls: Sequence[tuple[Any, ...]]) -> None:
        """Compiles a jitted program for each tuple of arguments, several at a time; later calls reuse the results."""
        compile_all([Program(self.score_name, program, functools.partial(_same, call), self.mesh) for call in calls])

    @property
    def needs_score(self) -> bool:
        """Whether a batch must be scored before its updates."""
        return True

    def compilations(self) -> dict[str, int]:
        """Number of shapes each program was compiled for."""
        programs = {self.score_name: self._score_program, "accumulate": self._accumulate, "apply": self._apply}
        return {name: program._cache_size() for name, program in programs.items()}

    def traced(self, frozen: nnx.State | None = None) -> dict[str, dict[int, Callable[[], jax.stages.Traced]]]:
        """Traces of every program by width (0: no width), to compile without the devices (planning/plan.py).

        Args:
          frozen: `base` as ShapeDtypeStructs.
        """
        rows, mesh = self._learning.micro_batch_rows, self.mesh
        frozen = jax.eval_shape(self._as_trained_on, frozen)
        state = self._state()
        sums = jax.eval_shape(self._zero_program, state.params)
        sums = placed(sums, replace(jax.tree.map(lambda _: replicated(mesh), sums), grads=self._places.params))

        def micro_batch(width: int) -> MicroBatch:
            place = rows_sharding(mesh, 2)
            return empty_micro_batch(
                rows, width, lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
            )

        def score(width: int) -> jax.stages.Traced:
            return self._score_program.trace(state.params, frozen, micro_batch(width))

        def accumulate(width: int) -> jax.stages.Traced:
            return self._accumulate.trace(state.params, frozen, sums, micro_batch(width))

        return {
            self.score_name: {width: functools.partial(score, width) for width in self._widths},
            "accumulate": {width: functools.partial(accumulate, width) for width in self._widths},
            "apply": {0: lambda: self._apply.trace(state, sums)},
        }

    def _state(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings."""
        return placed(self._abstract, self._places)

    def _over_batch(
        self, program: Callable[[MicroBatch], jax.Array], batch: TrainBatch, check_stop: Callable[[], None]
    ) -> np.ndarray:
        out = np.zeros(batch.ids.shape, np.float32)
        packed = self._packed(batch)
        with jax.set_mesh(self.mesh), progress.step(self.score_name, len(packed), patient=True):
            scores: list[jax.Array] = []
            for done, (_, micro_batch) in enumerate(packed):
                jax.block_until_ready(scores[-2:-1])  # the last micro-batch keeps running
                progress.reach(max(done - 1, 0))
                check_stop()
                scores.append(program(micro_batch))
        for (places, _), values in zip(packed, jax.device_get(scores), strict=True):
            for i, row, start in places:
                n = batch.length[i]
                out[i, :n] = values[row, start : start + n]
        return out

    def _packed(self, batch: TrainBatch) -> list[tuple[list[Place], MicroBatch]]:
        return micro_batches(batch, self._learning.micro_batch_rows, self._widths, self._per_row)

    def _sums(self, params: nnx.State, packed: Sequence[MicroBatch], check_stop: Callable[[], None]) -> Sums:
        with jax.set_mesh(self.mesh), progress.step(self._update_name, len(packed), patient=True):
            sums, finished = self._zero(params), []
            for done, micro_batch in enumerate(packed):
                jax.block_until_ready(finished[-2:-1])  # the last micro-batch keeps running
                progress.reach(max(done - 1, 0))
                check_stop()
                sums, counted = self._accumulate(params, self._frozen_inputs, sums, micro_batch)
                finished.append(counted)
        return sums

    # ---- the programs ----

    def _compile_score(self, graph: nnx.GraphDef) -> Callable[..., jax.Array]:
        """The compiled program (params, base, micro_batch) -> scores for the model of `graph`."""

        def program(params: nnx.State, base: nnx.State | None, micro_batch: MicroBatch) -> jax.Array:
            return self._score_fn(merged(graph, params, base), micro_batch)

        return jax.jit(program, out_shardings=replicated(self.mesh))

    def _zero_program(self, params: nnx.State) -> Sums:
        zero = Ratio(jnp.float32(0), jnp.float32(0))
        return Sums(jax.tree.map(jnp.zeros_like, params), zero, dict.fromkeys(self.metrics, zero), jnp.float32(0))

    def _accumulate_program(
        self, params: nnx.State, base: nnx.State | None, sums: Sums, micro_batch: MicroBatch
    ) -> tuple[Sums, jax.Array]:
        """The sums with those of a micro-batch, and its number of tokens, which is not donated to the next call."""

        def total(params: nnx.State) -> tuple[jax.Array, tuple[Ratio, dict[str, Ratio]]]:
            loss, metrics = self._loss_fn(merged(self._graph, params, base), micro_batch)
            return loss.total, (loss, metrics)

        (_, (loss, metrics)), grads = jax.value_and_grad(total, has_aux=True)(params)
        tokens = jnp.sum(micro_batch.mask)
        return jax.tree.map(jnp.add, sums, Sums(grads, loss, metrics, tokens)), tokens

    def _apply_program(self, state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, metrics, tokens = _mean_gradients(sums), sums.metrics, sums.tokens
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"].total)
        taken = finite & (tokens > 0)  # without a trained token, momentum alone would move the parameters
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)

        bad = jnp.where(taken, 0, state.nonfinite_in_a_row + ~finite)
        nonfinite = jnp.stack([~jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
        first = jnp.where(jnp.any(nonfinite), jnp.argmax(nonfinite), -1)  # index of the leaf, in tree order
        new = TrainState(keep(params, state.params), keep(optimizer, state.optimizer), state.updates + taken, bad)
        means = {k: jnp.where(r.count > 0, r.total / jnp.maximum(r.count, 1.0), jnp.nan) for k, r in metrics.items()}
        means["learning_rate"] = self._learning_rate_fn(state)
        return new, {
            **means,
            **{f"{k}/{WEIGHT}": r.count for k, r in metrics.items()},
            "gradient_norm": norm,
            WEIGHT: tokens,
            "skipped": 1.0 - taken,
            "nonfinite_in_a_row": bad,
            "nonfinite_param": first,
        }


def _mean_gradients(sums: Sums) -> nnx.State:
    return jax.tree.map(lambda g: g / jnp.maximum(sums.loss.count, 1.0), sums.grads)


def _same(arguments: tuple[Any, ...], _: int) -> tuple[Any, ...]:
    """The arguments of a program that has one shape."""
    return arguments
