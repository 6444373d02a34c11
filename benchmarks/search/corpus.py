"""`launch/bench.py corpus`: the time and memory of opening and reading a large jsonl corpus, in a separate process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MEASURE = """
import json, resource, sys, time
import numpy as np
from retrieval.corpus import MemoryMappedCorpus

start = time.perf_counter()
corpus = MemoryMappedCorpus(sys.argv[1])
opened = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of opening only: reading rows maps pages
rows = np.random.default_rng(0).integers(0, len(corpus), 100_000).tolist()
start = time.perf_counter()
for row in rows:
    corpus[row]
read = time.perf_counter() - start
print(json.dumps({"rows": len(corpus), "open_s": round(opened, 1), "rows_per_s": round(len(corpus) / opened),
                  "peak_mb": round(peak), "random_rows_per_s": round(len(rows) / read)}))
"""
TEXT = "The keeper of the northern harbor wrote down every ship that came and every ship that left. " * 7


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench corpus", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the synthetic corpus")
    parser.add_argument("--folder", help="folder for the synthetic corpus, which is removed at the end")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        path = Path(folder) / "corpus.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for row in range(flags.rows):
                file.write(json.dumps({"id": str(row), "contents": f'"Harbor {row}"\n{TEXT}'}) + "\n")
        size = path.stat().st_size
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path)], stdout=subprocess.PIPE, text=True, check=True
        )
    figures = {"bytes": size} | json.loads(done.stdout)
    print(json.dumps(figures))
    if flags.json:
        temporary = Path(f"{flags.json}.tmp")
        temporary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        temporary.replace(flags.json)
