"""The least that a step of training takes on a machine, counted by hand; and what programs move and do beside it."""

from __future__ import annotations

import jax.numpy as jnp

from psearch_jax.chips import forward_flops
from psearch_jax.config import Config
from psearch_jax.planning.plan import Plan
from psearch_jax.train.state import updates_per_step


def floor_seconds(plan: Plan, config: Config, mean_ids: int, sampled_ids: int) -> dict[str, float]:
    """The least time of one training step by part, from FLOPs and bytes counted by hand; no program reaches it.

    Forward as in `forward_flops`, in learning with the vocabulary where an id was sampled. An update is 4 times that
    where all is computed anew, else 3; one less with adapters, as weights need no gradient. Log-probs are one pass for
    the reference and one for the old policy, where the update does not give them itself. A critic takes one pass and
    an update, without the vocabulary. Decoding reads the weights and half of the final cache per id.

    Args:
      mean_ids: of a trajectory, prompt and passages included.
      sampled_ids: of them.
    """
    m, trajectories = plan.model, config.train.prompts * config.rollout.samples
    everywhere = forward_flops(m, [mean_ids], mean_ids)
    prefilled = trajectories * everywhere * (1 - sampled_ids / mean_ids)
    forward = trajectories * forward_flops(m, [mean_ids], sampled_ids)
    rate = plan.chips * plan.chip.flops
    calls = trajectories * sampled_ids / config.rollout.slots
    learning = config.learning
    old = learning.old_logprobs == "trainer" and (updates_per_step(config) > 1 or learning.kl_in == "reward")
    scored = old + (learning.kl_coefficient > 0)
    of_critic = trajectories * forward_flops(m, [mean_ids], 0) * (1 + _passes(config))
    critic = {"critic": of_critic / rate} if learning.algorithm == "ppo" else {}
    return {
        "prefill": prefilled / rate,
        "decode": calls * decode_floor_bytes(plan, config, mean_ids / 2) / plan.chip.bandwidth,
        "logprobs": forward * scored / rate,
        "update": forward * _passes(config) / rate,
        **critic,
    }


def decode_floor_bytes(plan: Plan, config: Config, mean_length: float) -> float:
    """The least that one decode step reads on a chip: weights, without a table that only ids are looked up in, and the
    cache of rows of `mean_length`."""
    m, mesh = plan.model, plan.mesh
    item = jnp.dtype(config.model.sampling_dtype).itemsize
    looked_up = 0 if m.tied else m.vocab_rows * m.width * item / mesh["tensor"]
    line = m.head_dim + 4 if config.model.int8_cache else m.head_dim * item  # bytes, in int8 with its scale
    kv_heads = max(1, m.kv_heads // mesh["tensor"])
    rows = config.rollout.slots / (mesh["data"] * mesh["fsdp"])
    return plan.resident["sampling_copy"] - looked_up + 2 * m.layers * kv_heads * line * rows * mean_length


def update_products_flops(plan: Plan, config: Config) -> float:
    """What the layers' products with weights take of a chip for one micro-batch of the widest rows: 6 per weight and
    id, 8 where all is computed anew (which may leave out a layer's last product)."""
    ids = max(plan.widths["accumulate"]) * config.learning.micro_batch_rows
    return _passes(config) * ids * forward_flops(plan.model, [1], 0) / plan.chips  # a row of one id has no pairs


def _passes(config: Config) -> int:
    """How many times a forward pass's FLOPs an update takes."""
    return 3 + (config.model.remat == "full") - (config.model.lora_rank > 0)
