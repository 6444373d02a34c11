"""examples/reference.py, a second and independent statement of the method, agrees with the library and learns."""

import ast
import importlib.util
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_learner, one_device_mesh, random_params
from programs import ROOT

from psearch_jax.config import DecoderConfig, LearningSection, RewardSection
from psearch_jax.rl.advantages import group_advantages
from psearch_jax.rl.batch import make_batch
from psearch_jax.rl.rewards import Reward
from psearch_jax.text.tags import parse_turn
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.types import Question, TrainBatch, Trajectory, Turn

FILE = ROOT / "examples" / "reference.py"
GROUPS, SAMPLES = 6, 4


@pytest.fixture(scope="module")
def reference():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("reference_example", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def damaged_rollout(reference, question, rng):
    """A rollout whose sampled tokens are those of a script after a few random edits; it may lack an end."""
    script = reference.scripted(question, rng.random() < 0.5, 0.5, rng)
    tokens = [i for i, sampled in zip(script.ids, script.sampled, strict=True) if sampled]
    for _ in range(rng.integers(0, 4)):
        at = rng.integers(len(tokens))
        edits = [[], [tokens[at]] * 2, [int(rng.integers(1, len(reference.VOCABULARY)))], [reference.TOKEN["##"]]]
        tokens[at : at + 1] = edits[rng.integers(len(edits))]
    rollout = reference.Rollout(question)
    for token in tokens:
        if not rollout.ended:
            rollout.append(token)
    return rollout


def damaged_rollouts(reference, groups, samples, seed=0):
    rng = np.random.default_rng(seed)
    kinds = ("parallel", "sequential", "single")
    questions = [reference.random_question(rng)._replace(kind=kinds[i % 3]) for i in range(groups)]
    return [damaged_rollout(reference, question, rng) for question in questions for _ in range(samples)]


def sampled_texts(reference, rollout) -> list[str]:
    """The text of each of a rollout's turns, which end with a closing tag, and of what follows them."""
    texts, words = [], []
    for token, sampled in zip(rollout.ids, rollout.sampled, strict=True):
        if sampled:
            words.append(reference.VOCABULARY[token])
            if words[-1] in ("</search>", "</answer>"):
                texts.append(" ".join(words))
                words = []
    return texts + [" ".join(words)] * bool(words)


def as_trajectory(reference, rollout, group=0, sample=0) -> Trajectory:
    """The rollout as the library's type, with its turns parsed by the library."""
    turns = []
    for number, text in enumerate(sampled_texts(reference, rollout)):
        action = parse_turn(text)
        ran = action.queries if number < reference.MAX_TURNS - 1 else ()
        turns.append(Turn(text, action.kind, action.well_formed, ran, ((),) * len(ran), action.answer, n_sampled=1))
    asked = rollout.question
    return Trajectory(
        question=Question("example", str(group), asked.text, (asked.answer,), asked.kind),
        sample=sample,
        status="answered" if turns and turns[-1].answer is not None else "truncated",
        turns=tuple(turns),
        ids=np.array(rollout.ids, np.int32),
        mask=np.array(rollout.sampled),
        logprobs=np.zeros(len(rollout.ids), np.float32),
        prompt_length=len(asked.text.split()),
    )


def config_of(reference) -> DecoderConfig:
    names = ("width", "layers", "heads", "kv_heads", "head_dim", "mlp", "rope_theta", "rms_eps")
    fields = {name: getattr(reference, name.upper()) for name in names}
    return DecoderConfig(vocab_rows=len(reference.VOCABULARY), tied=True, **fields)


def as_example_params(params: nnx.State) -> dict:
    """The library's parameters, or gradients, in the example's layout: a list of layers instead of stacked arrays."""
    values = nnx.to_pure_dict(params)
    count = len(values["layers"]["q_kernel"])
    layers = [{name: stacked[i] for name, stacked in values["layers"].items()} for i in range(count)]
    return {"embedding": values["embedding"], "layers": layers, "final_norm": values["final_norm"]}


def assert_close(ours, theirs, tolerance=1e-5):
    """Two trees are equal up to `tolerance`, relative to the largest entry of each array."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.max(np.abs(b))))


def test_the_example_stands_alone():
    """The oracle imports nothing of the library, and is short enough to be read in one sitting."""
    text = FILE.read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            imported |= {name.split(".")[0] for name in names}
    assert imported - sys.stdlib_module_names == {"jax", "numpy"}
    assert len(text.splitlines()) <= 400


def test_turns_and_rewards_agree(reference):
    """The library parses and rewards every transcript, also a broken one, by the published rule."""
    rollouts = damaged_rollouts(reference, 60, 20)
    seen = set()
    for rollout in rollouts:
        trajectory = as_trajectory(reference, rollout)
        parsed = [(turn.queries, turn.answer, turn.well_formed) for turn in trajectory.turns]
        completed = len(rollout.turns)
        assert parsed[:completed] == [tuple(turn) for turn in rollout.turns], trajectory.turns
        terms = Reward(RewardSection())([trajectory])[0].terms
        expected = reference.reward_parts(rollout)
        computed = [terms[name] for name in ("outcome", "format", "decomposition", "search_count")]
        np.testing.assert_allclose(computed, expected, atol=1e-12, err_msg=str(trajectory.turns))
        seen.add((rollout.question.kind, *(round(part, 2) for part in expected)))
    assert {parts[0] for parts in seen} == {"parallel", "sequential", "single"}
    assert {parts[1:3] for parts in seen} == {(1, 0), (1, -0.1), (0, 0.1), (0, 0)} and len(seen) > 20


def test_passages_are_forced_and_never_sampled(reference, monkeypatch):
    """The example does not train on passages, and runs no search in the last turn."""
    monkeypatch.setattr(reference, "CONTEXT", 100)
    question = reference.random_question(np.random.default_rng(0))
    rollout = reference.Rollout(question)
    query, passage = next(iter(question.passages.items()))
    written, observation = (reference.encode(text) for text in (f"<search> {query} </search>", passage))
    observation = [reference.TOKEN["<information>"], *observation, reference.TOKEN["</information>"]]
    for turn in range(reference.MAX_TURNS):
        assert not rollout.ended
        for token in written:
            rollout.append(token)
        rest = observation if turn < reference.MAX_TURNS - 1 else []
        size = len(written) + len(rest)
        assert rollout.ids[-size:] == written + rest
        assert rollout.sampled[-size:] == [True] * len(written) + [False] * len(rest)
    assert rollout.ended and len(rollout.searches) == reference.MAX_TURNS - 1


def test_advantages_agree(reference):
    """Groups are normalised alike, also those of equal rewards."""
    rewards = np.random.default_rng(0).normal(size=(GROUPS, SAMPLES))
    rewards[2] = 0.1 + 0.2
    groups = np.repeat(np.arange(GROUPS), SAMPLES).tolist()
    ours = group_advantages(rewards.reshape(-1), groups).reshape(GROUPS, SAMPLES)
    np.testing.assert_allclose(ours, reference.group_advantages(rewards), atol=1e-6)
    assert (ours[2] == 0).all() and (ours[:2] != 0).any()


@pytest.fixture(scope="module")
def scored(reference):
    """(learner, parameters, the batch, its arguments for the example): damaged rollouts scored by three policies."""
    rollouts = damaged_rollouts(reference, GROUPS, SAMPLES)
    trajectories = [as_trajectory(reference, rollout, i // SAMPLES, i % SAMPLES) for i, rollout in enumerate(rollouts)]
    rewards = [parts.total for parts in Reward(RewardSection())(trajectories)]
    advantages = group_advantages(rewards, [trajectory.question.id for trajectory in trajectories])
    config = config_of(reference)
    params, base = (random_params(config, seed, scale=0.1) for seed in (1, 2))
    # Close to the policy, so that some ratios are clipped and others are not.
    old = jax.tree.map(lambda x, other: 0.8 * x + 0.2 * other, params, base)
    learner, _ = make_learner(
        SimpleNamespace(size=config.vocab_rows), config, reference.CONTEXT, kl_coefficient=reference.KL_COEFFICIENT
    )
    batch = make_batch(trajectories, advantages, reference.CONTEXT)
    scores = {"old_logprobs": learner.score(old, batch), "ref_logprobs": learner.score(base, batch)}
    batch = TrainBatch(**{**vars(batch), **scores})
    ids, mask = reference.padded(rollouts)
    example_scores = (reference.token_logprobs(as_example_params(p), ids) for p in (old, base))
    rewards = np.array([sum(reference.reward_parts(rollout)) for rollout in rollouts]).reshape(GROUPS, SAMPLES)
    return learner, params, batch, (ids, mask, reference.group_advantages(rewards).reshape(-1), *example_scores)


def test_logprobs_agree(reference, scored):
    """Decoder and packed rows give the log-probs of the example's plain forward pass."""
    learner, params, batch, (ids, mask, _, *example_scores) = scored
    np.testing.assert_array_equal(batch.ids, ids)
    np.testing.assert_array_equal(batch.mask, mask)
    theirs = reference.token_logprobs(as_example_params(params), ids)
    for ours, other in zip(
        (learner.score(params, batch), batch.old_logprobs, batch.ref_logprobs), (theirs, *example_scores), strict=True
    ):
        assert_close(ours, np.asarray(other) * mask)


def test_loss_and_gradients_agree(reference, scored):
    """Loss, clip, KL and the mean over the sampled tokens of all micro-batches are those of the example."""
    learner, params, batch, arguments = scored
    theirs, slopes = jax.value_and_grad(reference.policy_loss)(as_example_params(params), *arguments)
    _, metrics = learner.update(init_state(params, learner._optimizer, one_device_mesh()), batch)
    assert 0.05 < metrics["clip_fraction"] < 0.95 and metrics["kl"] > 0.01
    np.testing.assert_allclose(metrics["loss"], theirs, rtol=1e-5)
    assert_close(as_example_params(learner.gradients(params, batch)), slopes)


def test_optimizers_agree(reference):
    """AdamW with bias correction, decoupled decay and a clipped norm takes the example's steps."""
    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "b": jnp.ones(5)}
    settings = LearningSection(learning_rate=0.01, warmup_ratio=0.0)
    optimizer = make_optimizer(settings, 10)
    state, ours = optimizer.init(params), params
    theirs, moments = params, reference.init_optimizer(params)

    def linear(params, slopes):
        return sum(jnp.sum(p * g) for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(slopes), strict=True))

    for size in (0.01, 3.0, 0.1):  # below, above and below the norm at which gradients are clipped
        slopes = jax.tree.map(lambda x, size=size: jnp.asarray(size * rng.normal(size=x.shape), jnp.float32), params)
        updates, state = optimizer.update(slopes, state, ours)
        ours = jax.tree.map(jnp.add, ours, updates)
        theirs, moments = reference.update(theirs, moments, 0.01, linear, slopes)
        assert_close(ours, theirs)


@pytest.mark.slow
def test_the_example_learns(reference):
    """The example learns to answer, and to split parallel questions only."""
    results = reference.train(seed=0, steps=60)
    chance, before, after, best = results.values()
    assert before["reward"] < chance["reward"] + 0.2 and before["EM"] < chance["EM"] + 0.2
    assert after["reward"] > best["reward"] - 0.3 and after["EM"] > 0.7
    assert after["parallel split"] > 0.9 and after["sequential split"] < 0.1
