"""Reports whether a run fits the memory of a TPU or GPU topology, without that hardware.

    python launch/plan.py --config=configs/qwen7b.py --topology=v5e:4x4

It compiles the run's programs for the topology; for TPUs this needs libtpu (`pip install 'jax[tpu]'`). It prints each
program's peak memory per chip as reported by the compiler, and the other arrays in memory at that time. For TPUs it
also compares the bytes that decoding moves and the FLOPs of an update with their lower bounds. If the run does not
fit, it prints what to change, with exit code 2.

    python launch/plan.py --config=configs/qwen7b.py --topology=h100:8 --search --write=configs/mine.py

`--search` first chooses the mesh, slots, rows per micro-batch and rematerialisation with which a step is expected to
be fastest, among those that fit, and then plans the run with them. `--write` writes them to a config file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli
from psearch_jax.types import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/qwen7b.py.", lock_config=False)
TOPOLOGY = flags.DEFINE_string("topology", None, "TPUs such as v5e:4x4, v5p:2x2x1; or GPUs such as h100, a100-80:8.")
SEARCH = flags.DEFINE_bool("search", False, "Choose mesh, slots, micro-batch rows and remat by expected time.")
WRITE = flags.DEFINE_string("write", None, "With --search: config file to write the chosen settings to.")
ARRAYS = flags.DEFINE_bool("arrays", False, "List all arrays over 1 MB per chip, not only replicated ones.")
JSON = flags.DEFINE_string("json", None, "File for the plan as JSON.")
IDS = flags.DEFINE_integer(
    "mean_ids", 0, "Mean tokens per trajectory, for the lower bound of a step's time; 0: half of the context."
)
SAMPLED = flags.DEFINE_integer("sampled_ids", 0, "How many of them are sampled; 0: a quarter.")
PROMPT = flags.DEFINE_integer("prompt_ids", 0, "How many are the prompt, which a group shares; 0: a tenth.")
cli.require("config", "topology")


def main(_: list[str]) -> None:
    from psearch_jax.runtime.accelerators import GIB, GPUS

    if WRITE.value and (not SEARCH.value or Path(WRITE.value).exists()):
        how = "with --search" if not SEARCH.value else "a new file"
        raise UserError(f"--write={WRITE.value}: accepted: {how}")
    is_gpu = TOPOLOGY.value.partition(":")[0] in GPUS
    if not is_gpu:
        jax.config.update("jax_platforms", "cpu")  # nothing runs on a device, so do not occupy a TPU
    from psearch_jax.config import from_mapping
    from psearch_jax.eval.tables import table
    from psearch_jax.models.attention.splash import splash_block
    from psearch_jax.planning import targets
    from psearch_jax.planning.plan import advice, make_plan
    from psearch_jax.planning.roofline import floor_seconds, step_seconds
    from psearch_jax.planning.search import search, with_changes, write_config
    from psearch_jax.rollout.collect import widths as widths_of
    from psearch_jax.runtime.paths import locate, make_writable, write_atomically
    from psearch_jax.sharding import described

    config = from_mapping(CONFIG.value.to_dict())
    if JSON.value:
        make_writable(locate(JSON.value).parent)
    if WRITE.value:
        make_writable(Path(WRITE.value).parent)
    target = (targets.cuda_target if is_gpu else targets.tpu_target)(TOPOLOGY.value)

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    ids = IDS.value or config.rollout.context_tokens // 2
    sampled = SAMPLED.value or ids // 4
    prompt = PROMPT.value or max(0, min(ids // 10, ids - sampled))
    if not (0 < sampled and 0 <= prompt <= ids - sampled):
        found, accepted = f"found {ids}, {sampled}, {prompt}", "0 < sampled_ids, sampled_ids + prompt_ids <= mean_ids"
        raise UserError(f"--mean_ids, --sampled_ids, --prompt_ids: {found}, accepted: {accepted}")
    record: dict[str, Any] = {}
    if SEARCH.value:
        settings = search(config, target, ids, sampled, log)
        if settings is None:
            accepted = "more or larger devices, or adapters"
            raise UserError(f"--search: no settings fit {TOPOLOGY.value}, accepted: {accepted}")
        seconds = ", ".join(f"{name} {value:.0f}" for name, value in settings.seconds.items())
        expected = f"{sum(settings.seconds.values()):.0f} s per step expected: {seconds}"
        print(", ".join(f"{name}={value}" for name, value in settings.changes.items()) + f"\n{expected}\n")
        record["search"] = {"settings": settings.changes, "expected_s": settings.seconds}
        config = with_changes(config, settings.changes)
    plan = make_plan(config, target, log)

    def gib(size: int) -> str:
        return f"{size / GIB:.2f}"

    mesh = described(plan.mesh, plan.rollout_mesh)
    kind = f"{plan.chips} x {target.kind}, {gib(plan.chip.hbm_bytes)} GiB each"
    print(f"{TOPOLOGY.value}: {kind}; {mesh}\n")
    if plan.split and not is_gpu:
        print("mesh.rollout_devices: refused by a run on a slice of several hosts\n")
    rows = [["resident", "GiB per chip"]]
    print(table(rows + [[name.replace("_", " "), gib(size)] for name, size in plan.resident.items()]) + "\n")
    rows = [["program", "largest at width", "peak", "other arrays", "total", "compiled in"]]
    for name, p in plan.programs.items():
        numbers = [gib(n) for n in (p.peak_bytes, p.resident_bytes, p.total_bytes)]
        width = f"{p.width} of {', '.join(map(str, plan.widths[name]))}" if p.width else ""
        rows.append([name, width, *([p.refused, "", ""] if p.refused else numbers), f"{p.compile_s:.0f} s"])
    print(table(rows) + "\n")
    spare = gib(plan.headroom_offloaded_bytes)
    print(f"headroom {gib(plan.headroom_bytes)} GiB; {spare} with the optimizer in host memory between updates")
    if not is_gpu:
        widths = sorted({*widths_of(config.rollout).prompts, *plan.widths["accumulate"]})
        blocks = ", ".join(f"{width} ({splash_block(width)})" for width in widths)
        print(f"row widths, with their attention block sizes: {blocks}")
    for name, shape, sharding, size, replicated in plan.large:
        if replicated or ARRAYS.value:
            where = "replicated" if replicated else "split"
            print(f"{where}: {name} {list(shape)} {sharding}, {size / 2**20:.1f} MiB on every chip")
    floor = floor_seconds(plan, config, ids, sampled, prompt)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in floor.items())
    print(
        f"a step takes at least {step_seconds(plan, config, floor):.0f} s ({parts}) with {ids} tokens per trajectory, "
        f"{sampled} of them sampled, {prompt} of the prompt"
    )
    record |= plan.to_json() | {"floor_s": floor} | _compared_with_floors(plan, config)
    if JSON.value:
        write_atomically(JSON.value, json.dumps(record, indent=2) + "\n")
    if not plan.fits:
        raise UserError("does not fit: " + "; ".join(advice(plan, config)))
    if WRITE.value:
        base = Path(config_flags.get_config_filename(flags.FLAGS["config"]))
        changes = config_flags.get_override_values(flags.FLAGS["config"]) | settings.changes
        write_config(Path(WRITE.value), base, changes, TOPOLOGY.value, expected)


def _compared_with_floors(plan: Any, config: Any) -> dict[str, Any]:
    """Prints the bytes and FLOPs of the compiled programs next to their lower bounds; returns them for the JSON."""
    from psearch_jax.planning.roofline import decode_floor_bytes, update_products_flops

    figures = {}
    decoding, update = (plan.programs.get(name) for name in ("generate", "accumulate"))
    if decoding and decoding.cost:
        half = config.rollout.context_tokens / 2
        figures["decode_bytes"] = moved = decoding.cost.turn_bytes
        figures["decode_floor_bytes"] = least = decode_floor_bytes(plan, config, half)
        ratio = f"{moved / least:.2f} x the lower bound"
        print(f"a decode step moves {moved / 1e9:.2f} GB per chip, {ratio} (rows half full)")
    if update and update.cost:
        figures["update_flops"] = done = update.cost.flops
        figures["update_products_flops"] = known = update_products_flops(plan, config)
        print(
            f"an update's micro-batch takes {done / 1e12:.1f} TFLOP per chip, {done / known:.2f} x its products with "
            "weights (full rows, without the vocabulary and the attention kernel)"
        )
    return figures


if __name__ == "__main__":
    cli.run(main)
