"""Checks the text of the model's compiled programs, for devices that this machine need not have."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import tiny_config
from jax.sharding import NamedSharding, PartitionSpec

from psearch_jax.config import Lora, MeshSection
from psearch_jax.models import decoder
from psearch_jax.models.backend import Backend
from psearch_jax.models.lora import abstract_adapters
from psearch_jax.planning.targets import tpu_target
from psearch_jax.sharding import STORAGE, attach_shardings, make_mesh, param_shardings


def test_gradients_of_weights_are_summed_in_float32():
    """Chips add their parts of a kernel's gradient in float32."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    mesh = make_mesh(MeshSection(1, 4, 2), tpu_target("v5e:2x4").devices)
    config, positions = tiny_config(width=384, heads=6, kv_heads=2, head_dim=64, mlp=1536), 256
    abstract = decoder.abstract_params(config)[1]
    params = attach_shardings(abstract, places := param_shardings(abstract, STORAGE, mesh))
    ids = jax.ShapeDtypeStruct((8, positions), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

    def loss(params, ids):
        model = nnx.merge(decoder.graphdef(config, jnp.bfloat16, "dots", Backend("splash")), params)
        return jnp.sum(model.hidden(ids)[0].astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss), out_shardings=places).lower(params, ids).compile().as_text()
    sums = re.findall(r"= (.*) (?:all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", text)
    arrays = [
        (kind, list(map(int, dims.split(","))))
        for each in sums
        for kind, dims in re.findall(r"\b(f32|bf16)\[([\d,]+)\]", each)
    ]
    of_rows = {positions, 2 * positions}  # a device has two rows
    kernels = [(kind, dims) for kind, dims in arrays if math.prod(dims) > 4096 and not of_rows & {*dims}]
    assert len(kernels) >= 3 and {kind for kind, _ in kernels} == {"f32"}, kernels
    assert any(of_rows & {*dims} for kind, dims in arrays if kind == "bf16"), "activations are, and may be"


@pytest.mark.parametrize(("dtype", "asked"), [("float32", True), ("bfloat16", False)])
def test_what_precision_is_asked_for(dtype, asked):
    """Every product of a float32 model requests full precision, also in the backward pass."""
    config, lora = tiny_config(), Lora(4, 8.0)
    graph = decoder.graphdef(config, jnp.dtype(dtype), remat="full", lora=lora)
    base, adapters = decoder.abstract_params(config)[1], abstract_adapters(config, lora)
    ids = jax.ShapeDtypeStruct((2, 300), jnp.int32)

    def loss(adapters, base, ids):
        model = nnx.merge(graph, base, adapters)
        hidden, _ = model.hidden(ids)
        return jnp.sum(model.logprobs(hidden, ids, 1.0, 400)[0]) + jnp.sum(model.logits(hidden[:, -1], 1.0, 400))

    for platform in ("tpu", "cuda"):
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(adapters, base, ids)
        text = program.lower(lowering_platforms=(platform,)).as_text()
        products = re.findall(r"dot_general.*", text)
        highest = [line for line in products if "precision = [HIGHEST, HIGHEST]" in line]
        assert len(products) > 60 and len(highest) == (len(products) if asked else 0)
