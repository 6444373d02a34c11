"""`launch/bench.py drafts`: rollouts with draft tokens next to plain decoding, on the same questions, in one run.

Every number of draft tokens (config.rollout.draft_tokens) samples the same trajectories, up to rounding: in bfloat16 a
few draws per hundred tokens fall to another side, as with another number of slots. The table says how many have equal
tokens, what share of the drafts was accepted, and how much faster the rollouts were. Where tokens differ, it gives the
log-prob of the likeliest token that was drawn at a first difference: rounding moves a draw between improbable tokens
much more often, because their shares of the distribution are no wider than its errors. Acceptance depends on the
policy and on the text, so a real policy and real questions give the figures that count. The default is the toy policy
in its closed world.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.timing import log, machine, written
from psearch_jax.assembly import build
from psearch_jax.closed_world.question_forms import questions as closed_world_questions
from psearch_jax.config import Config, from_mapping
from psearch_jax.data.sources import read_questions
from psearch_jax.eval.tables import table
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.runtime import cli
from psearch_jax.types import Question, Trajectory

SMOKE = Path(__file__).resolve().parents[2] / "configs" / "smoke.py"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="toy", help="policy, as --model of launch/eval.py")
    parser.add_argument("--adapters", default="", help="PEFT directory of LoRA adapters")
    parser.add_argument("--config", default=str(SMOKE), help="config file with budgets and prompt")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="sampling dtype")
    parser.add_argument("--index", default="", help="index directory; default: the config's passages")
    parser.add_argument("--questions", help="question file; default: the closed world's")
    parser.add_argument("--count", type=int, default=64, help="questions")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16], help="numbers of rows decoded together")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 7], help="numbers of draft tokens")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each; they alternate")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    cli.configure_jax()
    config = _config(flags)
    parts = build.from_path(config, flags.model)
    weights = parts.sampling_weights()
    asked = _questions(flags, parts)
    lines = []
    for slots in flags.slots:
        collectors = {n: _collector(parts, config, slots, n) for n in (0, *flags.drafts)}
        for collector in collectors.values():
            collector.warm_up(weights)
        lines += _measured(collectors, weights, asked, flags.temperature, flags.repeats, slots)
    written(flags.json, {"machine": machine(), "arguments": vars(flags), "drafts": lines})
    print(_table(lines))


def _config(flags: argparse.Namespace) -> Config:
    config = from_mapping(runpy.run_path(flags.config)["get_config"]().to_dict())
    config = replace(config, model=replace(config.model, sampling_dtype=flags.dtype))
    if flags.adapters:
        config = replace(config, model=replace(config.model, adapters=flags.adapters, lora_rank=0))
    if flags.questions:
        config = replace(config, data=replace(config.data, source=""))
    # Without a cache, which would have the first collector search for all others.
    retrieval = replace(config.retrieval, index=flags.index or config.retrieval.index, cache_mb=0)
    return replace(config, retrieval=retrieval)


def _questions(flags: argparse.Namespace, parts: build.Engine) -> list[Question]:
    if flags.questions:
        return read_questions(flags.questions)[: flags.count]
    return [
        question
        for kind in ("parallel", "sequential")
        for question in closed_world_questions(parts.world, "eval", kind, flags.count // 2, 1)
    ]


def _collector(parts: build.Engine, config: Config, slots: int, drafts: int) -> Collector:
    rollout = replace(config.rollout, slots=slots, samples=1, draft_tokens=drafts)
    return build.by_method(parts, replace(config, rollout=rollout), config.method)


def _measured(
    collectors: dict[int, Collector],
    weights: SamplingWeights,
    questions: Sequence[Question],
    temperature: float,
    repeats: int,
    slots: int,
) -> list[dict[str, Any]]:
    """A line per number of draft tokens; the collectors alternate."""
    seconds: dict[int, list[float]] = {n: [] for n in collectors}
    sampled: dict[int, list[Trajectory]] = {}
    for repeat in range(repeats):
        for n, collector in collectors.items():
            began = time.perf_counter()
            sampled[n] = collector.collect(weights, questions, 1, seed=1, step=0, temperature=temperature)
            seconds[n].append(time.perf_counter() - began)
            log(f"{slots} slots, {n} draft tokens, run {repeat + 1} of {repeats}: {seconds[n][-1]:.1f} s")
    lines = []
    for n, collector in collectors.items():
        usage, took = collector.usage, statistics.median(seconds[n])
        first, rounding = _differences(sampled[n], sampled[0])
        ratios = [plain / own for plain, own in zip(seconds[0], seconds[n], strict=True)]
        lines.append(
            {
                "slots": slots,
                "draft_tokens": n,
                "trajectories": len(questions),
                "equal": len(questions) - len(first),
                "first_differences": first,
                "logprob_rounding": rounding,
                "sampled": usage.decoded,
                "row_steps": usage.row_steps,
                "decode_steps": usage.decode_steps,
                "tokens_per_step": round(usage.tokens_per_step, 3),
                "accepted": round(usage.draft_use, 3) if usage.drafted else None,
                "seconds": round(took, 2),
                "speed": [round(ratio, 3) for ratio in ratios],
            }
        )
    return lines


def _differences(ours: Sequence[Trajectory], plain: Sequence[Trajectory]) -> tuple[list[tuple[float, float]], float]:
    """The log-probs of both tokens at the first difference of each pair of trajectories, and the largest difference of
    log-probs before one."""
    first, rounding = [], 0.0
    for own, other in zip(ours, plain, strict=True):
        n = min(len(own.ids), len(other.ids))
        differing = np.flatnonzero(own.ids[:n] != other.ids[:n])
        shared = int(differing[0]) if len(differing) else n
        gap = np.abs(own.logprobs[:shared] - other.logprobs[:shared])
        rounding = max(rounding, float(gap.max(initial=0.0)))
        if len(differing):
            first.append((round(float(own.logprobs[shared]), 3), round(float(other.logprobs[shared]), 3)))
        elif len(own.ids) != len(other.ids):
            raise AssertionError("one trajectory is the start of another: it ended although all tokens are equal")
    return first, rounding


def _table(lines: Sequence[dict[str, Any]]) -> str:
    rows = [["slots", "draft tokens", "equal", "likeliest difference", "rounding of log-probs", "accepted"]]
    rows[0] += ["tokens per step", "seconds", "speed over plain"]
    for line in lines:
        accepted = "" if line["accepted"] is None else f"{line['accepted']:.2f}"
        equal = f"{line['equal']} of {line['trajectories']}"
        likeliest = str(max((max(pair) for pair in line["first_differences"]), default=""))
        row = [str(line["slots"]), str(line["draft_tokens"]), equal, likeliest, f"{line['logprob_rounding']:.1e}"]
        row += [accepted, f"{line['tokens_per_step']:.2f}"]
        rows.append([*row, f"{line['seconds']:.1f}", f"{statistics.median(line['speed']):.2f}"])
    return table(rows)
