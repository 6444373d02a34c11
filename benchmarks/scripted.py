"""Rollouts of scripted lengths: a script sets the length of each turn and observation, whatever a policy samples.

They are sampled by the real Collector. Where its script ends a turn, a row samples a token that counts as a search, or
as an answer in the last turn. The retriever returns the scripted number of words.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.assembly import programs
from psearch_jax.config import DecoderConfig, MeshSection, from_mapping
from psearch_jax.rollout import sampling
from psearch_jax.rollout.boundary import HIT_ANSWER, HIT_SEARCH, BoundaryTables
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.copy import SamplingCopy
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.rollout.sampler_programs import SamplerState, choose_at_random
from psearch_jax.sharding import SAMPLING, make_mesh, param_shardings
from psearch_jax.text.tags import MIN_OBSERVATION_TOKENS
from psearch_jax.types import Question, Trajectory, Turn
from retrieval.protocol import Passage

SEARCH_ID, ANSWER_ID, STOP_ID = 0, 1, 2  # tokens that end a turn, and are sampled nowhere else
TAG_WORDS = 2  # words of an observation's opening and closing tags, as `WordTokenizer` counts them


@dataclass(frozen=True)
class Script:
    """One rollout: the tokens sampled in each turn, and the tokens of the observations in between."""

    turns: tuple[int, ...]
    observations: tuple[int, ...]  # one fewer

    def mask(self, prompt_tokens: int) -> np.ndarray:
        """By token, 1 where it is sampled."""
        parts = [np.zeros(prompt_tokens)]
        for i, turn in enumerate(self.turns):
            parts += [np.ones(turn), *(np.zeros(n) for n in self.observations[i : i + 1])]
        return np.concatenate(parts).astype(np.float32)


@dataclass(frozen=True)
class Work:
    """The rollouts to sample; those of a group share a prompt and are consecutive."""

    name: str
    prompt_tokens: int
    samples: int  # rollouts in a group
    slots: int  # rows decoded in one batch
    scripts: tuple[Script, ...]

    @property
    def sampled(self) -> int:
        return sum(sum(s.turns) for s in self.scripts)

    @property
    def longest(self) -> int:
        return self.prompt_tokens + max(sum(s.turns) + sum(s.observations) for s in self.scripts)

    def prompts(self, n_ids: int) -> list[list[int]]:
        rng = np.random.default_rng(1)
        return rng.integers(2, n_ids, (len(self.scripts) // self.samples, self.prompt_tokens)).tolist()


def scaled(length: float, scale: float) -> int:
    return max(TAG_WORDS + 1, round(length * scale))


def equal(scale: float = 1.0) -> Work:
    """64 rollouts in 8 groups: a prompt of 160 tokens, three turns of 60, and 240 forced tokens in between."""
    script = Script((scaled(60, scale),) * 3, (scaled(240, scale),) * 2)
    return Work("equal", scaled(160, scale), 8, 64, (script,) * 64)


def ragged(scale: float = 1.0) -> Work:
    """256 rollouts in groups of 8 over 64 slots: 1 to 4 turns of log-normal length (mean 60, at most 240), and 60 to
    240 forced tokens in between."""
    rng, spread = np.random.default_rng(0), 0.8
    scripts = []
    for _ in range(256):
        count = int(rng.integers(1, 5))
        turns = np.minimum(rng.lognormal(np.log(60) - spread**2 / 2, spread, count), 240)
        lengths = (turns, rng.integers(60, 241, count - 1))
        scripts.append(Script(*(tuple(scaled(x, scale) for x in part) for part in lengths)))
    return Work("ragged", scaled(160, scale), 8, 64, tuple(scripts))


WORKS: dict[str, Callable[[float], Work]] = {"equal": equal, "ragged": ragged}


def on_slots(work: Work, slots: int) -> Work:
    """The work over `slots` slots, with the same number of rollouts per slot."""
    count = len(work.scripts) * slots // work.slots
    scripts = (work.scripts * (count // len(work.scripts) + 1))[:count]
    return replace(work, slots=slots, scripts=scripts)


class WordTokenizer:
    """One token per word."""

    stop_ids = frozenset()

    def __init__(self, n_ids: int):
        self._n_ids = n_ids

    def next_user_message(self, text: str, max_tokens: int) -> list[int]:
        """Never used: every scripted turn ends with an action."""
        return []

    def encode_foreign(self, text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % self._n_ids for word in text.split()]


class ScriptedPassages:
    """A retriever whose passage has the scripted length of the query's rollout and turn: "rollout turn"."""

    def __init__(self, scripts: Sequence[Script]):
        self._scripts = scripts

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        rankings = []
        for query in queries:
            rollout, turn = map(int, query.split())
            words = self._scripts[rollout].observations[turn] - TAG_WORDS
            rankings.append([Passage(query, "", " ".join(f"{rollout}.{turn}.{i}" for i in range(words)))])
        return rankings


class ScriptedRollouts:
    """This project's rollouts of a `Work`, with the components of a training run on one device.

    Args:
      dtype: of weights and products.
      settings: config sections that override the defaults, as {"rollout": {"overlap_search": True}}.
      sampler: the class of the sampler.
    """

    def __init__(
        self,
        work: Work,
        model: DecoderConfig,
        params: nnx.State,
        dtype: str = "float32",
        settings: dict[str, dict[str, Any]] | None = None,
        sampler: type[Sampler] = Sampler,
    ):
        settings, self._work = settings or {}, work
        rollout = {
            "slots": work.slots,
            "samples": work.samples,
            "context_tokens": work.longest + 1,  # the longest rollout must not fill the context
            "prompt_tokens": work.prompt_tokens,
            "turn_tokens": 1 + max(n for s in work.scripts for n in s.turns),
            "obs_tokens": max([MIN_OBSERVATION_TOKENS, *(n for s in work.scripts for n in s.observations)]),
            "search_turns": max(len(s.turns) for s in work.scripts),
        }
        sections = {
            "rollout": rollout | settings.get("rollout", {}),
            "model": {"dtype": dtype, "sampling_dtype": dtype},
        }
        config = from_mapping(settings | sections)
        mesh, n_ids = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1]), model.vocab_rows
        prompts = work.prompts(n_ids)
        self._questions = [Question("scripted", str(i), "", (), "single") for i in range(len(prompts))]
        words = [sampling.id_words(q.source, q.id) for q in self._questions for _ in range(work.samples)]
        keys = sampling.row_keys(0, 0, words, [*range(work.samples)] * len(self._questions))
        self.sampler = programs.make_sampler(
            config,
            model,
            mesh,
            end_tables(n_ids),
            n_ids,
            (STOP_ID,),
            functools.partial(sampler, choose=choose_by_script(work, keys)),
        )
        self.collector = Collector.of(
            self.sampler,
            WordTokenizer(n_ids),
            ScriptedPassages(work.scripts),
            lambda question: prompts[int(question.id)],
            config.rollout,
            config.retrieval,
            parse_turn=self._parse_turn,
        )
        placed = jax.device_put(params, param_shardings(params, SAMPLING, mesh))
        self._params = SamplingCopy(placed, None, jnp.dtype(dtype), mesh, trained=False)(placed)

    def run(self, params: nnx.State | None = None) -> list[Trajectory]:
        """Samples all rollouts with `params`, a sampling copy; default: a copy of the initial parameters.

        Afterwards, `usage` is the cost.
        """
        weights = self.sampler.weights(params or self._params)
        stream = self.collector.stream(self._work.samples, seed=0)
        stream.add(self._questions, step=0)
        trajectories = stream.collect(lambda: weights, 0, 1.0)
        self.usage = stream.spent()
        return trajectories

    def _parse_turn(self, rollout: Any, sampled: np.ndarray, _: Any) -> Turn:
        """The script defines each turn's action, whatever its tokens are."""
        script, turn = self._work.scripts[rollout.order], len(rollout.turns)
        if len(sampled) != script.turns[turn]:
            raise AssertionError(
                f"rollout {rollout.order}, turn {turn}: {len(sampled)} tokens, not {script.turns[turn]}"
            )
        if turn + 1 == len(script.turns):
            return Turn("", "answer", True, answer="", n_sampled=len(sampled))
        return Turn("", "search", True, (f"{rollout.order} {turn}",), n_sampled=len(sampled))


def end_tables(n_ids: int) -> BoundaryTables:
    """One automaton state, in which the two tokens that end a turn complete their tags."""
    hit = np.zeros((1, n_ids), np.uint8)
    hit[0, [SEARCH_ID, ANSWER_ID]] = HIT_SEARCH, HIT_ANSWER
    return BoundaryTables(np.zeros_like(hit), hit)


def choose_by_script(work: Work, keys: np.ndarray) -> Callable[[jax.Array, SamplerState], jax.Array]:
    """Samples at random within a turn, and ends it where the script of the row's key does.

    Args:
      keys: [rollouts, 2], the random keys of the rollouts.
    """
    ends = np.zeros((len(work.scripts), max(len(s.turns) for s in work.scripts)), np.int32)  # lengths at a turn's end
    for i, script in enumerate(work.scripts):
        steps = np.add(script.turns, (0, *script.observations))
        ends[i, : len(steps)] = work.prompt_tokens + np.cumsum(steps)
    last = ends.max(1)

    def choose(logits: jax.Array, state: SamplerState) -> jax.Array:
        script = jnp.argmax(jnp.all(jax.random.key_data(state.key)[:, None] == keys[None], axis=-1), axis=1)  # [B]
        length = state.length + 1
        token = jnp.maximum(choose_at_random(logits, state), 1 + max(SEARCH_ID, ANSWER_ID, STOP_ID))
        token = jnp.where(jnp.any(jnp.asarray(ends)[script] == length[:, None], axis=1), SEARCH_ID, token)
        token = jnp.where(length == jnp.asarray(last)[script] - 1, ANSWER_ID, token)
        return jnp.where(length == jnp.asarray(last)[script], STOP_ID, token)

    return choose
