"""`launch/bench.py scale`: the machine that each model size needs, planned by launch/plan.py without that machine.

Every cell is a separate plan in OUT/NAME.json, so the same command resumes. For each TPU family it searches the
smallest slice whose plan fits; slices too small for weights, optimizer and cache are skipped without a plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psearch_jax.config import PRESETS
from psearch_jax.eval.tables import table
from psearch_jax.models import decoder
from psearch_jax.runtime.accelerators import CHIPS, GIB, GPUS
from psearch_jax.runtime.paths import write_atomically

ROOT = Path(__file__).resolve().parents[2]
# size -> (config file, tensor axis, slots)
SIZES = {
    "0.5b": ("qwen0p5b", 1, 64),
    "1.5b": ("qwen1p5b", 2, 64),
    "3b": ("qwen3b", 2, 128),
    "7b": ("qwen7b", 4, 128),
    "14b": ("qwen14b", 8, 128),
    "32b": ("qwen14b", 8, 128),
    "72b": ("qwen14b", 8, 128),
    "qwen3-8b": ("qwen3_8b", 4, 128),
}
SQUARES = {"2x2": 4, "2x4": 8, "4x4": 16, "4x8": 32, "8x8": 64, "8x16": 128, "16x16": 256}
CUBES = {"2x2x1": 4, "2x2x2": 8, "2x2x4": 16, "2x4x4": 32, "4x4x4": 64, "4x4x8": 128}
FAMILIES = {
    "v5e": (CHIPS["TPU v5 lite"], SQUARES),
    "v5p": (CHIPS["TPU v5"], CUBES),
    "v6e": (CHIPS["TPU v6 lite"], SQUARES),
}
PROGRAMS = ("prefill", "extend", "generate", "reshard", "logprobs", "update")
LIMIT_S = 1800


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench scale", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the plans, scale.md and scale.json")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="model sizes")
    parser.add_argument(
        "--families", nargs="+", default=[*FAMILIES, "h200"], choices=[*FAMILIES, "h200"], help="kinds of machine"
    )
    flags = parser.parse_args(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for family in flags.families:
        for size in flags.sizes:
            rows.append(_on_gpu(flags.out, size) if family == "h200" else _smallest(flags.out, size, family))
            write_atomically(flags.out / "scale.json", json.dumps(rows, indent=2) + "\n")
            write_atomically(flags.out / "scale.md", _table(rows) + "\n")
    if "v5e" in flags.families:
        fields = ["--config.mesh.tensor=4", "--config.learning.micro_batch_rows=2"]
        rows.append({"model": "7b, LoRA"} | _plan(flags.out, "7b-lora-v5e-2x4", "qwen7b_lora", "v5e:2x4", fields))
    if "h200" in flags.families:
        rows.append({"model": "7b, LoRA"} | _plan(flags.out, "7b-lora-h200", "qwen7b_lora", "h200", []))
    write_atomically(flags.out / "scale.json", json.dumps(rows, indent=2) + "\n")
    write_atomically(flags.out / "scale.md", _table(rows) + "\n")
    print(_table(rows))


def _smallest(out: Path, size: str, family: str) -> dict[str, Any]:
    """The plan for the smallest slice of the family that fits, or else for the largest one that was planned."""
    file, wanted, slots = SIZES[size]
    chip, slices = FAMILIES[family]
    plan: dict[str, Any] = {"topology": f"{family}: none of these"}
    for name, chips in slices.items():
        tensor = min(wanted, chips)
        if slots % (chips // tensor) or _held(size, chips, tensor, slots) > chip.hbm_bytes:
            continue
        plan = _plan(out, f"{size}-{family}-{name}", file, f"{family}:{name}", _fields(size, chips, tensor))
        if plan.get("fits"):
            break
    return {"model": size, **plan}


def _on_gpu(out: Path, size: str) -> dict[str, Any]:
    file, _, slots = SIZES[size]
    if _held(size, 1, 1, slots) > GPUS["h200"].hbm_bytes:
        return {"model": size, "topology": "h200", "fits": False}
    return {"model": size, **_plan(out, f"{size}-h200", file, "h200", _fields(size, 1, 1))}


def _held(size: str, chips: int, tensor: int, slots: int) -> float:
    """Bytes per chip while sampling, of the training state, the weights' copies and the KV cache only."""
    m = PRESETS[size]
    count = sum(x.size for x in _leaves(size))
    cache = 2 * m.layers * max(1, m.kv_heads // tensor) * m.head_dim * 2 * 4096 * slots / (chips / tensor)
    return 14 * count / chips + 2 * count / tensor + cache


def _leaves(size: str) -> list[Any]:
    import jax

    return jax.tree.leaves(decoder.abstract_params(PRESETS[size])[1])


def _fields(size: str, chips: int, tensor: int) -> list[str]:
    rows = chips // tensor
    fields = ["--config.model.path=", f"--config.model.preset={size}", f"--config.mesh.tensor={tensor}"]
    return [*fields, f"--config.learning.micro_batch_rows={max(rows, 8 if size == '0.5b' else 16)}"]


def _plan(out: Path, name: str, config: str, topology: str, fields: Sequence[str]) -> dict[str, Any]:
    file = out / f"{name}.json"
    if not file.is_file():
        print(f"{name} ..", file=sys.stderr, flush=True)
        command = [sys.executable, "launch/plan.py", f"--config=configs/{config}.py", f"--topology={topology}"]
        command += [f"--json={file}", *fields]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        if not file.is_file():
            raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(file.read_text(encoding="utf-8"))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    out = [
        [
            "model",
            "topology",
            "chips",
            "fsdp x tensor",
            "GiB per chip",
            *PROGRAMS,
            "headroom, GiB",
            "with optimizer offloaded",
            "compilation, s",
        ]
    ]
    for row in rows:
        if "programs" not in row:
            out.append([row["model"], row["topology"], *[""] * 9, "does not fit", "", ""])
            continue
        programs = row["programs"]
        peaks = [
            "refused" if programs[name]["refused"] else f"{programs[name]['total_bytes'] / GIB:.1f}"
            for name in PROGRAMS
        ]
        seconds = sum(p["compile_s"] for name, p in programs.items() if name != "update")
        fits = not any(p["refused"] for p in programs.values())
        headroom = [f"{row[key] / GIB:.1f}" if fits else "" for key in ("headroom_bytes", "headroom_offloaded_bytes")]
        out.append(
            [row["model"], row["topology"], str(row["chips"]), f"{row['mesh']['fsdp']} x {row['mesh']['tensor']}"]
            + [f"{row['hbm_bytes'] / GIB:.1f}", *peaks, *headroom, f"{seconds:.0f}"]
        )
    return table(out)
