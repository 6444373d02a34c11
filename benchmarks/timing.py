"""What the benchmarks of speed share: random policies of a few sizes, turns by the clock, figures and their table."""

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
from typing import Any

from psearch_jax.config import DecoderConfig
from psearch_jax.eval.tables import table
from psearch_jax.paths import write_whole

PACKAGES = ("numpy", "jax", "flax", "torch", "transformers", "trl", "scann", "faiss-cpu", "numba", "bm25s", "tantivy")
SIZES: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(64, 32, 2, 4, 2, 8, 64, tied=True, rope_theta=10_000.0),  # for a look at the program itself
    "toy": DecoderConfig(512, 128, 3, 4, 2, 32, 384, tied=True, rope_theta=10_000.0),
    "small": DecoderConfig(8192, 512, 8, 8, 4, 64, 1536, tied=True, rope_theta=10_000.0),
}


def parser(prog: str, description: str, works: Collection[str], peers: Collection[str]) -> argparse.ArgumentParser:
    """The flags of every benchmark that lets peers take turns."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--sizes", nargs="+", default=["toy", "small"], choices=SIZES)
    parser.add_argument("--works", nargs="+", default=list(works), choices=works)
    parser.add_argument("--peers", nargs="*", default=list(peers), choices=peers)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths: below 1 for a quick look")
    return parser


def by_turns(
    contenders: Mapping[str, Callable[[], Any]], repeats: int, log: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of each contender, one after the other, `repeats` times round; each ran once before that counts."""
    for name, run in contenders.items():
        start = time.perf_counter()
        run()
        log(f"{name}: {time.perf_counter() - start:.1f} s, compiling included")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
            log(f"{name}: {seconds[name][-1]:.2f} s")
    return seconds


def rates(amount: float, seconds: Sequence[float]) -> dict[str, float]:
    """`amount` per second: the median over the repeats, the least and the most."""
    values = {"median": statistics.median(seconds), "min": max(seconds), "max": min(seconds)}
    return {name: float(f"{amount / value:.4g}") for name, value in values.items()}


def missing(*packages: str) -> str:
    """The packages of these that are not installed, by commas."""
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
    """A Markdown table of the lines; rates as `median (min-max)`, what a line lacks is empty."""

    def cell(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"{value['median']:g} ({value['min']:g}-{value['max']:g})"
        return "" if value is None else str(value)

    return table([[c.replace("_", " ") for c in columns], *([cell(line.get(c)) for c in columns] for line in lines)])


def written(path: str | None, report: Mapping[str, Any]) -> None:
    if path:
        write_whole(path, json.dumps(report, indent=2, default=str) + "\n")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
