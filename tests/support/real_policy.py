"""Rollouts of a real model for tests/test_real.py. As a program, it runs greedy rollouts on eight devices:

python tests/support/real_policy.py DIR OUT.npz        with XLA_FLAGS=--xla_force_host_platform_device_count=8
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from real_questions import passages, questions

from psearch_jax.assembly import build
from psearch_jax.config import Config, DecoderConfig, from_mapping
from psearch_jax.models import hf, lora
from psearch_jax.rl.batch import make_batch
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.sharding import SAMPLING, make_mesh, param_shardings
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import make_optimizer
from psearch_jax.types import Trajectory
from retrieval.service import RetrievalService

CONTEXT, TURN_TOKENS, GREEDY = 256, 32, 8  # positions of a row; budget of a turn; number of greedy questions
RANK, ALPHA = 8, 16.0


# A prompt that describes tools is longer, and so is a call.
TOOL_CALLS = {"dialect": "tool_calls", "tools": "calculator", "prompt_tokens": 448, "turn_tokens": 48}
TOOL_CALLS |= {"obs_tokens": 96, "context_tokens": 640}


def config(directory: str, slots: int = 12, rollout: Mapping[str, Any] | None = None, **model: Any) -> Config:
    """Two short turns after a short prompt. `model`: fields of the model section, which is in float32 by default."""
    template = "tool_calls" if rollout else str(Path(__file__).with_name("real_template.txt"))
    section = {"tokenizer": directory, "preset": "0.5b", "dtype": "float32", "sampling_dtype": "float32", **model}
    budgets = {"slots": slots, "samples": 4, "context_tokens": CONTEXT, "prompt_tokens": 112}
    budgets |= {"turn_tokens": TURN_TOKENS, "obs_tokens": 72, "search_turns": 1, "num_buckets": 1}
    return from_mapping(
        {
            "model": section,
            "data": {"template": template},
            "retrieval": {"topk": 1},
            "rollout": budgets | dict(rollout or {}),
            "learning": {"micro_batch_rows": 4, "mini_batch_rollouts": 12, "kl_coefficient": 0.0},
        }
    )


@functools.cache
def retriever() -> RetrievalService:
    """Over the corpus that PSEARCH_CORPUS names, or else over the tests' own passages."""
    return RetrievalService.from_corpus(os.environ.get("PSEARCH_CORPUS") or passages())


@dataclass(frozen=True)
class Policy:
    """A model with its sampler and its trainer."""

    config: Config
    engine: build.Engine
    params: nnx.State  # if there are adapters: these, and `base` holds the weights
    base: nnx.State | None = None

    @classmethod
    def make(
        cls, directory: str, model: DecoderConfig, params: nnx.State, adapters: nnx.State | None = None, **fields: Any
    ) -> Policy:
        """A policy from weights in memory."""
        if adapters is not None:
            fields |= {"lora_rank": RANK, "lora_alpha": ALPHA}
        settings = config(directory, **fields)
        both = params if adapters is None else lora.join_adapters(params, adapters)
        engine = build.engine(settings, params=both, model=model, retriever=retriever())
        return cls(settings, engine, params if adapters is None else adapters, params if adapters else None)

    def collect(self, count: int, samples: int = 1, temperature: float = 1.0) -> list[Trajectory]:
        """Rollouts of the first `count` questions."""
        weights, collector = self.engine.sampling_weights(), self.engine.collector
        return collector.collect(weights, questions()[:count], samples, seed=0, step=0, temperature=temperature)

    @functools.cached_property
    def learner(self) -> Learner:
        optimizer = make_optimizer(self.config.learning, 1)
        size = self.engine.tokenizer.size
        return Learner(self.config, self.engine.model, optimizer, self.engine.mesh, size, base=self.base)

    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """The trainer's log-probs of the sampled tokens of each trajectory."""
        scores = self.learner.score(self.params, make_batch(trajectories, np.ones(len(trajectories)), CONTEXT))
        return [scores[i, : len(t.ids)][t.mask] for i, t in enumerate(trajectories)]


def gap(trajectories: Sequence[Trajectory], scores: Sequence[np.ndarray]) -> np.ndarray:
    """|sampler's log-prob - trainer's log-prob| of every sampled token."""
    return np.concatenate([np.abs(t.logprobs[t.mask] - s) for t, s in zip(trajectories, scores, strict=True)])


def main(directory: str, out: str) -> None:
    """Greedy rollouts with every layer split over two devices if its heads are even, and the rows over the others."""
    tensor = 1 + (hf.read_config(directory).heads % 2 == 0)
    settings = config(directory, slots=12 if tensor == 2 else 16)
    settings = replace(settings, mesh=replace(settings.mesh, data=8 // tensor, fsdp=1, tensor=tensor))
    mesh = make_mesh(settings.mesh)
    # Loaded once, in the sampler's sharding: four copies, one per group of rows, take 8 GB.
    model, params = hf.load_hf(directory, lambda abstract: param_shardings(abstract, SAMPLING, mesh), jnp.float32)
    engine = build.engine(settings, params=params, model=model, retriever=retriever())
    rollouts = engine.collector.collect(
        engine.sampling_weights(), questions()[:GREEDY], 1, seed=0, step=0, temperature=0.0
    )
    devices = {d for x in jax.tree.leaves(params) for d in x.sharding.device_set}
    np.savez(out, devices=len(devices), **{f"ids{i}": t.ids for i, t in enumerate(rollouts)})


if __name__ == "__main__":
    configure_jax()
    main(*sys.argv[1:])
