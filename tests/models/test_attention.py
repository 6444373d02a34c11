"""The implementations of attention against the plain definition: values and gradients, with and without a cache."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from psearch_jax.config import PRESETS
from psearch_jax.models.attention import attend_causally, on_each_device
from psearch_jax.models.attention.blocked import QUERY_BLOCK
from psearch_jax.models.attention.cached import KEY_BLOCK, QUERY_CHUNK, Keys, attend_chunk, decode
from psearch_jax.models.attention.cudnn import SEGMENTS
from psearch_jax.models.attention.splash import splash_attention, splash_block, splash_width
from psearch_jax.models.backend import FEW_ROWS, choose_backend
from psearch_jax.runtime import platforms
from psearch_jax.sharding import AXES


def plain(q, k, v, old=None, start=None, segments=None):
    """Softmax over all scores, in float64."""
    (B, T, N, H), K = q.shape, k.shape[1]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    seen = np.tile(np.tril(np.ones((T, T), bool)), (B, 1, 1))
    if segments is not None:
        seen &= segments[:, :, None] == segments[:, None]
    if old is not None:
        k, v = (np.concatenate([np.asarray(o, np.float64), new], axis=2) for o, new in zip(old, (k, v), strict=True))
        cached = np.arange(k.shape[2] - T) < start[:, None, None]
        seen = np.concatenate([np.broadcast_to(cached, (B, T, k.shape[2] - T)), seen], axis=2)
    k, v = (np.repeat(x, N // K, axis=1) for x in (k, v))
    scores = np.where(seen[:, None], np.einsum("BTNH,BNSH->BNTS", q, k) / np.sqrt(H), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("BNTS,BNSH->BTNH", weights / weights.sum(axis=-1, keepdims=True), v)


def dense(q, k, v, segments=None):
    """Attention by the definition, with all scores at once, differentiable."""
    segments = np.zeros(q.shape[:2], np.int32) if segments is None else segments
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[1], axis=1) for x in (k, v))
    seen = jnp.tril(segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.einsum("BTNH,BNSH->BNTS", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("BNTS,BNSH->BTNH", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


def draw(B=2, T=40, N=4, K=2, H=8, S=0, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, T, N, H)).astype(np.float32)
    kv = [rng.normal(size=(B, K, T, H)).astype(np.float32) for _ in range(2)]
    old = [rng.normal(size=(B, K, S, H)).astype(np.float32) for _ in range(2)] if S else None
    return q, *kv, old


def gradients(function, q, k, v):
    def total(q, k, v):
        return jnp.sum(jnp.sin(function(q, k, v)))

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v)


def splash(q, k, v, segments=None):
    return splash_attention(q, k, v, segments, interpret=True)


def in_segments(length):
    """Segment ids of two rows: three trajectories; one trajectory and padding."""
    place = np.arange(length)
    return np.stack([1 + (place > 5) + (place > length // 2), np.where(place < length - 9, 1, 0)]).astype(np.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("attention", "length", "heads", "kv_heads", "size"),
    [
        (attend_causally, 40, 4, 2, 8),
        (attend_causally, 2 * QUERY_BLOCK + 130, 4, 2, 8),
        (splash, 200, 4, 1, 64),
        (splash, 130, 2, 2, 16),
    ],
)
def test_attention_of_rows(attention, length, heads, kv_heads, size, packed):
    """Every query attends to the keys of its own trajectory up to its own, in values and in gradients."""
    q, k, v, _ = draw(T=length, N=heads, K=kv_heads, H=size)
    segments = in_segments(length) if packed else None
    attend = functools.partial(attention, segments=segments)
    np.testing.assert_allclose(jax.jit(attend)(q, k, v), plain(q, k, v, segments=segments), atol=1e-5)
    wanted = gradients(functools.partial(dense, segments=segments), q, k, v)
    for ours, theirs in zip(gradients(attend, q, k, v), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("length", "S"), [(1, 20), (40, 20), (QUERY_CHUNK + 30, 20), (9, 2 * KEY_BLOCK + 50)])
def test_attention_to_a_cache(length, S):
    """Rows of different lengths attend to their real keys only, each once, in every block of queries and keys."""
    q, k, v, old = draw(T=length, S=S, B=3)
    start = np.array([0, 13, S - 7], np.int32)
    wanted = plain(q, k, v, old, start)
    for attend in (attend_chunk, decode) if length == 1 else (attend_chunk,):
        function = jax.jit(lambda q, k, v, old, attend=attend: attend(q, k, v, Keys(*old), start))
        np.testing.assert_allclose(function(q, k, v, old), wanted, atol=2e-6)


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
    """Trajectories that are moved to rows of their own have the values and gradients of the packed row."""
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
    """Nothing is scattered: a GPU adds with atomic operations, slowly and in any order."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", without_a_gpu)
    q, k, v, _ = draw(B=4, T=40, N=4, K=2, H=32)
    attend = functools.partial(attend_causally, attention="cudnn", segments=rows_with_trajectories(40))
    traced = jax.make_jaxpr(functools.partial(gradients, attend))(q, k, v)
    assert "gather" in str(traced) and "scatter" not in str(traced)


SIXTEEN = 0.03  # for values from N(0, 1) and scores of std 16; rounding the query twice gives 3 times this error


def sixteen_bits(length, dtype="bfloat16"):
    """16-bit queries, keys and values at the models' head dim, with scores as large as trained heads have."""
    rng = np.random.default_rng(3)
    q, k = (4 * rng.normal(size=shape) for shape in ((1, length, 2, 128), (1, 1, length, 128)))
    return [jnp.asarray(x, jnp.dtype(dtype)) for x in (q, k, rng.normal(size=(1, 1, length, 128)))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("attention", "dtype"), [(attend_causally, "bfloat16"), (attend_causally, "float16"), (splash, "bfloat16")]
)
def test_sixteen_bits(attention, dtype, packed):
    """Scores are scaled in float32: scaling 16-bit queries would round every score by 2**-9 of its value."""
    q, k, v = sixteen_bits(QUERY_CHUNK + 128, dtype)
    segments = (1 + np.arange(q.shape[1]) // 100)[None].astype(np.int32) if packed else None
    out = np.asarray(attention(q, k, v, segments=segments), np.float64)
    np.testing.assert_allclose(out, plain(q, k, v, segments=segments), atol=SIXTEEN)


@pytest.mark.parametrize(("length", "attention"), [(20, attend_chunk), (1, attend_chunk), (1, decode)])
def test_sixteen_bits_with_a_cache(length, attention):
    """So are scores against cached keys, which a separate product computes."""
    q, k, v = sixteen_bits(40 + length)
    old, start = [x[:, :, :40] for x in (k, v)], np.array([40], np.int32)
    q, k, v = q[:, 40:], k[:, :, 40:], v[:, :, 40:]
    out = np.asarray(attention(q, k, v, Keys(*old), start), np.float64)
    np.testing.assert_allclose(out, plain(q, k, v, old, start), atol=SIXTEEN)


def assert_near(ours, wanted, bound):
    """Each of some 16-bit arrays is near its float32 counterpart, relative to the norm."""
    for x, y in zip(ours, wanted, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) < bound * np.linalg.norm(y)


def test_gradients_of_the_tpu_kernel_in_sixteen_bits():
    """The rounding error appended to queries counts once in every gradient."""
    low = sixteen_bits(100)
    assert_near(gradients(splash, *low), gradients(dense, *[x.astype(jnp.float32) for x in low]), 0.01)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel needs a GPU")
def test_the_gpu_kernel():
    """cuDNN's kernel agrees with the definition, in values and in gradients of packed rows."""
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
            (functools.partial(attend_causally, attention="cudnn", segments=segments), low),
            (functools.partial(dense, segments=segments), (q, k, v)),
        )
    )
    assert_near(ours, defined, 0.03)


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
    """If the mesh does not divide the kv heads, a device has the keys of its queries and no spare copies."""
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


@pytest.mark.parametrize("width", [16, 130, 448, 1549, 3072, 6196, 6656])
def test_rows_are_padded_to_full_blocks(width):
    """Small blocks of the kernel leave most of the matrix unit idle; a short row is one block."""
    block, padded = splash_block(width), splash_width(width)
    assert padded % block == 0 <= padded - width < max(block, 128) and block % 128 == 0
    assert block == 512 or block == padded
