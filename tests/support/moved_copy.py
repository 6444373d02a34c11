"""Sends weights from four devices to four others, for rollout/test_copy.py: moved_copy.py FSDP,TENSOR SAMPLER_TENSOR

Prints the largest difference from the weights. The transfers may not pass through host memory (jax 0.12 checks this on
a CPU, jax 0.10 does not).
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from helpers import random_params, tiny_config

from psearch_jax.config import Lora, MeshSection
from psearch_jax.models import lora
from psearch_jax.rollout.copy import MovedCopy
from psearch_jax.sharding import STORAGE, make_mesh, param_shardings


def nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def main() -> None:
    fsdp, tensor = map(int, sys.argv[1].split(","))
    source = make_mesh(MeshSection(1, fsdp, tensor), jax.devices()[:4])
    sampler = make_mesh(MeshSection(1, -1, int(sys.argv[2])), jax.devices()[4:])
    weights = random_params(tiny_config(64))
    stored = jax.device_put(weights, param_shardings(weights, STORAGE, source))
    copy = MovedCopy(weights, jnp.float32, source, sampler, in_int8=False, trained=True)
    with jax.transfer_guard_device_to_host("disallow"):
        sent = jax.block_until_ready(copy(stored))
    assert all(x.sharding.device_set <= set(sampler.devices.flat) for x in jax.tree.leaves(sent))
    adapters = lora.init_adapters(tiny_config(64), Lora(4, 8.0), 0)
    low = jax.device_put(adapters, param_shardings(adapters, STORAGE, source))
    frozen = MovedCopy(weights, jnp.float32, source, sampler, in_int8=False, trained=False)
    for bytes_sent in (copy.sent_bytes + nbytes(low), nbytes(low)):  # the base is sent once
        joined = jax.block_until_ready(frozen(stored, low))
        assert frozen.sent_bytes == bytes_sent, (frozen.sent_bytes, bytes_sent)
    again, received = lora.split_adapters(joined)
    pairs = zip(jax.tree.leaves((sent, again, received)), jax.tree.leaves((weights, weights, low)), strict=True)
    print(max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs))


if __name__ == "__main__":
    main()
