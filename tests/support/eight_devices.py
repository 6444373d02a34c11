"""Rollouts, gradients and three updates on one mesh, for train/test_learner.py: eight_devices.py D,F,T OUT.npz"""

import functools
import json
import sys
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import TINY, by_name, extend, random_params, same_bits, started, tiny_config, training_config

from psearch_jax.config import DecoderConfig, Lora, MeshSection
from psearch_jax.models import attention, decoder, lora, ragged
from psearch_jax.models.attention import cached
from psearch_jax.models.attention.cudnn import cudnn_attention
from psearch_jax.models.attention.splash import splash_attention
from psearch_jax.models.backend import Backend, choose_backend
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.rl.batch import mini_batches
from psearch_jax.rollout.boundary import build_tables
from psearch_jax.rollout.copy import SamplingCopy
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.rollout.sampler_programs import SamplerOptions
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.sharding import SAMPLING, STORAGE, attach_shardings, make_mesh, make_meshes, param_shardings
from psearch_jax.train.critic import build_critic, init_critic
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.types import TrainBatch

B, S, V = 8, 48, 416
TOKENS = [bytes([b]) for b in range(256)] + [b"</search>", b"</answer>", b"</", b">\n"] + [None] * 2
STOP = len(TOKENS) - 1
LEARNING = dict(micro_batch_rows=4, mini_batch_rollouts=B, learning_rate=1e-3, kl_coefficient=0.1)


def rollouts(sampler: Sampler, params: nnx.State, temperature: float = 1.0):
    """Samples two turns of eight rows of different lengths."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in rng.integers(3, 12, B)]
    keys = rng.integers(0, 2**32, (B, 2), np.uint32)
    weights = sampler.weights(params)
    state = sampler.generate(weights, started(sampler, weights, prompts, keys, S, 10), temperature)
    ids, n = rng.integers(0, 256, (B, 8)).astype(np.int32), rng.integers(0, 9, B).astype(np.int32)
    state = sampler.generate(weights, extend(sampler, weights, state, ids, n, 10), temperature)
    return jax.tree.map(np.asarray, replace(state, key=jax.random.key_data(state.key)))


def check_kernels(mesh) -> None:
    """Compares the attention kernels, each device running its own rows and heads, with unsharded attention.

    The TPU kernel is interpreted; JAX's own attention, called with the same arguments, replaces cuDNN's.
    """
    rng = np.random.default_rng(1)
    splash = functools.partial(splash_attention, interpret=True)
    here = functools.partial(jax.nn.dot_product_attention, implementation="xla")

    def instead(*args, implementation, **kwargs):
        return here(*args, **kwargs)

    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((B, 130, 4, 16), *[(B, 2, 130, 16)] * 2))
    numbered = np.sort(rng.integers(1, 4, (B, 130)).astype(np.int32))
    for kernel, marks in ((splash, ()), (cudnn_attention, ()), (cudnn_attention, (numbered,))):
        with jax.set_mesh(mesh), mock.patch.object(jax.nn, "dot_product_attention", instead):
            ours = jax.jit(functools.partial(attention.on_each_device, kernel))(q, k, v, *marks)
        np.testing.assert_allclose(
            ours, attention.attend_causally(q, k, v, segments=marks[0] if marks else None), atol=1e-5
        )
    segments = np.sort(rng.integers(0, 3, (B, 130)).astype(np.int32))
    with jax.set_mesh(mesh):
        ours = jax.jit(functools.partial(attention.on_each_device, splash))(q, k, v, segments)
    wanted = attention.attend_causally(q, k, v, segments=segments)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    if mesh.shape["tensor"] > 2:  # not used where `tensor` does not divide the kv heads (models/backend.py)
        return
    cache = KVCache(*(rng.normal(size=(2, B, 2, 64, 16)).astype(np.float32) for _ in range(2)))
    start = rng.integers(0, 65, B).astype(np.int32)
    # Each device's rows in reverse order.
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = np.arange(B, dtype=np.int32).reshape(parts, -1)[:, ::-1].reshape(-1)
    token, chunk = ((q[:, :T], k[:, :, :T], v[:, :, :T]) for T in (1, 20))

    def by_kernel(q, k, v, rows):
        work = ragged.list_work(start, cache, q.shape[1], q.shape[2])
        return ragged.attend(q, k, v, cache, np.int32(1), start, rows, work, interpret=True)

    old = cached.Keys(cache.k[1], cache.v[1])
    wanted = cached.decode(*token, old, start)
    with jax.set_mesh(mesh):
        in_groups = jax.jit(cached.decode_in_groups)(*token, cache, np.int32(1), start)
        ours = jax.jit(functools.partial(by_kernel, rows=None))(*token)
    np.testing.assert_allclose(in_groups, wanted, atol=1e-5)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    with jax.set_mesh(mesh):
        ours = jax.jit(functools.partial(by_kernel, rows=rows))(*chunk)
    wanted = cached.attend_chunk(*chunk, cached.Keys(cache.k[1][rows], cache.v[1][rows]), start)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)


def make_sampler(config: DecoderConfig, mesh, unstack="never", **options) -> Sampler:
    settings = SamplerOptions(**{"yield_share": 1.0, **options})
    backend = replace(choose_backend(mesh, settings.dtype, config), unstack=unstack, kernels_left=False)
    return Sampler(
        graph=decoder.graphdef(config, settings.dtype, backend=backend, lora=settings.lora),
        backend=backend,
        config=config,
        tables=build_tables(TOKENS, V),
        n_ids=len(TOKENS),
        stop_ids=[STOP],
        mesh=mesh,
        options=settings,
    )


def check_adapters(mesh, config: DecoderConfig, optimizer) -> None:
    """With adapters the sampler gets the base weights unsharded over `fsdp`: for fsdp=1, the learner's own arrays."""
    adapters, half = Lora(2, 4.0), jnp.dtype("bfloat16")
    weights = decoder.random_params(config, 0, half, lambda a: param_shardings(a, STORAGE, mesh))
    settings = training_config(S, model={"lora_rank": 2, "lora_alpha": 4.0, "sampling_dtype": "bfloat16"}, **LEARNING)
    learner = Learner(settings, config, optimizer, mesh, len(TOKENS), base=weights)
    fresh = lora.init_adapters(config, adapters, 0)
    copy = learner.sampling_copy(jax.device_put(fresh, param_shardings(fresh, STORAGE, mesh)))
    sampler = make_sampler(config, mesh, dtype=half, lora=adapters)
    for x, planned in zip(jax.tree.leaves(copy), jax.tree.leaves(sampler.abstract_params()), strict=True):
        if x.dtype != planned.dtype or not x.sharding.is_equivalent_to(planned.sharding, x.ndim):
            raise SystemExit(f"found {x.sharding}, {x.dtype}, expected {planned}")
    base, copied = jax.tree.leaves(learner.base), jax.tree.leaves(lora.split_adapters(copy)[0])
    shared = [any(x is y for y in base) for x in copied]
    if set(shared) != {mesh.shape["fsdp"] == 1}:
        raise SystemExit(f"{sum(shared)} of {len(shared)} base arrays are shared")


def check_critic(mesh, config: DecoderConfig, optimizer) -> None:
    """A critic's values and gradients on the mesh equal those on one device; its head has the storage sharding."""
    rng, shape = np.random.default_rng(3), (B, S)
    length = rng.integers(20, S + 1, B).astype(np.int32)
    mask = ((np.arange(S) < length[:, None]) & (rng.random(shape) < 0.5) & (np.arange(S) > 0)).astype(np.float32)
    ids = rng.integers(0, 256, shape).astype(np.int32)
    predicted, returns = (rng.normal(size=shape).astype(np.float32) * mask for _ in range(2))
    batch = TrainBatch(ids, length, mask, mask, *[np.zeros(shape, np.float32)] * 3, values=predicted, returns=returns)
    head = rng.normal(size=(config.width, 1)).astype(np.float32)
    results = []
    for where in (mesh, make_mesh(MeshSection(1, 1, 1), jax.devices()[:1])):
        settings = training_config(S, model={"shard_residual": where.shape["tensor"] > 1}, **LEARNING)
        critic = build_critic(settings, config, optimizer, where)
        start = init_critic(random_params(config, seed=6), config, None, 0, where)
        params = init_state(
            decoder.with_values(start, nnx.to_pure_dict(start) | {"value_head": head}), optimizer, where
        ).params
        results.append((critic.score(params, batch), by_name(critic.gradients(params, batch))))
        place = param_shardings(params, STORAGE, where)["value_head"].get_value()
        if not params["value_head"].get_value().sharding.is_equivalent_to(place, 2):
            raise SystemExit("the value head does not have the storage sharding")
    (values, gradients), (wanted, theirs) = results
    np.testing.assert_allclose(values, wanted, atol=2e-4)
    for name, value in gradients.items():
        np.testing.assert_allclose(
            value, theirs[name], rtol=1e-3, atol=1e-4 * np.abs(theirs[name]).max(), err_msg=name
        )


def check_vocabulary(mesh) -> None:
    """Log-probs in chunks, and their gradients, with each device computing the vocabulary for its own rows."""
    config = tiny_config(V, tied=False)
    graph = decoder.graphdef(config, jnp.float32, backend=Backend(vocab_chunk=16))
    params = random_params(config, seed=7)
    rng = np.random.default_rng(2)
    hidden = rng.normal(size=(B, 40, config.width)).astype(np.float32)
    ids = rng.integers(0, 400, (B, 40)).astype(np.int32)

    wanted = rng.random((B, 40)) < rng.random((B, 1))  # many in some rows, few in others

    def total(params, hidden):
        chosen, entropy = nnx.merge(graph, params).logprobs(hidden, ids, 0.7, 400, wanted)
        return jnp.sum(jnp.sin(chosen) + entropy)

    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    expected = both(params, hidden)
    with jax.set_mesh(mesh):
        ours = both(jax.device_put(params, param_shardings(params, STORAGE, mesh)), hidden)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(y))))


def check_regrouped(data: int, fsdp: int, tensor: int, sampler_tensor: int) -> None:
    """The copy for a sampler with another `tensor` is that of one mesh, without host memory or complete kernels."""
    mesh, sampler = make_meshes(MeshSection(data, fsdp, tensor, rollout_tensor=sampler_tensor))
    weights, adapters = random_params(tiny_config(64)), lora.init_adapters(tiny_config(64), Lora(4, 8.0), 0)
    stored, low = (jax.device_put(x, param_shardings(x, STORAGE, mesh)) for x in (weights, adapters))
    for trained, parts in ((True, (stored,)), (False, (stored, low))):
        abstract = (weights, adapters if len(parts) == 2 else None)
        copy = SamplingCopy(*abstract, jnp.float32, mesh, trained=trained, rollout_mesh=sampler)
        with jax.transfer_guard("disallow"):
            ours = jax.block_until_ready(copy(*parts))
        theirs = SamplingCopy(*abstract, jnp.float32, mesh, trained=trained)(*parts)
        assert same_bits(ours, theirs)
        shardings = param_shardings(ours, SAMPLING, sampler)
        assert all(x.sharding == s for x, s in zip(*map(jax.tree.leaves, (ours, shardings)), strict=True))
    copy = SamplingCopy(weights, None, jnp.float32, mesh, trained=True, rollout_mesh=sampler)
    program = copy.program(attach_shardings(weights, param_shardings(weights, STORAGE, mesh)))
    shape = ",".join(map(str, weights["layers"]["up_kernel"].get_value().shape))
    assert f"f32[{shape}]" not in program.compile(0).as_text(), "a device holds a complete kernel"


def main(sizes: str, out: str) -> None:
    data, fsdp, tensor = map(int, sizes.split(","))
    mesh = make_mesh(MeshSection(data, fsdp, tensor), jax.devices()[: data * fsdp * tensor])
    config = tiny_config(V, tied=False)
    optimizer = make_optimizer(training_config(S, **LEARNING).learning, 3)
    state = init_state(random_params(config, seed=6), optimizer, mesh)
    normed = tiny_config(V, tied=False, **TINY["qwen3"])
    check_adapters(mesh, normed, optimizer)
    if mesh.size > 1:  # these compare the mesh with one device
        check_kernels(mesh)
        check_vocabulary(mesh)
        check_critic(mesh, normed, optimizer)
        check_regrouped(1, 8, 1, 4)
        check_regrouped(2, 4, 1, 2)
    settings = training_config(S, model={"shard_residual": tensor > 1, "remat": "full"}, **LEARNING)
    learner = Learner(settings, config, optimizer, mesh, len(TOKENS))
    copy = learner.sampling_copy(state.params)
    rolled = rollouts(make_sampler(config, mesh), copy)

    normed_params = init_state(random_params(normed, seed=6), optimizer, mesh).params
    normed_copy = Learner(settings, normed, optimizer, mesh, len(TOKENS)).sampling_copy(normed_params)
    unstacked = rollouts(make_sampler(normed, mesh, "per_call" if mesh.size > 1 else "never"), normed_copy)

    mask = rolled.mask.astype(np.float32)
    advantage = mask * np.linspace(-1, 1, B, dtype=np.float32)[:, None]
    zeros = np.zeros_like(mask)
    batch = TrainBatch(rolled.ids, rolled.length, mask, advantage, zeros, zeros, rolled.logprobs, zeros, zeros)
    old = learner.score(state.params, batch)
    batch = TrainBatch(**{**vars(batch), "old_logprobs": old, "ref_logprobs": (old - 0.2).astype(np.float32)})
    (piece,) = mini_batches(batch, B)
    result = {name: getattr(rolled, name) for name in ("ids", "mask", "length", "status", "logprobs")}
    result |= {"unstacked_ids": unstacked.ids, "unstacked_logprobs": unstacked.logprobs}
    result |= {"trainer_logprobs": old, "learning_rate": np.float64(LEARNING["learning_rate"])}
    first, seen = None, []
    for _ in range(3):
        grads = by_name(learner.gradients(state.params, piece))
        first = first or grads
        seen.append(grads)
        state, metrics = learner.update(state, piece)
        if metrics["skipped"]:
            raise SystemExit("an update was skipped")
    for name, value in by_name(state.params).items():
        result[f"param/{name}"], result[f"grad/{name}"] = value, first[name]
        result[f"seen/{name}"] = np.abs(np.stack([g[name] for g in seen]))
    np.savez(out, **result)
    used = {d for x in jax.tree.leaves(state.params) for d in x.sharding.device_set}
    expected = param_shardings(state.params, STORAGE, mesh)
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True)
    sharded = all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in pairs)
    print(json.dumps({"devices": len(used), "sharded": sharded}))


if __name__ == "__main__":
    configure_jax()  # sets the compilation cache
    main(*sys.argv[1:])
