"""Reports whether a run fits the memory of a TPU or GPU topology, without that hardware.

    python launch/plan.py --config=configs/qwen7b.py --topology=v5e:4x4

It compiles the run's programs for the topology; for TPUs this needs libtpu (`pip install 'jax[tpu]'`), for GPUs JAX's
GPU package (`pip install 'jax[cuda13]'`). It prints each program's peak memory per chip as reported by the compiler,
the other arrays in memory at that time, and lower bounds on the seconds of a training step. If the run does not fit,
it prints what to change, with exit code 2. configs/machines.py has settings for some machines.
"""

import json
import sys

import jax
from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli
from psearch_jax.types import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/qwen7b.py.", lock_config=False)
TOPOLOGY = flags.DEFINE_string("topology", None, "TPUs such as v5e:4x4, v5p:2x2x1; or GPUs such as h100, a100-80:8.")
JSON = flags.DEFINE_string("json", None, "File for the plan as JSON.")
MEAN = flags.DEFINE_integer(
    "mean_tokens", 0, "Mean tokens per trajectory, for the lower bound of a step's time; 0: half of the context."
)
SAMPLED = flags.DEFINE_integer("sampled_tokens", 0, "How many of them are sampled; 0: a quarter.")
PROMPT = flags.DEFINE_integer("prompt_tokens", 0, "How many are the prompt, which a group shares; 0: a tenth.")
cli.require("config", "topology")


def main(_: list[str]) -> None:
    from psearch_jax.runtime.accelerators import GIB, GPUS

    is_gpu = TOPOLOGY.value.partition(":")[0] in GPUS
    if not is_gpu:
        jax.config.update("jax_platforms", "cpu")  # nothing runs on a device, so do not occupy a TPU
    from psearch_jax.config import from_mapping
    from psearch_jax.eval.tables import table
    from psearch_jax.planning import targets
    from psearch_jax.planning.plan import advice, make_plan
    from psearch_jax.planning.roofline import lower_bounds
    from psearch_jax.runtime.paths import locate, make_writable, write_atomically
    from psearch_jax.sharding import describe_meshes

    config = from_mapping(CONFIG.value.to_dict())
    mean = MEAN.value or config.rollout.context_tokens // 2
    sampled = SAMPLED.value or mean // 4
    prompt = PROMPT.value or max(0, min(mean // 10, mean - sampled))
    if not (0 < sampled and 0 <= prompt <= mean - sampled):
        accepted = "0 < sampled_tokens, sampled_tokens + prompt_tokens <= mean_tokens"
        raise UserError(
            f"--mean_tokens: found {mean}, {sampled} sampled, {prompt} of the prompt, accepted: {accepted}"
        )
    if JSON.value:
        make_writable(locate(JSON.value).parent)
    target = (targets.cuda_target if is_gpu else targets.tpu_target)(TOPOLOGY.value)
    plan = make_plan(config, target, log=lambda line: print(line, file=sys.stderr, flush=True))

    def gib(size: int) -> str:
        return f"{size / GIB:.2f}"

    kind = f"{plan.chips} x {target.kind}, {gib(plan.chip.hbm_bytes)} GiB each"
    print(f"{TOPOLOGY.value}: {kind}; {describe_meshes(plan.mesh, plan.rollout_mesh)}\n")
    rows = [["resident", "GiB per chip"]]
    print(table(rows + [[name.replace("_", " "), gib(size)] for name, size in plan.resident.items()]) + "\n")
    rows = [["program", "largest at width", "peak", "other arrays", "total", "compiled in"]]
    for name, p in plan.programs.items():
        numbers = [gib(n) for n in (p.peak_bytes, p.resident_bytes, p.total_bytes)]
        rows.append(
            [name, str(p.width or ""), *([p.refused, "", ""] if p.refused else numbers), f"{p.compile_s:.0f} s"]
        )
    print(f"{table(rows)}\n\nheadroom {gib(plan.headroom_bytes)} GiB")
    bounds = lower_bounds(plan, config, mean, sampled, prompt)
    lengths = f"{mean} tokens per trajectory, {sampled} of them sampled, {prompt} of the prompt"
    rows = [["part of a step", "lower bound, s"], *([name, f"{seconds:.1f}"] for name, seconds in bounds.items())]
    print(f"\n{table(rows)}\n\na step takes at least {sum(bounds.values()):.0f} s with {lengths}")
    if JSON.value:
        write_atomically(JSON.value, json.dumps(plan.to_json() | {"lower_bounds_s": bounds}, indent=2) + "\n")
    if not plan.fits:
        raise UserError("does not fit: " + "; ".join(advice(plan, config)))


if __name__ == "__main__":
    cli.run(main)
