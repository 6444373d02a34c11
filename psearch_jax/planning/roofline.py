"""Hand-counted lower bounds: seconds of a training step, bytes of a decode step, and FLOPs of an update."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from psearch_jax.config import Config
from psearch_jax.planning.plan import Plan
from psearch_jax.runtime.accelerators import forward_flops
from psearch_jax.train.state import updates_per_step


def floor_seconds(plan: Plan, config: Config, mean_ids: int, sampled_ids: int, prompt_ids: int) -> dict[str, float]:
    """Lower bounds in seconds for each part of a training step, from hand-counted FLOPs and bytes.

    A forward pass counts as in `forward_flops`, with the lm head on sampled tokens only. Prompts are prefilled once
    per group of rollouts. An update costs 4 forward passes with full rematerialisation, else 3; one less with LoRA,
    since the base weights need no gradient. Log-probs take one pass for the reference and one for the old policy,
    unless the update computes the latter. A critic takes one pass and an update, without the lm head. A decode step
    reads the weights and, on average, half of the final cache; all drafts are accepted. With `mesh.rollout_devices`,
    prefill and decode take place on the chips that sample.

    Args:
      mean_ids: mean tokens per trajectory, prompt and passages included.
      sampled_ids: the sampled ones among them.
      prompt_ids: those of the prompt.
    """
    m, trajectories = plan.model, config.train.prompts * config.rollout.samples
    prefilled_ids = mean_ids - sampled_ids - prompt_ids * (1 - 1 / config.rollout.samples)
    prefilled = trajectories * forward_flops(m, [mean_ids], 0) * prefilled_ids / mean_ids
    forward = trajectories * forward_flops(m, [mean_ids], sampled_ids)
    sampling, training = (math.prod(mesh.values()) * plan.chip.flops for mesh in (plan.rollout_mesh, plan.mesh))
    calls = trajectories * sampled_ids / config.rollout.slots / (1 + config.rollout.draft_tokens)
    critic_flops = trajectories * forward_flops(m, [mean_ids], 0) * (1 + update_passes(config))
    critic = {"critic": critic_flops / training} if config.learning.algorithm == "ppo" else {}
    return {
        "prefill": prefilled / sampling,
        "decode": calls * decode_floor_bytes(plan, config, mean_ids / 2) / plan.chip.bandwidth,
        "logprobs": forward * logprob_passes(config) / training,
        "update": forward * update_passes(config) / training,
        **critic,
    }


def step_seconds(plan: Plan, config: Config, parts: Mapping[str, float]) -> float:
    """The lower bound of a step from those of its parts, of which chips that sample ahead do theirs meanwhile."""
    total, sampling = sum(parts.values()), parts["prefill"] + parts["decode"]
    return max(sampling, total - sampling) if plan.split and config.train.staleness else total


def decode_floor_bytes(plan: Plan, config: Config, mean_length: float) -> float:
    """Lower bound on the bytes that one decode step reads on a chip: the weights, without an untied embedding table
    (a lookup reads only a few of its rows), and the KV cache of rows of `mean_length` tokens."""
    m, mesh = plan.model, plan.rollout_mesh
    item = jnp.dtype(config.model.sampling_dtype).itemsize
    looked_up = 0 if m.tied else m.vocab_rows * m.width * item / mesh["tensor"]
    line = m.head_dim + 4 if config.model.int8_cache else m.head_dim * item  # bytes; int8 with its 4-byte scale
    kv_heads = max(1, m.kv_heads // mesh["tensor"])
    rows = config.rollout.slots / (mesh["data"] * mesh["fsdp"])
    return plan.resident["sampling_copy"] - looked_up + 2 * m.layers * kv_heads * line * rows * mean_length


def update_products_flops(plan: Plan, config: Config) -> float:
    """FLOPs per chip of the layers' weight matmuls in one micro-batch of the widest rows: 6 per weight and token, 8
    with full rematerialisation (which may skip a layer's last matmul), 2 less with LoRA."""
    tokens = max(plan.widths["accumulate"]) * config.learning.micro_batch_rows
    # Of length 1: almost no attention.
    return update_passes(config) * tokens * forward_flops(plan.model, [1], 0) / math.prod(plan.mesh.values())


def logprob_passes(config: Config) -> int:
    """Forward passes for log-probs: of the reference, and of the old policy unless the update computes them."""
    learning = config.learning
    old = learning.old_logprobs == "trainer" and (updates_per_step(config) > 1 or learning.kl_in == "reward")
    return old + (learning.kl_coefficient > 0)


def update_passes(config: Config) -> int:
    """FLOPs of an update, in forward passes."""
    return 3 + (config.model.remat == "full") - (config.model.lora_rank > 0)
