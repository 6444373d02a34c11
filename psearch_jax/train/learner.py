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

from psearch_jax.config import DecoderConfig, LearningSection
from psearch_jax.models import decoder
from psearch_jax.rl.losses import METRICS, policy_loss
from psearch_jax.rollout.copy import SamplingCopy
from psearch_jax.runtime.metrics import Ratio
from psearch_jax.sharding import STORAGE, param_shardings, placed
from psearch_jax.train.trainable import Trainable, TrainingOptions, hidden_states, never_stop
from psearch_jax.types import MicroBatch, TrainBatch


def token_logprobs(
    model: decoder.Decoder, micro_batch: MicroBatch, temperature: float, n_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every token in the mask given its trajectory's prefix, and the entropy there.

    Returns:
      ([B, W], [B, W]) float32; 0 where the mask is 0.
    """
    hidden, ids, wanted = hidden_states(model, micro_batch)
    predicted = model.logprobs(hidden[:, :-1], ids[:, 1:], temperature, n_ids, wanted[:, 1:])
    logprobs, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in predicted)
    return logprobs, entropy


class Learner(Trainable):
    """Device programs of the policy; its score is the log-prob of every sampled token.

    Args (in addition to those of `Trainable`):
      learning: also the settings of the loss.
      temperature, n_ids: those of the sampler, so that all log-probs are of the same distribution.
      sampling_dtype: of the sampling copy, the reference and the base.
      on_policy: every update starts from the old policy itself, so its own forward pass gives the old log-probs;
        those of the batch are ignored.
      rollout_mesh: the sampler's; default: the same mesh.
    """

    def __init__(
        self,
        model: DecoderConfig,
        learning: LearningSection,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        options: TrainingOptions,
        *,
        temperature: float,
        n_ids: int,
        sampling_dtype: Any = jnp.float32,
        on_policy: bool = False,
        base: nnx.State | None = None,
        rollout_mesh: Mesh | None = None,
    ):
        self._has_reference = learning.kl_coefficient > 0
        self._reads_own_logprobs = on_policy and learning.old_logprobs == "trainer"
        self._lora, self._learning = options.lora, learning
        metrics = [name for name in METRICS if name != "kl" or self._has_reference]

        def loss_fn(model: decoder.Decoder, micro_batch: MicroBatch) -> tuple[Ratio, dict[str, Ratio]]:
            logp, entropy = token_logprobs(model, micro_batch, temperature, n_ids)
            old = micro_batch.sampler_logprobs if learning.old_logprobs == "sampler" else micro_batch.old_logprobs
            if self._reads_own_logprobs:
                old = jax.lax.stop_gradient(logp)
            loss, values = policy_loss(logp, entropy, old, micro_batch, learning, options.context_tokens)
            return loss, {name: values[name] for name in metrics}

        def score_fn(model: decoder.Decoder, micro_batch: MicroBatch) -> jax.Array:
            return token_logprobs(model, micro_batch, temperature, n_ids)[0]

        super().__init__(
            model, learning, optimizer, mesh, options, loss_fn=loss_fn, metrics=metrics, score_fn=score_fn, base=base
        )
        self._reference_score_program = self._compile_score(
            decoder.graphdef(model, options.dtype, options.remat, self._backend, options.shard_residual)
        )
        _, weights = decoder.abstract_params(model)
        cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, sampling_dtype), weights)
        self._frozen = placed(cast, param_shardings(weights, STORAGE, mesh)) if options.lora else None
        parts = self._weights_and_adapters(cast, self._abstract.params)
        self._copy = SamplingCopy(
            *parts, sampling_dtype, mesh, trained=options.lora is None, rollout_mesh=rollout_mesh
        )
        self._reference = jax.jit(functools.partial(jax.tree.map, lambda x: x.astype(sampling_dtype)))

    @property
    def needs_score(self) -> bool:
        """Whether a batch needs old log-probs from `score`: for the loss, or for a KL penalty in the reward."""
        in_update = self._reads_own_logprobs and self._learning.kl_in == "loss"
        return self._learning.old_logprobs == "trainer" and not in_update

    def sampling_copy(self, params: nnx.State) -> nnx.State:
        """The parameters in the sampler's format. The copy may alias the base, which is never donated."""
        return self._copy(*self._weights_and_adapters(self.base, params))

    def reference_copy(self, params: nnx.State) -> nnx.State:
        """A frozen copy in the sampling dtype and storage sharding; with adapters, the base itself."""
        return self._reference(params) if self.base is None else self.base

    def reference_score(
        self, reference: nnx.State, batch: TrainBatch, check_stop: Callable[[], None] = never_stop
    ) -> np.ndarray:
        """`score` with the reference: complete weights, or the adapters that a run started from. [N, S] float32."""
        program, frozen = self._scored_by(reference)
        return self._over_batch(lambda micro_batch: program(reference, frozen, micro_batch), batch, check_stop)

    def _scored_by(self, reference: nnx.State) -> tuple[Callable[..., jax.Array], Any]:
        """The program that scores with a reference, and its frozen inputs."""
        if "adapters" in reference:
            return self._score_program, self._frozen_inputs
        return self._reference_score_program, None

    def warm_up(self, params: nnx.State, reference: nnx.State | None = None) -> None:
        """As `Trainable.warm_up`, and compiles the reference's `score`."""
        super().warm_up(params)
        if reference is None:
            return
        program, frozen = self._scored_by(reference)
        calls = [(reference, frozen, batch) for batch in self._empty_batches()]
        with jax.set_mesh(self.mesh):
            self._compile(program, calls)
            for call in calls:
                jax.block_until_ready(program(*call))

    def compilations(self) -> dict[str, int]:
        """Number of shapes each program was compiled for."""
        return super().compilations() | {"reference_logprobs": self._reference_score_program._cache_size()}

    def traced(self, frozen: nnx.State | None = None) -> dict[str, dict[int, Callable[[], jax.stages.Traced]]]:
        """As `Trainable.traced`, with the program that makes the sampling copy (`reshard`)."""
        frozen = self._frozen if frozen is None else frozen
        parts = self._weights_and_adapters(frozen, self._state().params)
        programs = super().traced(frozen)
        if not self.needs_score and not self._has_reference:
            programs["logprobs"] = {}
        return {"reshard": {0: lambda: self._copy.traced(*parts)}, **programs}

    def _weights_and_adapters(self, base: nnx.State | None, params: nnx.State) -> tuple[nnx.State, nnx.State | None]:
        """(weights, adapters): (base, params) with LoRA, else (params, None)."""
        return (base, params) if self._lora else (params, None)
