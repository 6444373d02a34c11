"""Expected seconds of a training step on a machine, from FLOPs, bytes and the communication between its devices.

The arithmetic ranks settings and machines; the shares of the published peaks that programs reach are assumptions, the
same everywhere, so compare seconds only with each other. Compare with planning/roofline.py, which has lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from psearch_jax.config import Config, DecoderConfig, ModelSection
from psearch_jax.models.buckets import row_widths
from psearch_jax.planning.roofline import logprob_passes, update_passes
from psearch_jax.planning.simulation import Lengths, SampledStep, scaled, simulate
from psearch_jax.runtime.accelerators import Chip, forward_flops

HOP_S = 2e-6  # seconds that a collective takes per device that it passes, however small it is
LAYER_S = 2e-5  # and a layer of a decode step


@dataclass(frozen=True)
class Shares:
    """Reached shares of a chip's published peaks."""

    flops: float = 0.4
    bandwidth: float = 0.6
    link: float = 0.8


@dataclass(frozen=True)
class Machine:
    """Devices, and how they divide the work: every replica of `tensor` devices has rows of its own."""

    chip: Chip
    chips: int
    tensor: int

    @property
    def replicas(self) -> int:
        return self.chips // self.tensor


@dataclass(frozen=True)
class Job:
    """A training step: the model, its rollouts and their mean lengths."""

    model: DecoderConfig
    config: Config
    tokens: float  # of a rollout
    sampled: float  # of them

    @property
    def rollouts(self) -> int:
        return self.config.train.prompts * self.config.rollout.samples


def sampling_seconds(job: Job, where: Machine, slots: int, sampled: SampledStep, shares: Shares) -> dict[str, float]:
    """Seconds of decoding, and of prompts, passages and keys that are computed again.

    A decode step reads the weights and, on average, half of the final cache; products or `LAYER_S` may take longer.
    Prompts count once per rollout, although the rollouts of a group share one: 1 to 2% of a step too much.
    """
    m, chip, config = job.model, where.chip, job.config
    peak, bandwidth = chip.flops * shares.flops, chip.bandwidth * shares.bandwidth
    rows = slots / where.replicas
    # Where a chip holds all kv heads, decoding reads the complete span.
    positions = job.tokens / 2 if m.kv_heads % where.tensor == 0 else config.rollout.context_tokens
    read = sampler_bytes(m, config.model, where.tensor, rows * positions)
    multiplied = rows * forward_flops(m, [1], 1) / where.tensor / peak
    step = max(read / bandwidth, multiplied, m.layers * LAYER_S) + _sums(job, where, rows, shares)
    forced = 1 - job.sampled / job.tokens + sampled.continued_tokens / job.sampled / job.rollouts
    tokens = job.rollouts * job.tokens * forced
    flops = job.rollouts * forced * forward_flops(m, [int(job.tokens)], 0)
    passages = flops / (where.chips * peak) + _sums(job, where, tokens / where.replicas, shares, calls=0)
    return {"decode": sampled.decode_steps * step, "prefill and extend": passages}


def learning_seconds(job: Job, where: Machine, shares: Shares) -> dict[str, float]:
    """Seconds of log-probs and updates. Weights are gathered and gradients scattered while products run, if those take
    longer; the sums over `tensor` come on top."""
    m, config, chip = job.model, job.config, where.chip
    forward = job.rollouts * forward_flops(m, [int(job.tokens)], int(job.sampled))
    forward /= where.chips * chip.flops * shares.flops
    tokens = job.rollouts * job.tokens
    pieces = tokens / (config.learning.micro_batch_rows * row_widths(config.rollout.context_tokens)[-1])
    weights = forward_flops(m, [1], 1) / 2 / where.tensor
    split = (where.replicas - 1) / where.replicas / (chip.link * shares.link)
    gathered = pieces * 2 * weights * split  # in 16 bits
    scattered = 0.0 if config.model.lora_rank else pieces * 4 * weights * split
    sums = _sums(job, where, tokens / where.replicas, shares, calls=0)
    passes, again = update_passes(config), config.model.remat == "full"
    score = max(forward, gathered) + sums
    update = max(passes * forward, (2 + again) * gathered + scattered) + (2 + again) * sums
    critic = {"critic": score + update} if config.learning.algorithm == "ppo" else {}
    return {"logprobs": logprob_passes(config) * score, "update": update, **critic}


def sampler_bytes(model: DecoderConfig, section: ModelSection, tensor: int, positions: float) -> float:
    """Bytes of the sampler's weights on a chip, and of keys and values at `positions` of its rows.

    A chip holds its part of the kv heads, or all of them if `tensor` does not divide them.
    """
    weights, head = forward_flops(model, [1], 1) / 2, model.vocab_rows * model.width
    weights = (weights + head if section.int8_weights else 2 * weights) / tensor  # the head keeps 16 bits
    line = model.head_dim + 4 if section.int8_cache else 2 * model.head_dim
    kv_heads = model.kv_heads / tensor if model.kv_heads % tensor == 0 else model.kv_heads
    return weights + 2 * model.layers * kv_heads * line * positions


def _sums(job: Job, where: Machine, tokens: float, shares: Shares, calls: int = 1) -> float:
    """Seconds of a forward pass's sums over `tensor`, two per layer, for `tokens` of a replica in `calls` calls."""
    t, m = where.tensor, job.model
    if t == 1:
        return 0.0
    moved = 2 * m.layers * tokens * m.width * 2 * 2 * (t - 1) / t
    return moved / (where.chip.link * shares.link) + calls * 2 * m.layers * 2 * (t - 1) * HOP_S


def typical_step(job: Job, slots: int) -> SampledStep:
    """The cost of a step whose rollouts have one to all turns, of exponentially distributed lengths that `job` scales.

    With recorded rollouts at hand, use their lengths instead (`launch/bench.py staleness`).
    """
    rng, most = np.random.default_rng(0), job.config.rollout.turn_tokens
    counts = rng.integers(1, job.config.rollout.search_turns + 2, job.rollouts)
    mean = job.sampled / counts.mean()
    drawn = [Lengths(tuple(np.clip(rng.exponential(mean, n), 1, most).astype(int).tolist())) for n in counts]
    (step,) = simulate([scaled(drawn, job.sampled, most)], slots, 0, job.config.rollout.yield_share)
    return step
