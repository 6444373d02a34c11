"""The only place where a model meets a loss: `logprobs` and `update`, compiled once per batch length."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import LearningSection, Qwen2Config
from psearch_jax.metrics import Ratio
from psearch_jax.models import qwen2
from psearch_jax.rl.batch import pad_rows
from psearch_jax.rl.losses import policy_loss
from psearch_jax.sharding import SAMPLING, constrain, param_shardings
from psearch_jax.train.state import TrainState, abstract_state, state_shardings
from psearch_jax.types import TrainBatch

jax.tree_util.register_dataclass(TrainBatch)


def token_logprobs(
    model: qwen2.Qwen2, ids: jax.Array, temperature: float, n_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every id given those before it, and the entropy there.

    Args:
      ids: [B, S] int32, padded on the right.

    Returns:
      ([B, S], [B, S]) float32; position 0, which nothing predicts, is 0.
    """
    hidden, _ = model.hidden(ids)
    chosen, entropy = model.logprobs(hidden[:, :-1], ids[:, 1:], temperature, n_ids)
    first = ((0, 0), (1, 0))
    return jnp.pad(chosen, first), jnp.pad(entropy, first)


class Learner:
    """Device programs of learning.

    Args:
      model: the shape.
      learning: loss and batch settings.
      optimizer: an optax transformation.
      mesh: of parameters and rows.
      temperature, n_ids: of the sampler, so that all log-probs speak of one distribution.
      dtype: of the computation.
      sampling_dtype: of the sampling copy and the reference.
    """

    def __init__(
        self,
        model: Qwen2Config,
        learning: LearningSection,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        temperature: float,
        n_ids: int,
        dtype: Any = jnp.float32,
        sampling_dtype: Any = jnp.float32,
        remat: bool = True,
    ):
        self._graph = qwen2.graphdef(model, dtype, remat)
        self._learning, self._optimizer, self._mesh = learning, optimizer, mesh
        self._temperature, self._n_ids = temperature, n_ids
        self._logprobs = jax.jit(self._logprobs_program)
        _, abstract = qwen2.abstract_params(model)
        places = state_shardings(abstract_state(abstract, optimizer), mesh)
        self._update = jax.jit(self._update_program, donate_argnames="state", out_shardings=(places, None))
        self._cast = jax.jit(
            functools.partial(jax.tree.map, lambda x: x.astype(sampling_dtype)),
            out_shardings=param_shardings(abstract, SAMPLING, mesh),
        )
        self._reference = jax.jit(functools.partial(jax.tree.map, lambda x: x.astype(sampling_dtype)))

    def sampling_copy(self, params: nnx.State) -> nnx.State:
        """The parameters as the sampler reads them: cast once, split over `tensor` only."""
        return self._cast(params)

    def reference_copy(self, params: nnx.State) -> nnx.State:
        """A frozen copy in the sampling dtype, sharded as stored."""
        return self._reference(params)

    def logprobs(self, params: nnx.State, batch: TrainBatch) -> np.ndarray:
        """Log-prob of every id of a batch by the trainer's computation. [N, S] float32 on the host."""
        rows = self._learning.micro_batch_rows
        n = len(batch.length)
        ids = pad_rows(batch, -(-n // rows) * rows).ids.reshape(-1, rows, batch.ids.shape[1])
        with jax.set_mesh(self._mesh):
            out = self._logprobs(params, ids)
        return np.asarray(jax.device_get(out)).reshape(-1, batch.ids.shape[1])[:n]

    def update(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on one mini-batch, in micro-batches of `micro_batch_rows`.

        A loss or gradient that is not finite leaves parameters and optimizer as they were; `skipped` is then 1.
        """
        with jax.set_mesh(self._mesh):
            state, metrics = self._update(state, batch)
        return state, {k: float(v) for k, v in jax.device_get(metrics).items()}

    def gradients(self, params: nnx.State, batch: TrainBatch) -> nnx.State:
        """The gradients that `update` would apply, before clipping."""
        with jax.set_mesh(self._mesh):
            return jax.jit(self._gradients_program)(params, batch)[0]

    def compilations(self) -> dict[str, int]:
        """How many shapes each program was compiled for."""
        return {"logprobs": self._logprobs._cache_size(), "update": self._update._cache_size()}

    # ---- the programs ----

    def _logprobs_program(self, params: nnx.State, ids: jax.Array) -> jax.Array:
        model = nnx.merge(self._graph, params)

        def one(rows: jax.Array) -> jax.Array:
            return token_logprobs(model, constrain(rows, "rows", None), self._temperature, self._n_ids)[0]

        return jax.lax.map(one, ids)

    def _loss(self, params: nnx.State, batch: TrainBatch) -> tuple[jax.Array, tuple[Ratio, dict[str, Ratio]]]:
        model = nnx.merge(self._graph, params)
        logp, entropy = token_logprobs(model, constrain(batch.ids, "rows", None), self._temperature, self._n_ids)
        loss, metrics = policy_loss(
            logp,
            jax.lax.stop_gradient(entropy),
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.sampler_logprobs,
            batch.advantage,
            batch.mask,
            self._learning,
        )
        return loss.total, (loss, metrics)

    def _gradients_program(self, params: nnx.State, batch: TrainBatch):
        rows = self._learning.micro_batch_rows
        pieces = jax.tree.map(lambda a: a.reshape(-1, rows, *a.shape[1:]), batch)
        first = jax.tree.map(lambda a: a[0], pieces)
        _, (zero_loss, zero_metrics) = jax.eval_shape(self._loss, params, first)
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))

        def add(carry: Any, piece: TrainBatch):
            grads, loss, metrics = carry
            (_, (l, m)), g = jax.value_and_grad(self._loss, has_aux=True)(params, piece)
            return jax.tree.map(jnp.add, (grads, loss, metrics), (g, l, m)), None

        start = (jax.tree.map(jnp.zeros_like, params), zeros(zero_loss), zeros(zero_metrics))
        (grads, loss, metrics), _ = jax.lax.scan(add, start, pieces)
        count = jnp.maximum(loss.count, 1.0)
        return jax.tree.map(lambda g: g / count, grads), metrics

    def _update_program(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, metrics = self._gradients_program(state.params, batch)
        norm = optax.global_norm(grads)
        fine = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"].total)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)

        bad = jnp.where(fine, 0, state.bad_in_a_row + 1)
        new = TrainState(
            keep(params, state.params), keep(optimizer, state.optimizer), state.updates + fine, bad
        )
        means = {k: r.total / jnp.maximum(r.count, 1.0) for k, r in metrics.items()}
        return new, {**means, "gradient_norm": norm, "skipped": 1.0 - fine, "bad_in_a_row": bad}
