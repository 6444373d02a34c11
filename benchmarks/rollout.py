"""`launch/bench.py rollout`: multi-turn rollouts of scripted lengths, ours beside transformers on PyTorch.

Equal weights (random, float32), prompts and lengths; the contenders take turns on one machine, so read the ratios.
`equal` is 64 rollouts alike, `ragged` 256 of different lengths over 64 slots (benchmarks/scripted.py); the peers, in
benchmarks/peers.py, keep their cache over the turns (`torch`) or read all text anew at each (`torch, re-prefilling`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.growth import drawn, growth
from benchmarks.scripted import WORKS, Ours, Work
from benchmarks.timing import SIZES, by_turns, log, machine, missing, parser, rates, tabled, written
from benchmarks.yields import table_of_rules
from psearch_jax.launching import configure_jax
from psearch_jax.models import decoder

OURS = "this project"
PEERS = {"torch": True, "torch, re-prefilling": False}  # whether the cache is kept
COLUMNS = (
    "size",
    "work",
    "contender",
    "rollouts_per_s",
    "speed_to_ours",
    "sampled_per_s",
    "row_use",
    "decode_steps",
    "extend_calls",
    "extend_use",
    "search_share",
    "host_share",
    "max_difference",
)


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    if flags.simulate:
        lines = table_of_rules()
        print(tabled(lines, tuple(lines[0])))
        written(flags.json, {"simulate": lines})
        return
    configure_jax()
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(flags), "rollout": [], "skipped": []}
    if flags.growth or flags.figure:
        lines = [line for size in flags.sizes for line in growth(size, flags.scale, flags.repeats, flags.settings)]
        print(tabled(lines, tuple(lines[0])))
        written(flags.json, report | {"rollout": lines})
        if flags.figure:
            drawn(lines, flags.figure)
        return
    peers = dict.fromkeys(flags.peers)
    if peers and (lacking := missing("torch", "transformers")):
        report["skipped"] = [f"{name}: left out, {lacking} is not installed" for name in peers]
        peers = {}
    for size in flags.sizes:
        for name in flags.works:
            work = WORKS[name](flags.scale)
            report["rollout"] += compare(size, work, list(peers), flags.repeats, flags.settings, flags.search_s)
    print(tabled(report["rollout"], COLUMNS))
    for line in report["skipped"]:
        print(line)
    written(flags.json, report)


def compare(
    size: str, work: Work, peers: Sequence[str], repeats: int, settings: dict[str, dict[str, Any]], search_s: float
) -> list[dict[str, Any]]:
    """A line for each contender; `speed_to_ours` is its speed over that of the first."""
    model = SIZES[size]
    params = decoder.init_params(model, 0)
    ours = Ours(work, model, params, settings, search_s)
    last: dict[str, Any] = {}

    def run() -> None:
        last[OURS] = ours.run()

    contenders: dict[str, Callable[[], Any]] = {OURS: run}
    if peers:
        from benchmarks.peers import TorchRollouts, token_logprobs, torch_model

        theirs = torch_model(params, model)
        for name in peers:
            last[name] = TorchRollouts(work, model, theirs, PEERS[name])
            contenders[name] = last[name].run
    seconds = by_turns(contenders, repeats, log)
    lines = []
    for name in contenders:
        line = {"size": size, "work": work.name, "contender": name}
        line["rollouts_per_s"] = rates(len(work.scripts), seconds[name])
        line["sampled_per_s"] = rates(work.sampled, seconds[name])
        line["speed_to_ours"] = round(float(np.median(seconds[OURS]) / np.median(seconds[name])), 2)
        line["seconds"] = [round(s, 3) for s in seconds[name]]
        if peers:
            # Of the longest rollout: what was recorded while it was sampled, and one pass over it by PyTorch.
            longest = max(range(len(work.scripts)), key=lambda i: work.length(work.scripts[i]))
            if name == OURS:
                found = last[name][longest]
                ids, logprobs, sampled = found.ids, found.logprobs, found.mask
            else:
                ids, logprobs = last[name].ids[longest], last[name].logprobs[longest]
                sampled = logprobs != 0
            difference = np.abs(token_logprobs(theirs, ids) - logprobs)[sampled]
            if sampled.sum() != sum(work.scripts[longest].turns) or difference.max() > 1e-3:
                raise AssertionError(f"{name}: {sampled.sum()} ids, log-probs off by {difference.max():.1e}")
            line["max_difference"] = float(f"{difference.max():.1e}")
        lines.append(line | (ours.accounting() if name == OURS else {}))
    return lines


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    flags = parser("bench rollout", __doc__, WORKS, PEERS)
    flags.add_argument("--simulate", action="store_true", help="only count, on the host, what rules of yielding cost")
    flags.add_argument("--growth", action="store_true", help="ours alone, with more rows, turns or positions")
    flags.add_argument("--figure", help="the same, drawn into this file (.svg, .png or .pdf)")
    flags.add_argument(
        "--settings", default={}, type=json.loads, help="of ours, as config.py has them: JSON, sections of fields"
    )
    flags.add_argument(
        "--search_s", type=float, default=0.0, help="seconds that each search of ours takes; the peers search nothing"
    )
    return flags.parse_args(argv)
