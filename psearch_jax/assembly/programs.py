"""Creates the sampler of a config without using a device, so that plans can compile its programs for absent ones."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.models import decoder
from psearch_jax.models.backend import choose_backend
from psearch_jax.rollout.boundary import BoundaryTables
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.rollout.sampler_programs import SamplerOptions


def make_sampler(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    tables: BoundaryTables,
    n_ids: int,
    stop_ids: Sequence[int],
    sampler_class: type[Sampler] = Sampler,
) -> Sampler:
    """The sampler of a config."""
    m = config.model
    dtype = jnp.dtype(m.sampling_dtype)
    options = SamplerOptions(
        dtype=dtype,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        lora=m.lora,
    )
    backend = choose_backend(mesh, dtype, model, config.rollout.slots)
    return sampler_class(
        graph=decoder.graphdef(model, dtype, backend=backend, lora=m.lora),
        config=model,
        tables=tables,
        n_ids=n_ids,
        stop_ids=stop_ids,
        mesh=mesh,
        backend=backend,
        options=options,
    )
