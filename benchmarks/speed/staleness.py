"""`launch/bench.py staleness`: what rollouts ahead of the updates, and a mesh of their own, would save.

Decode steps are simulated from the lengths of recorded rollouts (psearch_jax/planning/simulation.py), with the slots
of a config, and turned into seconds (psearch_jax/planning/expected.py). The shares of the chip's peaks are
assumptions, the same for all rows of the table, so compare rows and not seconds. With two meshes, the slower of both
decides.
"""

from __future__ import annotations

import argparse
import json
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.timing import machine, written
from psearch_jax.config import PRESETS, Config, from_mapping
from psearch_jax.eval.tables import table
from psearch_jax.planning.expected import Job, Machine, Shares, learning_seconds, sampling_seconds
from psearch_jax.planning.simulation import Lengths, SampledStep, scaled, simulate
from psearch_jax.runtime.accelerators import CHIPS, GPUS
from psearch_jax.types import UserError

ROOT = Path(__file__).resolve().parents[2]
MACHINES = {
    "v5e:4x4": Machine(CHIPS["TPU v5 lite"], 16, 4),
    "v6e:4x4": Machine(CHIPS["TPU v6 lite"], 16, 4),
    "h100:8": Machine(GPUS["h100"], 8, 2),
}
STEPS = 6  # simulated and averaged, after those that fill the pipeline


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench staleness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", required=True, help="run whose trajectories/ give the distribution of lengths")
    parser.add_argument("--config", default=str(ROOT / "configs" / "qwen7b.py"), help="config with slots and batches")
    parser.add_argument("--preset", default="7b", choices=sorted(PRESETS), help="model shape")
    parser.add_argument("--tokens", type=float, default=3098, help="mean tokens per rollout")
    parser.add_argument("--sampled", type=float, default=600, help="mean sampled tokens; recorded turns are scaled")
    parser.add_argument("--slots", type=int, nargs="+", help="numbers of slots; default: the config's")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2], help="values of train.staleness")
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=list(MACHINES), help="machines")
    for name, share in vars(Shares()).items():
        parser.add_argument(f"--{name}_share", type=float, default=share, help=f"reached share of the peak {name}")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    config = from_mapping(runpy.run_path(flags.config)["get_config"]().to_dict())
    job = Job(PRESETS[flags.preset], config, flags.tokens, flags.sampled)
    recorded = recorded_lengths(Path(flags.rollouts), config.rollout.context_tokens)
    lengths = scaled(recorded, flags.sampled, config.rollout.turn_tokens)
    shares = Shares(flags.flops_share, flags.bandwidth_share, flags.link_share)
    lines = []
    for slots in flags.slots or [config.rollout.slots]:
        for staleness in flags.staleness:
            sampled = mean_step(lengths, replace(config, rollout=replace(config.rollout, slots=slots)), staleness)
            for name in flags.machines:
                expected = times(job, MACHINES[name], slots, staleness, sampled, shares)
                lines += [{"machine": name, **line} for line in expected]
    written(flags.json, {"machine": machine(), "arguments": vars(flags), "staleness": lines})
    columns = ["machine", "slots", "staleness", "devices that sample", "decode steps", "row use"]
    columns += ["sampling s", "learning s", "step s"]
    rows = [[*columns, "gain"]]
    for line in lines:
        same = [one for one in lines if (one["machine"], one["slots"]) == (line["machine"], line["slots"])]
        base = next((one["step s"] for one in same if not one["staleness"]), None)
        rows.append([*(_shown(line[name]) for name in columns), f"{base / line['step s']:.2f}" if base else ""])
    print(table(rows))


def recorded_lengths(run: Path, context_tokens: int) -> list[Lengths]:
    """The turns of a run's recorded rollouts.

    Raises:
      UserError: the run has none.
    """
    out = []
    for file in sorted((run / "trajectories").glob("*.jsonl")):
        for line in file.read_bytes().splitlines():  # str.splitlines would also cut at U+2028
            row = json.loads(line)
            turns = tuple(turn["n_sampled"] for turn in row["turns"] if turn["n_sampled"])
            cut = row["status"] == "truncated" and len(row["ids"]) < context_tokens
            if turns:
                out.append(Lengths(turns, row["status"] == "out_of_turns" or cut))
    if not out:
        raise UserError(f"--rollouts={run}: has no recorded rollouts, accepted: a run with trajectories/*.jsonl")
    return out


def mean_step(lengths: Sequence[Lengths], config: Config, staleness: int) -> SampledStep:
    """The mean cost of a step whose rollouts are drawn from `lengths`."""
    rng = np.random.default_rng(0)
    n = config.train.prompts * config.rollout.samples
    batches = [[lengths[i] for i in rng.integers(len(lengths), size=n)] for _ in range(STEPS + 2 * staleness)]
    steps = simulate(batches, config.rollout.slots, staleness, config.rollout.yield_share, first=staleness)
    fields = SampledStep.__dataclass_fields__
    return SampledStep(**{name: round(np.mean([getattr(step, name) for step in steps])) for name in fields})


def times(
    job: Job, where: Machine, slots: int, staleness: int, sampled: SampledStep, shares: Shares
) -> Iterator[dict[str, Any]]:
    """The expected seconds of a step on one mesh and, with staleness, on the best division into two."""
    base = {
        "slots": slots,
        "staleness": staleness,
        "decode steps": sampled.decode_steps,
        "row use": sampled.row_steps / (sampled.decode_steps * slots),
    }

    def divided(sampling: int, learning: int) -> dict[str, float]:
        there, here = (replace(where, chips=chips) for chips in (sampling, learning))
        return {
            "sampling s": sum(sampling_seconds(job, there, slots, sampled, shares).values()),
            "learning s": sum(learning_seconds(job, here, shares).values()),
        }

    chips, tensor = where.chips, where.tensor
    together = divided(chips, chips)
    yield {**base, "devices that sample": chips, **together, "step s": sum(together.values())}
    if staleness:
        # If fsdp did not divide the model's width, every chip that trains would hold all rows of every matrix.
        parts = [n for n in range(tensor, chips, tensor) if job.model.width % ((chips - n) // tensor) == 0]
        splits = [(n, divided(n, chips - n)) for n in parts]
        n, best = min(splits, key=lambda pair: max(pair[1].values()))
        yield {**base, "devices that sample": n, **best, "step s": max(best.values())}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.2f}" if 0 < value < 1 else f"{value:,.0f}"
