"""The simulation of decode steps against the sampler itself."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import make_collector, make_sampler, question, random_params, retriever, rollout_section
from written import CONFIG

from psearch_jax.planning.simulation import Lengths, simulate


@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_it_counts_what_the_sampler_counts(tiny_tokenizer, share, staleness):
    """Gains that the simulation promises and no run has."""
    # An end of message is the end of the rollout: otherwise lengths do not say whether a row waits.
    rollout = rollout_section(slots=5, samples=2, yield_share=share, turn_tokens=24, after_eos="end")
    params = random_params(CONFIG, seed=5, scale=0.4)
    sampler = make_sampler(tiny_tokenizer, CONFIG, yield_share=share)
    collector = make_collector(tiny_tokenizer, sampler, rollout, retriever())
    stream, batches, counted = collector.stream(2, seed=0), [], []
    for step in range(5 + staleness):
        if step == 0:
            for ahead in range(staleness):
                stream.add([question(f"{ahead}-{i}") for i in range(3)], ahead)
        stream.add([question(f"{step + staleness}-{i}") for i in range(3)], step + staleness)
        batches.append(stream.collect(sampler.weights(params), step, 1.0))
        counted.append(stream.spent())
    lengths = [[Lengths.of(t, rollout.context_tokens) for t in batch] for batch in batches]
    simulated = simulate(lengths, rollout.slots, staleness, share)
    assert [(one.decode_steps, one.row_steps) for one in simulated] == [
        (usage.decode_steps, usage.row_steps) for usage in counted[: len(simulated)]
    ]
    assert len(simulated) == 5 and len({len(one.turns) for batch in lengths for one in batch}) > 1


def test_staleness_fills_the_slots_of_the_last_rollouts():
    """By hand: one long rollout among short ones holds each step, unless the next ones use the other slots."""
    batches = [[Lengths((n,)) for n in (10, 1, 1, 1)] for _ in range(12)]
    alone = simulate(batches, slots=2, staleness=0, yield_share=0.5)
    assert {one.decode_steps for one in alone} == {10}
    ahead = simulate(batches, slots=2, staleness=2, yield_share=0.5, first=2)
    mean = np.mean([one.decode_steps for one in ahead])
    assert 6.5 <= mean < 8, "13 tokens a step on 2 slots need at least 6.5 decode steps"
    assert any(one.continued_tokens for one in ahead) and not any(one.continued_tokens for one in alone)
