"""Shared by the benchmarks: random policies, alternating timed runs, rates, tables, and a JSON file of the figures."""

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

OURS = "this project"
PACKAGES = ("numpy", "jax", "flax", "torch", "transformers", "scann", "faiss-cpu", "numba", "bm25s")
SIZES: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(64, 32, 2, 4, 2, 8, 64, tied=True, rope_theta=10_000.0),  # to test the benchmark itself
    "toy": DecoderConfig(512, 128, 3, 4, 2, 32, 384, tied=True, rope_theta=10_000.0),
    "small": DecoderConfig(8192, 512, 8, 8, 4, 64, 1536, tied=True, rope_theta=10_000.0),
}


def make_parser(name: str, description: str | None, works: Collection[str] = ()) -> argparse.ArgumentParser:
    """The flags of all benchmarks; with `works` also those of rollouts, updates and steps."""
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=description)
    parser.add_argument("--json", help="file for the figures")
    if works:
        parser.add_argument("--sizes", nargs="+", default=["toy", "small"], choices=SIZES, help="random policies")
        parser.add_argument("--model", help="a Hugging Face directory instead of random policies")
        parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="with --model")
        parser.add_argument("--works", nargs="+", default=list(works), choices=works, help="workloads")
        parser.add_argument(
            "--peers", action=argparse.BooleanOptionalAction, default=True, help="compare with PyTorch"
        )
        parser.add_argument("--repeats", type=int, default=5, help="timed runs per contender")
        parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths; below 1 for a quick test")
    return parser


def load_policies(flags: argparse.Namespace) -> dict[str, tuple[DecoderConfig, Any]]:
    """By name, the shape and weights of --model, or of each random policy of --sizes."""
    import jax.numpy as jnp

    from psearch_jax.models import decoder
    from psearch_jax.models.hf import load_hf

    if flags.model:
        return {Path(flags.model).name: load_hf(flags.model, dtype=jnp.dtype(flags.dtype))}
    return {size: (SIZES[size], decoder.init_params(SIZES[size], 0)) for size in flags.sizes}


def run_alternately(contenders: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contender in `repeats` alternating rounds, after one untimed run of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if turn:
                seconds[name].append(elapsed)
            log(f"{name}: {elapsed:.2f} s{'' if turn else ', including compilation'}")
    return seconds


def summarise_seconds(seconds: Mapping[str, Sequence[float]], amount: float, unit: str) -> dict[str, dict[str, Any]]:
    """For each contender `amount` per second (median, slowest, fastest) and its speed relative to ours."""
    ours = statistics.median(seconds[OURS])
    lines = {}
    for name, taken in seconds.items():
        rates = (amount / value for value in (statistics.median(taken), max(taken), min(taken)))
        median, slowest, fastest = (f"{rate:.4g}" for rate in rates)
        relative = round(ours / statistics.median(taken), 2)
        lines[name] = {"contender": name, unit: f"{median} ({slowest}-{fastest})", "relative_speed": relative}
    return lines


def find_peers(wanted: bool, *packages: str) -> bool:
    """Whether to run peers that need these packages; prints what is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if wanted and missing:
        print(f"peers left out: {', '.join(missing)} not installed")
    return wanted and not missing


def describe_machine() -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    load = [round(x, 1) for x in os.getloadavg()]
    return {"cores": os.cpu_count(), "load": load, "python": platform.python_version(), "packages": packages}


def report(flags: argparse.Namespace, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints the lines as a Markdown table, and writes them to --json with the machine and the flags."""
    columns = list(dict.fromkeys(column for line in lines for column in line))
    rows = [["" if line.get(column) is None else str(line[column]) for column in columns] for line in lines]
    print(table([[column.replace("_", " ") for column in columns], *rows]))
    if flags.json:
        figures = {"machine": describe_machine(), "arguments": vars(flags), name: lines}
        write_atomically(flags.json, json.dumps(figures, indent=2, default=str) + "\n")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
