"""The parameters as the sampler reads them."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.models import int8, lora
from psearch_jax.sharding import sampled_in_place, sampling_cast


class SamplingCopy:
    """Makes a copy that decodes: cast once, split over `tensor` only, the kernels in int8 where asked; adapters beside
    their base. Weights that are not trained are not copied where they lie as the sampler reads them.

    Args:
      weights, adapters: abstract or live; None where there are no adapters.
      dtype: of the copy; adapters stay as they are.
      in_int8: the kernels of the layers are whole numbers.
      trained: the weights change, so that what is read has to be a copy of them.
    """

    def __init__(
        self, weights: nnx.State, adapters: nnx.State | None, dtype: Any, mesh: Mesh, in_int8: bool, trained: bool
    ):
        same = all(x.dtype == dtype for x in jax.tree.leaves(weights))
        self._in_place = not trained and same and not in_int8 and sampled_in_place(weights, mesh)
        rounding = int8.with_kernels if in_int8 else None
        self._cast = sampling_cast(self._moved(weights, adapters), dtype, mesh, rounding)

    def __call__(self, weights: nnx.State, adapters: nnx.State | None = None) -> nnx.State:
        if self._in_place and adapters is None:
            return weights
        copy = self._cast(self._moved(weights, adapters))
        return lora.beside(weights, copy) if self._in_place else copy

    def traced(self, weights: nnx.State, adapters: nnx.State | None = None) -> jax.stages.Traced:
        """The program that casts, for ShapeDtypeStructs."""
        return self._cast.trace(self._moved(weights, adapters))

    def _moved(self, weights: nnx.State, adapters: nnx.State | None) -> nnx.State:
        if adapters is None:
            return weights
        return adapters if self._in_place else lora.beside(weights, adapters)
