"""`launch/bench.py rollout`: multi-turn rollouts of scripted lengths, compared with transformers on PyTorch.

All contenders have the same weights (random, or those of --model), prompts and lengths, and run alternately on one
machine: compare the ratios. `equal` is 64 rollouts of one length, `ragged` 256 of different lengths on 64 slots;
--slots scales both (scripted.py). The peers (peers.py) keep their KV cache over the turns
(`torch`) or prefill all text again at each turn (`torch, re-prefilling`). `products_gflops` is the rate, in GFLOP/s,
of the products with weights that every contender needs, counting each token once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.speed.growth import growth, plot
from benchmarks.speed.scripted import WORKS, Ours, Work, on_slots
from benchmarks.speed.timing import (
    SIZES,
    add_model_flags,
    log,
    machine,
    missing,
    parser,
    policies,
    rates,
    run_alternately,
    tabled,
    written,
)
from psearch_jax.config import DecoderConfig
from psearch_jax.models import decoder
from psearch_jax.runtime.cli import configure_jax

OURS = "this project"
PEERS = {"torch": True, "torch, re-prefilling": False}  # whether the cache is kept
COLUMNS = (
    "size",
    "work",
    "contender",
    "rollouts_per_s",
    "relative_speed",
    "sampled_per_s",
    "row_use",
    "decode_steps",
    "extend_calls",
    "extend_use",
    "search_share",
    "host_share",
    "products_gflops",
    "max_difference",
)


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    configure_jax()
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(flags), "rollout": [], "skipped": []}
    if flags.growth or flags.figure:
        lines = [line for size in flags.sizes for line in growth(size, flags.scale, flags.repeats, flags.settings)]
        print(tabled(lines, tuple(lines[0])))
        written(flags.json, report | {"rollout": lines})
        if flags.figure:
            plot(lines, flags.figure)
        return
    peers = dict.fromkeys(flags.peers)
    if peers and (lacking := missing("torch", "transformers")):
        report["skipped"] = [f"{name}: left out, {lacking} is not installed" for name in peers]
        peers = {}
    for size, policy in policies(flags).items():
        for name in flags.works:
            work, settings = on_slots(WORKS[name](flags.scale), flags.slots), (flags.settings, flags.search_s)
            report["rollout"] += compare(size, work, list(peers), flags.repeats, *settings, flags.dtype, policy)
    print(tabled(report["rollout"], COLUMNS))
    for line in report["skipped"]:
        print(line)
    written(flags.json, report)


def compare(
    size: str,
    work: Work,
    peers: Sequence[str],
    repeats: int,
    settings: dict[str, dict[str, Any]],
    search_s: float,
    dtype: str = "float32",
    policy: tuple[DecoderConfig, nnx.State] | None = None,
) -> list[dict[str, Any]]:
    """A line for each contender; `relative_speed` is its speed relative to ours.

    Args:
      dtype: of weights and products of all contenders.
      policy: default: random weights of the size.
    """
    model, params = policy or (SIZES[size], decoder.init_params(SIZES[size], 0))
    ours = Ours(work, model, params, settings, search_s, dtype)
    gflop = 2e-9 * work.read * sum(x.size for x in jax.tree.leaves(params["layers"]))
    gflop += 2e-9 * work.sampled * model.width * model.vocab_rows
    limit = 1e-3 if dtype == "float32" else 0.5  # largest difference from the log-probs of a PyTorch forward pass
    last: dict[str, Any] = {}

    def run() -> None:
        last[OURS] = ours.run()

    contenders: dict[str, Callable[[], Any]] = {OURS: run}
    if peers:
        from benchmarks.speed.peers import TorchRollouts, token_logprobs, torch_model

        theirs = torch_model(params, model, dtype)
        for name in peers:
            last[name] = TorchRollouts(work, model, theirs, PEERS[name])
            contenders[name] = last[name].run
    seconds = run_alternately(contenders, repeats, log)
    lines = []
    for name in contenders:
        line = {"size": size, "work": work.name, "contender": name}
        line["rollouts_per_s"] = rates(len(work.scripts), seconds[name])
        line["sampled_per_s"] = rates(work.sampled, seconds[name])
        line["relative_speed"] = round(float(np.median(seconds[OURS]) / np.median(seconds[name])), 2)
        line["products_gflops"] = float(f"{gflop / np.median(seconds[name]):.3g}")
        line["seconds"] = [round(s, 3) for s in seconds[name]]
        if peers:
            # Compare the log-probs recorded while sampling the longest rollout with a PyTorch forward pass over it.
            longest = max(range(len(work.scripts)), key=lambda i: work.length(work.scripts[i]))
            if name == OURS:
                trajectory = last[name][longest]
                ids, logprobs, sampled = trajectory.ids, trajectory.logprobs, trajectory.mask
            else:
                ids, logprobs = last[name].ids[longest], last[name].logprobs[longest]
                sampled = logprobs != 0
            difference = np.abs(token_logprobs(theirs, ids) - logprobs)[sampled]
            if sampled.sum() != sum(work.scripts[longest].turns) or difference.max() > limit:
                raise AssertionError(f"{name}: {sampled.sum()} tokens, log-probs off by {difference.max():.1e}")
            line["max_difference"] = float(f"{difference.max():.1e}")
        lines.append(line | (ours.accounting() if name == OURS else {}))
    return lines


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    flags = parser("bench rollout", __doc__, WORKS, PEERS)
    add_model_flags(flags)
    flags.add_argument("--slots", type=int, default=64, help="rows decoded in one batch, a multiple of 8")
    flags.add_argument("--growth", action="store_true", help="only ours, with more rows, turns or positions")
    flags.add_argument("--figure", help="as --growth, and plot it to this file (.svg, .png or .pdf)")
    flags.add_argument(
        "--settings", default={}, type=json.loads, help="our settings as JSON, sections of config fields"
    )
    flags.add_argument(
        "--search_s", type=float, default=0.0, help="seconds per search of ours; the peers do not search"
    )
    parsed = flags.parse_args(argv)
    if parsed.slots < 8 or parsed.slots % 8:
        flags.error(f"--slots={parsed.slots}: accepted: a multiple of 8, the rollouts of a group")
    return parsed
