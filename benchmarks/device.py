"""`launch/bench.py device`: the first four minutes with a GPU or TPU: rollouts and updates.

Random weights, nothing is downloaded. Each figure is printed as soon as it is measured; after --minutes no further
size is begun. `share_of_bound` compares with the published peaks of the device, if they are known: for decoding with
reading all weights once per step, for the rest with the FLOPs of the products with weights. `logp_gap` is the mean
difference between the log-probs of the sampler and of the trainer for the same tokens: their attention kernels differ,
so a wrong kernel shows here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import timing
from benchmarks.scripted import Script, ScriptedRollouts, Work, scaled
from benchmarks.update import Update, make_adapters, make_config, make_learner
from psearch_jax.config import PRESETS, DecoderConfig, MeshSection
from psearch_jax.models import decoder
from psearch_jax.rl.batch import make_batch
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.runtime.accelerators import chip_of
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.sharding import SAMPLING, make_mesh, param_shardings

SHAPES: dict[str, DecoderConfig] = {**timing.SIZES, **PRESETS}
ADAPTED = ("7b",)  # too large to train all weights on one device


def main(argv: Sequence[str]) -> None:
    parser = timing.make_parser("device", __doc__)
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b", "7b"], choices=SHAPES, help="shapes to measure")
    parser.add_argument("--minutes", type=float, default=3.0, help="begin no further size after this time")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the products")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths; below 1 for a quick test")
    parser.add_argument("--slots", type=int, default=64, help="rows decoded together, a multiple of 8")
    flags = parser.parse_args(argv)
    configure_jax()
    start, device = time.monotonic(), jax.devices()[0]
    lines: list[dict[str, Any]] = [{"part": device.device_kind, "what": f"{len(jax.devices())} x {device.platform}"}]
    chip = chip_of(device)
    flops, bandwidth = (chip.flops, chip.bandwidth) if chip else (math.inf, math.inf)
    for size in flags.sizes:
        if time.monotonic() - start > 60 * flags.minutes:
            timing.log(f"{size}: left out, {flags.minutes:g} minutes have passed")
            continue
        measure_rollouts(size, flags, flops, bandwidth, lines)
        measure_update(size, flags, flops, lines)
    timing.report(flags, "device", lines)


def add_line(
    lines: list[dict[str, Any]], part: str, what: str, amount: float, seconds: float, bound: float = 0
) -> None:
    """Appends and prints a figure; `bound` is the least possible number of seconds."""
    line = {"part": part, "what": what, "seconds": float(f"{seconds:.4g}"), "per_s": float(f"{amount / seconds:.4g}")}
    lines.append(line | ({"share_of_bound": float(f"{bound / seconds:.3g}")} if bound else {}))
    timing.log(str(lines[-1]))


class TimedSampler(Sampler):
    """Waits for each of the sampler's programs and adds up its seconds."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.seconds = dict.fromkeys(("prefill", "admit", "extend", "generate"), 0.0)
        for name in self.seconds:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, program: Callable) -> Callable:
        def run(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            out = jax.block_until_ready(program(*arguments, **keywords))
            self.seconds[name] += time.perf_counter() - start
            return out

        return run


def measure_rollouts(size: str, flags: Any, flops: float, bandwidth: float, lines: list[dict[str, Any]]) -> None:
    """Rollouts of 2,048 tokens at scale 1: a prompt of 512, three turns of 128 and two observations of 576."""
    script = Script((scaled(128, flags.scale),) * 3, (scaled(576, flags.scale),) * 2)
    work = Work("device", scaled(512, flags.scale), 8, flags.slots, (script,) * flags.slots)
    model, params = SHAPES[size], random_weights(SHAPES[size], flags.dtype)
    ours = ScriptedRollouts(work, model, params, flags.dtype, sampler=TimedSampler)
    ours.run()  # compiles
    ours.sampler.seconds = dict.fromkeys(ours.sampler.seconds, 0.0)
    start = time.perf_counter()
    trajectories = ours.run()
    total, seconds, rows = time.perf_counter() - start, ours.sampler.seconds, len(work.scripts)
    weights = sum(x.size for x in jax.tree.leaves(params["layers"]))
    step_s = jnp.dtype(flags.dtype).itemsize * (weights + model.vocab_rows * model.width) / bandwidth
    prefilled, extended = rows // work.samples * work.prompt_tokens, rows * sum(script.observations)
    steps, part = ours.usage.decode_steps, f"rollout {size}"
    add_line(lines, part, "prefilled tokens", prefilled, seconds["prefill"], 2 * weights * prefilled / flops)
    add_line(lines, part, "decode steps", steps, seconds["generate"], steps * step_s)
    add_line(lines, part, "observed tokens", extended, seconds["extend"], 2 * weights * extended / flops)
    add_line(lines, part, "rollouts", rows, total)
    if size not in ADAPTED:
        learner, state = make_learner(make_config(8, work.longest, flags.dtype), model, params)
        batch = make_batch(trajectories[:8], np.zeros(8), work.longest)
        gap = np.abs(learner.score(state.params, batch) - batch.sampler_logprobs)[batch.mask > 0].mean()
        lines[-1] |= {"logp_gap": float(f"{gap:.2g}")}


def measure_update(size: str, flags: Any, flops: float, lines: list[dict[str, Any]]) -> None:
    """An optimizer step on eight of these rollouts: of all weights, or of adapters."""
    model, adapted = SHAPES[size], size in ADAPTED
    params = random_weights(model, flags.dtype if adapted else "float32")  # products use flags.dtype
    script = Script((scaled(128, flags.scale),) * 3, (scaled(576, flags.scale),) * 2)
    masks = [script.mask(scaled(512, flags.scale))] * 8
    config = make_config(len(masks), len(masks[0]), flags.dtype, adapted, micro_batch_rows=1, remat="full")
    ours = Update(config, model, params, masks, make_adapters(model) if adapted else None)
    for _ in range(2):  # the first compiles
        start = time.perf_counter()
        ours.run()
    passes, tokens = 3 if adapted else 4, sum(map(len, masks))  # forward, recomputed forward, one or two backward
    bound = passes * 2 * sum(x.size for x in jax.tree.leaves(params["layers"])) * tokens / flops
    add_line(lines, f"update {size}", "tokens", tokens, time.perf_counter() - start, bound)


def random_weights(model: DecoderConfig, dtype: str) -> nnx.State:
    mesh = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1])
    return decoder.random_params(model, 0, jnp.dtype(dtype), lambda a: param_shardings(a, SAMPLING, mesh))
