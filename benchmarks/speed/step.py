"""`launch/bench.py step`: complete training steps, compared with transformers on PyTorch.

A step samples scripted rollouts (scripted.py) with the weights of the previous step, scores them with the
reference model, and takes one optimizer step on them. All contenders start from the same random float32 weights, with
the same prompts and lengths, and run alternately on one machine: compare the ratios. The peers keep their KV cache
over the turns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.speed.scripted import WORKS, Ours, Work
from benchmarks.speed.timing import SIZES, log, machine, missing, parser, rates, run_alternately, tabled, written
from benchmarks.speed.update import OURS, config_of, learner_of
from psearch_jax.config import DecoderConfig
from psearch_jax.models import decoder
from psearch_jax.models.buckets import buckets
from psearch_jax.rl.batch import make_batch
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.types import TrainBatch

PEERS = ("torch", "torch.compile")  # the second compiles reference pass and update
PHASES = ("rollouts", "reference", "update")
COLUMNS = ("size", "work", "contender", "rollouts_per_s", "relative_speed", *(f"{phase}_s" for phase in PHASES))


def main(argv: Sequence[str]) -> None:
    flags = parser("bench step", __doc__, WORKS, PEERS).parse_args(argv)
    configure_jax()
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(flags), "step": [], "skipped": []}
    peers = list(flags.peers)
    if peers and (lacking := missing("torch", "transformers")):
        report["skipped"] = [f"{name}: left out, {lacking} is not installed" for name in peers]
        peers = []
    for size in flags.sizes:
        for name in flags.works:
            report["step"] += compare(size, WORKS[name](flags.scale), peers, flags.repeats)
    print(tabled(report["step"], COLUMNS))
    for line in report["skipped"]:
        print(line)
    written(flags.json, report)


def compare(size: str, work: Work, peers: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """A line per contender, with the median seconds of its phases; `relative_speed` is its speed relative to ours."""
    model = SIZES[size]
    params = decoder.init_params(model, 0)
    steps: dict[str, Any] = {OURS: OurStep(work, model, params)}
    for name in peers:
        steps[name] = TorchStep(work, model, params, compiled=name == "torch.compile")
    runs: dict[str, Callable[[], Any]] = {name: step.run for name, step in steps.items()}
    seconds = run_alternately(runs, repeats, log)
    sampled = np.array([sum(script.turns) for script in work.scripts])
    lines = []
    for name, taken in seconds.items():
        line = {"size": size, "work": work.name, "contender": name, "rollouts_per_s": rates(len(work.scripts), taken)}
        line["relative_speed"] = round(float(np.median(seconds[OURS]) / np.median(taken)), 2)
        line["seconds"] = [round(s, 3) for s in taken]
        # In the first step policy, old policy and reference are equal, so its loss does not depend on the samples.
        step = steps[name]
        line["loss"] = float(f"{step.losses[0]:.5g}")
        if abs(line["loss"] + float(np.sum(step.advantages * sampled) / np.sum(sampled))) > 1e-3:
            raise AssertionError(f"{name}: a first loss of {line['loss']}")
        for phase in PHASES:  # without the first run, which compiles
            line[f"{phase}_s"] = round(float(np.median(step.clock[phase][1:])), 3)
        lines.append(line)
    return lines


class _Step:
    def __init__(self, work: Work):
        self.clock: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.losses: list[float] = []
        rng = np.random.default_rng(0)
        self.advantages = rng.standard_normal(len(work.scripts))
        config = config_of(len(work.scripts), work.longest)
        rollout = replace(config.rollout, samples=work.samples)
        train = replace(config.train, prompts=len(work.scripts) // work.samples)  # all in one optimizer step
        self.config = replace(config, rollout=rollout, train=train)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.clock[name].append(time.perf_counter() - began)


class OurStep(_Step):
    """This project's step."""

    def __init__(self, work: Work, model: DecoderConfig, params: Any):
        super().__init__(work)
        self._rollouts = Ours(work, model, params, {}, 0.0)
        self._learner, self._state = learner_of(self.config, model, params)
        self._reference = self._learner.reference_copy(self._state.params)

    def run(self) -> None:
        with self.phase("rollouts"):
            trajectories = self._rollouts.run(self._learner.sampling_copy(self._state.params))
            batch = make_batch(trajectories, self.advantages, self.config.rollout.context_tokens)
        with self.phase("reference"):
            reference = self._learner.reference_score(self._reference, batch)
            batch = replace(batch, ref_logprobs=reference)
        with self.phase("update"):
            self._state, metrics = self._learner.update(self._state, batch)
        self.losses.append(metrics["loss"])


class TorchStep(_Step):
    """The same with transformers on PyTorch; the old policy's log-probs are the sampler's."""

    def __init__(self, work: Work, model: DecoderConfig, params: Any, compiled: bool):
        from benchmarks.speed.peers import TorchRollouts, TorchUpdate, torch_model

        super().__init__(work)
        self._work, policy = work, torch_model(params, model)
        self._reference = copy.deepcopy(policy)
        self._rollouts = TorchRollouts(work, model, policy, keep=True)
        widths = buckets(self.config.rollout.context_tokens, self.config.rollout.num_buckets) if compiled else None
        self._update = TorchUpdate(policy, self.config.learning, widths, compiled)

    def run(self) -> None:
        with self.phase("rollouts"):
            self._rollouts.run()
            self._update.lay(self._batch())
        with self.phase("reference"):
            self._update.refer(self._reference)
        with self.phase("update"):
            self.losses.append(self._update.run()["loss"])

    def _batch(self) -> TrainBatch:
        work, rollouts = self._work, self._rollouts
        shape = (len(work.scripts), work.longest)
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, tokens in rollouts.ids.items():
            ids[row, : len(tokens)], logprobs[row, : len(tokens)] = tokens, rollouts.logprobs[row]
        mask = (logprobs != 0).astype(np.float32)
        length = np.array([work.length(script) for script in work.scripts], np.int32)
        advantage = mask * self.advantages[:, None].astype(np.float32)
        zeros = np.zeros(shape, np.float32)
        return TrainBatch(ids, length, mask, advantage, logprobs, zeros, logprobs, zeros, zeros)
