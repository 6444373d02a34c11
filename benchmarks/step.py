"""`launch/bench.py step`: complete training steps, compared with transformers on PyTorch.

A step samples scripted rollouts (scripted.py) with the weights of the previous step, scores them with the reference
model, and takes one optimizer step on them. Both start from the same random float32 weights and run alternately on one
machine: compare the ratios. The peer runs `equal` only, as in rollout.py.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.scripted import WORKS, ScriptedRollouts, Work
from benchmarks.update import make_config, make_learner
from psearch_jax.config import DecoderConfig
from psearch_jax.rl.batch import make_batch
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.types import TrainBatch

PHASES = ("rollouts", "reference", "update")


def main(argv: Sequence[str]) -> None:
    parser = timing.make_parser("step", __doc__, WORKS)
    flags = parser.parse_args(argv)
    if flags.model:
        parser.error("--model: accepted: the random policies of --sizes")
    configure_jax()
    peers, lines = timing.find_peers(flags.peers, "torch", "transformers"), []
    for size, (model, params) in timing.load_policies(flags).items():
        for name in flags.works:
            work = WORKS[name](flags.scale)
            steps: dict[str, Step] = {timing.OURS: OurStep(work, model, params)}
            if peers and name == "equal":
                steps["torch"] = TorchStep(work, model, params)
            lines += [{"size": size, "work": name} | line for line in compare(work, steps, flags.repeats)]
    timing.report(flags, "step", lines)


def compare(work: Work, steps: dict[str, Step], repeats: int) -> list[dict[str, Any]]:
    """A line per contender, with the median seconds of its phases; the loss of the first step is checked."""
    seconds = timing.run_alternately({name: step.run for name, step in steps.items()}, repeats)
    lines = timing.summarise_seconds(seconds, len(work.scripts), "rollouts_per_s")
    sampled = np.array([sum(script.turns) for script in work.scripts])
    for name, step in steps.items():
        # In the first step policy, old policy and reference are equal, so its loss does not depend on the samples.
        if abs(step.losses[0] + float(np.sum(step.advantages * sampled) / np.sum(sampled))) > 1e-3:
            raise AssertionError(f"{name}: a first loss of {step.losses[0]}")
        lines[name] |= {"loss": float(f"{step.losses[0]:.5g}")}
        # Without the first run, which compiles.
        lines[name] |= {f"{phase}_s": round(float(np.median(step.clock[phase][1:])), 3) for phase in PHASES}
    return list(lines.values())


class Step:
    """A training step whose phases are timed."""

    def __init__(self, work: Work):
        self.clock: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.losses: list[float] = []
        self.advantages = np.random.default_rng(0).standard_normal(len(work.scripts))
        config = make_config(len(work.scripts), work.longest)
        train = replace(config.train, prompts=len(work.scripts) // work.samples)  # all in one optimizer step
        self.config = replace(config, rollout=replace(config.rollout, samples=work.samples), train=train)

    def run(self) -> None:
        raise NotImplementedError

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.clock[name].append(time.perf_counter() - start)


class OurStep(Step):
    """This project's step."""

    def __init__(self, work: Work, model: DecoderConfig, params: Any):
        super().__init__(work)
        self._rollouts = ScriptedRollouts(work, model, params)
        self._learner, self._state = make_learner(self.config, model, params)
        self._reference = self._learner.reference_copy(self._state.params)

    def run(self) -> None:
        with self.phase("rollouts"):
            trajectories = self._rollouts.run(self._learner.sampling_copy(self._state.params))
            batch = make_batch(trajectories, self.advantages, self.config.rollout.context_tokens)
        with self.phase("reference"):
            batch = replace(batch, ref_logprobs=self._learner.reference_score(self._reference, batch))
        with self.phase("update"):
            self._state, metrics = self._learner.update(self._state, batch)
        self.losses.append(metrics["loss"])


class TorchStep(Step):
    """The same with transformers on PyTorch; the old policy's log-probs are the sampler's."""

    def __init__(self, work: Work, model: DecoderConfig, params: Any):
        from benchmarks.peers import TorchRollouts, TorchUpdate, torch_model

        super().__init__(work)
        policy = torch_model(params, model)
        self._reference = copy.deepcopy(policy)
        self._rollouts = TorchRollouts(work, model, policy)
        self._update = TorchUpdate(policy, self.config.learning)

    def run(self) -> None:
        with self.phase("rollouts"):
            ids, logprobs = self._rollouts.run()
            zeros, mask = np.zeros_like(logprobs), (logprobs != 0).astype(np.float32)
            length = np.full(len(ids), ids.shape[1], np.int32)
            advantage = mask * self.advantages[:, None].astype(np.float32)
            self._update.load(TrainBatch(ids, length, mask, advantage, logprobs, zeros, logprobs, zeros, zeros))
        with self.phase("reference"):
            self._update.score_reference(self._reference)
        with self.phase("update"):
            self.losses.append(self._update.run()["loss"])
