"""The trained policy: its log-probs, its loss, and its copies for the sampler and for the KL term."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.models import decoder
from psearch_jax.models.backend import choose_backend
from psearch_jax.rl.batch import Place, select_rows
from psearch_jax.rl.losses import METRICS, NO_KL, count_rows, policy_loss
from psearch_jax.rollout.copy import SamplingCopy
from psearch_jax.runtime.compiling import Program, abstract
from psearch_jax.runtime.metrics import Ratio
from psearch_jax.train.state import reads_own_logprobs, scores_before_update
from psearch_jax.train.trainable import Omitted, Trainable, hidden_states, never_stop
from psearch_jax.types import MicroBatch, TrainBatch


def token_logprobs(
    model: decoder.Decoder, micro_batch: MicroBatch, temperature: float, n_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every token in the mask given its trajectory's prefix, and the entropy there.

    Returns:
      ([B, W], [B, W]) float32; 0 where the mask is 0.
    """
    hidden, ids, in_mask = hidden_states(model, micro_batch)
    predicted = model.logprobs(hidden[:, :-1], ids[:, 1:], temperature, n_ids, in_mask[:, 1:])
    logprobs, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in predicted)
    return logprobs, entropy


class Learner(Trainable):
    """Device programs of the policy; its score is the log-prob of every sampled token.

    Args (in addition to those of `Trainable`):
      n_ids: number of token ids of the tokenizer; as in the sampler, so that all log-probs are of one distribution.
      rollout_mesh: the sampler's; default: the same mesh.
      teacher: the shape of the reference, if it is another model than the policy.
    """

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        n_ids: int,
        *,
        base: nnx.State | None = None,
        rollout_mesh: Mesh | None = None,
        teacher: DecoderConfig | None = None,
    ):
        learning, m, temperature = config.learning, config.model, config.rollout.temperature
        self._context_tokens, sampling_dtype = config.rollout.context_tokens, jnp.dtype(m.sampling_dtype)
        self._has_reference, self._scores_scripted = learning.kl_coefficient > 0, config.train.scripted_steps > 0
        self._needs_score, reads_own = scores_before_update(config), reads_own_logprobs(config)
        metrics = [name for name in METRICS if name != "kl" or self._has_reference]

        def loss_fn(model: decoder.Decoder, micro_batch: MicroBatch) -> tuple[Ratio, dict[str, Ratio]]:
            logp, entropy = token_logprobs(model, micro_batch, temperature, n_ids)
            old = micro_batch.sampler_logprobs if learning.old_logprobs == "sampler" else micro_batch.old_logprobs
            if reads_own:
                old = jax.lax.stop_gradient(logp)
            loss, values = policy_loss(logp, entropy, old, micro_batch, learning, self._context_tokens)
            return loss, {name: values[name] for name in metrics}

        def score_fn(model: decoder.Decoder, micro_batch: MicroBatch) -> jax.Array:
            return token_logprobs(model, micro_batch, temperature, n_ids)[0]

        super().__init__(
            config, model, optimizer, mesh, loss_fn=loss_fn, metrics=metrics, score_fn=score_fn, base=base
        )
        reference, dtype = teacher or model, jnp.dtype(m.dtype)
        backend = choose_backend(mesh, dtype, reference)  # packs as many trajectories into a row as the policy's
        self._reference_score = self._jit_score(decoder.graphdef(reference, dtype, m.remat, backend, m.shard_residual))
        self._copy = SamplingCopy(
            *self._weights_and_adapters(self._abstract.params),
            sampling_dtype,
            mesh,
            trained=m.lora is None,
            rollout_mesh=rollout_mesh,
        )
        self._reference = jax.jit(functools.partial(jax.tree.map, lambda x: x.astype(sampling_dtype)))

    @property
    def needs_score(self) -> bool:
        """Whether a batch needs old log-probs from `score`."""
        return self._needs_score

    def has_gradient(self, batch: TrainBatch) -> np.ndarray:
        """[N] bool, the rows that `update` computes.

        Without a KL term and an entropy bonus, a row without any advantage has a gradient of exactly 0. Such rows
        count in the divisor of the loss and are not computed; all other metrics are means over the computed rows. If
        there are none, the optimizer takes its step with a gradient of 0.
        """
        if self._learning.entropy_coefficient:
            return np.ones(len(batch.length), bool)
        has_kl = self._has_reference & (batch.ref_logprobs != NO_KL)
        return ((batch.advantage != 0) | has_kl).any(axis=1)

    def _pack_trained(self, batch: TrainBatch) -> tuple[list[tuple[list[Place], MicroBatch]], Omitted]:
        trained = self.has_gradient(batch)
        others = select_rows(batch, np.flatnonzero(~trained))
        count = count_rows(others, self._learning.aggregation, self._context_tokens)
        omitted = Omitted(np.float32(count), np.float32(others.mask.sum()))
        return self._packed(select_rows(batch, np.flatnonzero(trained))), omitted

    def sampling_copy(self, params: nnx.State) -> nnx.State:
        """The parameters in the sampler's format. The copy may alias the base, which is never donated."""
        return self._copy(*self._weights_and_adapters(params))

    def reference_copy(self, params: nnx.State) -> nnx.State:
        """A frozen copy in the sampling dtype and storage sharding; with adapters, the base itself."""
        return self._reference(params) if self.base is None else self.base

    def reference_score(
        self, reference: nnx.State, batch: TrainBatch, check_stop: Callable[[], None] = never_stop
    ) -> np.ndarray:
        """`score` with the reference, [N, S] float32.

        The reference has complete weights, of the policy or the teacher, or the adapters that a run started from.
        """
        score, frozen = self._reference_call(reference, self._frozen)
        return self._over_batch(lambda micro_batch: score(reference, frozen, micro_batch), batch, check_stop)

    def _reference_call(self, reference: nnx.State, frozen: nnx.State | None) -> tuple[Any, nnx.State | None]:
        """The jitted function that scores with a reference, and its frozen weights."""
        return (self._score, frozen) if "adapters" in reference else (self._reference_score, None)

    def programs(self, reference: nnx.State | None = None) -> list[Program]:
        """As `Trainable.programs`, with those that make the sampling copy and score with the reference.

        Args:
          reference: of `reference_score`, if the run has one.
        """
        copy = self._copy.program(*self._weights_and_adapters(self._abstract.params))
        programs = [copy, *super().programs()]
        if self._scores_scripted and not self.needs_score:
            params, frozen = self._abstract.params, self._abstract_frozen()
            programs.append(self._score_program(self.score_name, self._score, params, frozen))
        if reference is not None:
            function, frozen = self._reference_call(reference, self._abstract_frozen())
            reference = jax.tree.map(abstract, reference)
            programs.append(self._score_program("reference_logprobs", function, reference, frozen))
        return programs

    def _weights_and_adapters(self, params: nnx.State) -> tuple[nnx.State, nnx.State | None]:
        """(base, params) with LoRA, else (params, None)."""
        return (params, None) if self.base is None else (self.base, params)
