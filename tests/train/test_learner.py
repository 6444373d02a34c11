"""The learner: micro-batches, skipped updates, copies, and one device compared with eight."""

import json
import os
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_learner, one_device_mesh, random_params, same_bits, tiny_config
from programs import ROOT, completed

from psearch_jax.config import Config, LearningSection
from psearch_jax.models.buckets import row_widths
from psearch_jax.rl.batch import micro_batches, padding
from psearch_jax.rl.losses import NO_KL
from psearch_jax.runtime.metrics import WEIGHT
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.types import TrainBatch

CONFIG = tiny_config()
ROWS, S = 8, 16


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, seed=4, scale=0.03)


@pytest.fixture(scope="module")
def learner(tiny_tokenizer):
    """One learner for most tests, so that its programs compile once."""
    return make_learner(tiny_tokenizer, CONFIG, S, learning_rate=1e-3, kl_coefficient=0.1)[0]


@pytest.fixture
def fresh_state(params, learner):
    return init_state(params, learner._optimizer, one_device_mesh())


def some_batch(rows: int = ROWS, seed: int = 0, positions: int = S) -> TrainBatch:
    """Ragged rows, some without a sampled token, one empty."""
    rng = np.random.default_rng(seed)
    size = rows, positions
    length = rng.integers(6, positions + 1, rows).astype(np.int32)
    length[-1] = 0
    real = np.arange(positions) < length[:, None]
    mask = (real & (np.arange(positions) >= 3) & (rng.random(size) < 0.6)).astype(np.float32)
    mask[2:3] = 0
    ids = np.where(real, rng.integers(0, 390, size), 0).astype(np.int32)
    old, ref, sampler = (np.where(real, -6 + rng.normal(size=size), 0).astype(np.float32) for _ in range(3))
    advantage = (rng.normal(size=(rows, 1)) * mask).astype(np.float32)
    values, returns = (np.where(mask > 0, rng.normal(size=size), 0).astype(np.float32) for _ in range(2))
    return TrainBatch(ids, length, mask, advantage, old, ref, sampler, values, returns)


def on_policy(learner, params, batch: TrainBatch) -> TrainBatch:
    """The batch with old log-probs near the policy's own, so that no ratio is far outside the clip."""
    old = learner.score(params, batch) + 0.05 * np.sign(batch.old_logprobs + 6)
    return TrainBatch(**{**vars(batch), "old_logprobs": old.astype(np.float32), "ref_logprobs": old - 0.1})


def worst(a, b) -> float:
    """Largest difference between two trees, each array relative to its own largest entry."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y))) / np.max(np.abs(np.asarray(y)))) for x, y in pairs)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_neither_micro_batches_nor_shared_rows_change_anything(tiny_tokenizer, params, aggregation):
    """Gradients and log-probs depend on neither, for every aggregation."""
    batch, results = some_batch(12, seed=3, positions=48), []
    shapes = ((6, (48,)), (2, (32, 48))) if aggregation == "token_mean" else ((2, (48,)),)
    for rows, widths in shapes:  # unpacked rows are other micro-batches, too
        changes = dict(aggregation=aggregation, micro_batch_rows=rows, kl_coefficient=0.1, importance_cap=2.0)
        learner, _ = make_learner(tiny_tokenizer, CONFIG, 48, **changes)
        learner._widths = widths
        batch = batch if results else on_policy(learner, params, batch)
        results.append((learner.gradients(params, batch), learner.score(params, batch)))
    learner._per_row = 1
    results.append((learner.gradients(params, batch), learner.score(params, batch)))
    assert [padding(micro_batches(batch, 2, (48,), most)) < 0.25 for most in (None, 1)] == [True, False]
    for gradients, logprobs in results[1:]:
        assert worst(gradients, results[0][0]) < 2e-6
        np.testing.assert_allclose(logprobs, results[0][1], atol=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_rows_without_advantage_need_not_be_computed(tiny_tokenizer, params, aggregation):
    """Without a KL term, either. Gradients, parameters and loss equal those with them, even if no row is left."""
    changes = {"learning_rate": 1e-3, "aggregation": aggregation, "kl_coefficient": 0.1}
    learner, optimizer = make_learner(tiny_tokenizer, CONFIG, S, **changes)
    batch = on_policy(learner, params, some_batch())
    batch.advantage[:5], batch.ref_logprobs[:5] = 0, NO_KL
    assert learner.has_gradient(batch).tolist() == [False] * 5 + [True] * 3
    silent = replace(batch, advantage=0 * batch.advantage, ref_logprobs=np.full_like(batch.ref_logprobs, NO_KL))
    results = []
    for omits in (True, False):
        if not omits:
            learner.has_gradient = lambda batch: np.ones(len(batch.length), bool)
        gradients = learner.gradients(params, batch)
        state, first = learner.update(init_state(params, optimizer, one_device_mesh()), batch)
        state, second = learner.update(state, silent)  # moves by momentum
        assert int(state.updates) == 2
        results.append(
            (gradients, state.params, [(m["loss"], m[WEIGHT], m["gradient_norm"]) for m in (first, second)])
        )
    assert worst(results[0][0], results[1][0]) < 1e-6 and worst(results[0][1], results[1][1]) < 1e-4
    np.testing.assert_allclose(*(figures for _, _, figures in results), rtol=1e-6, atol=1e-9)


def test_an_update_without_a_trained_token_moves_nothing(params, learner, fresh_state):
    """Not even the momentum of earlier updates does."""
    good = on_policy(learner, params, some_batch())
    empty = TrainBatch(**{**vars(good), "mask": np.zeros_like(good.mask), "advantage": np.zeros_like(good.mask)})
    state, _ = learner.update(fresh_state, good)
    before = jax.device_get((state.params, state.optimizer))
    state, metrics = learner.update(state, empty)
    assert same_bits(before, (state.params, state.optimizer)) and int(state.updates) == 1
    assert (metrics["skipped"], metrics["nonfinite_in_a_row"], metrics[WEIGHT]) == (1, 0, 0) and np.isnan(
        metrics["entropy"]
    )


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_non_finite_update_is_skipped_and_counted(params, learner, fresh_state, poison):
    """Parameters and optimizer state stay as they are."""
    good = on_policy(learner, params, some_batch())
    advantage = good.advantage.copy()
    advantage[np.nonzero(good.mask)[0][0], np.nonzero(good.mask)[1][0]] = poison
    bad = TrainBatch(**{**vars(good), "advantage": advantage})
    state, metrics = learner.update(fresh_state, good)
    assert metrics["skipped"] == 0 and int(state.updates) == 1
    before = jax.device_get((state.params, state.optimizer))
    for row in (1, 2):
        state, metrics = learner.update(state, bad)
        assert metrics["skipped"] == 1 and metrics["nonfinite_in_a_row"] == row
        assert same_bits(before, (state.params, state.optimizer)) and int(state.updates) == 1
    state, metrics = learner.update(state, good)
    assert metrics["skipped"] == 0 and metrics["nonfinite_in_a_row"] == 0 and int(state.updates) == 2
    assert not same_bits(before[0], state.params)


def test_the_rate_rises_stays_and_falls():
    """The rate rises linearly over the updates of the warm-up and falls to 0 over those of the decay."""
    learning = LearningSection(learning_rate=1e-3, warmup_ratio=0.5, decay_ratio=0.25, weight_decay=0.0)
    optimizer = make_optimizer(learning, total_updates=8)
    weights = {"w": jnp.ones(3)}
    state = optimizer.init(weights)
    steps = []
    for _ in range(8):
        change, state = optimizer.update({"w": jnp.full(3, 0.1)}, state, weights)
        steps.append(-float(change["w"][0]))
    np.testing.assert_allclose(steps, np.array([1, 1.75, 2.5, 3.25, 4, 4, 4, 2]) * 1e-3 / 4, rtol=1e-3)


@pytest.mark.parametrize("most", [None, 3, 1])
def test_micro_batches_lose_no_trajectory_and_no_position(most):
    """Every trajectory is in exactly one place, complete and aligned."""
    widths = (16, 32, 48, 64)
    for seed, (n, longest) in enumerate([(7, 64), (40, 64), (40, 20), (1, 64), (0, 64)]):
        batch = some_batch(n + 1, seed, positions=longest)  # the last one is empty
        seen = []
        for places, micro_batch in micro_batches(batch, 3, widths, most):
            assert micro_batch.ids.shape[0] == 3 and micro_batch.ids.shape[1] in widths
            real = np.zeros(micro_batch.ids.shape, bool)
            for i, row, start in places:
                n = batch.length[i]
                here = np.s_[row, start : start + n]
                assert not real[here].any() and len(set(micro_batch.segments[here])) == 1
                real[here] = True
                np.testing.assert_array_equal(micro_batch.positions[here], np.arange(n))
                for name in ("ids", "mask", "advantage", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
                    np.testing.assert_array_equal(getattr(micro_batch, name)[here], getattr(batch, name)[i, :n])
            np.testing.assert_array_equal(micro_batch.segments > 0, real)
            assert not micro_batch.mask[~real].any() and not micro_batch.ids[~real].any()
            shared = [sum(place.row == row for place in places) for row in range(3)]
            assert micro_batch.segments.max(1).tolist() == shared and (not most or max(shared) <= most)
            seen += [place.trajectory for place in places]
        assert sorted(seen) == np.flatnonzero(batch.length).tolist()


# Descending lengths that best-fit packing can place if rows are opened one by one, but not if all are open.
NOT_AT_ONCE = (
    "2048 2048 1785 1622 1470 1295 1233 1191 1121 1024 1020 974 959 881 866 848 794 698 568 517 461 440 433 432 425 "
    "423 395 387 379 306 295 272 252 242 205 203 200 152 120 97"
)


def test_packing_always_finds_room():
    """Also for lengths that best-fit packing cannot place in all chosen rows at once."""
    rng, lengths = np.random.default_rng(0), [[int(n) for n in NOT_AT_ONCE.split()]]
    lengths += [rng.integers(40, rng.choice([400, 1200, 2048]), rng.integers(1, 60)).tolist() for _ in range(60)]
    for n in lengths:
        batch = replace(some_batch(len(n), positions=2048), length=np.array(n, np.int32))
        for rows in (1, 2):
            for most in (None, 1, 2, 4):
                batches = micro_batches(batch, rows, row_widths(2048, 3), most)
                assert sorted(place.trajectory for places, _ in batches for place in places) == list(range(len(n)))


def test_an_update_that_computes_its_old_logprobs_itself(tiny_tokenizer, params, learner):
    """Gradients and metrics equal those with a separate pass over the batch."""
    rollouts = Config().train.prompts * Config().rollout.samples  # one update per step
    own, optimizer = make_learner(
        tiny_tokenizer, CONFIG, S, learning_rate=1e-3, kl_coefficient=0.1, mini_batch_rollouts=rollouts
    )
    batch = on_policy(learner, params, some_batch())
    scored = replace(batch, old_logprobs=learner.score(params, batch))
    assert worst(own.gradients(params, batch), learner.gradients(params, scored)) < 2e-6
    states = (init_state(params, learner._optimizer, one_device_mesh()) for _ in range(2))
    (_, ours), (_, expected) = (
        f.update(s, b) for f, s, b in zip((own, learner), states, (batch, scored), strict=True)
    )
    assert expected["logp_gap"] > 0.1 and ours["ratio"] == pytest.approx(1, abs=1e-6)
    assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert not own.needs_score and "logprobs" not in {program.name for program in own.programs()}


EIGHT = ROOT / "tests" / "support" / "eight_devices.py"


def on_mesh(mesh, file):
    """The results of tests/support/eight_devices.py on a mesh of up to eight devices, in a separate process."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, str(EIGHT), mesh, str(file)]
    done = completed(command, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(file)), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    return on_mesh("1,1,1", tmp_path_factory.mktemp("devices") / "one.npz")


MESHES = ["2,2,2", *(pytest.param(mesh, marks=pytest.mark.weekly) for mesh in ("1,8,1", "1,2,4"))]


@pytest.fixture(scope="module", params=MESHES)
def one_and_eight(request, on_one, tmp_path_factory):
    """The results on one device and on a mesh of eight."""
    return {"one": on_one, "eight": on_mesh(request.param, tmp_path_factory.mktemp("devices") / "eight.npz")}


@pytest.mark.slow
def test_eight_devices_sample_the_same_ids(one_and_eight):
    """Rollouts and log-probs do not depend on the mesh."""
    (one, _), (eight, report) = one_and_eight["one"], one_and_eight["eight"]
    assert report["devices"] == 8 and report["sharded"]
    for name in ("ids", "mask", "length", "status", "unstacked_ids"):
        np.testing.assert_array_equal(one[name], eight[name], err_msg=name)
    np.testing.assert_allclose(one["logprobs"], eight["logprobs"], atol=1e-5)
    np.testing.assert_allclose(one["unstacked_logprobs"], eight["unstacked_logprobs"], atol=1e-5)
    assert one["mask"].sum() > 50
    np.testing.assert_allclose(one["trainer_logprobs"], eight["trainer_logprobs"], atol=1e-5)


@pytest.mark.slow
def test_eight_devices_learn_the_same(one_and_eight):
    """Gradients and three updates do not depend on the mesh."""
    one, eight = one_and_eight["one"][0], one_and_eight["eight"][0]
    names = [k.removeprefix("grad/") for k in one if k.startswith("grad/")]
    assert len(names) == 15
    rate = float(one["learning_rate"])
    for name in names:
        a, b = one[f"grad/{name}"], eight[f"grad/{name}"]
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(a)), name
        steady = np.all(one[f"seen/{name}"] > 1e-6, axis=0)
        assert steady.any(), name
        gap = np.abs(one[f"param/{name}"] - eight[f"param/{name}"])[steady]
        assert gap.max() <= 0.02 * rate, name
