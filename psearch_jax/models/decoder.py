"""The decoder of Qwen2.5 and Qwen3 in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Letters in shapes: B rows, T query positions, S key positions, D width, N heads, K kv heads, G = N/K, H head dim,
F mlp, V vocabulary rows, L layers.

Each parameter is declared once, with its logical axes. The layers are stacked on a leading axis L and run by one
`lax.scan`, so that compile time does not grow with depth (except for decoding: models/unstacked.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora, Remat
from psearch_jax.models import ragged, ragged_chunk
from psearch_jax.models.attention import Implementation
from psearch_jax.models.attention.cached import MAX_DECODE_TOKENS
from psearch_jax.models.attention.scores import ATTENTION_OUTPUT, NEG_INF
from psearch_jax.models.int8 import Scales
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.models.layer import LayerContext, layer, rms_norm, rope_cos_sin
from psearch_jax.models.lora import Adapters
from psearch_jax.models.products import precision, product, product_left
from psearch_jax.models.transposed import Transposed
from psearch_jax.models.unstacked import Unstacked, unstack
from psearch_jax.models.vocabulary import Pass, Scored, at_once, by_blocks, by_chunks, gathered, n_blocks
from psearch_jax.sharding import COMPUTE, STORAGE, constrain, fsdp_gathered, spec

VOCAB_CHUNK, VISITED_ROWWISE = 1024, 256  # positions per chunk of a vocabulary pass: by default, on a CPU
BlockedHead = tuple[jax.Array | None, jax.Array | None]  # [n, D, V/n] and [n, V/n, D], blocks of columns; see _blocks


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
        L, D, N, K, H, F = (
            config.layers,
            config.width,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.mlp,
        )
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
      attention: the implementation for rows without a cache; it also stands for the platform, as the kernels that read
        the cache and the dtype of activations depend on it.
      shard_residual: between layers, split the positions over `tensor`; what remat stores shrinks by that factor.
      lora: add adapters to every kernel of the layers.
      int8: the kernels of the layers are in int8, with scales (models/int8.py).
      values: a value head [D, 1], which starts at 0, replaces the lm head.
      transposed: store frozen matrices in both orders (models/transposed.py).
    """

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        attention: Implementation = "blocked",
        shard_residual: bool = False,
        *,
        lora: Lora | None = None,
        int8: bool = False,
        values: bool = False,
        transposed: bool = False,
    ):
        self.config, self.dtype, self.remat, self.attention = config, jnp.dtype(dtype), remat, attention
        self.activations = jnp.dtype(jnp.float32) if attention == "rowwise" else self.dtype
        self.shard_residual, self.lora_scale = shard_residual, lora.scale if lora else 0.0
        self.embedding = _normal(rngs, (config.vocab_rows, config.width), ("vocab", "embed"))
        self.layers = Layers(config, rngs)
        self.final_norm = _ones((config.width,), (None,))
        headless = config.tied or values
        self.lm_head = None if headless else _normal(rngs, (config.width, config.vocab_rows), ("embed", "vocab"))
        self.value_head = _zeros((config.width, 1), ("embed", None)) if values else None
        self.adapters = Adapters(config, lora.rank, rngs) if lora else None
        self.scales = Scales(config) if int8 else None
        self.transposed = Transposed(config, head=not values) if transposed else None

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
          span: cached positions to attend to, at least max(start); default: the complete cache. models/ragged.py and
            ragged_chunk.py ignore it and read only the positions before `start`.
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
        rotation = rope_cos_sin(positions, config.head_dim, config.rope_theta)
        table = fsdp_gathered(self.embedding[...], "vocab", "embed")  # once, not once per row
        if self.attention == "rowwise" and table.dtype != self.activations:
            # XLA's CPU backend would convert the complete table to float32 before the loop that decodes.
            table, ids = jax.lax.optimization_barrier((table, ids))
        x = jnp.take(table, ids, axis=0).astype(self.activations)
        listed, by_length, mesh = None, False, jax.sharding.get_abstract_mesh()
        if cache is not None and ids.shape[1] > MAX_DECODE_TOKENS:
            by_length = ragged_chunk.applies(self.attention, cache.k_transposed, config, mesh)
            if by_length:
                rows = jnp.arange(ids.shape[0]) if rows is None else rows
                listed = ragged_chunk.work_list(begin, cache, ids.shape[1], self.attention)
        elif cache is not None and rows is None:
            by_length = ragged.applies(self.attention, cache.k_transposed, config, mesh)
            listed = ragged.work_list(begin, cache, self.attention) if by_length else None
        context = LayerContext(
            config=config,
            dtype=self.dtype,
            attention=self.attention,
            lora_scale=self.lora_scale,
            positions_axis="positions" if self.shard_residual else None,
            rotation=rotation,
            start=begin,
            cache=cache,
            span=span,
            rows=rows,
            segments=segments,
            keep_kv=keep_kv,
            by_length=by_length,
            listed=listed,
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
        for module in (self.adapters, self.scales, self.transposed and self.transposed.layers):
            if module is not None:
                weights |= nnx.to_pure_dict(nnx.state(module, nnx.Param))
        return weights

    def unstack(self, left_operands: bool = False) -> Unstacked:
        """A separate copy of each layer's weights, for many calls of `hidden`; see models/unstacked.py."""
        return unstack(self._weights(), self.config.layers, self._head(), left_operands)

    @_precise
    def logits(
        self, hidden: jax.Array, temperature: float, n_ids: int, unstacked: Unstacked | None = None
    ) -> jax.Array:
        """[..., D] -> [..., V] float32 logits / temperature; embedding rows without a token get -1e30 for -inf."""
        if unstacked is None or unstacked.head is None:
            return self._logits(self._head(), hidden, temperature, n_ids)
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = product_left(rows, unstacked.head, self.dtype).reshape(*hidden.shape[:-1], -1)
        return self._scaled(out, temperature, n_ids, 0)

    def _head(self) -> jax.Array:
        """The head [D, V]."""
        return self.embedding[...].T if self.lm_head is None else self.lm_head[...]

    def _blocks(self) -> BlockedHead:
        """The head by blocks of columns: in both orders if models/transposed.py stores it, else in its own."""
        if self.transposed is not None:
            return self.transposed.head[...], self.transposed.head_transposed[...]
        D, V = self.config.width, self.config.vocab_rows
        n = n_blocks(V)
        if self.lm_head is None:
            return None, self.embedding[...].reshape(n, V // n, D)
        return self.lm_head[...].reshape(D, n, V // n).swapaxes(0, 1), None

    def _logits(
        self, head: jax.Array, hidden: jax.Array, temperature: float, n_ids: int, first: jax.Array | int = 0
    ) -> jax.Array:
        """`logits` for some columns of the head, the first of which is token id `first`."""
        if hidden.dtype == self.dtype:
            out = jnp.matmul(hidden, head.astype(self.dtype), preferred_element_type=jnp.float32)
        else:
            out = product(hidden.reshape(-1, hidden.shape[-1]), head, self.dtype).reshape(*hidden.shape[:-1], -1)
        return self._scaled(out, temperature, n_ids, first)

    def _block_logits(
        self, block: BlockedHead, h: jax.Array, index: jax.Array, temperature: float, n_ids: int
    ) -> jax.Array:
        """`logits` [M, V/n] of states [M, D] for one block of the head, [D, V/n] and [V/n, D]."""
        kernel, transposed = block
        with precision(self.dtype):  # the backward pass is traced later
            if kernel is None:
                out = product(h, transposed.T, self.dtype)
            else:
                out = product(h, kernel, self.dtype, transposed)
        return self._scaled(out, temperature, n_ids, index * out.shape[1])

    def _scaled(self, out: jax.Array, temperature: float, n_ids: int, first: jax.Array | int) -> jax.Array:
        """A product with the head as logits."""
        return jnp.where(first + jnp.arange(out.shape[-1]) < n_ids, out / temperature, NEG_INF)

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
        chunk: int | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability of `targets` and entropy of the distribution at each wanted position.

        The logits are computed for `chunk` wanted positions at a time, and recomputed in the backward pass: [B, T, V]
        never exists, and unwanted positions cost nothing. On a mesh, head and hidden states are gathered once, before
        the first chunk. Each device computes its own rows and columns, and only the sums of the softmax are
        communicated in between. The gradients of both are summed over the devices once, after the last chunk.

        Args:
          hidden: [B, T, D].
          targets: [B, T] int32, the token that each position predicts.
          wanted: [B, T] bool; default: everywhere.

        Returns:
          ([B, T] float32, [B, T] float32), 0 at unwanted positions.
        """
        chunk = chunk or (VISITED_ROWWISE if self.attention == "rowwise" else VOCAB_CHUNK)
        options = {"temperature": temperature, "n_ids": n_ids}
        wanted = jnp.ones(targets.shape, bool) if wanted is None else wanted
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            if self.attention == "rowwise":
                visit, head = by_blocks(functools.partial(self._block_logits, **options)), self._blocks()
            else:
                visit, head = at_once(functools.partial(self._scored, **options)), self._head()
            return _at_wanted(visit, chunk, head, hidden, targets, wanted)
        head = self._head()
        stored = spec(("embed", "vocab"), STORAGE, mesh, head.shape)
        rows = spec(("rows",), COMPUTE, mesh, hidden.shape)

        def local(head: jax.Array, *row_arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            if stored[0]:
                head = gathered(head, stored[0], self.dtype)
            visit = at_once(functools.partial(self._scored, **options, split=stored[1]))
            return _at_wanted(visit, chunk, head, *row_arrays)

        mapped = jax.shard_map(local, in_specs=(stored, rows, rows, rows), out_specs=(rows, rows), check_vma=False)
        return mapped(head, hidden, targets, wanted)

    def _scored(
        self, head: jax.Array, h: jax.Array, t: jax.Array, *, temperature: float, n_ids: int, split: str | None = None
    ) -> Scored:
        """Log-probs, entropies and log-sum-exps [M] for states [M, D] and targets [M], by all columns of the head at
        once; with `split`, the device has a part of them, and that mesh axis the others."""
        columns = head.shape[1]

        def over_all(x: jax.Array, reduce: Callable = jax.lax.psum) -> jax.Array:
            return reduce(x, split) if split else x

        first = jax.lax.axis_index(split) * columns if split else 0
        with precision(self.dtype):  # the backward pass is traced later
            out = self._logits(head, h, temperature, n_ids, first)
        row_max = over_all(jax.lax.stop_gradient(jnp.max(out, axis=-1, keepdims=True)), jax.lax.pmax)
        out -= row_max
        log_sum = jnp.log(over_all(jnp.sum(jnp.exp(out), axis=-1, keepdims=True)))
        table, place = out - log_sum, t - first
        chosen = jnp.take_along_axis(table, jnp.clip(place, 0, columns - 1)[..., None], axis=-1)[..., 0]
        if split:
            chosen = over_all(jnp.where((place >= 0) & (place < columns), chosen, 0.0))
        entropy = -over_all(jnp.sum(jnp.exp(table) * jnp.where(table > NEG_INF / 2, table, 0.0), axis=-1))
        return chosen, entropy, (row_max + log_sum)[..., 0]


def _at_wanted(
    visit: Pass, chunk: int, head: Any, hidden: jax.Array, targets: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`Decoder.logprobs` of a device's rows, with a head as `visit` takes it."""
    B, T, D = hidden.shape
    chunk = min(chunk, B * T)
    # The wanted positions of all rows come first, then the others.
    order = jnp.argsort(~wanted.reshape(-1), stable=True)
    order = jnp.concatenate([order, B * T + jnp.arange(-(B * T) % chunk, dtype=order.dtype)])
    unique = {"unique_indices": True}  # also those past the end, which pad the last chunk
    flat = (jnp.asarray(x).reshape(B * T, *x.shape[2:]) for x in (hidden, targets))
    h, t = (x.at[order].get(mode="fill", fill_value=0, **unique) for x in flat)
    results = by_chunks(visit, chunk, head, h, t, jnp.sum(wanted))
    chosen, entropy = (jnp.zeros(B * T).at[order].set(x, mode="drop", **unique).reshape(B, T) for x in results)
    return jnp.where(wanted, chosen, 0.0), jnp.where(wanted, entropy, 0.0)


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
    attention: Implementation = "blocked",
    shard_residual: bool = False,
    *,
    lora: Lora | None = None,
    int8: bool = False,
    values: bool = False,
    transposed: bool = False,
) -> nnx.GraphDef:
    """The static half of a model; `nnx.merge(graphdef, params)` is the model.

    With `lora`, the parameters include adapters; with `int8`, scales; with `values`, a value head in place of the lm
    head; with `transposed`, what `transposed.with_transposed` adds.
    """

    def made() -> Decoder:
        rngs = nnx.Rngs(params=0)
        return Decoder(
            config,
            rngs,
            dtype,
            remat,
            attention,
            shard_residual,
            lora=lora,
            int8=int8,
            values=values,
            transposed=transposed,
        )

    return nnx.split(nnx.eval_shape(made), nnx.Param)[0]


def init_params(config: DecoderConfig, seed: int) -> nnx.State:
    """Random parameters, float32, from the `params` stream of `seed`."""
    return nnx.split(Decoder(config, nnx.Rngs(params=seed)), nnx.Param)[1]


def random_params(
    config: DecoderConfig, seed: int, dtype: Any, shardings: Callable[[nnx.State], nnx.State]
) -> nnx.State:
    """`init_params` in `dtype`, created with the shardings `shardings(abstract parameters)`."""

    def made() -> nnx.State:
        return jax.tree.map(lambda x: x.astype(dtype), init_params(config, seed))

    return jax.jit(made, out_shardings=shardings(abstract_params(config)[1]))()


def with_values(params: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """A copy of `params` (arrays or ShapeDtypeStructs) with `values`, a nested dict of arrays, in their place."""

    def take(path: tuple[str, ...]) -> Any:
        return functools.reduce(lambda node, key: node[key], path, values)

    return nnx.from_flat_state({path: v.replace(take(path)) for path, v in nnx.to_flat_state(params)})
