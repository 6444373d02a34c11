"""The live parts of a training run, and the clock that its phases are timed by."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from psearch_jax.config import Config
from psearch_jax.data.loader import QuestionLoader
from psearch_jax.rollout.collect import Collector
from psearch_jax.train import settings
from psearch_jax.train.critic import Critic
from psearch_jax.train.learner import Learner
from psearch_jax.train.preemption import StopRequest
from psearch_jax.train.state import TrainState
from psearch_jax.types import Question, RewardParts, Trajectory


@dataclass
class Run:
    """The live parts of a training run, made by build.py."""

    config: Config  # as the method has it
    collector: Collector
    learner: Learner
    loader: QuestionLoader
    evaluation: Sequence[Question]
    reward: Callable[[Trajectory], RewardParts]
    abstract: TrainState  # the state's ShapeDtypeStructs, with the place of each
    fresh: Callable[[], TrainState] | None  # makes the state of step 0; holds the weights that it starts from
    model: Any  # DecoderConfig
    tokenizer_path: str
    given: Config  # as the user has it: what config.json records
    reference: nnx.State | None = None  # None when the KL coefficient is 0
    critic: Critic | None = None  # of PPO
    lora: dict[str, Any] | None = None  # what a checkpoint of adapters says about the weights beside them
    settings: settings.Record = field(default_factory=dict)  # what decides the run's numbers
    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stop: StopRequest = field(default_factory=StopRequest)
    keeps_copy: bool = False  # of the state, in host memory, while a step's updates go on
    _state: TrainState | None = None

    @property
    def state(self) -> TrainState:
        """The state behind the last step. It is made when first asked for: a run that resumes never holds two."""
        if self._state is None:
            assert self.fresh is not None, "the state was given up"
            self.state = self.fresh()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        self._state, self.fresh = state, None

    @property
    def has_state(self) -> bool:
        """Whether there is one, or can be: a step given up between its updates may have used it up."""
        return self._state is not None or self.fresh is not None

    @contextmanager
    def phase(self, name: str, times: dict[str, float] | None = None) -> Iterator[None]:
        """Adds the wall time of a block to the run's total of that phase, and to `times`."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.wall_s[name] += seconds
        if times is not None:
            times[name] = times.get(name, 0.0) + seconds
