"""Device programs that train one set of parameters: score a batch, update on a mini-batch.

Policy (learner.py), critic (critic.py) and supervised fine-tuning share everything here; they differ in the loss and
the score that they pass in. A mini-batch is packed into micro-batches (rl/batch.py). `accumulate` adds the gradient
sums of one micro-batch and is compiled once per width; `apply` divides once and takes the optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.models import decoder
from psearch_jax.models import lora as adapters
from psearch_jax.models.backend import choose_backend
from psearch_jax.models.buckets import buckets, row_widths
from psearch_jax.rl.batch import Place, micro_batches, padding
from psearch_jax.runtime import progress
from psearch_jax.runtime.compiling import Program, abstract
from psearch_jax.runtime.metrics import WEIGHT, Ratio
from psearch_jax.sharding import attach_shardings, constrain, replicated
from psearch_jax.train.state import TrainState, abstract_state, learning_rate, state_shardings
from psearch_jax.types import MicroBatch, TrainBatch

jax.tree_util.register_dataclass(MicroBatch)  # here, because types.py needs no jax
LossFn = Callable[[decoder.Decoder, MicroBatch], tuple[Ratio, dict[str, Ratio]]]  # loss and metrics
ScoreFn = Callable[[decoder.Decoder, MicroBatch], jax.Array]  # [B, W] float32; 0 where the mask is 0
MAX_NONFINITE_UPDATES = 3  # in a row, after which a run stops
_INTEGERS = ("ids", "segments", "positions")  # int32 fields of a micro-batch; the others are float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """What the micro-batches of a mini-batch add up to; nothing is divided yet."""

    grads: nnx.State
    loss: Ratio
    metrics: dict[str, Ratio]
    tokens: jax.Array  # [] float32, trained tokens


class Omitted(NamedTuple):
    """The counts of rows that are left out of the micro-batches of an update, because their gradient is 0."""

    loss_count: np.float32 = np.float32(0)  # what they add to the divisor of loss and gradient
    tokens: np.float32 = np.float32(0)  # in their mask


def never_stop() -> None:
    """The default for `check_stop`."""


def empty_micro_batch(rows: int, width: int, like: Callable[[tuple[int, int], Any], Any]) -> MicroBatch:
    """A micro-batch of `rows` empty rows; `like` makes an array from a shape and a dtype."""
    dtypes = {name: jnp.int32 if name in _INTEGERS else jnp.float32 for name in MicroBatch.__dataclass_fields__}
    return MicroBatch(**{name: like((rows, width), dtype) for name, dtype in dtypes.items()})


def merge(graph: nnx.GraphDef, params: nnx.State, base: nnx.State | None) -> decoder.Decoder:
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
      config: of the run; with `model.lora`, `params` below are the adapters'.
      model: the architecture.
      optimizer: an optax transformation.
      mesh: for parameters and rows.
      loss_fn: the loss of a micro-batch and its metrics, one of which is `loss`.
      metrics: the names of these metrics.
      score_fn: the score of every token in the mask, such as its log-prob.
      score_name: the name of the `score` program, such as `logprobs`.
      update_name: the name of an update's progress.
      learning_rate_fn: the learning rate of the next update from a state; default: that of `make_optimizer`.
      base: with `lora`, the frozen weights in storage sharding; ShapeDtypeStructs are enough to compile.
      values: the model has a value head in place of the lm head.
    """

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
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
        self._learning, self._optimizer, self.mesh, self.base = config.learning, optimizer, mesh, base
        self._learning_rate_fn = learning_rate_fn or functools.partial(learning_rate, learning=config.learning)
        m, rollout = config.model, config.rollout
        dtype = jnp.dtype(m.dtype)
        self._backend = choose_backend(mesh, dtype, model)
        self._graph = decoder.graphdef(
            model, dtype, m.remat, self._backend, m.shard_residual, lora=m.lora, values=values
        )
        self._per_row = self._backend.max_segments
        self._widths = (buckets if self._per_row == 1 else row_widths)(rollout.context_tokens, rollout.num_buckets)
        trained = adapters.abstract_trained(decoder.abstract_params(model, values)[1], model, m.lora)
        state = abstract_state(trained, optimizer)
        shardings = state_shardings(state, mesh)
        self._abstract = attach_shardings(state, shardings)
        self._sums_shardings = Sums(shardings.params, *[replicated(mesh)] * 3)
        self._score = self._jit_score(self._graph)
        self._zero = jax.jit(self._zero_sums, out_shardings=self._sums_shardings)
        self._accumulate = jax.jit(
            self._add_micro_batch, donate_argnames="sums", out_shardings=(self._sums_shardings, replicated(mesh))
        )
        self._apply = jax.jit(self._apply_sums, donate_argnames="state", out_shardings=(shardings, replicated(mesh)))
        self._names = [".".join(path) for path, _ in nnx.to_flat_state(trained)]

    @functools.cached_property
    def _frozen(self) -> nnx.State | None:
        """The base as the programs take it; one CPU would convert it again for every micro-batch."""
        if not self._backend.widens_frozen:
            return self.base
        return jax.tree.map(lambda x: x.astype(jnp.float32), self.base)

    def score(self, params: nnx.State, batch: TrainBatch, check_stop: Callable[[], None] = never_stop) -> np.ndarray:
        """The score of every token in the batch's mask; 0 elsewhere. [N, S] float32.

        `check_stop` is called before every micro-batch, while at most one is running, and may raise.
        """
        return self._over_batch(lambda micro_batch: self._score(params, self._frozen, micro_batch), batch, check_stop)

    def update(
        self, state: TrainState, batch: TrainBatch, check_stop: Callable[[], None] = never_stop
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on one mini-batch, in micro-batches of `micro_batch_rows`. Donates `state`.

        The metrics include `update_padding`, the padded share of the micro-batches' positions. `check_stop` is called
        before every micro-batch, while at most one runs; if it raises, `state` is intact. If loss or gradient is not
        finite, or the mask is empty, parameters and optimizer state stay unchanged and `skipped` is 1. Means without
        anything to count are NaN.
        """
        packed, omitted = self._pack_trained(batch)
        pieces = [micro_batch for _, micro_batch in packed]
        state, metrics = self.update_micro_batches(state, pieces, check_stop, omitted)
        return state, metrics | {"update_padding": padding(packed)}

    def update_micro_batches(
        self,
        state: TrainState,
        micro_batches: Sequence[MicroBatch],
        check_stop: Callable[[], None] = never_stop,
        omitted: Omitted = Omitted(),  # noqa: B008 (immutable)
    ) -> tuple[TrainState, dict[str, float]]:
        """`update` on micro-batches that the caller has packed. Each distinct shape is compiled once."""
        sums = self._sums(state.params, micro_batches, check_stop, omitted)
        with jax.set_mesh(self.mesh):
            state, metrics = self._apply(state, sums)
        return state, {k: float(v) for k, v in jax.device_get(metrics).items()}

    def gradients(self, params: nnx.State, batch: TrainBatch) -> nnx.State:
        """The gradients that `update` would use, before clipping."""
        packed, omitted = self._pack_trained(batch)
        sums = self._sums(params, [micro_batch for _, micro_batch in packed], never_stop, omitted)
        return _mean_gradients(sums)

    def nonfinite_cause(self, metrics: Mapping[str, float]) -> str:
        """What was not finite in the update that produced `metrics`, for messages."""
        index = int(metrics["nonfinite_param"])
        return f"first in the gradient of {self._names[index]}" if index >= 0 else "in the loss or the gradient's norm"

    def programs(self) -> list[Program]:
        """Every program of a step."""
        frozen, state = self._abstract_frozen(), self._abstract
        sums = jax.eval_shape(self._zero_sums, state.params, Omitted())
        sums = attach_shardings(sums, jax.tree.broadcast(self._sums_shardings, sums))
        programs = [
            Program("zero", self._zero, lambda _: (state.params, Omitted()), self.mesh),
            Program(
                "accumulate",
                self._accumulate,
                lambda width: (state.params, frozen, sums, self._abstract_micro_batch(width)),
                self.mesh,
                self._widths,
            ),
            Program("apply", self._apply, lambda _: (state, sums), self.mesh),
        ]
        if self.needs_score:
            programs.append(self._score_program(self.score_name, self._score, state.params, frozen))
        return programs

    def _score_program(self, name: str, function: Any, params: nnx.State, frozen: nnx.State | None) -> Program:
        def arguments(width: int) -> tuple[Any, ...]:
            return params, frozen, self._abstract_micro_batch(width)

        return Program(name, function, arguments, self.mesh, self._widths)

    def _abstract_micro_batch(self, width: int) -> MicroBatch:
        return empty_micro_batch(self._learning.micro_batch_rows, width, jax.ShapeDtypeStruct)

    def _abstract_frozen(self) -> nnx.State | None:
        """`_frozen` as ShapeDtypeStructs, also if `base` has no values."""
        dtype = jnp.float32 if self._backend.widens_frozen else None
        frozen = jax.tree.map(abstract, self.base)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=x.sharding), frozen)

    @property
    def needs_score(self) -> bool:
        """Whether a batch must be scored before its updates."""
        return True

    def _over_batch(
        self, program: Callable[[MicroBatch], jax.Array], batch: TrainBatch, check_stop: Callable[[], None]
    ) -> np.ndarray:
        out = np.zeros(batch.ids.shape, np.float32)
        packed = self._packed(batch)
        scores = self._run(self.score_name, program, [micro_batch for _, micro_batch in packed], check_stop)
        for (places, _), values in zip(packed, jax.device_get(scores), strict=True):
            for i, row, start in places:
                n = batch.length[i]
                out[i, :n] = values[row, start : start + n]
        return out

    def _packed(self, batch: TrainBatch) -> list[tuple[list[Place], MicroBatch]]:
        return micro_batches(batch, self._learning.micro_batch_rows, self._widths, self._per_row)

    def _pack_trained(self, batch: TrainBatch) -> tuple[list[tuple[list[Place], MicroBatch]], Omitted]:
        """The micro-batches of the rows with a gradient, and the counts of the others; here, all rows have one."""
        return self._packed(batch), Omitted()

    def _sums(
        self, params: nnx.State, packed: Sequence[MicroBatch], check_stop: Callable[[], None], omitted: Omitted
    ) -> Sums:
        with jax.set_mesh(self.mesh):
            sums = self._zero(params, omitted)

        def add(micro_batch: MicroBatch) -> jax.Array:
            nonlocal sums
            sums, tokens = self._accumulate(params, self._frozen, sums, micro_batch)
            return tokens

        self._run(self._update_name, add, packed, check_stop)
        return sums

    def _run(
        self,
        name: str,
        program: Callable[[MicroBatch], jax.Array],
        micro_batches: Sequence[MicroBatch],
        check_stop: Callable[[], None],
    ) -> list[jax.Array]:
        """The results of a program for all micro-batches; at most one is running when `check_stop` is called."""
        results: list[jax.Array] = []
        with jax.set_mesh(self.mesh), progress.step(name, len(micro_batches), patient=True):
            for done, micro_batch in enumerate(micro_batches):
                jax.block_until_ready(results[-2:-1])  # the last micro-batch keeps running
                progress.reach(max(done - 1, 0))
                check_stop()
                results.append(program(micro_batch))
        return results

    # ---- the programs ----

    def _jit_score(self, graph: nnx.GraphDef) -> Callable[..., jax.Array]:
        """The jitted function (params, base, micro_batch) -> scores for the model of `graph`."""

        def program(params: nnx.State, base: nnx.State | None, micro_batch: MicroBatch) -> jax.Array:
            return self._score_fn(merge(graph, params, base), micro_batch)

        return jax.jit(program, out_shardings=replicated(self.mesh))

    def _zero_sums(self, params: nnx.State, omitted: Omitted) -> Sums:
        zero = jnp.float32(0)
        loss = Ratio(zero, zero + omitted.loss_count)
        metrics = dict.fromkeys(self.metrics, Ratio(zero, zero)) | {"loss": loss}
        return Sums(jax.tree.map(jnp.zeros_like, params), loss, metrics, zero + omitted.tokens)

    def _add_micro_batch(
        self, params: nnx.State, base: nnx.State | None, sums: Sums, micro_batch: MicroBatch
    ) -> tuple[Sums, jax.Array]:
        """The sums with those of a micro-batch, and its number of tokens, which is not donated to the next call."""

        def total(params: nnx.State) -> tuple[jax.Array, tuple[Ratio, dict[str, Ratio]]]:
            loss, metrics = self._loss_fn(merge(self._graph, params, base), micro_batch)
            return loss.total, (loss, metrics)

        (_, (loss, metrics)), grads = jax.value_and_grad(total, has_aux=True)(params)
        tokens = jnp.sum(micro_batch.mask)
        return jax.tree.map(jnp.add, sums, Sums(grads, loss, metrics, tokens)), tokens

    def _apply_sums(self, state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, metrics, tokens = _mean_gradients(sums), sums.metrics, sums.tokens
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"].total)
        taken = finite & (tokens > 0)  # with an empty mask, momentum alone would move the parameters
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
