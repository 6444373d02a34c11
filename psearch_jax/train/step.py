"""The only place where a model meets a loss: `logprobs` and `update`.

A mini-batch is laid into micro-batches of packed rows (rl/batch.py); `accumulate` adds the gradient sums of one of
them and is compiled once per width, `apply` divides once and takes the optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.buckets import buckets, row_widths
from psearch_jax.config import LearningSection, Lora, Qwen2Config, Remat
from psearch_jax.metrics import Ratio
from psearch_jax.models import int8, qwen2
from psearch_jax.models import lora as adapters
from psearch_jax.models.attention import implementation_for, takes_segments
from psearch_jax.rl.batch import Place, micro_batches, padding
from psearch_jax.rl.losses import METRICS, policy_loss
from psearch_jax.sharding import (
    STORAGE,
    constrain,
    param_shardings,
    placed,
    replicated,
    rows_sharding,
    sampled_in_place,
    sampling_cast,
)
from psearch_jax.train.state import TrainState, abstract_state, learning_rate, state_shardings
from psearch_jax.types import Packed, TrainBatch

jax.tree_util.register_dataclass(Packed)  # here, because types.py needs no jax
_COUNTED = ("logprobs", "reference_logprobs", "accumulate", "apply")
Sums = tuple[nnx.State, Ratio, dict[str, Ratio]]  # of gradients, loss and metrics, not divided yet


def _go_on() -> None:
    """Nobody asks to stop."""


def token_logprobs(model: qwen2.Qwen2, piece: Packed, temperature: float, n_ids: int) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every id that counts, given those before it in its trajectory, and the entropy there.

    Returns:
      ([B, W], [B, W]) float32; 0 where the mask is.
    """
    ids, segments = constrain(piece.ids, "rows", None), constrain(piece.segments, "rows", None)
    hidden, _ = model.hidden(ids, positions=piece.positions, segments=segments)
    wanted = constrain(piece.mask, "rows", None) > 0
    found = model.logprobs(hidden[:, :-1], ids[:, 1:], temperature, n_ids, wanted[:, 1:])
    chosen, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in found)
    return chosen, entropy


def _live(graph: nnx.GraphDef, params: nnx.State, base: nnx.State | None) -> qwen2.Qwen2:
    return nnx.merge(graph, params) if base is None else nnx.merge(graph, base, params)


class Learner:
    """Device programs of learning.

    Args:
      model: the shape.
      learning: loss and batch settings.
      optimizer: an optax transformation.
      mesh: of parameters and rows.
      context_tokens: S, the longest row.
      temperature, n_ids: of the sampler, so that all log-probs speak of one distribution.
      dtype: of the computation.
      sampling_dtype: of the sampling copy and the reference.
      lora: only adapters are trained: `params` below are theirs, and `base` holds the weights beside them.
      widths: how many there are for rows to be padded to.
      on_policy: every update starts from the policy that is the old one, so its own forward pass gives the old
        log-probs; those of the batch are not looked at.
      int8_sampling: the kernels of the sampling copy are in int8.
      pack: trajectories share rows, where attention can tell them apart.

    Attributes:
      needs_old: whether the old log-probs must be put into a batch (`logprobs`).
      base: with `lora`, the frozen weights in the sampling dtype, sharded as stored; whoever loads them sets it.
    """

    base: nnx.State | None = None

    def __init__(
        self,
        model: Qwen2Config,
        learning: LearningSection,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        context_tokens: int,
        temperature: float,
        n_ids: int,
        dtype: Any = jnp.float32,
        sampling_dtype: Any = jnp.float32,
        remat: Remat = "full",
        shard_residual: bool = False,
        lora: Lora | None = None,
        widths: int = 4,
        on_policy: bool = False,
        int8_sampling: bool = False,
        pack: bool = True,
    ):
        form = implementation_for(mesh, dtype)
        self._plain = qwen2.graphdef(model, dtype, remat, form, shard_residual)
        self._graph = qwen2.graphdef(model, dtype, remat, form, shard_residual, lora)
        self._together = pack and takes_segments(form)
        self._learning, self._optimizer, self._mesh = learning, optimizer, mesh
        self._on_policy = on_policy
        self.needs_old = learning.old_logprobs == "trainer" and not on_policy
        self._temperature, self._n_ids = temperature, n_ids
        self._context = context_tokens
        self._widths = (row_widths if self._together else buckets)(context_tokens, widths)
        _, weights = qwen2.abstract_params(model)
        trained = adapters.abstract_adapters(model, lora) if lora else weights
        self._abstract = abstract_state(trained, optimizer)
        low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, sampling_dtype), weights)
        self._frozen = placed(low, param_shardings(weights, STORAGE, mesh)) if lora else None
        self._places = state_shardings(self._abstract, mesh)
        sums_places = (self._places.params, replicated(mesh), replicated(mesh))
        self._logprobs = jax.jit(
            functools.partial(self._logprobs_program, self._graph), out_shardings=replicated(mesh)
        )
        self._reference_logprobs = jax.jit(
            functools.partial(self._logprobs_program, self._plain), out_shardings=replicated(mesh)
        )
        self._zero = jax.jit(self._zero_program, out_shardings=sums_places)
        self._accumulate = jax.jit(self._accumulate_program, donate_argnames="sums", out_shardings=sums_places)
        self._apply = jax.jit(
            self._apply_program, donate_argnames="state", out_shardings=(self._places, replicated(mesh))
        )
        self._names = [".".join(path) for path, _ in nnx.to_flat_state(trained)]
        # The base is never donated: where it lies as the sampler reads it, sampling needs no second one.
        self._base_in_place = lora is not None and not int8_sampling and sampled_in_place(weights, mesh)
        moved = adapters.beside(weights, trained) if lora and not self._base_in_place else trained
        self._cast = sampling_cast(moved, sampling_dtype, mesh, int8.with_kernels if int8_sampling else None)
        self._reference = jax.jit(functools.partial(jax.tree.map, lambda x: x.astype(sampling_dtype)))

    def sampling_copy(self, params: nnx.State) -> nnx.State:
        """The parameters as the sampler reads them: cast once, split over `tensor` only; adapters beside the base."""
        if self.base is None or self._base_in_place:
            copy = self._cast(params)
            return copy if self.base is None else adapters.beside(self.base, copy)
        return self._cast(adapters.beside(self.base, params))

    def reference_copy(self, params: nnx.State) -> nnx.State:
        """A frozen copy in the sampling dtype, sharded as stored; with adapters the base itself."""
        return self._reference(params) if self.base is None else self.base

    def logprobs(self, params: nnx.State, batch: TrainBatch, look: Callable[[], None] = _go_on) -> np.ndarray:
        """Log-prob of every id of a batch that counts by the trainer's computation; 0 elsewhere. [N, S] float32.

        `look` is called before every micro-batch, with one or none under way, and may raise.
        """
        return self._score(lambda piece: self._logprobs(params, self.base, piece), batch, look)

    def reference_logprobs(
        self, reference: nnx.State, batch: TrainBatch, look: Callable[[], None] = _go_on
    ) -> np.ndarray:
        """The same by the reference, adapters off. [N, S] float32."""
        return self._score(lambda piece: self._reference_logprobs(reference, None, piece), batch, look)

    def _score(
        self, program: Callable[[Packed], jax.Array], batch: TrainBatch, look: Callable[[], None]
    ) -> np.ndarray:
        out = np.zeros(batch.ids.shape, np.float32)
        with jax.set_mesh(self._mesh):
            pieces = self._pieces(batch)
            found: list[jax.Array] = []
            for _, piece in pieces:
                jax.block_until_ready(found[-2:-1])  # the last one is under way meanwhile
                look()
                found.append(program(piece))
        for (places, _), values in zip(pieces, jax.device_get(found), strict=True):
            for i, row, start in places:
                n = batch.length[i]
                out[i, :n] = values[row, start : start + n]
        return out

    def _pieces(self, batch: TrainBatch) -> list[tuple[list[Place], Packed]]:
        return micro_batches(batch, self._learning.micro_batch_rows, self._widths, self._together)

    def update(
        self, state: TrainState, batch: TrainBatch, look: Callable[[], None] = _go_on
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on one mini-batch, in micro-batches of `micro_batch_rows`. Donates `state`.

        The metrics hold `update_padding`, the share of all positions of the micro-batches without a real id.
        `look` is called before every micro-batch, with none under way; when it raises, `state` is as it was. A loss or
        gradient that is not finite leaves parameters and optimizer as they were; `skipped` is then 1.
        """
        pieces = self._pieces(batch)
        sums = self._sums(state.params, pieces, look)
        with jax.set_mesh(self._mesh):
            state, metrics = self._apply(state, sums)
        found = {k: float(v) for k, v in jax.device_get(metrics).items()}
        return state, found | {"update_padding": padding(pieces)}

    def gradients(self, params: nnx.State, batch: TrainBatch) -> nnx.State:
        """The gradients that `update` would apply, before clipping."""
        grads, loss, _ = self._sums(params, self._pieces(batch))
        return jax.tree.map(lambda g: g / jnp.maximum(loss.count, 1.0), grads)

    def culprit(self, metrics: Mapping[str, float]) -> str:
        """The name of the first parameter whose gradient was not finite in the update that gave `metrics`."""
        index = int(metrics["bad_gradient"])
        return "no parameter" if index < 0 else self._names[index]

    def warm_up(self, params: nnx.State, reference: nnx.State | None = None) -> None:
        """Compiles every width of `logprobs` and `accumulate`, so that no later step stops to compile."""
        for width in self._widths:
            empty = np.zeros((self._learning.micro_batch_rows, width), np.float32)
            piece = Packed(*[empty.astype(np.int32)] * 3, *[empty] * 5)
            with jax.set_mesh(self._mesh):
                jax.block_until_ready(self._accumulate(params, self.base, self._zero(params), piece))
                if self.needs_old:
                    jax.block_until_ready(self._logprobs(params, self.base, piece))
                if reference is not None:
                    jax.block_until_ready(self._reference_logprobs(reference, None, piece))

    def compilations(self) -> dict[str, int]:
        """How many shapes each program was compiled for."""
        return {name: getattr(self, f"_{name}")._cache_size() for name in _COUNTED}

    def traced(self) -> dict[str, dict[int, Callable[[], jax.stages.Traced]]]:
        """Every program by its width (0: it has none), to be compiled where there are no devices (plan.py)."""
        rows, mesh = self._learning.micro_batch_rows, self._mesh

        def piece(width: int) -> Packed:
            place = rows_sharding(mesh, 2)
            ids, reals = (jax.ShapeDtypeStruct((rows, width), t, sharding=place) for t in (jnp.int32, jnp.float32))
            return Packed(*[ids] * 3, *[reals] * 5)

        state = placed(self._abstract, self._places)
        sums = jax.eval_shape(self._zero_program, state.params)
        others = jax.tree.map(lambda _: replicated(mesh), sums[1:])
        sums = placed(sums, (self._places.params, *others))
        moved = state.params
        if self._frozen is not None and not self._base_in_place:
            moved = adapters.beside(self._frozen, state.params)

        def logprobs(width: int) -> jax.stages.Traced:
            return self._logprobs.trace(state.params, self._frozen, piece(width))

        def accumulate(width: int) -> jax.stages.Traced:
            return self._accumulate.trace(state.params, self._frozen, sums, piece(width))

        scored = self._widths if self.needs_old or self._learning.kl_coefficient > 0 else ()
        return {
            "reshard": {0: lambda: self._cast.trace(moved)},
            "logprobs": {width: functools.partial(logprobs, width) for width in scored},
            "accumulate": {width: functools.partial(accumulate, width) for width in self._widths},
            "apply": {0: lambda: self._apply.trace(state, sums)},
        }

    def _sums(
        self, params: nnx.State, pieces: Sequence[tuple[list[Place], Packed]], look: Callable[[], None] = _go_on
    ) -> Sums:
        with jax.set_mesh(self._mesh):
            sums = self._zero(params)
            for _, piece in pieces:
                jax.block_until_ready(sums[1])
                look()
                sums = self._accumulate(params, self.base, sums, piece)
        return sums

    # ---- the programs ----

    def _logprobs_program(
        self, graph: nnx.GraphDef, params: nnx.State, base: nnx.State | None, piece: Packed
    ) -> jax.Array:
        return token_logprobs(_live(graph, params, base), piece, self._temperature, self._n_ids)[0]

    def _loss(
        self, params: nnx.State, base: nnx.State | None, batch: Packed
    ) -> tuple[jax.Array, tuple[Ratio, dict[str, Ratio]]]:
        model = _live(self._graph, params, base)
        logp, entropy = token_logprobs(model, batch, self._temperature, self._n_ids)
        old = batch.sampler_logprobs if self._learning.old_logprobs == "sampler" else batch.old_logprobs
        if self._on_policy and self._learning.old_logprobs == "trainer":
            old = jax.lax.stop_gradient(logp)
        loss, metrics = policy_loss(
            logp,
            jax.lax.stop_gradient(entropy),
            old,
            batch.ref_logprobs if self._learning.kl_coefficient > 0 else old,
            batch.sampler_logprobs,
            batch.advantage,
            batch.mask,
            batch.segments,
            self._learning,
            self._context,
        )
        return loss.total, (loss, metrics)

    def _zero_program(self, params: nnx.State) -> Sums:
        zero = Ratio(jnp.float32(0), jnp.float32(0))
        return jax.tree.map(jnp.zeros_like, params), zero, dict.fromkeys(METRICS, zero)

    def _accumulate_program(self, params: nnx.State, base: nnx.State | None, sums: Sums, piece: Packed) -> Sums:
        (_, (loss, metrics)), grads = jax.value_and_grad(self._loss, has_aux=True)(params, base, piece)
        return jax.tree.map(jnp.add, sums, (grads, loss, metrics))

    def _apply_program(self, state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, loss, metrics = sums
        grads = jax.tree.map(lambda g: g / jnp.maximum(loss.count, 1.0), grads)
        norm = optax.global_norm(grads)
        fine = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"].total)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)

        bad = jnp.where(fine, 0, state.bad_in_a_row + 1)
        broken = jnp.stack([~jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
        first = jnp.where(jnp.any(broken), jnp.argmax(broken), -1)  # of the tensors, in the order of the tree
        new = TrainState(keep(params, state.params), keep(optimizer, state.optimizer), state.updates + fine, bad)
        means = {k: r.total / jnp.maximum(r.count, 1.0) for k, r in metrics.items()}
        means["learning_rate"] = learning_rate(state, self._learning)
        return new, {**means, "gradient_norm": norm, "skipped": 1.0 - fine, "bad_in_a_row": bad, "bad_gradient": first}
