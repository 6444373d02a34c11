"""Makes sampling copies for another `tensor` on the same eight devices, for rollout/test_copy.py:
regrouped_copy.py DATA,FSDP,TENSOR,SAMPLER_TENSOR ...

Prints the largest difference from the copies of a single mesh. The transfers may not pass through host memory, and no
device may hold a complete kernel meanwhile.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from helpers import random_params, tiny_config

from psearch_jax.config import Lora, MeshSection
from psearch_jax.models import lora
from psearch_jax.rollout.copy import SamplingCopy
from psearch_jax.sharding import SAMPLING, STORAGE, attach_shardings, make_meshes, param_shardings


def difference(data: int, fsdp: int, tensor: int, sampler_tensor: int) -> float:
    """The largest difference for one pair of meshes."""
    mesh, sampler = make_meshes(MeshSection(data, fsdp, tensor, rollout_tensor=sampler_tensor))
    assert sampler.shape["tensor"] == sampler_tensor and list(sampler.devices.flat) == list(mesh.devices.flat)
    weights = random_params(tiny_config(64))
    adapters = lora.init_adapters(tiny_config(64), Lora(4, 8.0), 0)
    stored, low = (jax.device_put(x, param_shardings(x, STORAGE, mesh)) for x in (weights, adapters))
    differences = []
    for trained, parts in ((True, (stored,)), (False, (stored, low))):
        abstract = (weights, adapters if len(parts) == 2 else None)
        copy = SamplingCopy(*abstract, jnp.float32, mesh, trained=trained, rollout_mesh=sampler)
        with jax.transfer_guard("disallow"):
            ours = jax.block_until_ready(copy(*parts))
        theirs = SamplingCopy(*abstract, jnp.float32, mesh, trained=trained)(*parts)
        places = param_shardings(ours, SAMPLING, sampler)
        assert all(x.sharding == place for x, place in zip(*map(jax.tree.leaves, (ours, places)), strict=True))
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        differences += [float(np.max(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)))) for a, b in pairs]
    if sampler_tensor > 1:
        copy = SamplingCopy(weights, None, jnp.float32, mesh, trained=True, rollout_mesh=sampler)
        program = copy.program(attach_shardings(weights, param_shardings(weights, STORAGE, mesh)))
        shapes = set(re.findall(r"f32\[([\d,]+)\]", program.compile(0).as_text()))
        complete = weights["layers"]["up_kernel"].get_value().shape
        assert ",".join(map(str, complete)) not in shapes, shapes
    return max(differences)


if __name__ == "__main__":
    print(max(difference(*map(int, sizes.split(","))) for sizes in sys.argv[1:]))
