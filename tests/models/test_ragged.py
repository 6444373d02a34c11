"""Decode attention over each row's own length: on a CPU, and for TPUs and GPUs, interpreted and compiled."""

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
from psearch_jax.models import decoder, ragged
from psearch_jax.models.attention import cached as attention_to_cache
from psearch_jax.models.attention.cached import MAX_DECODE_TOKENS, Keys
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.rollout.sampler import SamplerShapes
from psearch_jax.sharding import make_mesh

LAYERS, LAYER, H = 3, 1, 128
BOUNDS = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}


def drawn(B, K, G, S, dtype, cached, T=1, seed=0):
    """Random queries, the keys and values of T new tokens per row, and a cache."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, K * G, H), (B, K, T, H), (B, K, T, H), (LAYERS, B, K, S, H), (LAYERS, B, K, S, H)
    q, k, v, *old = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return 4 * q, k, v, KVCache.of(*old, jnp.dtype(cached))


def by_definition(q, k, v, cache, start):
    """Attention computed row by row and head by head in float64."""
    q, k, v, ks, vs = (np.asarray(x, np.float64) for x in (q, k, v, cache.k[LAYER], cache.v[LAYER]))
    if cache.k_scale is not None:
        ks, vs = ks * cache.k_scale[LAYER][..., None], vs * cache.v_scale[LAYER][..., None]
    out, group = np.zeros_like(q), q.shape[2] // k.shape[1]
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        keys, values = (
            np.concatenate([x[b, n // group, : start[b]], y[b, n // group]]) for x, y in ((ks, k), (vs, v))
        )
        for t in range(q.shape[1]):
            seen = start[b] + t + 1
            scores = keys[:seen] @ q[b, t, n] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ values[:seen] / weights.sum()
    return out


def with_behind(cache, start, value):
    """The cache with `value` past each row's end. An int8 cache gets `value` in its scales and 127 in its numbers."""

    def put(x):
        past_end = (np.arange(S) >= start[:, None]).reshape(1, len(start), 1, S, *[1] * (x.ndim - 4))
        return jnp.where(past_end, jnp.asarray(127 if x.dtype == jnp.int8 else value, x.dtype), x)

    S = cache.positions
    return jax.tree.map(put, cache)


SHAPES = [
    (1, 7, 1120, "bfloat16", "bfloat16"),
    (2, 6, 608, "float16", "float16"),
    (4, 1, 96, "bfloat16", "bfloat16"),
    (2, 3, 416, "float32", "float32"),
    (1, 7, 2080, "bfloat16", "int8"),
    (4, 2, 608, "float32", "int8"),
]


@pytest.mark.parametrize("form", ["splash", "cudnn"])
@pytest.mark.parametrize(
    ("K", "G", "S", "dtype", "cached", "T"),
    [(*shape, T) for i, shape in enumerate(SHAPES) for T in (1, (3, MAX_DECODE_TOKENS)[i % 2])],
)
def test_every_row_to_its_own_length(K, G, S, dtype, cached, form, T):
    """A block skipped at a row's end or read from its neighbour, another layer's cache, heads paired wrongly, a draft
    that attends to the drafts after it, or a NaN past a row's end or the cache's end that reaches the output."""
    size = ragged.block_positions(K, H, jnp.dtype(cached).itemsize, S) if form == "splash" else ragged.GPU_BLOCK
    ends = [0, 1, size - 1, size, size + 1, S // 2, ragged.GPU_PART, ragged.GPU_PART + 1, S - 1, S]
    start = np.array(sorted({min(end, S) for end in ends}), np.int32)
    q, k, v, cache = drawn(len(start), K, G, S, dtype, cached, T)
    wanted = by_definition(q, k, v, cache, start)
    cache = with_behind(cache, start, jnp.nan)
    interpreted = functools.partial(ragged.decode, implementation=form, interpret=True)
    got = jax.jit(interpreted)(q, k, v, cache, jnp.int32(LAYER), start)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=BOUNDS[dtype])
    if T > 1:  # the last token is a draft with values that are not finite
        k, v = (x.at[:, :, -1].set(jnp.nan) for x in (k, v))
        got = jax.jit(interpreted)(q, k, v, cache, jnp.int32(LAYER), start)[:, :-1]
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted[:, :-1], atol=BOUNDS[dtype])


@pytest.mark.parametrize(
    ("dtype", "cached"),
    [*((name, name) for name in BOUNDS), ("float32", "int8"), ("bfloat16", "int8")],
)
@pytest.mark.parametrize(
    ("K", "G", "S", "B", "T"), [(1, 7, 1120, 6, 1), (2, 2, 832, 24, 4), (4, 1, 96, 3, 1), (2, 3, 288, 1, 8)]
)
def test_rows_in_groups(K, G, S, B, T, dtype, cached):
    """A group that ends with its first row, a block that two visits count, or reads past a row's end."""
    start = np.random.default_rng(1).integers(0, S + 1, B).astype(np.int32)
    start[:3] = [S, 0, min(257, S)][:B]
    q, k, v, cache = drawn(B, K, G, S, dtype, cached, T)
    wanted = by_definition(q, k, v, cache, start)
    cache = with_behind(cache, start, 3e4)
    cache = replace(cache, k=cache.k.swapaxes(3, 4), k_transposed=True)
    got = jax.jit(functools.partial(ragged.decode, implementation="rowwise"))(q, k, v, cache, jnp.int32(LAYER), start)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=BOUNDS[dtype])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize(("dtype", "cached"), [("float32", "float32"), ("bfloat16", "int8")])
def test_without_blocks(dtype, cached, T, transposed):
    """The form for other machines, in which a draft attends to the drafts after it or past its row's end."""
    start = np.array([0, 5, 96], np.int32)
    q, k, v, cache = drawn(3, 2, 3, 96, dtype, cached, T)
    wanted = by_definition(q, k, v, cache, start)
    cache = jax.tree.map(lambda x: x[LAYER], with_behind(cache, start, 3e4))
    keys = Keys(cache.k.swapaxes(2, 3) if transposed else cache.k, cache.v, transposed, cache.k_scale, cache.v_scale)
    got = attention_to_cache.decode(q, k, v, keys, start)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=BOUNDS[dtype])
    if T > 1:  # the last token is a draft with values that are not finite
        k, v = (x.at[:, :, -1].set(jnp.nan) for x in (k, v))
        got = attention_to_cache.decode(q, k, v, keys, start)[:, :-1]
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted[:, :-1], atol=BOUNDS[dtype])


def test_groups_fill_what_they_may():
    """Groups that do not divide the rows, or whose blocks exceed a processor's cache."""
    for rows, line, wanted in ((64, 2**16, 16), (48, 2**16, 16), (7, 2**16, 7), (34, 2**16, 2), (8, 2**21, 1)):
        assert ragged.group_rows(rows, line) == wanted


def test_the_work_is_what_the_rows_hold():
    """Every entry is read: one for each block of every row, one for an empty row, and no others."""
    start = np.array([0, 1, 512, 513, 6208, 0, 1024], np.int32)
    row, block, count = jax.jit(functools.partial(ragged.work, block=512, entries=7 * 13))(start)
    listed = list(zip(row[:count].tolist(), block[:count].tolist(), strict=True))
    assert listed == [(r, b) for r, n in enumerate(start) for b in range(max(1, -(-n // 512)))]
    assert [ragged.block_positions(K, 128, 2, 6208) for K in (1, 2, 4, 8)] == [512, 256, 128, 128]
    assert ragged.block_positions(1, 128, 2, 96) == 96


def test_where_it_is_asked_for(tiny_tokenizer):
    """A kernel used where its heads do not fill registers, or where a device lacks the keys of its query heads."""
    one, split = one_device_mesh(), jax.sharding.AbstractMesh((1, 2, 4), ("data", "fsdp", "tensor"))
    asked = {size: ragged.applies("splash", False, shape, one) for size, shape in PRESETS.items()}
    assert asked == {size: shape.head_dim == 128 for size, shape in PRESETS.items()} and asked["7b"]
    for form, transposed in (("splash", False), ("cudnn", False), ("rowwise", True)):
        assert ragged.applies(form, transposed, PRESETS["7b"], split)
        assert not ragged.applies(form, transposed, PRESETS["1.5b"], split)
    assert all(ragged.applies("rowwise", True, shape, one) for shape in PRESETS.values())
    assert all(ragged.applies("cudnn", False, shape, one) for shape in PRESETS.values())
    assert not ragged.applies("cudnn", False, replace(PRESETS["7b"], head_dim=96), one)
    assert not any(ragged.applies("blocked", False, shape, one) for shape in PRESETS.values())
    rollout = RolloutSection()
    assert SamplerShapes.of(rollout, one, by_length=True).spans == (rollout.context_tokens,)
    assert len(SamplerShapes.of(rollout, one).spans) == 4


@pytest.mark.parametrize(("form", "T"), [("splash", 1), ("splash", 4), ("cudnn", 1), ("cudnn", 4)])
def test_a_model_that_decodes_with_it(monkeypatch, form, T):
    """Another position, layer or rotation than in the portable form."""
    config = tiny_config(head_dim=H)
    params, rng = random_params(config, scale=0.1), np.random.default_rng(0)
    shape = (config.layers, 4, config.kv_heads, 64, H)
    cache = KVCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    ids, start = rng.integers(0, 400, (4, T)).astype(np.int32), np.array([0, 5, 33, 64], np.int32)
    asked = []

    def interpreted(*arguments, **keywords):
        asked.append(arguments)
        return ragged_decode(*arguments, interpret=True, **keywords)

    ragged_decode = ragged.decode
    monkeypatch.setattr(ragged, "decode", interpreted)

    def hidden(form):
        model = nnx.merge(decoder.graphdef(config, jnp.float32, attention=form), params)
        return jax.jit(functools.partial(model.hidden, keep_kv=True))(ids, cache, start)

    if form == "splash":  # in each of 28 layers, the work list would take a twentieth of a step
        model = nnx.merge(decoder.graphdef(config, jnp.float32, attention=form), params)
        traced = jax.make_jaxpr(functools.partial(model.hidden, keep_kv=True))(ids, cache, start)
        (layers,) = (equation for equation in traced.eqns if equation.primitive.name == "scan")
        assert "cumsum" in str(traced) and "cumsum" not in str(layers.params["jaxpr"])
        asked.clear()
    (ours, new), (wanted, wanted_new) = hidden(form), hidden("blocked")
    assert len(asked) == 1
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    for x, y in zip(new, wanted_new, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_it_compiles_for_tpus(topology, T):
    """Code that only the interpreter accepts, or a cache that is first copied to another layout."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    from psearch_jax.planning.targets import tpu_target

    devices, B, S = tpu_target(topology).devices, 32, 6208
    for size, tensor in (("7b", 4), ("1.5b", 1), ("14b", 2)):
        shape, mesh = PRESETS[size], make_mesh(MeshSection(1, -1, tensor), devices)

        def placed(sizes, *axes, dtype=jnp.bfloat16, mesh=mesh):
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

        rows, K = ("data", "fsdp"), shape.kv_heads
        q = placed((B, T, shape.heads, H), rows, None, "tensor")
        own = placed((B, K, T, H), rows, "tensor")
        cache = placed((LAYERS, B, K, S, H), None, rows, "tensor")
        layer, start = placed((), dtype=jnp.int32), placed((B,), rows, dtype=jnp.int32)

        number = placed(cache.shape, None, rows, "tensor", dtype=jnp.int8)
        scale = placed(cache.shape[:-1], None, rows, "tensor", dtype=jnp.float32)
        for kv_cache in (KVCache(cache, cache), KVCache(number, number, False, scale, scale)):
            with jax.set_mesh(mesh):
                decode = functools.partial(ragged.decode, implementation="splash")
                compiled = jax.jit(decode).lower(q, own, own, kv_cache, layer, start).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < 2**22, (size, kv_cache.v.dtype)
            assert "all-gather" not in compiled.as_text()


def described(size, B, S, cached, sharding=None, T=1):
    """The abstract arguments of `ragged.decode` for a published model."""
    shape = PRESETS[size]

    def of(sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    K, H = shape.kv_heads, shape.head_dim
    cache, scales = of((LAYERS, B, K, S, H), jnp.dtype(cached)), of((LAYERS, B, K, S), jnp.float32)
    cache = KVCache(cache, cache, False, scales, scales) if cached == "int8" else KVCache(cache, cache)
    own = of((B, K, T, H))
    return of((B, T, shape.heads, H)), own, own, cache, of((), jnp.int32), of((B,), jnp.int32)


@pytest.mark.parametrize("cached", ["bfloat16", "int8"])
@pytest.mark.parametrize(("size", "T"), [("1.5b", 1), ("7b", 4)])
def test_it_lowers_for_gpus(size, T, cached):
    """Code that the interpreter accepts and the GPU kernel language cannot express."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"), abstract_device=device)
    decode = jax.jit(functools.partial(ragged.decode, implementation="cudnn"))
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = decode.trace(*described(size, 32, 6208, cached, T=T)).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in lowered and "ragged_decode" in lowered


@pytest.mark.parametrize("cached", ["bfloat16", "int8"])
@pytest.mark.parametrize("gpu", ["h100", "a100-80", "l4"])
def test_it_compiles_for_gpus(gpu, cached):
    """More shared memory than a block may use, or a cache that is copied before it is read."""
    from psearch_jax.planning.targets import absent_gpus, has_gpu_compiler

    if not has_gpu_compiler():
        pytest.skip("the compiler for GPUs is not installed: pip install 'jax[cuda13]'")
    mesh = make_mesh(MeshSection(), absent_gpus(gpu, 1))
    place = NamedSharding(mesh, PartitionSpec())
    for size, T in (("0.5b", 1), ("1.5b", 4), ("7b", 1), ("7b", 4)):
        decode = jax.jit(functools.partial(ragged.decode, implementation="cudnn"))
        with jax.set_mesh(mesh):
            compiled = decode.lower(*described(size, 32, 6208, cached, place, T)).compile()
        # The partial results of the parts, and their combination.
        assert compiled.memory_analysis().temp_size_in_bytes < 2**23 * T, (size, T)


def test_a_cache_of_bytes_that_32_bits_do_not_count():
    """From 2 GiB on, a 32-bit offset into a cache of bytes would turn negative and read unrelated memory."""
    B = 384
    arguments = described("7b", B, 6208, "int8")
    assert 2**31 < arguments[3].v.size <= 2**32
    traced = str(jax.jit(functools.partial(ragged.decode, implementation="cudnn")).trace(*arguments).jaxpr)
    assert f"i8[1,{B},4,6208,{H}]" in traced
    traced = str(
        jax.jit(functools.partial(ragged.decode, implementation="cudnn"))
        .trace(*described("7b", 64, 6208, "int8"))
        .jaxpr
    )
    assert "i8[1," not in traced
