"""The components of a training run, and the timing of its phases."""

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
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.preemption import StopRequest
from psearch_jax.train.critic import Critic
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import TrainState
from psearch_jax.types import Question, RewardParts, Trajectory


@dataclass
class Run:
    """The components of a training run, made by build.py."""

    config: Config  # with the method's settings applied
    collector: Collector
    learner: Learner
    loader: QuestionLoader
    evaluation: Sequence[Question]
    reward: Callable[[Trajectory], RewardParts]
    abstract: TrainState  # the state as ShapeDtypeStructs with shardings
    fresh: Callable[[], TrainState] | None  # makes the state of step 0 from weights that it holds
    model: Any  # DecoderConfig
    tokenizer_path: str
    given: Config  # as the user set it; recorded in config.json
    reference: nnx.State | None = None  # None when the KL coefficient is 0
    critic: Critic | None = None  # PPO only
    lora: dict[str, Any] | None = None  # what a checkpoint of adapters records about their base weights
    settings: settings.Record = field(default_factory=dict)  # the settings that affect the results
    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stop: StopRequest = field(default_factory=StopRequest)
    keeps_copy: bool = False  # of the state in host memory during a step's updates
    _state: TrainState | None = None

    @property
    def state(self) -> TrainState:
        """The state after the last step. It is made on first access, so a resumed run never holds two."""
        if self._state is None:
            assert self.fresh is not None, "the state was discarded"
            self.state = self.fresh()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        self._state, self.fresh = state, None

    @property
    def has_state(self) -> bool:
        """Whether a state exists or can be made: a step abandoned between its updates may have donated it."""
        return self._state is not None or self.fresh is not None

    @contextmanager
    def phase(self, name: str, times: dict[str, float] | None = None) -> Iterator[None]:
        """Adds the wall time of the block to the run's total for that phase, and to `times`."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.wall_s[name] += seconds
        if times is not None:
            times[name] = times.get(name, 0.0) + seconds
