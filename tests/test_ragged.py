"""Decoding that reads each row's own length: on a CPU, and for TPUs interpreted and compiled ahead of time."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import one_device_mesh, random_params, tiny_config
from jax.sharding import NamedSharding, PartitionSpec

from psearch_jax.config import PRESETS, MeshSection, RolloutSection
from psearch_jax.models import qwen2, ragged
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.rollout.collect import widths
from psearch_jax.sharding import make_mesh

LAYERS, LAYER, H = 3, 1, 128
BOUNDS = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}


def drawn(B, K, G, S, dtype, cached, seed=0):
    """Queries, keys and values of an id, and a cache."""
    rng = np.random.default_rng(seed)
    shapes = (B, 1, K * G, H), (B, K, 1, H), (B, K, 1, H), (LAYERS, B, K, S, H), (LAYERS, B, K, S, H)
    q, k, v, *old = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return 4 * q, k, v, KVCache.of(*old, jnp.dtype(cached))


def by_definition(q, k, v, cache, start):
    """Row by row and head by head in float64."""
    q, k, v, ks, vs = (np.asarray(x, np.float64) for x in (q, k, v, cache.k[LAYER], cache.v[LAYER]))
    if cache.k_scale is not None:
        ks, vs = ks * cache.k_scale[LAYER][..., None], vs * cache.v_scale[LAYER][..., None]
    out, group = np.zeros_like(q), q.shape[2] // k.shape[1]
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        keys, values = (
            np.concatenate([x[b, n // group, : start[b]], y[b, n // group]]) for x, y in ((ks, k), (vs, v))
        )
        scores = keys @ q[b, 0, n] / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, 0, n] = weights @ values / weights.sum()
    return out


def with_behind(cache, start, value):
    """The cache with `value` behind the rows' ends, in int8 in the scales and the largest number in the lines."""

    def put(x):
        behind = (np.arange(S) >= start[:, None]).reshape(1, len(start), 1, S, *[1] * (x.ndim - 4))
        return jnp.where(behind, jnp.asarray(127 if x.dtype == jnp.int8 else value, x.dtype), x)

    S = cache.positions
    return jax.tree.map(put, cache)


@pytest.mark.parametrize(
    ("K", "G", "S", "dtype", "cached"),
    [
        (1, 7, 1120, "bfloat16", "bfloat16"),
        (2, 6, 608, "float16", "float16"),
        (4, 1, 96, "bfloat16", "bfloat16"),
        (2, 3, 416, "float32", "float32"),
        (1, 7, 2080, "bfloat16", "int8"),
        (4, 2, 608, "float32", "int8"),
    ],
)
def test_every_row_to_its_own_length(K, G, S, dtype, cached):
    """A block left out at a row's end, or one of its neighbour's read; another layer's; heads paired wrongly; a NaN
    behind a row's end, or behind the cache's, that comes through."""
    size = ragged.block_positions(K, H, jnp.dtype(cached).itemsize, S)
    start = np.array(sorted({0, 1, size - 1, size, min(size + 1, S), S // 2, S - 1, S}), np.int32)
    q, k, v, cache = drawn(len(start), K, G, S, dtype, cached)
    wanted = by_definition(q, k, v, cache, start)
    cache = with_behind(cache, start, jnp.nan)
    got = jax.jit(functools.partial(ragged.decode, interpret=True))(q, k, v, cache, jnp.int32(LAYER), start)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=BOUNDS[dtype])


@pytest.mark.parametrize(
    ("dtype", "cached"),
    [*((name, name) for name in BOUNDS), ("float32", "int8"), ("bfloat16", "int8")],
)
@pytest.mark.parametrize(("K", "G", "S", "B"), [(1, 7, 1120, 6), (2, 2, 832, 24), (4, 1, 96, 3), (2, 3, 288, 1)])
def test_rows_in_groups(K, G, S, B, dtype, cached):
    """A group that ends with its first row, or a block that two visits count; what lies behind a row's end."""
    start = np.random.default_rng(1).integers(0, S + 1, B).astype(np.int32)
    start[:3] = [S, 0, min(257, S)][:B]
    q, k, v, cache = drawn(B, K, G, S, dtype, cached)
    wanted = by_definition(q, k, v, cache, start)
    cache = with_behind(cache, start, 3e4)
    cache = replace(cache, k=cache.k.swapaxes(3, 4), keys_across=True)
    got = jax.jit(ragged.decode)(q, k, v, cache, jnp.int32(LAYER), start)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=BOUNDS[dtype])


def test_groups_fill_what_they_may():
    """Groups that leave rows over, or whose blocks are more than a processor keeps."""
    for rows, line, wanted in ((64, 2**16, 16), (48, 2**16, 16), (7, 2**16, 7), (34, 2**16, 2), (8, 2**21, 1)):
        assert ragged.group_rows(rows, line) == wanted


def test_the_work_is_what_the_rows_hold():
    """An entry for every block of every row, one for an empty row, and none besides: what is listed is read."""
    start = np.array([0, 1, 512, 513, 6208, 0, 1024], np.int32)
    row, block, count = jax.jit(functools.partial(ragged.work, block=512, entries=7 * 13))(start)
    listed = list(zip(row[:count].tolist(), block[:count].tolist(), strict=True))
    assert listed == [(r, b) for r, n in enumerate(start) for b in range(max(1, -(-n // 512)))]
    assert [ragged.block_positions(K, 128, 2, 6208) for K in (1, 2, 4, 8)] == [512, 256, 128, 128]
    assert ragged.block_positions(1, 128, 2, 96) == 96


def test_where_it_is_asked_for(tiny_tokenizer):
    """A kernel asked for where its lines do not fill registers, or where a device lacks the keys of its heads."""
    one, split = one_device_mesh(), jax.sharding.AbstractMesh((1, 2, 4), ("data", "fsdp", "tensor"))
    asked = {size: ragged.applies("splash", False, shape, one) for size, shape in PRESETS.items()}
    assert asked == {size: shape.head_dim == 128 for size, shape in PRESETS.items()} and asked["7b"]
    for form, across in (("splash", False), ("rowwise", True)):
        assert ragged.applies(form, across, PRESETS["7b"], split)
        assert not ragged.applies(form, across, PRESETS["1.5b"], split)
    assert all(ragged.applies("rowwise", True, shape, one) for shape in PRESETS.values())
    assert not any(ragged.applies(form, False, PRESETS["7b"], one) for form in ("cudnn", "blocked"))
    rollout = RolloutSection()
    assert widths(rollout, by_length=True).spans == (rollout.context_tokens,) and len(widths(rollout).spans) == 4


def test_a_model_that_decodes_with_it(monkeypatch):
    """Another position, layer or rotation than in the form that stands everywhere else."""
    config = tiny_config(head_dim=H)
    params, rng = random_params(config, scale=0.1), np.random.default_rng(0)
    shape = (config.layers, 4, config.kv_heads, 64, H)
    cache = KVCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    ids, start = rng.integers(0, 400, (4, 1)).astype(np.int32), np.array([0, 5, 33, 64], np.int32)
    asked = []

    def interpreted(*arguments):
        asked.append(arguments)
        return ragged_decode(*arguments, interpret=True)

    ragged_decode = ragged.decode
    monkeypatch.setattr(ragged, "decode", interpreted)

    def hidden(form):
        model = nnx.merge(qwen2.graphdef(config, jnp.float32, attention=form), params)
        return jax.jit(functools.partial(model.hidden, keep_kv=True))(ids, cache, start)

    (ours, new), (wanted, wanted_new) = hidden("splash"), hidden("blocked")
    assert len(asked) == 1
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    for x, y in zip(new, wanted_new, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_it_compiles_for_tpus(topology):
    """What an interpreter allows and the TPU's compiler refuses, or a cache that is copied to another layout first."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    from psearch_jax.plan import tpu_target

    devices, B, S = tpu_target(topology).devices, 32, 6208
    for size, tensor in (("7b", 4), ("1.5b", 1), ("14b", 2)):
        shape, mesh = PRESETS[size], make_mesh(MeshSection(1, -1, tensor), devices)

        def placed(sizes, *axes, dtype=jnp.bfloat16, mesh=mesh):
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

        rows, K = ("data", "fsdp"), shape.kv_heads
        q = placed((B, 1, shape.heads, H), rows, None, "tensor")
        own = placed((B, K, 1, H), rows, "tensor")
        cache = placed((LAYERS, B, K, S, H), None, rows, "tensor")
        layer, start = placed((), dtype=jnp.int32), placed((B,), rows, dtype=jnp.int32)

        number = placed(cache.shape, None, rows, "tensor", dtype=jnp.int8)
        scale = placed(cache.shape[:-1], None, rows, "tensor", dtype=jnp.float32)
        for one in (KVCache(cache, cache), KVCache(number, number, False, scale, scale)):
            with jax.set_mesh(mesh):
                compiled = jax.jit(ragged.decode).lower(q, own, own, one, layer, start).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < 2**22, (size, one.v.dtype)
            assert "all-gather" not in compiled.as_text()
