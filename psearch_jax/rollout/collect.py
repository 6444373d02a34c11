"""Turns questions into trajectories with a fixed set of compiled shapes (the loop itself: rollout/scheduler.py)."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.models.buckets import buckets
from psearch_jax.rollout import sampling
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.sampler_state import Widths
from psearch_jax.rollout.scheduler import Parts, Progress
from psearch_jax.rollout.stream import RolloutStream
from psearch_jax.rollout.turns import ParseTurn, TurnParser
from psearch_jax.rollout.usage import Usage
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
            widths=widths(rollout, sampler.by_length),
            pool_rows=pool_rows(rollout, sampler.mesh),
            rows_per_call=rows_per_call(rollout, sampler.mesh),
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

    def warm_up(self, weights: SamplingWeights) -> None:
        """Compiles every shape that `collect` can need, so that no later step waits for a compilation."""
        self.compile(weights, self.parts.widths.prompts)
        rows, pool, widths = self.parts.rows_per_call, self.parts.pool_rows, self.parts.widths
        state = self.sampler.new_state(self.parts.rollout.slots, self.parts.rollout.context_tokens)
        nothing = np.zeros(rows, np.int32)
        for width in widths.observations:
            ids = np.zeros((rows, width), np.int32)
            state = self.sampler.extend(weights, state, ids, nothing, 1, nothing - 1)
        for width in widths.prompts:
            ids, n = np.zeros((pool, width), np.int32), np.zeros(pool, np.int32)
            prompts = self.sampler.prefill(weights, ids, n)
            state = self.sampler.admit(state, prompts, nothing - 1, np.zeros((rows, 2), np.uint32), 1, 1, nothing - 1)
        for span in widths.spans:
            state = self.sampler.generate(weights, state, 1.0, span)
        jax.block_until_ready(state)

    def with_widths(self, widths: Widths) -> Collector:
        """The same collector with programs of other widths; each is compiled when it is first needed."""
        other = copy.copy(self)
        other.parts, other.usage = replace(self.parts, widths=widths), Usage()
        return other

    def compile(self, weights: SamplingWeights, prompts: Sequence[int]) -> None:
        """Compiles the programs of every width without running any, in less memory than `warm_up`.

        Args:
          prompts: the prompt widths to compile for; other widths are compiled when first needed.
        """
        rows, pool_rows, widths = self.parts.rows_per_call, self.parts.pool_rows, self.parts.widths
        sampler, compiler = self.sampler, self.sampler.compile_only()
        state = sampler.new_state(self.parts.rollout.slots, self.parts.rollout.context_tokens)
        nothing, keys = np.zeros(rows, np.int32), np.zeros((rows, 2), np.uint32)

        def generate(span: int) -> None:
            compiler.generate(weights, state, 1.0, span)

        def prefill(width: int) -> None:
            ids, n = np.zeros((pool_rows, width), np.int32), np.zeros(pool_rows, np.int32)
            compiler.prefill(weights, ids, n)
            pool = sampler.new_state(pool_rows, width)
            compiler.admit(state, pool, nothing - 1, keys, 1, 1, nothing - 1)

        def extend(width: int) -> None:
            ids = np.zeros((rows, width), np.int32)
            compiler.extend(weights, state, ids, nothing, 1, nothing - 1)

        work = [functools.partial(generate, span) for span in widths.spans]
        work += [functools.partial(prefill, width) for width in prompts]
        work += [functools.partial(extend, width) for width in widths.observations]
        sampling.row_keys(0, 0, [np.zeros(8, np.uint32)], [0])
        compile_all(work)

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


def widths(rollout: RolloutSection, by_length: bool = False) -> Widths:
    """The widths of every program that `collect` can need; one span for a sampler that decodes `by_length`."""
    token_widths = (buckets(most, rollout.num_buckets) for most in (rollout.prompt_tokens, rollout.obs_tokens))
    return Widths(*token_widths, buckets(rollout.context_tokens, 1 if by_length else rollout.num_buckets))


def pool_rows(rollout: RolloutSection, mesh: jax.sharding.Mesh) -> int:
    """Prompts prefilled at once: enough for all slots, rounded up to equal shares per device and process."""
    unit = math.lcm(mesh.shape["data"] * mesh.shape["fsdp"], jax.process_count())
    return -(-math.ceil(rollout.slots / rollout.samples) // unit) * unit


def rows_per_call(rollout: RolloutSection, mesh: jax.sharding.Mesh) -> int:
    """R, the slots per call of `admit` or `extend`: an eighth of all, rounded up to equal shares per device."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    return devices * math.ceil(rollout.slots / devices / 8)


def for_one(collector: Collector) -> tuple[Collector, int]:
    """A collector for questions that come one by one, and the prompt width of most of them.

    Its widths are narrow, because a user waits while padding is computed. Prompts differ only in the question.
    """
    parts = collector.parts
    template_tokens = len(collector.render(Question("", "", "?", (), "single")))
    usual = min(-(-(template_tokens + QUESTION_TOKENS) // 32) * 32, parts.rollout.prompt_tokens)
    prompts = (usual, *(width for width in parts.widths.prompts if width > usual))
    observations = buckets(parts.rollout.obs_tokens, 8)
    return collector.with_widths(Widths(prompts, observations, parts.widths.spans[-1:])), usual
