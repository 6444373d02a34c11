"""Tests with a real model: `make test-real PSEARCH_QWEN=DIR` (Qwen2.5-0.5B-Instruct) or `PSEARCH_SMOLLM2=DIR`.

Random weights are forgiving: their distributions are flat, nothing in them depends on the twentieth layer, and no
token of a tiny vocabulary ends a tag in its middle. These tests roll out, score, export and shard a trained model on
two short turns (support/real_policy.py), over passages written for the tests or over the corpus that PSEARCH_CORPUS
names. Their figures are printed in one table at the end of the run.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import check_template, count_ends, turns_of

MODEL = os.environ.get("PSEARCH_QWEN") or os.environ.get("PSEARCH_SMOLLM2", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(7200),  # sampling 300 trajectories takes half an hour where two cores do other work, too
    pytest.mark.skipif(
        not MODEL, reason="neither PSEARCH_QWEN nor PSEARCH_SMOLLM2 names real weights (make test-real)"
    ),
]
MARGIN = 1e-3  # float32 logits closer to each other than this are a tie
SAMPLED = (12, 25)  # questions and samples of each: 300 trajectories


@pytest.fixture(scope="module")
def loaded():
    """(shape, float32 weights), the start of all tests below."""
    from psearch_jax.models import hf

    return hf.load_hf(MODEL)


@pytest.fixture(scope="module")
def policy(loaded):
    """The policy in float32."""
    from real_policy import Policy

    return Policy.make(MODEL, *loaded)


@pytest.fixture(scope="module")
def greedy(policy):
    from real_policy import GREEDY

    return policy.collect(GREEDY, temperature=0.0)


@pytest.fixture(scope="module")
def sampled(loaded):
    """300 trajectories at temperature 1, sampled in large batches."""
    from real_policy import Policy

    return Policy.make(MODEL, *loaded, slots=100).collect(*SAMPLED)


@pytest.fixture
def figure(record_property):
    """Adds a line to the table at the end of the run (tests/conftest.py)."""

    def add(what: str, value: str) -> None:
        record_property("figure", [what, value])

    return add


@pytest.fixture(autouse=True)
def memory_back():
    """Frees what a test loaded before the next one loads."""
    yield
    gc.collect()


def summary(values: np.ndarray) -> str:
    return f"mean {values.mean():.2g}, 99% {np.quantile(values, 0.99):.2g}, largest {values.max():.2g}"


def torch_model(directory, dtype):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


def torch_logits(model, ids) -> np.ndarray:
    """[S, V] float32 of one row."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(ids)[None], dtype=torch.long)).logits[0].float().numpy()


def torch_logprobs(model, trajectory, size) -> np.ndarray:
    """Log-probs of the sampled tokens, over the tokenizer's token ids only."""
    logits = torch_logits(model, trajectory.ids)[:, :size].astype(np.float64)
    at = np.flatnonzero(trajectory.mask)
    rows = logits[at - 1]
    rows -= rows.max(axis=-1, keepdims=True)
    return rows[np.arange(len(at)), trajectory.ids[at]] - np.log(np.exp(rows).sum(axis=-1))


@functools.cache
def _forward(graph):
    from flax import nnx

    def logits(params, ids):
        model = nnx.merge(graph, params)
        return model.logits(model.hidden(ids)[0][0], 1.0, model.config.vocab_rows)

    return jax.jit(logits)


def our_logits(graph, params, ids) -> np.ndarray:
    """[S, V] float32 of one row from one forward pass without a cache; rows are padded to one width."""
    from real_policy import CONTEXT

    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_forward(graph)(params, padded))[: len(ids)]


def test_logprobs_equal_those_of_transformers_in_float32(policy, sampled, figure):
    """A wrong rotation, norm or bias that tiny random weights hide, or a mask that is off by one after the
    passages."""
    some = sampled[:: len(sampled) // 12]
    assert any(len(turns_of(t)) > 1 for t in some), "no trajectory of several turns"
    theirs, size = torch_model(MODEL, "float32"), policy.engine.tokenizer.size
    ours = policy.score(some)
    gaps = np.concatenate([np.abs(o - torch_logprobs(theirs, t, size)) for o, t in zip(ours, some, strict=True)])
    figure(f"log-probs and transformers', float32, {len(gaps)} ids", summary(gaps))
    assert gaps.max() < 2e-3


def test_logprobs_equal_those_of_transformers_in_bfloat16(policy, sampled, loaded, figure):
    """In 16 bits no two programs agree exactly: ours must be about as close to float32 as transformers is."""
    from real_policy import Policy

    some = sampled[:: len(sampled) // 12]
    exact = np.concatenate(policy.score(some))
    half = np.concatenate(Policy.make(MODEL, *loaded, dtype="bfloat16").score(some))
    theirs, size = torch_model(MODEL, "bfloat16"), policy.engine.tokenizer.size
    other = np.concatenate([torch_logprobs(theirs, t, size) for t in some])
    figure(f"log-probs in bfloat16 and in float32, {len(exact)} ids", summary(np.abs(half - exact)))
    figure("the same of transformers", summary(np.abs(other - exact)))
    assert np.abs(half - exact).mean() < 1.5 * np.abs(other - exact).mean() < 0.1
    assert np.abs(half - other).mean() < 0.1


def test_greedy_decoding_is_one_forward_pass(policy, loaded, greedy, figure):
    """A cache whose positions shift after an observation, or a prefill that attends to padding: each turn looks
    plausible but comes from another model. Where the best two logits are nearly equal, either token may be chosen."""
    from psearch_jax.models import decoder

    graph, params = decoder.graphdef(loaded[0], jnp.float32), loaded[1]
    count = ties = 0
    for trajectory in greedy:
        at = np.flatnonzero(trajectory.mask)
        logits = our_logits(graph, params, trajectory.ids)[at - 1][:, : policy.engine.tokenizer.size]
        deficit = logits.max(axis=-1) - logits[np.arange(len(at)), trajectory.ids[at]]
        assert (deficit <= MARGIN).all(), f"{trajectory.question.text}: {deficit.max()} below the best logit"
        count, ties = count + len(at), ties + int((deficit > 0).sum())
    assert sum(len(turns_of(t)) > 1 for t in greedy) >= 2, "too few trajectories of several turns"
    figure(f"greedy ids that one forward pass gives, of {count}", f"{count - ties}; ties within {MARGIN:g}: {ties}")


def test_the_device_stops_where_the_host_reads_a_tag(policy, sampled, figure):
    """Many of the 150,000 tokens contain the end of a tag and more text. A row that runs past a tag learns from text
    that the host never read, and one that stops early is cut."""
    from real_policy import TURN_TOKENS

    engine = policy.engine
    ends = count_ends(engine.tokenizer, engine.collector.dialect, sampled, TURN_TOKENS)
    assert len(sampled) >= 300 and min(ends[how] for how in ("search", "answer", "budget")) > 0, ends
    counts = ", ".join(f"{n} at {name}" for name, n in ends.items())
    figure(f"turns of {len(sampled)} trajectories that end alike on device and host", counts)


@pytest.mark.parametrize("directory", [MODEL, os.environ.get("PSEARCH_QWEN3", "")], ids=["model", "Qwen3"])
def test_tool_calls_are_those_of_the_chat_template(directory):
    """A policy that was trained on native calls sees other text around them than in its training data."""
    from psearch_jax.rollout.calculator import CALCULATOR
    from psearch_jax.rollout.tools import SEARCH_SCHEMA
    from psearch_jax.text.dialects import ToolCalls
    from psearch_jax.text.tokenizer import Tokenizer

    if not directory:
        pytest.skip("PSEARCH_QWEN3 names no directory with Qwen3's tokenizer")
    tokenizer = Tokenizer.load(directory)
    if "tool_call" not in tokenizer.hf.chat_template:
        pytest.skip(f"{directory}: the chat template writes no tool calls")
    check_template(ToolCalls(tokenizer, 200, schemas=[SEARCH_SCHEMA, CALCULATOR.schema]))


def test_the_device_stops_where_the_host_reads_a_call(loaded, figure):
    """Real tokens split the stop strings in other places than the toy's, and a reply is cut or runs on. Without
    training, the 0.5B writes calls as bare JSON, which are none."""
    from real_policy import TOOL_CALLS, Policy
    from real_questions import questions

    policy = Policy.make(MODEL, *loaded, slots=64, rollout=TOOL_CALLS)
    if "tool_call" not in (policy.engine.tokenizer.hf.chat_template or ""):
        pytest.skip(f"{MODEL}: the chat template writes no tool calls")
    count = len(questions())
    trajectories = policy.collect(count, -(-1000 // count))
    dialect = policy.engine.collector.dialect
    ends = count_ends(policy.engine.tokenizer, dialect, trajectories, TOOL_CALLS["turn_tokens"])
    called = sum(bool(t.executed) for t in trajectories)
    assert len(trajectories) >= 1000 and min(ends[how] for how in ("answer", "stop token", "budget")) > 100, ends
    counts = ", ".join(f"{n} at {name}" for name, n in ends.items())
    figure(f"turns of {len(trajectories)} trajectories with tool calls that end alike", f"{counts}; {called} call")


VARIANTS = {
    "float32": ({}, 1e-3),
    "bfloat16": ({"sampling_dtype": "bfloat16", "dtype": "bfloat16"}, 0.05),
    "LoRA": ({"sampling_dtype": "bfloat16", "dtype": "bfloat16"}, 0.05),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_sampler_is_close_to_its_trainer(policy, loaded, variant, figure):
    """Samples of another policy that are trained on as the policy's own: importance ratios that no update explains."""
    from real_policy import Policy, gap

    fields, bound = VARIANTS[variant]
    model, params = loaded
    if variant == "float32":
        own = policy
    elif variant == "LoRA":
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        own = Policy.make(MODEL, model, params, adapters(model), **fields)
    else:
        own = Policy.make(MODEL, model, params, **fields)
    rollouts = own.collect(12)
    differences = gap(rollouts, own.score(rollouts))
    figure(f"sampler and trainer, {variant}, {len(differences)} ids", summary(differences))
    assert differences.mean() < bound


def adapters(model):
    """Random adapters, none of them 0, whose contribution is small compared with the weights."""
    from real_policy import ALPHA, RANK

    from psearch_jax.config import Lora
    from psearch_jax.models import lora

    rng = np.random.default_rng(0)
    fresh = lora.init_adapters(model, Lora(RANK, ALPHA), 0)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 2e-3, x.shape), jnp.float32), fresh)


@pytest.mark.parametrize("with_adapters", [False, True], ids=["weights", "LoRA"])
def test_an_export_is_the_same_model(loaded, greedy, tmp_path, with_adapters, figure):
    """An export that is not the trained model: a transposed kernel, or an adapter merged with another scale."""
    from real_policy import ALPHA, RANK

    from psearch_jax.config import Lora
    from psearch_jax.models import decoder, hf, lora

    (model, params), record = loaded, None
    if with_adapters:
        record = Lora(RANK, ALPHA)
        params = lora.join_adapters(params, adapters(model))
    hf.save_hf(params, model, MODEL, tmp_path / "exported", lora=record)
    graph = decoder.graphdef(model, jnp.float32, lora=record)
    theirs = torch_model(tmp_path / "exported", "float32")
    difference = added = 0.0
    for trajectory in greedy[:3]:
        ours, exported = our_logits(graph, params, trajectory.ids), torch_logits(theirs, trajectory.ids)
        difference = max(difference, float(np.abs(ours - exported).max() / np.abs(ours).max()))
        if with_adapters:
            plain = our_logits(decoder.graphdef(model, jnp.float32), loaded[1], trajectory.ids)
            added = max(added, float(np.abs(ours - plain).max() / np.abs(ours).max()))
    name = "with merged adapters" if with_adapters else "of the weights"
    figure(f"logits of an export {name}, float32", f"largest relative difference {difference:.1g}")
    assert difference < 1e-4
    assert not with_adapters or added > 100 * difference, "the adapters are too small for a wrong merge to show"


def test_eight_devices_give_the_tokens_of_one(policy, loaded, greedy, tmp_path, figure):
    """Rows, heads or vocabulary reassembled wrongly where they do not divide as evenly as those of tiny models."""
    from psearch_jax.models import decoder

    program, out = Path(__file__).parent / "support" / "real_policy.py", tmp_path / "eight.npz"
    root = str(program.parents[2])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(program), MODEL, str(out)],
        env=environment | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    eight = np.load(out)
    assert eight["devices"] == 8
    graph, ties, count = decoder.graphdef(loaded[0], jnp.float32), 0, 0
    for i, trajectory in enumerate(greedy):
        ids, other = trajectory.ids, eight[f"ids{i}"]
        count += int(trajectory.mask.sum())
        if np.array_equal(ids, other):
            continue
        shared = min(len(ids), len(other))
        at = int(np.argmax(ids[:shared] != other[:shared]))
        logits = our_logits(graph, loaded[1], ids)[at - 1]
        assert trajectory.mask[at] and abs(logits[ids[at]] - logits[other[at]]) <= MARGIN, trajectory.question.text
        ties += 1
    figure(f"greedy rollouts equal on 1 and on 8 devices, {count} ids", f"{len(greedy) - ties} of {len(greedy)}")
    assert ties <= 1
