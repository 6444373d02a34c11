"""Attention of chunks that continue cache rows, for TPUs and GPUs: interpreted and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import one_device_mesh, random_params, tiny_config
from jax.sharding import NamedSharding, PartitionSpec
from test_ragged import BOUNDS, LAYER, LAYERS, H, by_definition, drawn, with_behind

from psearch_jax.config import PRESETS, MeshSection
from psearch_jax.models import decoder, ragged_chunk
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.sharding import make_mesh

FORMS = ("splash", "cudnn")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("K", "G", "S", "dtype", "cached", "T"),
    [
        (1, 7, 1120, "bfloat16", "bfloat16", 200),
        (2, 2, 416, "float32", "float32", 40),
        (2, 3, 1120, "float16", "int8", 130),
        (4, 1, 96, "float32", "int8", 128),
    ],
)
def test_every_row_continues_its_own(K, G, S, dtype, cached, T, form):
    """Another row's or layer's keys, a block skipped or counted twice at a row's end, a query that sees the chunk's
    later tokens, heads paired wrongly, or a NaN past a row's end that reaches the output."""
    starts = np.array(sorted({min(end, S) for end in (0, 1, 64, 512, 513, S - 1, S)}), np.int32)
    rows = np.random.default_rng(2).permutation(len(starts) + 2).astype(np.int32)[: len(starts)]
    q, k, v, cache = drawn(len(starts), K, G, S, dtype, cached, T)
    wanted = by_definition(q, k, v, cache, starts)
    cache = with_behind(cache, starts, jnp.nan)
    # The rows in another order, between rows that nothing may read.
    cache = jax.tree.map(
        lambda x: jnp.full_like(jnp.pad(x, [(0, 0), (0, 2), *[(0, 0)] * (x.ndim - 2)]), 99).at[:, rows].set(x), cache
    )
    attend = functools.partial(ragged_chunk.attend, form=form, interpret=True)
    got = jax.jit(attend)(q, k, v, cache, jnp.int32(LAYER), starts, rows)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=BOUNDS[dtype])


def test_a_row_of_the_call_without_a_row_of_the_cache():
    """A call for fewer rows than it has places for: -1 would read before the cache, or make other rows NaN."""
    starts, rows = np.array([5, 0], np.int32), np.array([1, -1], np.int32)
    q, k, v, cache = drawn(2, 2, 2, 96, "float32", "float32", 40)
    order = KVCache(cache.k[:, ::-1], cache.v[:, ::-1])
    for form in FORMS:
        attend = jax.jit(functools.partial(ragged_chunk.attend, form=form, interpret=True))
        got = attend(q, k, v, order, jnp.int32(LAYER), starts, rows)
        np.testing.assert_allclose(got, by_definition(q, k, v, cache, starts), atol=2e-5)


def test_the_work_is_what_rows_and_queries_need():
    """Keys that a block of queries cannot see, or a block of a row's cache past its end, are not visited."""
    start = np.array([0, 1, 512, 513, 1500], np.int32)
    pair, block, count = jax.jit(functools.partial(ragged_chunk.work, size=512, query_blocks=3, key_blocks=3))(start)
    listed = list(zip(pair[:count].tolist(), block[:count].tolist(), strict=True))
    assert listed == [
        (3 * row + queries, keys)
        for row, length in enumerate(start)
        for queries in range(3)
        for keys in range(-(-length // 512) + queries + 1)
    ]
    full = jax.jit(functools.partial(ragged_chunk.work, size=512, query_blocks=3, key_blocks=3))(np.full(5, 1536))
    assert full[2] == len(full[0]), "the list has room for full rows"


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_extends_with_it(monkeypatch, form):
    """Another position, layer, rotation or cache row than in the portable form."""
    config = tiny_config(head_dim=H)
    params, rng = random_params(config, scale=0.1), np.random.default_rng(0)
    shape = (config.layers, 6, config.kv_heads, 64, H)
    cache = KVCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    ids, start = rng.integers(0, 400, (4, 20)).astype(np.int32), np.array([0, 5, 33, 64], np.int32)
    asked, attend = [], ragged_chunk.attend

    def interpreted(*arguments, **keywords):
        asked.append(arguments)
        return attend(*arguments, interpret=True, **keywords)

    monkeypatch.setattr(ragged_chunk, "attend", interpreted)

    def hidden(form, rows):
        model = nnx.merge(decoder.graphdef(config, jnp.float32, attention=form), params)
        return jax.jit(functools.partial(model.hidden, keep_kv=True))(ids, cache, start, rows=rows)

    rows = jnp.array([5, 0, 2, 3], jnp.int32)
    if form == "splash":  # the work list is computed once, not in each layer
        model = nnx.merge(decoder.graphdef(config, jnp.float32, attention=form), params)
        traced = jax.make_jaxpr(functools.partial(model.hidden, keep_kv=True))(ids, cache, start, rows=rows)
        (layers,) = (equation for equation in traced.eqns if equation.primitive.name == "scan")
        assert "cumsum" in str(traced) and "cumsum" not in str(layers.params["jaxpr"])
        asked.clear()
    (ours, new), (wanted, wanted_new) = hidden(form, rows), hidden("blocked", rows)
    assert len(asked) == 1
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    for x, y in zip(new, wanted_new, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_where_it_is_used():
    """A CPU keeps the form with transposed keys, and a head that does not fill registers is left to the compiler."""
    one = one_device_mesh()
    assert not ragged_chunk.applies("rowwise", True, PRESETS["7b"], one)
    assert not ragged_chunk.applies("blocked", False, PRESETS["7b"], one)
    assert ragged_chunk.applies("splash", False, PRESETS["7b"], one)
    assert not ragged_chunk.applies("splash", False, PRESETS["0.5b"], one)
    assert ragged_chunk.applies("cudnn", False, PRESETS["0.5b"], one)


def described(size, R, T, cached, mesh=None, B=32, S=6208):
    """The abstract arguments of `ragged_chunk.attend` for a published model."""
    shape, rows = PRESETS[size], ("data", "fsdp")

    def of(sizes, dtype, *axes):
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    K, H = shape.kv_heads, shape.head_dim
    cache = of((LAYERS, B, K, S, H), jnp.dtype(cached), None, rows, "tensor")
    scales = of((LAYERS, B, K, S), jnp.float32, None, rows, "tensor")
    kv_cache = KVCache(cache, cache, False, scales, scales) if cached == "int8" else KVCache(cache, cache)
    own = of((R, K, T, H), jnp.bfloat16, rows, "tensor")
    q = of((R, T, shape.heads, H), jnp.bfloat16, rows, None, "tensor")
    numbers = of((R,), jnp.int32, rows)
    return q, own, own, kv_cache, of((), jnp.int32), numbers, numbers


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_it_compiles_for_tpus(topology):
    """Code that only the interpreter accepts, more memory than a core has, or a copy of the cache or of its rows."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    from psearch_jax.planning.targets import tpu_target

    devices, R, T = tpu_target(topology).devices, 8, 1000
    for size, tensor in (("7b", 4), ("1.5b", 1), ("14b", 1)):
        mesh = make_mesh(MeshSection(1, -1, tensor), devices)
        for cached in ("bfloat16", "int8"):
            arguments = described(size, R, T, cached, mesh)
            with jax.set_mesh(mesh):
                attend = functools.partial(ragged_chunk.attend, form="splash")
                compiled = jax.jit(attend).lower(*arguments).compile()
            chunk = R * T * PRESETS[size].heads * 128 * 2 // len(devices)  # the queries of a device
            assert compiled.memory_analysis().temp_size_in_bytes < 5 * chunk, (size, cached)
            assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("cached", ["bfloat16", "int8"])
def test_it_lowers_for_gpus(cached):
    """Code that the interpreter accepts and the GPU kernel language cannot express."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"), abstract_device=device)
    attend = jax.jit(functools.partial(ragged_chunk.attend, form="cudnn"))
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = attend.trace(*described("1.5b", 8, 600, cached)).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in lowered and "ragged_chunk" in lowered


@pytest.mark.parametrize("gpu", ["h100", "a100-80", "l4"])
def test_it_compiles_for_gpus(gpu):
    """More shared memory or registers than a block may use, or a copy of the cache or of its rows."""
    from psearch_jax.planning.targets import absent_gpus, has_gpu_compiler

    if not has_gpu_compiler():
        pytest.skip("the compiler for GPUs is not installed: pip install 'jax[cuda13]'")
    mesh, R, T = make_mesh(MeshSection(), absent_gpus(gpu, 1)), 8, 1000
    for size, cached in (("0.5b", "bfloat16"), ("1.5b", "int8"), ("7b", "bfloat16")):
        attend = jax.jit(functools.partial(ragged_chunk.attend, form="cudnn"))
        with jax.set_mesh(mesh):
            compiled = attend.lower(*described(size, R, T, cached, mesh)).compile()
        chunk = R * T * PRESETS[size].heads * PRESETS[size].head_dim * 2
        assert compiled.memory_analysis().temp_size_in_bytes < 5 * chunk, (size, cached)
