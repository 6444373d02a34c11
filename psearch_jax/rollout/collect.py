"""Turns questions into trajectories with a fixed set of compiled shapes (the loop itself: rollout/scheduler.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.models.buckets import buckets
from psearch_jax.rollout import sampling
from psearch_jax.rollout.rollouts import ParseTurn, Parts, Progress
from psearch_jax.rollout.sampler import Sampler, SamplerShapes
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.stream import RolloutStream
from psearch_jax.rollout.tools import Tool
from psearch_jax.rollout.turns import TurnParser
from psearch_jax.runtime.compiling import Program, compile_all
from psearch_jax.text.dialects import Dialect, Tags
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question, Trajectory, UserError
from retrieval.protocol import Retriever

QUESTION_TOKENS = 32  # most questions that are asked on a terminal have no more tokens


@dataclass(frozen=True, eq=False)
class Collector(Parts):
    """Turns questions into trajectories."""

    @classmethod
    def of(
        cls,
        sampler: Sampler,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        render: Callable[[Question], list[int]],
        rollout: RolloutSection,
        retrieval: RetrievalSection,
        dialect: Dialect | None = None,
        tools: Sequence[Tool] = (),
        parse_turn: ParseTurn | None = None,
    ) -> Collector:
        """A collector with the shapes of a config.

        Args:
          dialect: default: with tags.
          tools: those besides the search.
          parse_turn: from sampled tokens to a turn; default: by the grammar of the dialect.

        Raises:
          UserError: rollout.obs_tokens is too small for the passages of a search or for the chat template.
        """
        dialect = dialect or Tags(tokenizer, rollout.obs_tokens, retrieval.max_sub_queries)
        if rollout.obs_tokens < dialect.min_budget:
            raise UserError(
                f"config.rollout.obs_tokens: {rollout.obs_tokens} found, at least {dialect.min_budget} accepted, the "
                "tokens of the tags, and of the chat template between a reply and the next"
            )
        return cls(
            sampler=sampler,
            tokenizer=tokenizer,
            retriever=retriever,
            render=render,
            rollout=rollout,
            retrieval=retrieval,
            dialect=dialect,
            tools=tuple(tools),
            parse_turn=parse_turn or TurnParser(dialect),
            shapes=SamplerShapes.of(rollout, sampler.mesh, sampler.by_length),
        )

    def warm_up(
        self,
        weights: SamplingWeights,
        *,
        suspends: bool = False,
        prompts: tuple[int, ...] | None = None,
        others: Sequence[Program] = (),
    ) -> None:
        """Compiles every program without running any, so that no later call waits for a compilation.

        Args:
          weights: or their ShapeDtypeStructs.
          suspends: as in `Sampler.programs`.
          prompts: the prompt widths to compile for, if not all; others are compiled when they are first needed.
          others: programs of the caller, compiled at the same time.
        """
        shapes = replace(self.shapes, prompts=prompts or self.shapes.prompts)
        sampling.row_keys(0, 0, [np.zeros(8, np.uint32)], [0])
        compile_all([*self.sampler.programs(shapes, weights, suspends), *others])

    def collect(
        self,
        weights: SamplingWeights,
        questions: Sequence[Question],
        samples: int,
        *,
        seed: int,
        step: int,
        temperature: float,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Rolls out `samples` trajectories for every question of this process.

        Every process calls this with its own questions, whose number may differ.

        Args:
          weights: the policy.
          seed, step: parts of every rollout's random key.

        Returns:
          Q x R trajectories, all samples of a question together, in the order of `questions`.

        Raises:
          RetrievalError, or what `progress` raises: in every process if it is raised in one.
        """
        stream = self.stream(samples, seed)
        stream.add(questions, step)
        return stream.collect(lambda: weights, step, temperature, progress)

    def stream(self, samples: int, seed: int) -> RolloutStream:
        """A stream of batches whose rollouts may overlap; `samples` and `seed` as in `collect`."""
        return RolloutStream(self, samples, seed)


def for_one(collector: Collector) -> tuple[Collector, int]:
    """A collector for questions that come one by one, and the prompt width of most of them.

    Its widths are narrow, because a user waits while padding is computed. Prompts differ only in the question.
    """
    template_tokens = len(collector.render(Question("", "", "?", (), "single")))
    usual = min(-(-(template_tokens + QUESTION_TOKENS) // 32) * 32, collector.rollout.prompt_tokens)
    shapes = replace(
        collector.shapes,
        prompts=(usual, *(width for width in collector.shapes.prompts if width > usual)),
        observations=buckets(collector.rollout.obs_tokens, min(8, -(-collector.rollout.obs_tokens // 64))),
        spans=collector.shapes.spans[-1:],
    )
    return replace(collector, shapes=shapes), usual
