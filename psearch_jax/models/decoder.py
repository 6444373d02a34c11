"""The decoder of all model families in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Letters in shapes: B rows, T query positions, S key positions, D width, N heads, K kv heads, G = N/K, H head dim,
F mlp, V vocabulary rows, L layers.

Each parameter is declared once, with its logical axes. The layers are stacked on a leading axis L and run by one
`lax.scan`, so that compile time does not grow with depth (except for decoding: workarounds.unstack).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora, Remat
from psearch_jax.models import ragged, workarounds
from psearch_jax.models.attention.scores import ATTENTION_OUTPUT, NEG_INF
from psearch_jax.models.backend import Backend
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.models.layer import LayerContext, layer, rms_norm, rope_cos_sin
from psearch_jax.models.lora import Adapters
from psearch_jax.models.products import precision, product, round_to
from psearch_jax.models.vocabulary import gather_head, score_logits, score_wanted
from psearch_jax.models.workarounds import Unstacked
from psearch_jax.sharding import COMPUTE, STORAGE, constrain, gather_fsdp, spec


def _precise(method: Callable) -> Callable:
    """Runs a method of the model with the `precision` for its dtype."""

    @functools.wraps(method)
    def traced(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        with precision(self.dtype):
            return method(self, *args, **kwargs)

    return traced


class Layers(nnx.Module):
    """The parameters of all decoder layers, stacked."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = config
        L, D, N, K, H, F = c.layers, c.width, c.heads, c.kv_heads, c.head_dim, c.mlp
        self.attention_norm = _ones((L, D), ("layers", None))
        self.q_kernel = _normal(rngs, (L, D, N, H), ("layers", "embed", "heads", None))
        self.k_kernel = _normal(rngs, (L, D, K, H), ("layers", "embed", "kv_heads", None))
        self.v_kernel = _normal(rngs, (L, D, K, H), ("layers", "embed", "kv_heads", None))
        self.o_kernel = _normal(rngs, (L, N, H, D), ("layers", "heads", None, "embed"))
        self.mlp_norm = _ones((L, D), ("layers", None))
        self.gate_kernel = _normal(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.up_kernel = _normal(rngs, (L, D, F), ("layers", "embed", "mlp"))
        self.down_kernel = _normal(rngs, (L, F, D), ("layers", "mlp", "embed"))
        if config.qkv_bias:
            self.q_bias = _zeros((L, N, H), ("layers", "heads", None))
            self.k_bias = _zeros((L, K, H), ("layers", "kv_heads", None))
            self.v_bias = _zeros((L, K, H), ("layers", "kv_heads", None))
        if config.qk_norm:
            self.q_norm = _ones((L, H), ("layers", None))
            self.k_norm = _ones((L, H), ("layers", None))


class Decoder(nnx.Module):
    """The decoder. `hidden` runs the trunk; `logits` and `logprobs` apply the lm head, `values` the value head.

    Args:
      config: the shape.
      rngs: holds the `params` stream for initialisation (normal, std 0.02, as the published models).
      dtype: of the computation; parameters are stored in float32 and cast where they are used. On a CPU only products
        with weights use it, and the activations are float32 (models/products.py).
      remat: what the backward pass recomputes of each layer: nothing (`none`), all but the attention and the products
        with weights (`dots`), or everything (`full`); the rest is stored.
      backend: the forms of computations for the devices (models/backend.py).
      shard_residual: between layers, split the positions over `tensor`; what remat stores shrinks by that factor.
      lora: add adapters to every kernel of the layers.
      values: a value head [D, 1], which starts at 0, replaces the lm head.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        backend: Backend = Backend(),  # noqa: B008 (frozen)
        shard_residual: bool = False,
        *,
        lora: Lora | None = None,
        values: bool = False,
    ):
        self.config, self.dtype, self.remat, self.backend = config, jnp.dtype(dtype), remat, backend
        self.activations = backend.activations(self.dtype)
        self.shard_residual, self.lora_scale = shard_residual, lora.scale if lora else 0.0
        self.embedding = _normal(rngs, (config.vocab_rows, config.width), ("vocab", "embed"))
        self.layers = Layers(config, rngs)
        self.final_norm = _ones((config.width,), (None,))
        headless = config.tied or values
        self.lm_head = None if headless else _normal(rngs, (config.width, config.vocab_rows), ("embed", "vocab"))
        self.value_head = _zeros((config.width, 1), ("embed", None)) if values else None
        self.adapters = Adapters(config, lora.rank, rngs) if lora else None

    @_precise
    def hidden(
        self,
        ids: jax.Array,
        cache: KVCache | None = None,
        start: jax.Array | None = None,
        *,
        keep_kv: bool = False,
        span: int | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        rows: jax.Array | None = None,
        unstacked: Unstacked | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Runs the trunk over a chunk of tokens.

        Args:
          ids: [B, T] int32. Rows are padded on the right, so real positions do not attend to pads (causal attention).
          cache: keys and values of the positions before the chunk; not written here.
          start: [B] int32, the position of ids[:, 0], which is also the number of real cached positions.
          span: cached positions to attend to, at least max(start); default: the complete cache. Used where
            `backend.cache` is `span`.
          rows: [B] int32, the cache rows that the chunk continues, as in models/kv_cache.py; default: all in order.
          keep_kv: also return the chunk's keys and values, for a cache.
          positions: [B, T] int32, of each token in its text; default: counted from `start`.
          segments: [B, T] int32, equal within each text of a row (attention.causal); only without a cache.
          unstacked: the layers' weights from the method `unstack`; default: a scan over the module's stacked weights.

        Returns:
          ([B, T, D] normalised hidden states in `activations`, None or the chunk's keys and values [L, B, K, T, H]).
        """
        config = self.config
        begin = jnp.zeros(ids.shape[0], jnp.int32) if start is None else start
        if positions is None:
            positions = begin[:, None] + jnp.arange(ids.shape[1])
        rotation = rope_cos_sin(positions, config)
        table = gather_fsdp(self.embedding[...], "vocab", "embed")  # once, not once per row
        x = workarounds.look_up(table, ids, self.activations, self.backend.is_cpu)
        work = None
        if cache is not None and self.backend.cache == "kernel":
            work = ragged.list_work(begin, cache, ids.shape[1], config.heads)
        context = LayerContext(
            config=config,
            dtype=self.dtype,
            backend=self.backend,
            lora_scale=self.lora_scale,
            positions_axis="positions" if self.shard_residual else None,
            rotation=rotation,
            start=begin,
            cache=cache,
            span=span,
            rows=rows,
            segments=segments,
            keep_kv=keep_kv,
            work=work,
        )
        x = constrain(x, "rows", context.positions_axis, None)
        step = functools.partial(layer, context=context)
        if self.remat != "none" and not keep_kv:
            step = jax.checkpoint(step, policy=_stored(self.remat))
        if unstacked is None:
            x, new = jax.lax.scan(step, x, (self._weights(), jnp.arange(config.layers)))
        else:
            each = []
            for index, weights in enumerate(unstacked.layers):
                x, kept = step(x, (weights, jnp.int32(index)))
                each.append(kept)
            new = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
        return rms_norm(x, self.final_norm[...], config.rms_eps), new

    def _weights(self) -> dict[str, jax.Array]:
        """All arrays that the layers use, by name, each [L, ...]."""
        weights = nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))
        if self.adapters is not None:
            weights |= nnx.to_pure_dict(nnx.state(self.adapters, nnx.Param))
        return weights

    def unstack(self) -> Unstacked:
        """A separate copy of each layer's weights, for many decode steps; see models/workarounds.py."""
        head = self._head() if self.backend.unstack == "once" else None
        return workarounds.unstack(self._weights(), self.config.layers, head, self.backend.kernels_left)

    @_precise
    def logits(
        self, hidden: jax.Array, temperature: float, n_ids: int, unstacked: Unstacked | None = None
    ) -> jax.Array:
        """[..., D] -> [..., V] float32 logits / temperature; embedding rows without a token get -1e30 for -inf."""
        if unstacked is None or unstacked.head is None:
            return self._logits(self._head(), hidden, temperature, n_ids)
        if not self.backend.kernels_left:
            return self._logits(unstacked.head, hidden, temperature, n_ids)
        rows = round_to(hidden.reshape(-1, hidden.shape[-1]), self.dtype)
        out = workarounds.multiply_left(rows, unstacked.head).reshape(*hidden.shape[:-1], -1)
        return _mask_columns(out / temperature, n_ids)

    def _head(self) -> jax.Array:
        """The head [D, V]."""
        return self.embedding[...].T if self.lm_head is None else self.lm_head[...]

    def _logits(
        self, head: jax.Array, hidden: jax.Array, temperature: float, n_ids: int, first: jax.Array | int = 0
    ) -> jax.Array:
        """`logits` for some columns of the head, the first of which is token id `first`."""
        if hidden.dtype == self.dtype:
            out = jnp.matmul(hidden, head.astype(self.dtype), preferred_element_type=jnp.float32)
        else:
            out = product(hidden.reshape(-1, hidden.shape[-1]), head, self.dtype).reshape(*hidden.shape[:-1], -1)
        return _mask_columns(out / temperature, n_ids, first)

    @_precise
    def values(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [...] float32, for a model with a value head."""
        return jnp.matmul(hidden.astype(jnp.float32), self.value_head[...])[..., 0]

    @_precise
    def logprobs(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        temperature: float,
        n_ids: int,
        wanted: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability of `targets` and entropy of the distribution at each wanted position.

        The logits are computed for `backend.vocab_chunk` wanted positions at a time, and recomputed in the backward
        pass: [B, T, V] never exists, and unwanted positions cost nothing. On a mesh, head and hidden states are
        gathered once, before the first chunk. Each device computes its own rows and columns, and only the sums of the
        softmax are communicated in between. The gradients of both are summed over the devices once, after the last
        chunk.

        Args:
          hidden: [B, T, D].
          targets: [B, T] int32, the token that each position predicts.
          wanted: [B, T] bool; default: everywhere.

        Returns:
          ([B, T] float32, [B, T] float32), 0 at unwanted positions.
        """
        chunk = self.backend.vocab_chunk
        wanted = jnp.ones(targets.shape, bool) if wanted is None else wanted

        def score(head: jax.Array, h: jax.Array, t: jax.Array, split: str | None = None) -> tuple:
            first = jax.lax.axis_index(split) * head.shape[1] if split else 0
            with precision(self.dtype):  # the backward pass is traced later
                logits = self._logits(head, h, temperature, n_ids, first)
            return score_logits(logits, t, split)

        mesh, head = jax.sharding.get_abstract_mesh(), self._head()
        if mesh.empty or mesh.size == 1:
            return score_wanted(score, chunk, head, hidden, targets, wanted)
        stored = spec(("embed", "vocab"), STORAGE, mesh, head.shape)
        rows = spec(("rows",), COMPUTE, mesh, hidden.shape)

        def local(head: jax.Array, *row_arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            if stored[0]:
                head = gather_head(head, stored[0], self.dtype)
            return score_wanted(functools.partial(score, split=stored[1]), chunk, head, *row_arrays)

        mapped = jax.shard_map(local, in_specs=(stored, rows, rows, rows), out_specs=(rows, rows), check_vma=False)
        return mapped(head, hidden, targets, wanted)


def _mask_columns(logits: jax.Array, n_ids: int, first: jax.Array | int = 0) -> jax.Array:
    """Logits of which the columns without a token get `NEG_INF`; the first column is token id `first`."""
    return jnp.where(first + jnp.arange(logits.shape[-1]) < n_ids, logits, NEG_INF)


def _stored(remat: Remat) -> Callable[..., bool]:
    """What is stored of a layer for its backward pass."""
    rules = jax.checkpoint_policies
    if remat == "full":
        return rules.nothing_saveable
    return rules.save_from_both_policies(
        rules.dots_with_no_batch_dims_saveable, rules.save_only_these_names(ATTENTION_OUTPUT)
    )


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


def _ones(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.ones(shape, jnp.float32), axes=axes)


def abstract_params(config: DecoderConfig, values: bool = False) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph definition and parameters as ShapeDtypeStructs, which use no memory; with `values`, of a critic."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0), values=values)), nnx.Param)


def graphdef(
    config: DecoderConfig,
    dtype: Any,
    remat: Remat = "none",
    backend: Backend = Backend(),  # noqa: B008 (frozen)
    shard_residual: bool = False,
    *,
    lora: Lora | None = None,
    values: bool = False,
) -> nnx.GraphDef:
    """The static half of a model; `nnx.merge(graphdef, params)` is the model.

    With `lora`, the parameters include adapters; with `values`, a value head in place of the lm head.
    """

    def make() -> Decoder:
        rngs = nnx.Rngs(params=0)
        return Decoder(config, rngs, dtype, remat, backend, shard_residual, lora=lora, values=values)

    return nnx.split(nnx.eval_shape(make), nnx.Param)[0]


def init_params(config: DecoderConfig, seed: int) -> nnx.State:
    """Random parameters, float32, from the `params` stream of `seed`."""
    return nnx.split(Decoder(config, nnx.Rngs(params=seed)), nnx.Param)[1]


def random_params(
    config: DecoderConfig, seed: int, dtype: Any, shardings: Callable[[nnx.State], nnx.State]
) -> nnx.State:
    """`init_params` in `dtype`, created with the shardings `shardings(abstract parameters)`."""

    def create() -> nnx.State:
        return jax.tree.map(lambda x: x.astype(dtype), init_params(config, seed))

    return jax.jit(create, out_shardings=shardings(abstract_params(config)[1]))()


def with_values(params: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """A copy of `params` (arrays or ShapeDtypeStructs) with `values`, a nested dict of arrays, in their place."""

    def take(path: tuple[str, ...]) -> Any:
        return functools.reduce(lambda node, key: node[key], path, values)

    return nnx.from_flat_state({path: v.replace(take(path)) for path, v in nnx.to_flat_state(params)})
