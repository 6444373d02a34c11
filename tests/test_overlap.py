"""Searches that run while other rows decode (`rollout.overlap_search`)."""

import subprocess
import sys
import threading
from pathlib import Path

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

from psearch_jax.rollout import inflight
from psearch_jax.rollout.inflight import in_background
from retrieval.protocol import RetrievalError

CONFIG = tiny_config(tied=False)
ROWS = 6


class Sampler(ScriptedSampler):
    """Counts how often `generate` was asked for."""

    calls, more = 0, threading.Condition()

    def generate(self, *arguments, **options):
        with self.more:
            self.calls += 1
            self.more.notify_all()
        return super().generate(*arguments, **options)


class OneAtATime:
    """The real service, which takes no second batch before the first is answered."""

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
    """Each search in the background begins when the next `generate` was asked for; how many there were."""
    done = []

    def behind_the_next_generate(search):
        at = sampler.calls

        def waited():
            with sampler.more:
                assert sampler.more.wait_for(lambda: sampler.calls > at, 60), "nothing decodes meanwhile"
            done.append(at)
            return search()

        return in_background(waited)

    monkeypatch.setattr(inflight, "in_background", behind_the_next_generate)
    return done


@pytest.fixture
def run(tiny_tokenizer, sampler, params):
    """Two searches and an answer after turns of many lengths, twice as many rollouts as slots."""
    encode, rng = tiny_tokenizer.encode_foreign, np.random.default_rng(0)
    word, query = encode("a")[0], encode("<search> Ada Lovelace ## Alan Turing </search>")
    answer = encode("<answer> Ada Lovelace </answer>")
    words = [[word] * n for n in rng.integers(0, 15, 3 * ROWS)]
    scripts = [a + query + b + query + c + answer for a, b, c in zip(*[iter(words)] * 3, strict=True)]

    def collected(service, overlap, **changes):
        rollout = rollout_section(slots=3, context_tokens=240, turn_tokens=60, overlap_search=overlap, **changes)
        asked = [question(i) for i in range(ROWS)]
        sampler.give(0, 0, [(q, 0) for q in asked], scripts)
        collector = make_collector(tiny_tokenizer, sampler, rollout, service)
        return collector.collect(params, asked, 1, seed=0, step=0, temperature=1.0), collector.usage

    return collected


def test_other_rows_decode_while_a_row_is_searched_for(run, searches):
    """A search that is waited for all the same; passages of another row, or of the search before; a row that is
    extended twice, or never."""
    ahead, _ = run(OneAtATime(), True)
    assert len(searches) >= 5
    for ours, wanted in zip(ahead, run(real_retriever(), False)[0], strict=True):
        assert ours.status == wanted.status == "answered" and len(ours.turns) == 3
        assert [t.queries for t in ours.turns] == [t.queries for t in wanted.turns]
        assert [t.passages for t in ours.turns] == [t.passages for t in wanted.turns]
        np.testing.assert_array_equal(ours.ids, wanted.ids)
        np.testing.assert_array_equal(ours.mask, wanted.mask)
        np.testing.assert_allclose(ours.logprobs, wanted.logprobs, atol=1e-5)


def test_an_initial_search_beside_them(run, searches):
    """Two batches at once in a retriever that takes one: the first search of a new row comes while others are out."""
    found, _ = run(OneAtATime(), True, initial_search=True)
    assert [len(t.turns) for t in found] == [4] * ROWS and searches


def test_one_that_fails_ends_the_rollouts(run):
    """An error lost in its thread: rows that wait for passages for ever, or go on without."""
    with pytest.raises(RetrievalError, match="nobody answers"):
        run(Gone(), True)
    assert all(t.status == "answered" for t in run(real_retriever(), True)[0])


def test_no_end_of_the_program_waits_for_one():
    """A preempted machine whose retriever is gone would wait out the client's patience before it may stop."""
    code = (
        "import time; from psearch_jax.rollout.inflight import in_background; in_background(lambda: time.sleep(900))"
    )
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=300).returncode == 0
