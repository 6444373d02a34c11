"""The sampling copy of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.models import lora
from psearch_jax.runtime.compiling import Program, abstract
from psearch_jax.sharding import SAMPLING, STORAGE, param_shardings


def make_cast(abstract: nnx.State, dtype: Any, mesh: Mesh, regroup: bool = False) -> Callable[[nnx.State], nnx.State]:
    """A jitted function from stored parameters to the sampler's copy, which is split by `SAMPLING` in `mesh`.

    The copy is in `dtype`. Adapters keep their dtype: the model casts them where it uses them, and rounding them twice
    would differ from training.

    Args:
      regroup: `mesh` is not the one of the parameters. Devices then first exchange parts until the copy is split by
        `STORAGE` in `mesh`, and gather fsdp after that, so that none ever holds more of a kernel than in the end.
    """

    def cast_one(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        adapter = isinstance(variable, nnx.LoRAParam)
        return variable.replace(jnp.copy(value) if adapter else value.astype(dtype))

    def cast(params: nnx.State) -> nnx.State:
        copy = jax.tree.map(cast_one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
        if regroup:
            copy = jax.lax.with_sharding_constraint(copy, param_shardings(copy, STORAGE, mesh))
        return copy

    return jax.jit(cast, out_shardings=param_shardings(jax.eval_shape(cast, abstract), SAMPLING, mesh))


def can_sample_in_place(abstract: nnx.State, mesh: Mesh) -> bool:
    """Whether the storage and sampling shardings are equivalent: they are unless the mesh splits over fsdp."""
    pairs = zip(
        jax.tree.leaves(param_shardings(abstract, STORAGE, mesh)),
        jax.tree.leaves(param_shardings(abstract, SAMPLING, mesh)),
        jax.tree.leaves(abstract),
        strict=True,
    )
    return all(stored.is_equivalent_to(read, x.ndim) for stored, read, x in pairs)


class SamplingCopy:
    """Makes the copy that decodes: cast once, split over `tensor` only, with adapters and base weights in one tree.

    Frozen weights are not copied if they already have the sampler's dtype and layout.

    Args:
      weights, adapters: abstract or concrete; adapters are None if there are none.
      dtype: of the copy; adapters keep theirs.
      mesh: of the weights.
      trained: the weights change, so the sampler needs a copy of them.
      rollout_mesh: the sampler's, of the same devices in the same order; default: `mesh`.
    """

    def __init__(
        self,
        weights: nnx.State,
        adapters: nnx.State | None,
        dtype: Any,
        mesh: Mesh,
        *,
        trained: bool,
        rollout_mesh: Mesh | None = None,
    ):
        rollout_mesh = rollout_mesh or mesh
        same = rollout_mesh == mesh and all(x.dtype == dtype for x in jax.tree.leaves(weights))
        self._in_place = same and not trained and can_sample_in_place(weights, mesh)
        self._mesh = mesh
        self._cast = make_cast(self._copied(weights, adapters), dtype, rollout_mesh, rollout_mesh != mesh)

    def __call__(self, weights: nnx.State, adapters: nnx.State | None = None) -> nnx.State:
        if self._in_place and adapters is None:
            return weights
        with jax.set_mesh(self._mesh):
            copy = self._cast(self._copied(weights, adapters))
        return lora.join_adapters(weights, copy) if self._in_place else copy

    def program(self, weights: nnx.State, adapters: nnx.State | None = None) -> Program:
        """The program that a call with these arguments runs; ShapeDtypeStructs are enough."""
        arguments = jax.tree.map(abstract, self._copied(weights, adapters))
        return Program("reshard", self._cast, lambda _: (arguments,), self._mesh)

    def _copied(self, weights: nnx.State, adapters: nnx.State | None) -> nnx.State:
        """The parameters that the copy does not share with training."""
        if adapters is None:
            return weights
        return adapters if self._in_place else lora.join_adapters(weights, adapters)
