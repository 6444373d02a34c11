"""Lower bounds on the seconds of a training step, from hand-counted FLOPs and bytes and the chips' published peaks."""

from __future__ import annotations

import math

import jax.numpy as jnp

from psearch_jax.config import Config
from psearch_jax.planning.plan import Plan
from psearch_jax.runtime.accelerators import forward_flops
from psearch_jax.train.state import scores_before_update


def lower_bounds(
    plan: Plan, config: Config, mean_tokens: int, sampled_tokens: int, prompt_tokens: int
) -> dict[str, float]:
    """Seconds that each part of a training step takes at least.

    A forward pass counts as in `forward_flops`, with the lm head on sampled tokens only. Prompts are prefilled once
    per group of rollouts. An update costs 4 forward passes with full rematerialisation, else 3; one less with LoRA,
    since the base weights need no gradient. Log-probs take one pass for the reference and one for the old policy,
    unless the update computes the latter. A critic takes one pass and an update, without the lm head. A decode step
    reads the weights and, on average, half of the final cache.

    Args:
      mean_tokens: mean tokens per trajectory, prompt and passages included.
      sampled_tokens: the sampled ones among them.
      prompt_tokens: those of the prompt.
    """
    m, learning, trajectories = plan.model, config.learning, config.train.prompts * config.rollout.samples
    prefilled = mean_tokens - sampled_tokens - prompt_tokens * (1 - 1 / config.rollout.samples)
    headless = trajectories * forward_flops(m, [mean_tokens], 0)
    forward = trajectories * forward_flops(m, [mean_tokens], sampled_tokens)
    update_passes = 3 + (config.model.remat == "full") - (config.model.lora_rank > 0)
    flops = {
        "prefill": headless * prefilled / mean_tokens,
        "logprobs": forward * (scores_before_update(config) + (learning.kl_coefficient > 0)),
        "update": forward * update_passes,
        "critic": headless * (1 + update_passes) if learning.algorithm == "ppo" else 0.0,
    }
    decode_steps = trajectories * sampled_tokens / config.rollout.slots
    seconds = {name: value / (plan.chips * plan.chip.flops) for name, value in flops.items()}
    return seconds | {"decode": decode_steps * decode_step_bytes(plan, config, mean_tokens / 2) / plan.chip.bandwidth}


def decode_step_bytes(plan: Plan, config: Config, mean_length: float) -> float:
    """Bytes that one decode step reads on a chip at least: the weights, without an untied embedding table (a lookup
    reads only a few of its rows), and the KV cache of rows of `mean_length` tokens."""
    m, mesh = plan.model, plan.rollout_mesh
    item = jnp.dtype(config.model.sampling_dtype).itemsize
    embedding = 0 if m.tied else m.vocab_rows * m.width * item / mesh["tensor"]
    line = m.head_dim * item
    kv_heads = max(1, m.kv_heads // mesh["tensor"])
    rows = config.rollout.slots * mesh["tensor"] / math.prod(mesh.values())
    return plan.resident["sampling_copy"] - embedding + 2 * m.layers * kv_heads * line * rows * mean_length
