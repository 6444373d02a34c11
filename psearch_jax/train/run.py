"""The components of a training run, and the timing of its phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.data.loader import QuestionLoader
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.stream import RolloutStream
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.preemption import StopRequest
from psearch_jax.train.learner import Learner
from psearch_jax.train.replay import Recording
from psearch_jax.train.state import TrainState
from psearch_jax.train.trainable import Trainable
from psearch_jax.types import Question, RewardParts, Trajectory


@dataclass
class Run:
    """The components of a training run, made by assembly/build.py."""

    config: Config  # with the method's settings applied
    collector: Collector
    learner: Learner
    loader: QuestionLoader
    evaluation: Sequence[Question]
    reward: Callable[[Sequence[Trajectory]], list[RewardParts]]
    stream: RolloutStream  # the rollouts of training
    abstract: TrainState  # the state as ShapeDtypeStructs with shardings
    initial_state: Callable[[], TrainState] | None  # makes the state of step 0 from weights that it holds
    model: DecoderConfig
    tokenizer_path: str
    user_config: Config  # as the user set it; recorded in config.json
    reference: nnx.State | None = None  # None when the KL coefficient is 0
    scripted: Mapping[bytes, Trajectory] = field(default_factory=dict)  # by the identity of their questions
    critic: Trainable | None = None  # PPO only
    recording: Recording | None = None  # of the rollouts to learn from, in place of sampling
    lora: dict[str, Any] | None = None  # what a checkpoint of adapters records about their base weights
    settings: settings.Record = field(default_factory=dict)  # the settings that affect the results
    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stop: StopRequest = field(default_factory=StopRequest)
    state: TrainState | None = None  # after the last step; None before `begin`

    def begin(self) -> None:
        """Makes the state of step 0 and releases the weights that it is made from."""
        assert self.initial_state is not None, "a run begins once"
        make, self.initial_state = self.initial_state, None
        self.state = make()

    def current_state(self) -> TrainState:
        """The state after the last step. Raises AssertionError before `begin`."""
        assert self.state is not None, "no state: `begin` first"
        return self.state

    def sampling_weights(self) -> SamplingWeights:
        """The current policy as the sampler reads it."""
        return self.collector.sampler.weights(self.learner.sampling_copy(self.current_state().params))

    @contextmanager
    def phase(self, name: str, times: dict[str, float] | None = None) -> Iterator[None]:
        """Adds the wall time of the block to the run's total for that phase, and to `times`."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.wall_s[name] += seconds
        if times is not None:
            times[name] = times.get(name, 0.0) + seconds
