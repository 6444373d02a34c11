"""The implementations of attention against the plain definition: values and gradients, with and without a cache."""

import functools
import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from psearch_jax.config import PRESETS, MeshSection
from psearch_jax.models.attention import attend_causally, on_each_device
from psearch_jax.models.attention.blocked import QUERY_BLOCK
from psearch_jax.models.attention.cached import KEY_BLOCK, QUERY_CHUNK, Keys, attend_chunk, decode
from psearch_jax.models.attention.cudnn import SEGMENTS
from psearch_jax.models.attention.splash import splash_attention, splash_block, splash_width
from psearch_jax.models.backend import FEW_ROWS, choose_backend
from psearch_jax.models.buckets import buckets
from psearch_jax.runtime import platforms
from psearch_jax.sharding import AXES, make_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "configs"))


def plain(q, k, v, old=None, start=None, segments=None):
    """Softmax over all scores, head by head, in float64."""
    B, T, N, H = q.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if old is not None:
        k, v = (np.concatenate([np.asarray(o, np.float64), new], axis=2) for o, new in zip(old, (k, v), strict=True))
    S = k.shape[2]
    out = np.zeros((B, T, N, H))
    for b in range(B):
        seen = np.tril(np.ones((T, T), bool))
        if old is not None:
            before = np.arange(S - T) < int(start[b])
            seen = np.concatenate([np.tile(before, (T, 1)), seen], axis=1)
        if segments is not None:
            seen &= segments[b][:, None] == segments[b]
        for n in range(N):
            kv = n // (N // k.shape[1])
            scores = np.where(seen, q[b, :, n] @ k[b, kv].T / np.sqrt(H), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, :, n] = weights / weights.sum(axis=1, keepdims=True) @ v[b, kv]
    return out


def draw(B=2, T=40, N=4, K=2, H=8, S=0, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, T, N, H)).astype(np.float32)
    kv = [rng.normal(size=(B, K, T, H)).astype(np.float32) for _ in range(2)]
    old = [rng.normal(size=(B, K, S, H)).astype(np.float32) for _ in range(2)] if S else None
    return q, *kv, old


@pytest.mark.parametrize("length", [1, 40, 2 * QUERY_BLOCK + 130])
def test_blocked_attention(length):
    """Every query attends to the keys up to its own, with any number of blocks."""
    q, k, v, _ = draw(T=length)
    np.testing.assert_allclose(jax.jit(attend_causally)(q, k, v), plain(q, k, v), atol=2e-6)


@pytest.mark.parametrize(("length", "S"), [(1, 20), (40, 20), (QUERY_CHUNK + 30, 20), (9, 2 * KEY_BLOCK + 50)])
def test_attention_to_a_cache(length, S):
    """Rows of different lengths attend to their real keys only, each once, in every block of queries and keys."""
    q, k, v, old = draw(T=length, S=S, B=3)
    start = np.array([0, 13, S - 7], np.int32)
    wanted = plain(q, k, v, old, start)
    for form in (attend_chunk, decode) if length == 1 else (attend_chunk,):
        function = jax.jit(lambda q, k, v, old, form=form: form(q, k, v, Keys(*old), start))
        np.testing.assert_allclose(function(q, k, v, old), wanted, atol=2e-6)


def gradients(function, q, k, v):
    def total(q, k, v):
        return jnp.sum(jnp.sin(function(q, k, v)))

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v)


def whole(q, k, v):
    """Attention with all scores at once, differentiable."""
    return dense(q, k, v, np.zeros(q.shape[:2], np.int32))


def test_gradients_of_blocked_attention():
    """The recomputation in the backward pass is that of the forward pass."""
    q, k, v, _ = draw(T=QUERY_CHUNK + 70)
    for ours, wanted in zip(gradients(attend_causally, q, k, v), gradients(whole, q, k, v), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


@pytest.mark.parametrize(("length", "heads", "kv_heads", "size"), [(128, 4, 2, 128), (200, 4, 1, 64), (130, 2, 2, 16)])
def test_the_tpu_kernel(length, heads, kv_heads, size):
    """The kernel's padding would leak into values or gradients, a scale be missing, or heads be paired wrongly."""
    q, k, v, _ = draw(T=length, N=heads, K=kv_heads, H=size)
    np.testing.assert_allclose(splash(q, k, v), plain(q, k, v), atol=1e-5)
    for ours, wanted in zip(gradients(splash, q, k, v), gradients(whole, q, k, v), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4)


def in_segments(length):
    """Segment ids of two rows: three trajectories; one trajectory and padding."""
    place = np.arange(length)
    return np.stack([1 + (place > 5) + (place > length // 2), np.where(place < length - 9, 1, 0)]).astype(np.int32)


def dense(q, k, v, segments):
    """Attention by the definition, with all scores at once, differentiable."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[1], axis=1) for x in (k, v))
    seen = jnp.tril(segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.einsum("BTNH,BNSH->BNTS", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("BNTS,BNSH->BTNH", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


@pytest.mark.parametrize(
    ("form", "length"),
    [("blocked", 40), ("blocked", 2 * QUERY_BLOCK + 30), ("splash", 200)],
)
def test_attention_within_segments(form, length):
    """A trajectory would attend to the one before it in its row, in values or in gradients."""
    q, k, v, _ = draw(T=length)
    segments = in_segments(length)
    function = splash if form == "splash" else functools.partial(attend_causally, implementation=form)
    function = functools.partial(function, segments=segments)
    np.testing.assert_allclose(jax.jit(function)(q, k, v), plain(q, k, v, segments=segments), atol=1e-5)
    ours, wanted = (
        jax.jit(functools.partial(gradients, f))(q, k, v)
        for f in (function, functools.partial(dense, segments=segments))
    )
    for x, y in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def rows_with_trajectories(length):
    """Segment ids of four packed rows: `SEGMENTS` trajectories that fill it, two and padding, one, and none."""
    place, out = np.arange(length), np.zeros((4, length), np.int32)
    out[0] = 1 + np.searchsorted([1, length // 3, length // 2], place, side="right")
    out[1] = np.where(place < length - 9, 1 + (place > 20), 0)
    out[2] = 1
    assert out[0].max() == SEGMENTS
    return out


def without_a_gpu(q, k, v, *, implementation, **arguments):
    """JAX's own attention with the arguments for cuDNN's, with NaN where that leaves values that count for nothing."""
    assert implementation == "cudnn"
    lengths = arguments["query_seq_lengths"]
    out = DOT_PRODUCT(q, k, v, implementation="xla", **arguments)
    real = jnp.arange(q.shape[1]) < lengths[:, None]
    return jnp.where(real[..., None, None], out, jnp.nan)


DOT_PRODUCT = jax.nn.dot_product_attention


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(40, 4, 2), (64, 3, 1)])
def test_the_gpu_kernel_within_segments(monkeypatch, length, heads, kv_heads):
    """A trajectory that is moved to another's place, is cut, or attends to a neighbour; a gradient that returns to
    another position, or that the padding after a trajectory makes NaN."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", without_a_gpu)
    q, k, v, _ = draw(B=4, T=length, N=heads, K=kv_heads, H=32)
    segments = rows_with_trajectories(length)
    real = (segments > 0)[..., None, None]

    def ours(q, k, v):
        return jnp.where(real, attend_causally(q, k, v, "cudnn", segments), 0)

    def defined(q, k, v):
        return jnp.where(real, dense(q, k, v, segments), 0)

    wanted = np.where(real, plain(q, k, v, segments=segments), 0)
    np.testing.assert_allclose(jax.jit(ours)(q, k, v), wanted, atol=1e-5)
    for x, y in zip(gradients(ours, q, k, v), gradients(defined, q, k, v), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_no_number_is_added_one_by_one(monkeypatch):
    """The transpose of a gather is a scatter, which a GPU adds with atomic operations: slow, and in any order."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", without_a_gpu)
    q, k, v, _ = draw(B=4, T=40, N=4, K=2, H=32)
    attend = functools.partial(attend_causally, implementation="cudnn", segments=rows_with_trajectories(40))
    traced = jax.make_jaxpr(functools.partial(gradients, attend))(q, k, v)
    assert "gather" in str(traced) and "scatter" not in str(traced)


SIXTEEN = 0.03  # for values from N(0, 1) and scores of std 16; rounding the query twice gives 3 times this error


def sixteen_bits(length, dtype=jnp.bfloat16):
    """16-bit queries, keys and values at the models' head dim, with scores as large as trained heads have."""
    rng = np.random.default_rng(3)
    q, k = (4 * rng.normal(size=shape) for shape in ((1, length, 2, 128), (1, 1, length, 128)))
    return [jnp.asarray(x, dtype) for x in (q, k, rng.normal(size=(1, 1, length, 128)))]


def splash(q, k, v, segments=None):
    return splash_attention(q, k, v, segments, interpret=True)


@pytest.mark.parametrize(
    ("length", "form", "dtype"),
    [
        (100, attend_causally, "bfloat16"),
        (QUERY_CHUNK + 128, attend_causally, "bfloat16"),
        (QUERY_CHUNK + 128, attend_causally, "float16"),
        (QUERY_CHUNK + 128, splash, "bfloat16"),
    ],
)
def test_sixteen_bits(length, form, dtype):
    """Scaling 16-bit queries would round every score once more, by 2**-9 of its value."""
    q, k, v = sixteen_bits(length, jnp.dtype(dtype))
    np.testing.assert_allclose(np.asarray(form(q, k, v), np.float64), plain(q, k, v), atol=SIXTEEN)


@pytest.mark.parametrize("form", [attend_causally, splash])
def test_sixteen_bits_within_segments(form):
    """The same for a packed row, whose trajectories attend only to their own keys."""
    q, k, v = sixteen_bits(QUERY_CHUNK)
    segments = (1 + np.arange(QUERY_CHUNK) // 100)[None].astype(np.int32)
    got = np.asarray(form(q, k, v, segments=segments), np.float64)
    np.testing.assert_allclose(got, plain(q, k, v, segments=segments), atol=SIXTEEN)


@pytest.mark.parametrize(("length", "form"), [(20, attend_chunk), (1, attend_chunk), (1, decode)])
def test_sixteen_bits_with_a_cache(length, form):
    """The same for scores against cached keys, which a separate product computes."""
    q, k, v = sixteen_bits(40 + length)
    old, start = [x[:, :, :40] for x in (k, v)], np.array([40], np.int32)
    q, k, v = q[:, 40:], k[:, :, 40:], v[:, :, 40:]
    got = form(q, k, v, Keys(*old), start)
    np.testing.assert_allclose(np.asarray(got, np.float64), plain(q, k, v, old, start), atol=SIXTEEN)


def test_gradients_of_the_tpu_kernel_in_sixteen_bits():
    """The rounding error appended to queries would count twice in a gradient, or be missing in that of the keys."""
    low = sixteen_bits(100)
    wide = [x.astype(jnp.float32) for x in low]
    for ours, wanted in zip(gradients(splash, *low), gradients(whole, *wide), strict=True):
        ours, wanted = np.asarray(ours, np.float64), np.asarray(wanted, np.float64)
        assert np.linalg.norm(ours - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel needs a GPU")
def test_the_gpu_kernel():
    """cuDNN would get axes in another order, keys of other heads, or another scale than the other implementations."""
    q, k, v, _ = draw(T=300, N=4, K=2, H=64)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    np.testing.assert_allclose(attend_causally(*low, "cudnn").astype(np.float32), plain(q, k, v), atol=3e-2)
    q, k, v = sixteen_bits(QUERY_CHUNK + 128)
    np.testing.assert_allclose(np.asarray(attend_causally(q, k, v, "cudnn"), np.float64), plain(q, k, v), atol=SIXTEEN)
    q, k, v, _ = draw(B=4, T=300, N=4, K=2, H=64)
    low, segments = [x.astype(jnp.bfloat16) for x in (q, k, v)], rows_with_trajectories(300)
    real = (segments > 0)[..., None, None]
    ours, defined = (
        gradients(lambda *x, f=f: jnp.where(real, f(*x), 0).astype(jnp.float32), *x)
        for f, x in (
            (functools.partial(attend_causally, implementation="cudnn", segments=segments), low),
            (functools.partial(dense, segments=segments), (q, k, v)),
        )
    )
    for x, y in zip(ours, defined, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) < 0.03 * np.linalg.norm(y)


@pytest.mark.parametrize("gpu", ["h100"])
def test_packed_rows_compile_for_gpus(gpu):
    """cuDNN refuses lengths together with a causal mask or grouped heads, or the gradient needs a scatter."""
    from psearch_jax.planning.targets import absent_gpus, has_gpu_compiler

    if not has_gpu_compiler():
        pytest.skip("the compiler for GPUs is not installed: pip install 'jax[cuda13]'")
    mesh = make_mesh(MeshSection(), absent_gpus(gpu, 1))
    place = NamedSharding(mesh, PartitionSpec())

    def of(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def total(q, k, v, segments):
        return jnp.sum(attend_causally(q, k, v, "cudnn", segments).astype(jnp.float32))

    B, T, N, K, H = 2, 3072, 12, 2, 128
    arguments = of((B, T, N, H)), of((B, K, T, H)), of((B, K, T, H)), of((B, T), jnp.int32)
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*arguments).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="__cudnn$fmha') == 2 and " scatter(" not in text
    separate = SEGMENTS * B * T * (N + 2 * K) * H * 2  # queries, keys and values in rows of their own
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * separate


def mesh_of(*described):
    """A mesh of simulated devices, each described by its platform and compute capability."""
    devices = [
        SimpleNamespace(platform=p, compute_capability=c) if c else SimpleNamespace(platform=p) for p, c in described
    ]
    return SimpleNamespace(devices=np.array(devices).reshape(1, -1, 1), size=len(devices), shape={"tensor": 1})


def test_the_backend_follows_the_devices(monkeypatch):
    """A device is never asked for a kernel that it lacks, such as a T4 (configs/colab.py) for cuDNN's."""
    t4, a100, amd, tpu, cpu = ("gpu", "7.5"), ("gpu", "8.0"), ("gpu", "gfx942"), ("tpu", None), ("cpu", None)
    shape = PRESETS["7b"]
    for devices, attention, cache in (
        ([t4], "blocked", "span"),
        ([a100], "cudnn", "span"),
        ([a100, t4], "blocked", "span"),  # one program for all devices
        ([amd], "blocked", "span"),
        ([tpu, tpu], "splash", "kernel"),
        ([cpu], "blocked", "groups"),
    ):
        backend = choose_backend(mesh_of(*devices), "bfloat16", shape)
        assert (backend.attention, backend.cache) == (attention, cache), devices
        assert choose_backend(mesh_of(*devices), "float32", shape).attention == "blocked"
        assert backend.activations("bfloat16") == ("float32" if devices == [cpu] else "bfloat16")
        assert (backend.unstack == "per_call") == (devices[0][0] == "gpu")
    assert choose_backend(mesh_of(tpu), "bfloat16", PRESETS["0.5b"]).cache == "span"  # heads of 64
    split = SimpleNamespace(**{**vars(mesh_of(tpu)), "shape": {"tensor": 8}})  # a device lacks keys of its queries
    assert choose_backend(split, "bfloat16", shape).cache == "span"
    monkeypatch.setattr(platforms, "cpu_multiplies", lambda dtype: False)
    few, many = (choose_backend(mesh_of(cpu), "float32", shape, rows) for rows in (FEW_ROWS, FEW_ROWS + 1))
    assert few.kernels_left and few.unstack == "once"
    assert not many.kernels_left and many.unstack == "never"
    assert choose_backend(mesh_of(cpu, cpu), "float32", shape).unstack == "never"


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(16, 2, 4), (28, 4, 4), (28, 4, 7), (12, 2, 1), (6, 3, 2)])
def test_every_device_has_the_keys_of_its_queries(heads, kv_heads, tensor):
    """If the mesh does not divide the kv heads, a device would lack the keys of its queries, or hold spare copies."""
    mesh = AbstractMesh((1, 2, tensor), AXES, axis_types=(AxisType.Auto,) * 3)
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, 16, heads, 8), (4, kv_heads, 16, 8)))
    seen = []

    def kernel(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return q

    with jax.sharding.use_abstract_mesh(mesh):
        assert jax.eval_shape(functools.partial(on_each_device, kernel), q, k, k).shape == q.shape
    ((local, keys, values),) = seen
    assert local == (4 // 2, 16, heads // tensor, 8) and keys == values and local[2] % keys[1] == 0
    # No more copies than needed.
    assert keys == (4 // 2, math.lcm(kv_heads, tensor) // tensor, 16, 8)


@pytest.mark.parametrize(
    "name", ["colab", "qwen0p5b", "qwen7b", "qwen7b_lora", "qwen14b", "qwen3_8b", "hotpot_sample", "smoke"]
)
def test_no_row_is_left_with_small_blocks(name):
    """A width that only 128 divides would get the kernel's small blocks, which leave most of the matrix unit idle."""
    rollout = importlib.import_module(name).get_config().rollout
    widths = {*buckets(rollout.context_tokens), *buckets(rollout.prompt_tokens)}
    for width in widths:
        block, padded = splash_block(width), splash_width(width)
        assert padded % block == 0 <= padded - width < max(block, 128) and block % 128 == 0
        assert block == 512 or block == padded, width  # a short row is one block
    if rollout.context_tokens >= 2048:  # the last width is padded only inside the kernel
        assert all(width % 512 == 0 for width in buckets(rollout.context_tokens)[:-1])
