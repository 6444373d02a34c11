"""Searches that run while other rows decode (`rollout.overlap_search`)."""

import threading

import numpy as np
import pytest
from helpers import (
    ScriptedSampler,
    make_collector,
    make_sampler,
    question,
    random_params,
    rollout_section,
    tiny_config,
)
from helpers import retriever as real_retriever

from psearch_jax.rollout import search
from retrieval.protocol import RetrievalError, in_background

CONFIG = tiny_config(tied=False)
ROWS = 6


class Sampler(ScriptedSampler):
    """Counts the calls of `generate`."""

    calls, more = 0, threading.Condition()

    def generate(self, *arguments, **options):
        with self.more:
            self.calls += 1
            self.more.notify_all()
        return super().generate(*arguments, **options)


class OneAtATime:
    """The real service, which accepts no second batch before the first is answered."""

    def __init__(self):
        self._service, self._busy = real_retriever(), threading.Lock()

    def search(self, queries, k):
        assert self._busy.acquire(blocking=False), "two batches at once"
        try:
            return self._service.search(queries, k)
        finally:
            self._busy.release()


class Gone:
    def search(self, queries, k):
        raise RetrievalError("nobody answers")


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, seed=2)


@pytest.fixture(scope="module")
def sampler(tiny_tokenizer):
    made = make_sampler(tiny_tokenizer, CONFIG, cls=Sampler, yield_share=0.25)
    made.after = tiny_tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    return made


@pytest.fixture
def searches(sampler, monkeypatch):
    """Delays each background search until the next call of `generate`; returns one entry per search."""
    done = []

    def after_the_next_generate(run_search):
        at = sampler.calls

        def waited():
            with sampler.more:
                assert sampler.more.wait_for(lambda: sampler.calls > at, 60), "no row is decoded during the search"
            done.append(at)
            return run_search()

        return in_background(waited)

    monkeypatch.setattr(search, "in_background", after_the_next_generate)
    return done


@pytest.fixture
def run(tiny_tokenizer, sampler, params):
    """Two searches and an answer, with turns of many lengths and twice as many rollouts as slots."""
    encode, rng = tiny_tokenizer.encode_foreign, np.random.default_rng(0)
    word, query = encode("a")[0], encode("<search> Ada Lovelace ## Alan Turing </search>")
    answer = encode("<answer> Ada Lovelace </answer>")
    words = [[word] * n for n in rng.integers(0, 15, 3 * ROWS)]
    scripts = [a + query + b + query + c + answer for a, b, c in zip(*[iter(words)] * 3, strict=True)]

    def collected(service, overlap, **changes):
        rollout = rollout_section(slots=3, context_tokens=240, turn_tokens=60, overlap_search=overlap, **changes)
        questions = [question(i) for i in range(ROWS)]
        sampler.give(0, 0, [(q, 0) for q in questions], scripts)
        collector = make_collector(tiny_tokenizer, sampler, rollout, service)
        return collector.collect(sampler.weights(params), questions, 1, seed=0, step=0, temperature=1.0)

    return collected


def test_other_rows_decode_while_a_row_is_searched_for(run, searches):
    """Rows decode during a search, and get the same passages as without overlap, once."""
    ahead = run(OneAtATime(), True)
    assert len(searches) >= 5
    for ours, expected in zip(ahead, run(real_retriever(), False), strict=True):
        assert ours.status == expected.status == "answered" and len(ours.turns) == 3
        assert [t.queries for t in ours.turns] == [t.queries for t in expected.turns]
        assert [t.passages for t in ours.turns] == [t.passages for t in expected.turns]
        np.testing.assert_array_equal(ours.ids, expected.ids)
        np.testing.assert_array_equal(ours.mask, expected.mask)
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-5)


def test_an_initial_search_waits_for_the_one_in_progress(run, searches):
    """A retriever gets one batch at a time."""
    trajectories = run(OneAtATime(), True, initial_search=True)
    assert [len(t.turns) for t in trajectories] == [4] * ROWS and searches


def test_a_search_that_fails_ends_the_rollouts(run):
    """An error in the background thread is raised."""
    with pytest.raises(RetrievalError, match="nobody answers"):
        run(Gone(), True)
    assert all(t.status == "answered" for t in run(real_retriever(), True))
