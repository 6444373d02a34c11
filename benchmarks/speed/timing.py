"""Shared by the speed benchmarks: random policies of a few sizes, alternating timed runs, figures and tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from psearch_jax.config import DecoderConfig
from psearch_jax.eval.tables import table
from psearch_jax.runtime.paths import write_atomically

PACKAGES = ("numpy", "jax", "flax", "torch", "transformers", "trl", "scann", "faiss-cpu", "numba", "bm25s", "tantivy")
SIZES: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(64, 32, 2, 4, 2, 8, 64, tied=True, rope_theta=10_000.0),  # to test the benchmark itself
    "toy": DecoderConfig(512, 128, 3, 4, 2, 32, 384, tied=True, rope_theta=10_000.0),
    "small": DecoderConfig(8192, 512, 8, 8, 4, 64, 1536, tied=True, rope_theta=10_000.0),
}


def parser(prog: str, description: str, works: Collection[str], peers: Collection[str]) -> argparse.ArgumentParser:
    """The flags of every benchmark that compares with peers."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--sizes", nargs="+", default=["toy", "small"], choices=SIZES, help="random policies")
    parser.add_argument("--works", nargs="+", default=list(works), choices=works, help="workloads")
    parser.add_argument("--peers", nargs="*", default=list(peers), choices=peers, help="peers to compare with")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs per contender")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths; below 1 for a quick test")
    return parser


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--model and --dtype, for `policies`."""
    parser.add_argument("--model", help="a Hugging Face directory, instead of the random policies of --sizes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and products")


def policies(flags: argparse.Namespace) -> dict[str, Any]:
    """By name, the shape and weights of --model, or None for each random policy of --sizes."""
    if not flags.model:
        return dict.fromkeys(flags.sizes)
    import jax.numpy as jnp

    from psearch_jax.models.hf import load_hf

    return {Path(flags.model).name: load_hf(flags.model, dtype=jnp.dtype(flags.dtype))}


def run_alternately(
    contenders: Mapping[str, Callable[[], Any]], repeats: int, log: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of each contender in `repeats` alternating rounds, after one untimed run of each."""
    for name, run in contenders.items():
        start = time.perf_counter()
        run()
        log(f"{name}: {time.perf_counter() - start:.1f} s, including compilation")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
            log(f"{name}: {seconds[name][-1]:.2f} s")
    return seconds


def rates(amount: float, seconds: Sequence[float]) -> dict[str, float]:
    """`amount` per second: median, minimum and maximum over the repeats."""
    values = {"median": statistics.median(seconds), "min": max(seconds), "max": min(seconds)}
    return {name: float(f"{amount / value:.4g}") for name, value in values.items()}


def missing(*packages: str) -> str:
    """Those of the packages that are not installed, separated by commas."""
    return ", ".join(name for name in packages if find_spec(name) is None)


def machine() -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    load = [round(x, 1) for x in os.getloadavg()]
    return {"cores": os.cpu_count(), "load": load, "python": platform.python_version(), "packages": packages}


def tabled(lines: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table of the lines; rates as `median (min-max)`, missing values empty."""

    def cell(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"{value['median']:g} ({value['min']:g}-{value['max']:g})"
        return "" if value is None else str(value)

    return table([[c.replace("_", " ") for c in columns], *([cell(line.get(c)) for c in columns] for line in lines)])


def written(path: str | None, report: Mapping[str, Any]) -> None:
    if path:
        write_atomically(path, json.dumps(report, indent=2, default=str) + "\n")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
