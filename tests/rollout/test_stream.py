"""Rollouts that outlive the call in which they began: suspended, continued with newer weights, saved and restored."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
from helpers import make_collector, make_learner, make_sampler, question, random_params, retriever, rollout_section
from written import CONFIG

from psearch_jax.rl.batch import make_batch
from psearch_jax.rollout.rollouts import Rollout
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.stream import InFlight
from psearch_jax.train.checkpointing import in_flight
from psearch_jax.train.state import init_state

BATCH, SAMPLES = 2, 2
ROLLOUT = rollout_section(slots=6, samples=SAMPLES, turn_tokens=24, prompt_tokens=96)


@pytest.fixture(scope="module")
def policies():
    """Three versions of a policy that differ clearly."""
    return [SamplingWeights(random_params(CONFIG, seed=seed), None) for seed in (2, 3, 4)]


def batch(i: int) -> list:
    """Questions of different lengths, in another order of lengths in every batch."""
    words = ["Who is older?", "Who, of the two whom everybody knows, is the older one?", "Who?"]
    return [question(f"{i}-{j}", words[(i + j) % 3]) for j in range(BATCH)]


@functools.cache  # compiled once for all tests
def shared_sampler(tokenizer):
    return make_sampler(tokenizer, CONFIG, yield_share=0.2)


def make_stream(tokenizer, rollout=ROLLOUT):
    return make_collector(tokenizer, shared_sampler(tokenizer), rollout, retriever()).stream(SAMPLES, seed=0)


def collected(stream, policies, ahead: int, batches: int = 4, between=lambda stream: stream) -> list:
    """The trajectories of each batch; the weights change with every batch."""
    out, added = [], 0
    for version in range(batches):
        while len(stream) <= ahead:
            stream.add(batch(added), step=added)
            added += 1
        weights = policies[version % len(policies)]
        out.append(stream.collect(lambda w=weights: w, version, 1.0))
        stream = between(stream)
    return out


def ids(trajectories) -> list[str]:
    return [t.question.id for t in trajectories]


def same(ours, theirs) -> bool:
    return all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs) and a.turns == b.turns
        for a, b in zip(sum(ours, []), sum(theirs, []), strict=True)
    ) and [t.versions for one in ours for t in one] == [t.versions for one in theirs for t in one]


@pytest.mark.parametrize("overlap", [False, True])
def test_suspending_changes_no_token(tiny_tokenizer, policies, overlap):
    """With equal weights, suspended rollouts sample what they would have sampled at once, also during a search."""
    rollout = replace(ROLLOUT, overlap_search=overlap)
    ahead = collected(make_stream(tiny_tokenizer, rollout), policies[:1], ahead=2)
    at_once = collected(make_stream(tiny_tokenizer, rollout), policies[:1], ahead=0)
    assert sum(len(t.versions) > 1 for one in ahead for t in one) >= 3, "no rollout was continued"
    for ours, theirs in zip(sum(ahead, []), sum(at_once, []), strict=True):
        assert (ours.question, ours.sample, ours.status) == (theirs.question, theirs.sample, theirs.status)
        assert ours.turns == theirs.turns and np.array_equal(ours.ids, theirs.ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_every_token_has_the_weights_and_the_log_prob_it_was_sampled_with(tiny_tokenizer, policies):
    """Every token is recorded with the version and the log-prob of the weights that sampled it."""
    trajectories = sum(collected(make_stream(tiny_tokenizer), policies, ahead=2, batches=5), [])
    learner, optimizer = make_learner(tiny_tokenizer, CONFIG, ROLLOUT.context_tokens)
    data = make_batch(trajectories, np.ones(len(trajectories), np.float32), ROLLOUT.context_tokens)
    scores = [learner.score(init_state(p.params, optimizer, learner.mesh).params, data) for p in policies]
    continued = 0
    for i, t in enumerate(trajectories):
        starts = [*t.versions, (len(t.ids), None)]
        assert starts == sorted(starts, key=lambda pair: pair[0]) and starts[0][0] == t.prompt_length
        for (start, version), (end, _) in zip(starts, starts[1:], strict=False):
            mask = t.mask[start:end]
            np.testing.assert_allclose(t.logprobs[start:end], scores[version % 3][i, start:end] * mask, atol=2e-4)
        continued += len(t.versions) > 1
    assert continued >= 3


def test_no_token_is_older_than_allowed(tiny_tokenizer, policies):
    """Batches are collected in order, with weights at most `ahead` steps old."""
    for ahead in (1, 2):
        for version, trajectories in enumerate(collected(make_stream(tiny_tokenizer), policies, ahead, batches=6)):
            assert ids(trajectories) == [q.id for q in batch(version) for _ in range(SAMPLES)]
            assert all(0 <= version - v <= ahead for t in trajectories for _, v in t.versions)


def test_a_restored_stream_continues_to_the_bit(tiny_tokenizer, policies):
    """Rollouts in flight that were saved and restored continue bit for bit."""

    def through_a_file(stream):
        record = json.loads(json.dumps(in_flight.gather_in_flight(stream.in_flight(), SAMPLES)))
        other = make_stream(tiny_tokenizer)
        other.restore(in_flight.restore_in_flight(record, SAMPLES))
        return other

    straight = collected(make_stream(tiny_tokenizer), policies, ahead=2, batches=5)
    resumed = collected(make_stream(tiny_tokenizer), policies, 2, 5, through_a_file)
    assert same(straight, resumed) and any(len(t.versions) > 1 for one in straight for t in one)


def test_a_snapshot_does_not_change_afterwards(tiny_tokenizer, policies):
    """A checkpoint of an interrupted step holds the rollouts as they were before it."""
    stream, other = make_stream(tiny_tokenizer), make_stream(tiny_tokenizer)
    first = collected(stream, policies, ahead=2, batches=1)
    before = stream.in_flight()
    saved = in_flight.gather_in_flight(before, SAMPLES)
    stream.add(batch(3), step=3)
    again = [stream.collect(lambda: policies[1], 1, 1.0)]
    assert in_flight.gather_in_flight(before, SAMPLES) == saved
    other.restore(before)
    other.add(batch(3), step=3)
    assert same(again, [other.collect(lambda: policies[1], 1, 1.0)]) and first


def test_fewer_slots_after_a_resume(tiny_tokenizer, policies):
    """Rollouts that find no slot in a resumed run start again from their prompts."""
    stream = make_stream(tiny_tokenizer, replace(ROLLOUT, slots=9))
    collected(stream, policies, ahead=2, batches=2)
    assert len(stream.in_flight().suspended) > 2
    small = make_stream(tiny_tokenizer, replace(ROLLOUT, slots=2))
    small.restore(stream.in_flight())
    for version in (2, 3):
        trajectories = small.collect(lambda w=policies[version % 3]: w, version, 1.0)
        assert ids(trajectories) == [q.id for q in batch(version) for _ in range(SAMPLES)]


def test_rollouts_of_two_processes_continue_in_one_in_order(monkeypatch):
    """One process continues the rollouts of two in the order of their batches."""

    def of(process: int) -> InFlight:
        waiting = [
            Rollout(
                order, question(f"{order // SAMPLES * 2 + process}"), order % SAMPLES, [1, 2], np.zeros(2, np.uint32)
            )
            for order in range(4 * SAMPLES)
        ]
        return InFlight(4 * SAMPLES, (range(2 * SAMPLES), range(2 * SAMPLES, 4 * SAMPLES)), tuple(waiting), (), {})

    monkeypatch.setattr(in_flight.processes, "allgather", lambda _: [of(0), of(1)])
    taken_up = in_flight.restore_in_flight(in_flight.gather_in_flight(of(0), SAMPLES), SAMPLES)
    assert [one.order for one in taken_up.waiting] == list(range(8 * SAMPLES))
    assert [one.question.id for one in taken_up.waiting] == [str(i // SAMPLES) for i in range(8 * SAMPLES)]
    assert taken_up.batches == (range(4 * SAMPLES), range(4 * SAMPLES, 8 * SAMPLES))
