"""Measures host memory while a checkpoint of two layers of the 7B shape is loaded and exported.

    python tests/support/host_memory.py FOLDER

It writes the checkpoint, loads it over eight CPU devices (fsdp 4 x tensor 2), and exports it again; the files must be
equal. Prints the size of the arrays, which on a TPU or GPU are in device memory, and the peaks of anonymous memory
beyond them.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

import jax
import jax.numpy as jnp

from psearch_jax.config import PRESETS, MeshSection
from psearch_jax.models import decoder, hf
from psearch_jax.runtime.paths import TOY_POLICY
from psearch_jax.sharding import STORAGE, make_mesh, param_shardings


def anonymous_bytes() -> int:
    """Bytes of this process's memory that are not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@contextmanager
def peak_growth() -> Iterator[dict[str, float]]:
    """Yields a dict that gets the peak growth of anonymous memory in bytes."""
    measured, first, over = {"peak": 0.0}, anonymous_bytes(), threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            measured["peak"] = max(measured["peak"], anonymous_bytes() - first)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield measured
    finally:
        over.set()
        watcher.join()


def main(folder: Path) -> None:
    config, mesh = replace(PRESETS["7b"], layers=2, vocab_rows=8192), make_mesh(MeshSection(1, 4, 2))
    if not (folder / "random").is_dir():
        params = decoder.random_params(config, 0, jnp.bfloat16, lambda a: param_shardings(a, STORAGE, mesh))
        hf.save_hf(params, config, TOY_POLICY, folder / "random", jnp.bfloat16)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # with new memory
    float(jnp.ones(8).sum())  # starts the backend, whose memory is not counted
    with peak_growth() as load:
        _, params = hf.load_hf(folder / "random", lambda a: param_shardings(a, STORAGE, mesh), jnp.bfloat16)
    arrays = sum(x.nbytes for x in jax.tree.leaves(params))
    with peak_growth() as export:
        hf.save_hf(params, config, TOY_POLICY, folder / "exported", jnp.bfloat16)
    for file in (folder / "random").glob("*.safetensors"):
        assert file.read_bytes() == (folder / "exported" / file.name).read_bytes(), file.name
    figures = {"arrays": arrays, "load_over_arrays": load["peak"] - arrays, "export_over_arrays": export["peak"]}
    print(json.dumps({name: value / 1e9 for name, value in figures.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
