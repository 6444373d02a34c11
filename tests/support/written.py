"""Rollouts whose tokens the test writes: complete trajectories with every other part real, each of them checked."""

from dataclasses import replace

import numpy as np
from helpers import make_collector, question, rollout_section, tiny_config

from psearch_jax.text import tags

CONFIG = tiny_config(tied=False)


def say(tokenizer, *parts) -> list[int]:
    """The tokens of texts; an int is a token id itself, -1 a sampled one."""
    out: list[int] = []
    for part in parts:
        out += [part] if isinstance(part, int) else tokenizer.encode_foreign(part)
    return out


def check(trajectory, tokenizer, script, rollout) -> None:
    """Checks what must hold for any trajectory, whatever the model wrote."""
    t = trajectory
    assert t.ids.dtype == np.int32 and t.mask.dtype == bool and t.logprobs.dtype == np.float32
    assert len(t.ids) == len(t.mask) == len(t.logprobs) <= rollout.context_tokens
    assert not t.mask[: t.prompt_length].any()
    assert np.all(t.logprobs[~t.mask] == 0) and np.all(t.logprobs[t.mask] < 0) and np.all(np.isfinite(t.logprobs))
    sampled = t.ids[t.mask].tolist()
    script = [*script, *[tokenizer.hf.convert_tokens_to_ids("<|im_end|>")] * (len(sampled) - len(script))]
    assert all(a == b for a, b in zip(sampled, script, strict=False) if b >= 0), "the record is not what was sampled"
    assert sum(turn.n_sampled for turn in t.turns) == len(sampled)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], t.mask.astype(int), [0]])))
    runs = [t.ids[a:b] for a, b in edges.reshape(-1, 2)]
    sampled_turns = [turn for turn in t.turns if turn.n_sampled]
    assert len(sampled_turns) <= rollout.search_turns + 1 and len(t.turns) - len(sampled_turns) <= 2
    assert [len(r) for r in runs] == [turn.n_sampled for turn in sampled_turns]
    observed = tokenizer.decode(t.ids[~t.mask])
    assert all(text in observed for turn in t.turns for _, text in turn.seen)
    for turn in t.turns:
        assert len(turn.queries) == len(turn.passages) <= tags.MAX_SUB_QUERIES
        assert all(q.strip() == q and q for q in turn.queries)
        assert turn.answer is None or (turn is t.turns[-1] and t.status == "answered")


def collect(
    sampler, tokenizer, params, scripts, rollout=None, service=None, samples=1, questions=None, one_bucket=False
):
    """Trajectories of scripted rollouts, all checked. scripts: one list of tokens per question (and sample)."""
    rollout = rollout or rollout_section(samples=samples)
    questions = questions or [question(i) for i in range(len(scripts) // samples)]
    pairs = [(q, s) for q in questions for s in range(samples)]
    sampler.give(0, 0, pairs, scripts)
    collector = make_collector(tokenizer, sampler, rollout, service)
    if one_bucket:
        shapes = collector.shapes
        shapes = replace(shapes, observations=shapes.observations[-1:], spans=shapes.spans[-1:])
        collector = replace(collector, shapes=shapes)
    out = collector.collect(collector.sampler.weights(params), questions, samples, seed=0, step=0, temperature=1.0)
    assert [(t.question, t.sample) for t in out] == pairs
    for trajectory, script in zip(out, scripts, strict=True):
        check(trajectory, tokenizer, script, rollout)
    return out
