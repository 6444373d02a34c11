"""Rollouts of scripted lengths: the script sets the length of each turn and observation, whatever a policy samples.

Ours are sampled by the real Collector with stand-ins. At its row's scripted token budget, a turn ends with a token
that counts as a search, or as an answer in the last turn. The retriever returns the scripted number of words.
"""

from __future__ import annotations

import time
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
from psearch_jax.rollout.sampler_programs import random_draw
from psearch_jax.rollout.sampler_state import SamplerState, Status
from psearch_jax.rollout.turns import ParseTurn, Rollout
from psearch_jax.sharding import SAMPLING, make_mesh, param_shardings
from psearch_jax.text.tags import MIN_OBSERVATION_TOKENS
from psearch_jax.types import Question, Trajectory, Turn, UserError
from retrieval.protocol import Passage

SEARCH_ID, ANSWER_ID = 0, 1  # tokens that end a turn, and are sampled nowhere else
TAG_WORDS = 2  # words of an observation's opening and closing tags, as `Words` counts them


@dataclass(frozen=True)
class Script:
    """One rollout: the tokens sampled in each turn, and the tokens of the observations in between."""

    turns: tuple[int, ...]
    observations: tuple[int, ...]  # one fewer


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

    def length(self, script: Script) -> int:
        return self.prompt_tokens + sum(script.turns) + sum(script.observations)

    @property
    def read(self) -> int:
        """Tokens that a model must process if it keeps its KV cache and prefills a prompt once per group."""
        prompts = self.prompt_tokens * (len(self.scripts) // self.samples)
        return prompts + sum(sum(s.turns) + sum(s.observations) for s in self.scripts)

    @property
    def longest(self) -> int:
        return max(self.length(s) for s in self.scripts)

    def prompts(self, n_ids: int) -> list[list[int]]:
        rng = np.random.default_rng(1)
        return rng.integers(0, n_ids, (len(self.scripts) // self.samples, self.prompt_tokens)).tolist()


def equal(scale: float = 1.0) -> Work:
    """64 rollouts in 8 groups: a prompt of 160 tokens, three turns of 60, and 240 forced tokens in between."""
    script = Script((_ids(60, scale),) * 3, (_ids(240, scale),) * 2)
    return Work("equal", _ids(160, scale), 8, 64, (script,) * 64)


def ragged(scale: float = 1.0, seed: int = 0) -> Work:
    """256 rollouts in groups of 8 over 64 slots: 1 to 4 turns of log-normal length (mean 60, at most 240), and 60 to
    240 forced tokens in between."""
    rng, spread = np.random.default_rng(seed), 0.8
    scripts = []
    for _ in range(256):
        n = int(rng.integers(1, 5))
        turns = np.minimum(rng.lognormal(np.log(60) - spread**2 / 2, spread, n), 240)
        observations = rng.integers(60, 241, n - 1)
        scripts.append(Script(*(tuple(_ids(x, scale) for x in part) for part in (turns, observations))))
    return Work("ragged", _ids(160, scale), 8, 64, tuple(scripts))


WORKS: dict[str, Callable[[float], Work]] = {"equal": equal, "ragged": ragged}


def on_slots(work: Work, slots: int) -> Work:
    """The work over `slots` slots, with the same number of rollouts per slot."""
    count = len(work.scripts) * slots // work.slots
    scripts = (work.scripts * (count // len(work.scripts) + 1))[:count]
    return replace(work, slots=slots, scripts=scripts)


def _ids(n: float, scale: float) -> int:
    return max(TAG_WORDS + 1, round(n * scale))


class Words:
    """A tokenizer with one token per word."""

    stop_ids = frozenset()

    def __init__(self, n_ids: int):
        self._n_ids = n_ids

    def next_user_message(self, text: str, max_tokens: int) -> list[int]:
        """Never used: every scripted turn ends with an action."""
        return []

    def encode_foreign(self, text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % self._n_ids for word in text.split()]


class ScriptedPassages:
    """A retriever whose passage has the scripted length of the query's rollout and turn: "rollout turn".

    Args:
      search_s: seconds per call, to imitate a network.
    """

    def __init__(self, scripts: Sequence[Script], search_s: float):
        self._scripts, self._search_s = scripts, search_s

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        time.sleep(self._search_s)
        rankings = []
        for query in queries:
            rollout, turn = map(int, query.split())
            words = self._scripts[rollout].observations[turn] - TAG_WORDS
            rankings.append([Passage(query, "", " ".join(f"{rollout}.{turn}.{i}" for i in range(words)))])
        return rankings


def _tables(n_ids: int) -> BoundaryTables:
    """One automaton state, in which the two tokens that end a turn complete their tags."""
    hit = np.zeros((1, n_ids), np.uint8)
    hit[0, [SEARCH_ID, ANSWER_ID]] = HIT_SEARCH, HIT_ANSWER
    return BoundaryTables(np.zeros_like(hit), hit)


def _scripted_draw(logits: jax.Array, state: SamplerState) -> jax.Array:
    """Ends each turn at its budget, and samples at random before; `state.key[:, 1]` is the row's total length."""
    is_last_turn = state.length + 1 >= state.key[:, 1].astype(jnp.int32)
    end = jnp.where(is_last_turn, ANSWER_ID, SEARCH_ID)
    other = jnp.maximum(random_draw(logits, state), max(SEARCH_ID, ANSWER_ID) + 1)
    return jnp.where(state.turn_left == 1, end, other)


def _scripted_turns(scripts: Sequence[Script]) -> ParseTurn:
    """The script defines each turn's action, whatever its tokens are."""

    def parse(rollout: Rollout, sampled: np.ndarray, _: Status) -> Turn:
        script, turn = scripts[rollout.order], len(rollout.turns)
        if len(sampled) != script.turns[turn]:
            expected = script.turns[turn]
            raise AssertionError(f"rollout {rollout.order}: {len(sampled)} tokens in turn {turn}, expected {expected}")
        if turn + 1 == len(script.turns):
            return Turn("", "answer", True, answer="", n_sampled=len(sampled))
        return Turn("", "search", True, (f"{rollout.order} {turn}",), n_sampled=len(sampled))

    return parse


class ScriptedSampler(Sampler):
    """The real sampler, except that scripts set the turn budgets and a full turn counts as a search or an answer.

    The row's total length replaces half of its random key, so that the device recognizes the row's last turn.
    """

    work: Work
    given: dict[tuple[int, ...], Script]  # by a rollout's key

    def __init__(self, **arguments: Any):
        super().__init__(**arguments, draw=_scripted_draw)

    def begin(self, work: Work, given: dict[tuple[int, ...], Script]) -> None:
        self.work, self.given = work, given
        self._turns: dict[int, list[int]] = {}  # by slot: lengths of the remaining turns
        self.extend_calls = 0

    def admit(self, state, pool, source, keys, turn_tokens, budget_end, rows=None) -> SamplerState:
        slots = np.arange(len(source)) if rows is None else rows
        keys, budgets = np.array(keys), np.ones(len(source), np.int32)
        for at in np.flatnonzero(np.asarray(source) >= 0):
            script = self.given[tuple(keys[at].tolist())]
            keys[at, 1] = self.work.length(script)
            budgets[at], *self._turns[int(slots[at])] = script.turns
        return super().admit(state, pool, source, keys, budgets, budget_end, rows)

    def extend(self, weights, state, ids, n, turn_tokens, rows=None) -> SamplerState:
        slots, budgets = np.arange(len(n)) if rows is None else rows, np.ones(len(n), np.int32)
        for at in np.flatnonzero(n):
            budgets[at] = self._turns[int(slots[at])].pop(0)
        self.extend_calls += 1
        return super().extend(weights, state, ids, n, budgets, rows)


class Ours:
    """This project's rollouts of a `Work`, with the components of a training run.

    Args:
      settings: config sections that override the defaults, as {"rollout": {"slots": 32}}; not `model`.
      search_s: seconds per search.
      dtype: of weights and products.
      sampler: the class of the sampler.
    """

    def __init__(
        self,
        work: Work,
        model: DecoderConfig,
        params: nnx.State,
        settings: dict[str, dict[str, Any]],
        search_s: float,
        dtype: str = "float32",
        sampler: type[ScriptedSampler] = ScriptedSampler,
    ):
        observation = max([n for s in work.scripts for n in s.observations], default=0)
        rollout = {
            "slots": work.slots,
            "samples": work.samples,
            "context_tokens": work.longest + 1,  # the longest rollout must not fill the context
            "prompt_tokens": work.prompt_tokens,
            "turn_tokens": max(n for s in work.scripts for n in s.turns),
            "obs_tokens": max(MIN_OBSERVATION_TOKENS, observation),
            "search_turns": max(len(s.turns) for s in work.scripts),
            "max_tokens_after_answer": 0,
        }
        if "model" in settings:
            raise UserError("--settings: found section model, accepted: others (all contenders share one dtype)")
        dtypes = {"dtype": dtype, "sampling_dtype": dtype}
        config = from_mapping(settings | {"rollout": rollout | settings.get("rollout", {}), "model": dtypes})
        mesh, n_ids = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1]), model.vocab_rows
        self.sampler = programs.make_sampler(config, model, mesh, _tables(n_ids), n_ids, (), sampler)
        prompts = work.prompts(n_ids)
        self._questions = [Question("scripted", str(i), "", (), "single") for i in range(len(prompts))]
        self._collector = Collector(
            self.sampler,
            Words(n_ids),
            ScriptedPassages(work.scripts, search_s),
            lambda question: prompts[int(question.id)],
            config.rollout,
            config.retrieval,
            _scripted_turns(work.scripts),
        )
        self._work, self._model = work, model
        placed = jax.device_put(params, param_shardings(params, SAMPLING, mesh))
        self._params = SamplingCopy(placed, None, jnp.dtype(dtype), mesh, in_int8=False, trained=False)(placed)

    def run(self, params: nnx.State | None = None) -> list[Trajectory]:
        """Samples all rollouts with `params`, a sampling copy; default: a copy of the initial parameters."""
        work, seed, step = self._work, 0, 0
        words = [sampling.id_words(q.source, q.id) for q in self._questions for _ in range(work.samples)]
        keys = sampling.row_keys(seed, step, words, [*range(work.samples)] * len(self._questions))
        self.sampler.begin(work, dict(zip(map(tuple, keys.tolist()), work.scripts, strict=True)))
        began = time.perf_counter()
        weights = self.sampler.weights(params or self._params)
        trajectories = self._collector.collect(
            weights, self._questions, work.samples, seed=seed, step=step, temperature=1.0
        )
        self._seconds = time.perf_counter() - began
        return trajectories

    def accounting(self) -> dict[str, Any]:
        """The utilization figures of the last run."""
        usage = self._collector.usage
        return {
            "row_use": round(usage.row_use, 3),
            "decode_steps": usage.decode_steps,
            "extend_calls": self.sampler.extend_calls,
            "extend_use": round(usage.extend_use, 3),
            "search_share": round(usage.search_s / self._seconds, 4),
            "host_share": round(usage.host_s / self._seconds, 4),
        }
