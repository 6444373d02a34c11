"""Turns questions into trajectories with a fixed set of compiled shapes (the loop itself: rollout/scheduler.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.models.buckets import buckets
from psearch_jax.rollout import sampling
from psearch_jax.rollout.rollouts import ParseTurn, Parts, Progress, Usage
from psearch_jax.rollout.sampler import Sampler, SamplerShapes
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.stream import RolloutStream
from psearch_jax.rollout.turns import TurnParser
from psearch_jax.runtime.compiling import compile_all
from psearch_jax.text import tags
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question, Trajectory, UserError
from retrieval.protocol import Retriever

QUESTION_TOKENS = 32  # most questions that are asked on a terminal have no more tokens


class Collector:
    """Turns questions into trajectories.

    Args:
      sampler: the device programs.
      tokenizer: of the policy.
      retriever: answers one batch of sub-queries per yield; None if the budgets allow no search.
      render: from a question to the token ids of its prompt.
      rollout, retrieval: budgets and options.
      parse_turn: from sampled tokens to a turn; default: by the tag grammar.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        render: Callable[[Question], list[int]],
        rollout: RolloutSection,
        retrieval: RetrievalSection,
        parse_turn: ParseTurn | None = None,
    ):
        tags.check_observation_budget(rollout.obs_tokens, "config.rollout.obs_tokens")
        own = len(tokenizer.next_user_message("", rollout.obs_tokens))
        if own > rollout.obs_tokens:
            raise UserError(
                f"config.rollout.obs_tokens: {rollout.obs_tokens} found, accepted: at least {own}, the tokens of the "
                "chat template between a reply and the next"
            )
        by_grammar = TurnParser(tokenizer, retrieval.max_sub_queries, rollout.max_tokens_after_answer)
        self.parts = Parts(
            sampler=sampler,
            tokenizer=tokenizer,
            retriever=retriever,
            rollout=rollout,
            retrieval=retrieval,
            parse_turn=parse_turn or by_grammar,
            shapes=SamplerShapes.of(rollout, sampler.mesh, sampler.by_length),
        )
        self.usage, self.render = Usage(), render

    @property
    def sampler(self) -> Sampler:
        """The device programs."""
        return self.parts.sampler

    @property
    def retriever(self) -> Retriever | None:
        """None if the budgets allow no search."""
        return self.parts.retriever

    def with_retriever(self, retriever: Retriever) -> Collector:
        """The same collector with another retriever."""
        other = copy.copy(self)
        other.parts, other.usage = replace(self.parts, retriever=retriever), Usage()
        return other

    def with_shapes(self, shapes: SamplerShapes) -> Collector:
        """The same collector with programs of other shapes; each is compiled when it is first needed."""
        other = copy.copy(self)
        other.parts, other.usage = replace(self.parts, shapes=shapes), Usage()
        return other

    def warm_up(
        self, weights: SamplingWeights, *, suspends: bool = False, prompts: tuple[int, ...] | None = None
    ) -> None:
        """Compiles every program without running any, so that no later call waits for a compilation.

        Args:
          suspends: as in `Sampler.programs`.
          prompts: the prompt widths to compile for, if not all; others are compiled when they are first needed.
        """
        shapes = self.parts.shapes
        shapes = replace(shapes, prompts=prompts or shapes.prompts)
        sampling.row_keys(0, 0, [np.zeros(8, np.uint32)], [0])
        compile_all(self.sampler.programs(shapes, weights, suspends))

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
          Q x R trajectories, all samples of a question together, in the order of `questions`. Until the next call,
          `usage` is the cost of this one.

        Raises:
          RetrievalError, or what `progress` raises: in every process if it is raised in one.
        """
        stream = self.stream(samples, seed)
        stream.add(questions, step)
        trajectories = stream.collect(weights, step, temperature, progress)
        self.usage = stream.spent()
        return trajectories

    def stream(self, samples: int, seed: int) -> RolloutStream:
        """A stream of batches whose rollouts may overlap; `samples` and `seed` as in `collect`."""
        return RolloutStream(self.parts, self.render, samples, seed)


def for_one(collector: Collector) -> tuple[Collector, int]:
    """A collector for questions that come one by one, and the prompt width of most of them.

    Its widths are narrow, because a user waits while padding is computed. Prompts differ only in the question.
    """
    parts = collector.parts
    template_tokens = len(collector.render(Question("", "", "?", (), "single")))
    usual = min(-(-(template_tokens + QUESTION_TOKENS) // 32) * 32, parts.rollout.prompt_tokens)
    shapes = replace(
        parts.shapes,
        prompts=(usual, *(width for width in parts.shapes.prompts if width > usual)),
        observations=buckets(parts.rollout.obs_tokens, 8),
        spans=parts.shapes.spans[-1:],
    )
    return collector.with_shapes(shapes), usual
