"""Drafts of the next tokens: where they come from, and that they change no sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ScriptedSampler, make_sampler, random_params, started, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from psearch_jax.models import int8
from psearch_jax.rollout import drafts
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.sampler_state import Status

B, S, C, TURN = 8, 96, 8, 20
CONFIG = tiny_config()
EXACT = ("ids", "mask", "length", "turn_left", "budget_end", "automaton", "status", "key")


def by_definition(ids: list[int], n: int) -> list[int]:
    """The draft for one row, by trying every earlier occurrence of its last tokens."""
    last = len(ids) - 1
    for context in range(drafts.LONGEST, 0, -1):
        for end in range(last - 1, context - 2, -1):
            if ids[end - context + 1 : end + 1] == ids[len(ids) - context :]:
                copied = ids[end + 1 :]
                return [copied[i % len(copied)] for i in range(n)]
    return [-1] * n


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=4, max_size=4), st.sampled_from((1, 4)))
def test_a_draft_is_what_followed_the_last_tokens(rows, n):
    """A draft from the padding, from a shorter or earlier match, or from the last token itself: all slow, none wrong,
    so only this test would notice."""
    ids = np.zeros((4, 24), np.int32)
    for row, known in zip(ids, rows, strict=True):
        row[: len(known)] = known
    length = np.array([len(known) for known in rows], np.int32)
    got = jax.jit(drafts.copied, static_argnums=2)(ids, length, n)
    assert np.asarray(got).tolist() == [by_definition(known, n) for known in rows]


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 390, n).tolist() for n in rng.integers(3, 12, B)]


def keys(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (B, 2), np.uint32)


def turns(sampler, weights, seed: int, temperature) -> list:
    """The states after each of three turns, between which some tokens are appended."""
    rng = np.random.default_rng(seed)
    state, states = started(sampler, weights, prompts(seed), keys(seed), S, TURN), []
    for turn in range(3):
        if turn:
            n = rng.integers(1, C + 1, B).astype(np.int32)
            state = sampler.extend(weights, state, rng.integers(3, 390, (B, C)).astype(np.int32), n, TURN)
        state = sampler.generate(weights, state, temperature)
        states.append(jax.device_get(state))
    return states


def same(plain, drafted) -> None:
    for name in EXACT:
        np.testing.assert_array_equal(getattr(drafted, name), getattr(plain, name), err_msg=name)
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=2e-5)
    for ours, wanted in zip(jax.tree.leaves(drafted.cache), jax.tree.leaves(plain.cache), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-5)


@pytest.mark.parametrize(("n", "options"), [(1, {}), (3, {"top_k": 5, "top_p": 0.8}), (7, {})], ids=str)
def test_the_samples_are_those_of_plain_decoding(tiny_tokenizer, n, options):
    """A draft accepted because it is likely and not because it is what the row's key draws would change what is
    sampled, and by that the distribution that training corrects for."""
    plain = make_sampler(tiny_tokenizer, CONFIG, **options)
    drafting = make_sampler(tiny_tokenizer, CONFIG, draft_tokens=n, **options)
    accepted = 0
    for seed in range(3):
        weights = SamplingWeights(random_params(CONFIG, seed=seed, scale=0.2), None)
        for temperature in (0.0, 0.4, np.linspace(0, 1.2, B, dtype=np.float32)):
            wanted, got = (turns(one, weights, seed, temperature) for one in (plain, drafting))
            for before, after in zip(wanted, got, strict=True):
                same(before, after)
            sampled = int(got[-1].mask.sum())
            accepted += sampled - int(got[-1].row_steps.sum())
            assert got[-1].row_steps.sum() <= sampled <= got[-1].row_steps.sum() + got[-1].drafted.sum()
            assert wanted[-1].row_steps.sum() == sampled and not wanted[-1].drafted.any()
    assert accepted > 20


def test_drafts_with_a_cache_in_int8(tiny_tokenizer):
    """A scale of an accepted draft that is not written would scale its keys by 0."""
    weights = SamplingWeights(int8.with_kernels(*[random_params(CONFIG, seed=1)] * 2), None)
    one, other = (
        make_sampler(tiny_tokenizer, CONFIG, int8_weights=True, int8_cache=True, draft_tokens=n) for n in (0, 3)
    )
    wanted, got = (turns(sampler, weights, 1, 0.4)[-1] for sampler in (one, other))
    # Drafts of one step attend to each other before they are rounded, so a few draws may differ.
    equal = [int(np.argmin(np.append(a == b, False))) for a, b in zip(wanted.ids, got.ids, strict=True)]
    assert np.mean(np.array(equal) >= wanted.length) >= 0.5
    for b, n in enumerate(equal):
        known = min(n, int(wanted.length[b])) - 1
        for name in ("k_scale", "v_scale"):
            ours, theirs = (getattr(state.cache, name)[:, b, :, :known] for state in (got, wanted))
            np.testing.assert_allclose(ours, theirs, rtol=0.1)
            assert np.all(ours > 0)


@pytest.mark.parametrize(("period", "accepted"), [(1, 1.0), (4, 1.0), (0, 0.0)])
def test_all_or_none_accepted(tiny_tokenizer, period, accepted):
    """Extremes with a known number of steps: text that repeats itself, and text in which no token occurs twice."""
    n, length = 3, 40
    weights = SamplingWeights(random_params(CONFIG, seed=1), None)
    sampler = make_sampler(tiny_tokenizer, CONFIG, cls=ScriptedSampler, draft_tokens=n)
    text = (list(range(10, 10 + period)) * 60 if period else list(range(10, 100)))[: length + 6]
    prompt, sampler.scripts = text[:6], {tuple(keys(0)[0].tolist()): text[6:]}
    state = started(sampler, weights, [prompt] + [None] * (B - 1), keys(0), S, length)
    state = jax.device_get(sampler.generate(weights, state, 1.0))
    assert Status(state.status[0]) == Status.TURN_FULL and state.mask[0].sum() == length
    if accepted:
        assert state.steps == -(-length // (n + 1)) == state.row_steps[0] and state.drafted[0] == n * state.steps
    else:
        assert state.steps == length == state.row_steps[0] and state.drafted[0] == 0


def test_a_draft_past_the_end_of_the_context(tiny_tokenizer):
    """A draft whose positions lie behind the row's last one must be neither written nor sampled."""
    weights = SamplingWeights(random_params(CONFIG, seed=1), None)
    states = []
    for n in (0, 7):
        sampler = make_sampler(tiny_tokenizer, CONFIG, cls=ScriptedSampler, draft_tokens=n)
        sampler.scripts = {tuple(key): [5] * 60 for key in keys(0).tolist()}
        state = started(sampler, weights, [[5] * (3 + i) for i in range(B)], keys(0), 32, 60, 32)
        states.append(jax.device_get(sampler.generate(weights, state, 1.0)))
    same(*states)
    assert np.all(states[1].length == 32) and set(states[1].status.tolist()) == {int(Status.CONTEXT_FULL)}


def test_a_logit_that_is_not_finite_behind_a_draft(tiny_tokenizer):
    """A row must end where its logits fail, and not earlier because a draft there is computed as well."""
    config = tiny_config(tied=False)  # so that a broken embedding breaks only the logits after its token
    params = random_params(config, seed=1)
    params["embedding"] = params["embedding"].replace(params["embedding"][...].at[7].set(jnp.nan))
    broken = SamplingWeights(params, None)
    states = []
    for n in (0, 3):
        sampler = make_sampler(tiny_tokenizer, config, cls=ScriptedSampler, draft_tokens=n)
        sampler.scripts = {tuple(key): [5] * 9 + [7] + [5] * 20 for key in keys(0).tolist()}
        state = started(sampler, broken, [[5, 5, 5]] * B, keys(0), S, TURN)
        states.append(jax.device_get(sampler.generate(broken, state, 1.0)))
    for name in EXACT:
        np.testing.assert_array_equal(getattr(states[1], name), getattr(states[0], name), err_msg=name)
    assert set(states[1].status.tolist()) == {int(Status.NOT_FINITE)} and states[1].mask.sum(1).tolist() == [10] * B
    assert states[1].steps < states[0].steps
