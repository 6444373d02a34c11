"""The shipped policy for tool calls: what the device samples is what the host parses."""

import numpy as np
import pytest
from calls import count_ends

from psearch_jax.assembly import build
from psearch_jax.closed_world.question_forms import calculated_forms, questions
from psearch_jax.config import from_mapping
from psearch_jax.text.dialects import ToolCalls

CONFIG = {
    "model": {"path": "toy", "dtype": "float32", "sampling_dtype": "float32"},
    "data": {"source": "closed_world", "template": "toy"},
    "retrieval": {"topk": 2},
    "rollout": {
        "dialect": "tool_calls",
        "tools": "calculator",
        "context_tokens": 448,
        "prompt_tokens": 64,
        "turn_tokens": 64,
        "obs_tokens": 144,
        "num_buckets": 1,
    },
}


@pytest.fixture(scope="module")
def sampled():
    """The parts of a run, and 1,000 trajectories, a part of them at a temperature at which turns break."""
    parts = build.engine(from_mapping(CONFIG))
    asked = [
        question
        for kind in ("parallel", "sequential")
        for forms in ([], calculated_forms(kind))
        for question in questions(parts.world, "train", kind, 25, 0, forms)
    ]
    weights, trajectories = parts.sampling_weights(), []
    for step, temperature in enumerate((1.0, 1.6)):
        trajectories += parts.collector.collect(weights, asked, 5, seed=0, step=step, temperature=temperature)
    return parts, trajectories


@pytest.mark.slow
def test_the_device_stops_where_the_host_parses(sampled):
    """A row ends at the first token that completes a stop string, at a stop token, or at its budget, never between."""
    parts, trajectories = sampled
    assert len(trajectories) == 1000 and isinstance(parts.collector.dialect, ToolCalls)
    ends = count_ends(parts.tokenizer, parts.collector.dialect, trajectories, CONFIG["rollout"]["turn_tokens"])
    assert ends["answer"] > 500 and ends["stop token"] > 1000, ends


@pytest.mark.slow
def test_the_shipped_policy_calls_both_tools(sampled):
    """The cold start taught the format and both tools, and to call one of them, or both at once."""
    first = sampled[1][:500]
    assert np.mean([t.status == "answered" for t in first]) > 0.9 < np.mean([t.well_formed for t in first])
    calls = [turn.calls for t in first for turn in t.executed]
    assert {"search", "calculator"} == {call.tool for turn in calls for call in turn}
    assert any(len({call.tool for call in turn}) == 2 for turn in calls) and any(len(turn) == 1 for turn in calls)
    results = [p for t in first for turn in t.executed for ranking in turn.passages for p in ranking]
    assert np.mean([passage.id == "tool error" for passage in results]) < 0.2
