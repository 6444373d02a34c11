"""`launch/bench.py weights`: host memory while a large checkpoint is loaded and exported.

It writes a Hugging Face directory of random bfloat16 weights, loads it over eight CPU devices (fsdp 4 x tensor 2), and
exports it again; every tensor must be unchanged. It measures the peak of anonymous memory beyond the arrays, which on
a TPU or GPU are in device memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from psearch_jax.config import PRESETS, DecoderConfig, MeshSection
from psearch_jax.models import hf
from psearch_jax.models.tensors import TensorReader, write_files
from psearch_jax.runtime.paths import write_atomically

ROOT = Path(__file__).resolve().parents[2]
DTYPE = np.dtype(ml_dtypes.bfloat16)
FILE_BYTES, BLOCK = 4_000_000_000, 2**24


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench weights", description=__doc__)
    parser.add_argument("--preset", default="7b", choices=list(PRESETS), help="shape of the model")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; default: the preset's")
    parser.add_argument("--vocab-rows", type=int, default=0, help="rows of the embedding; default: the preset's")
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints; needs twice their size")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # for the measured subprocess
    flags = parser.parse_args(argv)
    if flags.measure:
        print(json.dumps(_measure(flags.measure)))
        return
    config = PRESETS[flags.preset]
    config = replace(config, layers=flags.layers or config.layers, vocab_rows=flags.vocab_rows or config.vocab_rows)
    with tempfile.TemporaryDirectory(dir=flags.dir) as folder:
        start = time.perf_counter()
        write_random(config, Path(folder) / "random")
        written = time.perf_counter() - start
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        }
        command = [sys.executable, "launch/bench.py", "weights", f"--measure={folder}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures = {"preset": flags.preset, "layers": config.layers, "write_s": round(written, 1)}
    figures |= json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(figures))
    if flags.json:
        write_atomically(Path(flags.json), json.dumps(figures, indent=2) + "\n")


def write_random(config: DecoderConfig, out: Path) -> None:
    """Writes a directory of random weights, file by file, and an unused tokenizer file."""
    block = np.random.default_rng(0).normal(0, 0.02, BLOCK).astype(DTYPE)

    def pieces(path: tuple[str, ...], layer: int | None, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        left, turn = int(np.prod(shape)), zlib.crc32(repr((path, layer)).encode()) % 1009  # varies the tensors
        while left:
            piece = np.roll(block[: min(left, BLOCK)], turn)
            left -= piece.size
            yield piece

    out.mkdir(parents=True)
    write_files(out, hf.tensors_of(config, pieces), DTYPE, FILE_BYTES)
    write_atomically(out / "tokenizer.json", "{}")
    hf.write_config(out, config, DTYPE)


def _measure(folder: Path) -> dict[str, Any]:
    import jax

    from psearch_jax.sharding import STORAGE, make_mesh, param_shardings

    mesh = make_mesh(MeshSection(1, 4, 2))
    float(jax.numpy.ones(8).sum())  # starts the backend, whose memory is not counted
    with _peak() as load:
        config, params = hf.load_hf(folder / "random", lambda a: param_shardings(a, STORAGE, mesh), DTYPE)
    arrays = sum(x.nbytes for x in jax.tree.leaves(params))
    with _peak() as export:
        hf.save_hf(params, config, folder / "random", folder / "exported", DTYPE)
    before, after = (_digests(config, folder / name) for name in ("random", "exported"))
    if before != after:
        raise SystemExit("bench weights: an exported tensor differs from the original")
    return {
        "arrays_gb": round(arrays / 1e9, 2),
        "load_s": round(load["seconds"], 1),
        "load_over_arrays_gb": round((load["peak"] - arrays) / 1e9, 2),
        "export_s": round(export["seconds"], 1),
        "export_over_arrays_gb": round(export["peak"] / 1e9, 2),
    }


@contextmanager
def _peak() -> Iterator[dict[str, float]]:
    """Yields a dict that gets the seconds and the peak growth of anonymous memory in bytes."""
    measured: dict[str, float] = {"peak": 0.0}
    start, first, over = time.perf_counter(), _anonymous(), threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            measured["peak"] = max(measured["peak"], _anonymous() - first)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield measured
    finally:
        over.set()
        watcher.join()
        measured["seconds"] = time.perf_counter() - start


def _anonymous() -> int:
    """Bytes of this process's memory that are not backed by a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("bench weights: /proc/self/status has no RssAnon, accepted: Linux")


def _digests(config: DecoderConfig, directory: Path) -> dict[str, str]:
    reader = TensorReader(directory)
    digests = {}
    for tensor in hf.tensors_of(config, lambda *_: ()):
        digest = hashlib.blake2b()
        for start in range(0, tensor.shape[0], 4096):
            stop = min(start + 4096, tensor.shape[0])
            part = reader.take(tensor.name, (slice(start, stop), *[slice(None)] * (len(tensor.shape) - 1)))
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        digests[tensor.name] = digest.hexdigest()
    return digests
