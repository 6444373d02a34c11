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

from psearch_jax.config import DecoderConfig, LearningSection, Lora, Remat
from psearch_jax.models import decoder
from psearch_jax.models.attention import implementation_for
from psearch_jax.rl.losses import METRICS, policy_loss
from psearch_jax.rollout.copy import SamplingCopy
from psearch_jax.runtime.metrics import Ratio
from psearch_jax.sharding import STORAGE, param_shardings, placed
from psearch_jax.train.trainable import Trainable, empty_piece, go_on, read
from psearch_jax.types import MicroBatch, TrainBatch


def token_logprobs(
    model: decoder.Decoder, piece: MicroBatch, temperature: float, n_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every token in the mask given its trajectory's prefix, and the entropy there.

    Returns:
      ([B, W], [B, W]) float32; 0 where the mask is 0.
    """
    hidden, ids, wanted = read(model, piece)
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
      int8_sampling: the sampling copy has int8 kernels.
    """

    metrics, scored = METRICS, "logprobs"

    def __init__(
        self,
        model: DecoderConfig,
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
        self._temperature, self._n_ids = temperature, n_ids
        self._context, self._on_policy, self._lora = context_tokens, on_policy, lora
        super().__init__(
            model, learning, optimizer, mesh, context_tokens, dtype, remat, shard_residual, lora, widths, pack
        )
        form = implementation_for(mesh, dtype)
        self._reference_score = self._scoring(decoder.graphdef(model, dtype, remat, form, shard_residual))
        _, weights = decoder.abstract_params(model)
        cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, sampling_dtype), weights)
        self._frozen = placed(cast, param_shardings(weights, STORAGE, mesh)) if lora else None
        parts = self._beside(cast, self._abstract.params)
        self._copy = SamplingCopy(*parts, sampling_dtype, mesh, int8_sampling, trained=lora is None)
        self._reference = jax.jit(functools.partial(jax.tree.map, lambda x: x.astype(sampling_dtype)))

    @property
    def needs_score(self) -> bool:
        """Whether a batch needs old log-probs from `score`: for the loss, or for a KL penalty in the reward."""
        by_trainer = self._learning.old_logprobs == "trainer"
        return by_trainer and (not self._on_policy or self._learning.kl_in == "reward")

    def sampling_copy(self, params: nnx.State) -> nnx.State:
        """The parameters in the sampler's format. The copy may alias the base, which is never donated."""
        return self._copy(*self._beside(self.base, params))

    def reference_copy(self, params: nnx.State) -> nnx.State:
        """A frozen copy in the sampling dtype and storage sharding; with adapters, the base itself."""
        return self._reference(params) if self.base is None else self.base

    def reference_score(self, reference: nnx.State, batch: TrainBatch, look: Callable[[], None] = go_on) -> np.ndarray:
        """`score` with the reference: complete weights, or the adapters that a run started from. [N, S] float32."""
        return self._over_batch(lambda piece: self._by_reference(reference, piece), batch, look)

    def _by_reference(self, reference: nnx.State, piece: MicroBatch) -> jax.Array:
        if "adapters" in reference:
            return self._score(reference, self._frozen_inputs, piece)
        return self._reference_score(reference, None, piece)

    def warm_up(self, params: nnx.State, reference: nnx.State | None = None) -> None:
        """Compiles every program at every width, so that no later step has to."""
        super().warm_up(params)
        for width in self._widths if reference is not None else ():
            piece = empty_piece(self._learning.micro_batch_rows, width, np.zeros)
            with jax.set_mesh(self.mesh):
                jax.block_until_ready(self._by_reference(reference, piece))

    def compilations(self) -> dict[str, int]:
        """Number of shapes each program was compiled for."""
        return super().compilations() | {"reference_logprobs": self._reference_score._cache_size()}

    def traced(self, frozen: nnx.State | None = None) -> dict[str, dict[int, Callable[[], jax.stages.Traced]]]:
        """As `Trainable.traced`, with the program that makes the sampling copy (`reshard`)."""
        frozen = self._frozen if frozen is None else frozen
        parts = self._beside(frozen, self._state().params)
        programs = super().traced(frozen)
        if not self.needs_score and self._learning.kl_coefficient == 0:
            programs["logprobs"] = {}
        return {"reshard": {0: lambda: self._copy.traced(*parts)}, **programs}

    def _beside(self, base: nnx.State | None, params: nnx.State) -> tuple[nnx.State, nnx.State | None]:
        """(weights, adapters): (base, params) with LoRA, else (params, None)."""
        return (base, params) if self._lora else (params, None)

    def _scores(self, model: decoder.Decoder, piece: MicroBatch) -> jax.Array:
        return token_logprobs(model, piece, self._temperature, self._n_ids)[0]

    def _loss(self, model: decoder.Decoder, piece: MicroBatch) -> tuple[Ratio, dict[str, Ratio]]:
        learning = self._learning
        logp, entropy = token_logprobs(model, piece, self._temperature, self._n_ids)
        old = piece.sampler_logprobs if learning.old_logprobs == "sampler" else piece.old_logprobs
        if self._on_policy and learning.old_logprobs == "trainer":
            old = jax.lax.stop_gradient(logp)
        return policy_loss(
            logp,
            entropy,
            old,
            piece.ref_logprobs if learning.kl_coefficient > 0 else old,
            piece.sampler_logprobs,
            piece.advantage,
            piece.mask,
            piece.segments,
            learning,
            self._context,
        )
