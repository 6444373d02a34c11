"""The sampling copy of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from psearch_jax.config import DecoderConfig
from psearch_jax.models import int8, lora
from psearch_jax.models.transposed import multiplies_slowly_transposed, with_head
from psearch_jax.sharding import (
    SAMPLING,
    STORAGE,
    MeshAxes,
    Regrouping,
    own_part,
    param_shardings,
    placed,
    regrouping,
)


def sampled_shape(config: DecoderConfig, mesh: Mesh, dtype: Any) -> DecoderConfig:
    """The sampling copy's shape: a tied head becomes a separate matrix where products with a transpose are slow."""
    return replace(config, tied=config.tied and not multiplies_slowly_transposed(mesh, dtype))


def sampling_cast(
    abstract: nnx.State,
    dtype: Any,
    mesh: Mesh,
    rounding: Callable[..., nnx.State] | None = None,
    tables: Sequence[Mapping[str, MeshAxes]] = (SAMPLING,),
) -> Callable[[nnx.State], nnx.State]:
    """A jitted function from stored parameters to the sampler's copy, which is split by one of `tables` after the
    other, and in the end by the last.

    The copy is in `dtype`, except for parameters that `rounding(copy, params)` replaces. Adapters keep their dtype:
    the model casts them where it uses them, and rounding them twice would differ from training.
    """

    def one(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        adapter = isinstance(variable, nnx.LoRAParam)
        return variable.replace(jnp.copy(value) if adapter else value.astype(dtype))

    def cast(params: nnx.State) -> nnx.State:
        copy = jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
        copy = rounding(copy, params) if rounding else copy
        for table in tables[:-1]:
            copy = jax.lax.with_sharding_constraint(copy, param_shardings(copy, table, mesh))
        return copy

    return jax.jit(cast, out_shardings=param_shardings(jax.eval_shape(cast, abstract), tables[-1], mesh))


def sampled_in_place(abstract: nnx.State, mesh: Mesh) -> bool:
    """Whether the storage and sampling shardings are equivalent: they are unless the mesh splits over fsdp."""
    pairs = zip(
        jax.tree.leaves(param_shardings(abstract, STORAGE, mesh)),
        jax.tree.leaves(param_shardings(abstract, SAMPLING, mesh)),
        jax.tree.leaves(abstract),
        strict=True,
    )
    return all(stored.is_equivalent_to(read, x.ndim) for stored, read, x in pairs)


class SamplingCopy:
    """Makes the copy that decodes: cast once, split over `tensor` only, optionally with kernels in int8, with adapters
    and base weights in one tree. Frozen weights are not copied if they already have the sampler's dtype and layout.
    The copy has the form of `sampled_shape`.

    Args:
      weights, adapters: abstract or concrete; adapters are None if there are none.
      dtype: of the copy; adapters keep theirs.
      mesh: of the weights.
      in_int8: convert the layers' kernels to int8.
      trained: the weights change, so the sampler needs a copy of them.
      rollout_mesh: the sampler's, of the same devices; default: `mesh`.

    Raises:
      ValueError: `rollout_mesh` is no regrouping of `mesh`. `make_meshes` makes none of this kind.
    """

    def __init__(
        self,
        weights: nnx.State,
        adapters: nnx.State | None,
        dtype: Any,
        mesh: Mesh,
        *,
        in_int8: bool,
        trained: bool,
        rollout_mesh: Mesh | None = None,
    ):
        rollout_mesh = rollout_mesh or mesh
        same = rollout_mesh == mesh and all(x.dtype == dtype for x in jax.tree.leaves(weights))
        self._in_place = same and not trained and not in_int8 and sampled_in_place(weights, mesh)
        rounding = int8.with_kernels if in_int8 else None
        self._unties = "lm_head" not in weights and multiplies_slowly_transposed(mesh, dtype)
        self._frozen_head: jax.Array | None = None
        self._grouping = None if rollout_mesh == mesh else regrouping(mesh, rollout_mesh.shape["tensor"])
        if self._grouping and self._grouping.target != rollout_mesh:
            raise ValueError("no regrouping of the weights' mesh")
        where = (self._grouping.common, rounding, self._grouping.tables[1:]) if self._grouping else (mesh, rounding)
        self._cast = sampling_cast(self._moved(weights, adapters), dtype, *where)

    def __call__(self, weights: nnx.State, adapters: nnx.State | None = None) -> nnx.State:
        if self._unties and self._in_place:
            if self._frozen_head is None:
                self._frozen_head = _head(weights)
            weights = with_head(weights, self._frozen_head)
        if self._in_place and adapters is None:
            return weights
        moved, grouping = self._moved(weights, adapters), self._grouping
        if grouping:
            copy = self._cast(_with_shards_of(moved, _places(moved, grouping)))
            copy = _with_shards_of(copy, param_shardings(copy, SAMPLING, grouping.target))
        else:
            copy = self._cast(moved)
        if self._in_place:
            return lora.join_adapters(weights, copy)
        return with_head(copy, _head(copy)) if self._unties else copy

    def traced(self, weights: nnx.State, adapters: nnx.State | None = None) -> jax.stages.Traced:
        """The casting program, traced for ShapeDtypeStructs."""
        moved = self._moved(weights, adapters)
        return self._cast.trace(placed(moved, _places(moved, self._grouping)) if self._grouping else moved)

    def _moved(self, weights: nnx.State, adapters: nnx.State | None) -> nnx.State:
        if adapters is None:
            return weights
        return adapters if self._in_place else lora.join_adapters(weights, adapters)


class MovedCopy:
    """Makes the same copy as `SamplingCopy` for a sampler on other devices than those of the weights.

    The weights are cast in their storage sharding. Array by array they are regrouped into the sampler's shards and
    sent from device to device within each process: JAX would copy other shards through the host's memory. Frozen
    weights are sent once, adapters every time.

    Args:
      source: the mesh of the weights; `mesh` is the sampler's. The others as in `SamplingCopy`.

    Attributes:
      sent_bytes: of the last copy, counting every array once.

    Raises:
      ValueError: as `own_part`, for either mesh, or as `regrouping`. `make_meshes` makes none of this kind.
    """

    def __init__(self, weights: nnx.State, dtype: Any, source: Mesh, mesh: Mesh, in_int8: bool, trained: bool):
        rounding = int8.with_kernels if in_int8 else None
        self._cast = sampling_cast(weights, dtype, source, rounding, (STORAGE,))
        self._mesh, self._trained = mesh, trained
        tensor = mesh.shape["tensor"]
        if source.size // jax.process_count() % tensor:  # its groups would cross processes: keep those of `source`
            tensor = source.shape["tensor"]
        self._grouping = regrouping(source, tensor)
        self._own_source, self._own_target = own_part(self._grouping.target), own_part(mesh)
        self._unties = "lm_head" not in weights and multiplies_slowly_transposed(mesh, dtype)
        self._kept: nnx.State | None = None
        self.sent_bytes = 0

    def __call__(self, weights: nnx.State, adapters: nnx.State | None = None) -> nnx.State:
        copy, self.sent_bytes = self._kept, 0
        if copy is None:
            copy = self._sent(self._cast(weights))
            copy = with_head(copy, _head(copy)) if self._unties else copy
            self._kept = None if self._trained else copy
        return copy if adapters is None else lora.join_adapters(copy, self._sent(adapters))

    def traced(self, weights: nnx.State, adapters: nnx.State | None = None) -> jax.stages.Traced:
        """The casting program, traced for ShapeDtypeStructs. `adapters` are sent without a program."""
        return self._cast.trace(weights)

    def _sent(self, params: nnx.State) -> nnx.State:
        self.sent_bytes += sum(x.nbytes for x in jax.tree.leaves(params))
        grouping, targets = self._grouping, param_shardings(params, SAMPLING, self._mesh)
        steps = [param_shardings(params, table, grouping.common) for table in grouping.tables]
        places = param_shardings(params, SAMPLING, grouping.target)

        def send(x: jax.Array, place: NamedSharding, target: NamedSharding, *steps: NamedSharding) -> jax.Array:
            own = _resharded(steps[1:])(_with_shards_of(x, steps[0]))
            own = _with_shards_of(own, NamedSharding(self._own_source, place.spec))
            sent = jax.block_until_ready(jax.device_put(own, NamedSharding(self._own_target, target.spec)))
            return _with_shards_of(sent, target)

        return jax.tree.map(send, params, places, targets, *steps)


def _places(params: nnx.State, grouping: Regrouping) -> nnx.State:
    """Where `params` are at first, in the common mesh of a regrouping."""
    return param_shardings(params, grouping.tables[0], grouping.common)


def _with_shards_of(x: Any, sharding: Any) -> Any:
    """The same arrays in shardings under which this process's devices hold the same shards."""

    def one(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])

    return jax.tree.map(one, x, sharding)


@functools.cache
def _resharded(steps: tuple[NamedSharding, ...]) -> Callable[[jax.Array], jax.Array]:
    """A program that moves an array to one place after the other."""

    def program(x: jax.Array) -> jax.Array:
        for step in steps[:-1]:
            x = jax.lax.with_sharding_constraint(x, step)
        return x

    return jax.jit(program, out_shardings=steps[-1])


@jax.jit
def _head(weights: nnx.State) -> jax.Array:
    """The tied head [D, V] as a separate array."""
    return jnp.transpose(weights["embedding"].get_value())
