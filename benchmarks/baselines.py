"""`launch/bench.py baselines`: the paper's comparison in the closed world, every method trained with the same budget.

Trains the toy policy by each method and seed (as `make demo` does), evaluates greedily on held-out questions, and
prints: the paper's table, paired differences from search_r1, the decision to split before and after, and what the
trained policies do in worlds of other names and relations. It goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.multihop_rag import write_multihop_rag
from psearch_jax.data.closed_world import ClosedWorld
from psearch_jax.data.themes import THEMES
from psearch_jax.eval.benchmarks import CLOSED_WORLD, FOUR_ENTITIES
from psearch_jax.eval.evaluate import read_scores
from psearch_jax.eval.scores import Score, by_kind, em_interval, finished_by_turn, paired, splitting, summarise
from psearch_jax.eval.tables import share, splitting_table, table
from psearch_jax.metrics import mean
from psearch_jax.paths import write_whole
from psearch_jax.types import KINDS

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("r1", "search_r1", "parallel_prompt", "parallelsearch")
REFERENCE, OURS = "search_r1", "parallelsearch"
KINDS_AND_FOUR = (*KINDS, FOUR_ENTITIES)  # FOUR_ENTITIES: comparisons of more than any training question holds
SETS = tuple(f"{CLOSED_WORLD}:{name}" for name in KINDS_AND_FOUR)
Scores = Mapping[str, Sequence[Score]]  # by set, without its prefix
# Other worlds need more ids per word than the one that the tokenizer was made for.
ROOM = ("--prompt_tokens=160", "--obs_tokens=512", "--context_tokens=1024", "--turn_tokens=96", "--slots=64")


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    out, seeds = Path(flags.out), flags.seeds
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for method in METHODS:
            _train(out / f"{method}-{seed}", method, seed, flags.steps)

    def scores(name: str, model: str | Path, *arguments: str) -> dict[str, list[Score]]:
        return _evaluate(out / "evaluations" / name, model, *arguments)

    every = [*(f"--benchmark={name}" for name in SETS), f"--count={flags.count}"]

    def by_set(name: str, model: str | Path, *arguments: str) -> Scores:
        found = scores(name, model, *every, *arguments)
        return {kind: found[full] for kind, full in zip(KINDS_AND_FOUR, SETS, strict=True)}

    by_method = {
        method: {seed: by_set(f"{method}-{seed}", out / f"{method}-{seed}") for seed in seeds} for method in METHODS
    }
    before = by_set("toy-sampled", "toy", "--temperature=1")
    after = {seed: by_set(f"{OURS}-{seed}-sampled", out / f"{OURS}-{seed}", "--temperature=1") for seed in seeds}

    report: dict[str, Any] = {"arguments": vars(flags)}
    parts = ["Every method after training, mean over seeds, greedy:", methods_table(by_method)]
    parts += ["Each seed, parallel questions:", seeds_table(by_method)]
    parts += ["Share of parallel questions finished by turn:", finished_table(by_method)]
    report["paired"] = {method: _differences(by_method, method) for method in METHODS if method != REFERENCE}
    parts += [f"Paired with {REFERENCE} over the same questions, all seeds together:", _paired_table(report["paired"])]
    report["splitting"] = {
        "before": splitting(_all(before)),
        "after": splitting([s for found in after.values() for s in _all(found)]),
    }
    parts += [
        "The decision to split, sampled at temperature 1:",
        splitting_table({moment: {"splitting": found} for moment, found in report["splitting"].items()}),
    ]
    report["cross_corpus"] = _cross_corpus(out, scores, seeds, flags.count)
    parts += ["In other worlds, greedy:", _cross_table(report["cross_corpus"])]
    text = "\n\n".join(parts) + "\n"
    write_whole(out / "baselines.md", text)
    write_whole(out / "baselines.json", json.dumps(report, indent=2) + "\n")
    print(text, end="")


def methods_table(by_method: Mapping[str, Mapping[int, Scores]]) -> str:
    """EM per set and on average over the kinds, as the paper's main table; turns and splitting beside it."""
    rows = [["method", *(f"EM {name}" for name in KINDS_AND_FOUR), "average of kinds"]]
    for kind in ("parallel", "sequential"):
        rows[0] += [f"turns {kind}", f"split {kind}"]
    for method, by_seed in by_method.items():
        figures = {name: [summarise(found[name]) for found in by_seed.values()] for name in KINDS_AND_FOUR}
        em = {name: mean(f["em"] for f in found) for name, found in figures.items()}
        row = [method, *(share(em[name]) for name in KINDS_AND_FOUR), share(mean(em[kind] for kind in KINDS))]
        for kind in ("parallel", "sequential"):
            row.append(f"{mean(f['turns'] for f in figures[kind]):.2f}")
            row.append(share(mean(f["decomposition_ratio"] for f in figures[kind])))
        rows.append(row)
    return table(rows)


def seeds_table(by_method: Mapping[str, Mapping[int, Scores]]) -> str:
    rows = [["method", "seed", "EM", "95%", "split", "turns", "LLM calls"]]
    for method, by_seed in by_method.items():
        for seed, found in by_seed.items():
            group = found["parallel"]
            f, (low, high) = summarise(group), em_interval(group)
            spread = f"{share(low)}-{share(high)}"
            numbers = [share(f["decomposition_ratio"]), f"{f['turns']:.2f}", str(f["llm_calls"])]
            rows.append([method, str(seed), share(f["em"]), spread, *numbers])
    return table(rows)


def finished_table(by_method: Mapping[str, Mapping[int, Scores]]) -> str:
    rows = [["method", *map(str, range(1, 7))]]
    for method, by_seed in by_method.items():
        shares = [finished_by_turn(found["parallel"]) for found in by_seed.values()]
        rows.append([method, *(share(mean(column)) for column in zip(*shares, strict=True))])
    return table(rows)


def _differences(by_method: Mapping[str, Mapping[int, Scores]], method: str) -> dict[str, Any]:
    """Seeds count as samples of a question: the interval is over questions."""

    def pooled(name: str, kind: str) -> list[Score]:
        return [replace(s, sample=seed) for seed, found in by_method[name].items() for s in found[kind]]

    return {
        kind: {value: paired(pooled(REFERENCE, kind), pooled(method, kind), value) for value in ("em", "turns")}
        for kind in ("parallel", FOUR_ENTITIES, "sequential")
    }


def _all(found: Scores) -> list[Score]:
    return [s for group in found.values() for s in group]


def _paired_table(found: Mapping[str, Any]) -> str:
    rows = [["method", "questions", "EM difference", "95%", "p", "turns ratio", "95%"]]
    for method, kinds in found.items():
        for kind, values in kinds.items():
            em, turns = values["em"], values["turns"]
            spread = f"{em['low']:+.3f} to {em['high']:+.3f}"
            ratio = [f"{turns['ratio']:.3f}", f"{turns['ratio_low']:.3f}-{turns['ratio_high']:.3f}"]
            rows.append([method, kind, f"{em['difference']:+.3f}", spread, f"{em['p']:.4f}", *ratio])
    return table(rows)


def _cross_corpus(out: Path, scores: Any, seeds: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Rows of world, policy, kind and figures."""
    rows = []

    def add(world: str, policy: str, found: Sequence[Score]) -> None:
        for kind, group in by_kind(found).items():
            if kind in ("parallel", "sequential"):
                rows.append({"world": world, "policy": policy, "kind": kind, **summarise(group)})

    worlds = {"its own": [], "other facts": ["--world_seed=1"]}
    worlds |= {theme: [f"--world_theme={theme}"] for theme in list(THEMES)[1:]}
    policies = {"toy": "toy", **{f"{OURS}-{seed}": out / f"{OURS}-{seed}" for seed in seeds}}
    sets = [f"--benchmark=closed_world:{kind}" for kind in ("parallel", "sequential")]
    for world, extra in worlds.items():
        for policy, model in policies.items():
            name = f"{policy}-in-{world.replace(' ', '-')}"
            found = scores(name, model, *sets, f"--count={count // 2}", *ROOM, *extra)
            add(world, policy, [s for group in found.values() for s in group])
    questions, corpus = write_multihop_rag(ClosedWorld.make(0), out, count // 2)
    index = out / "multihop-index"
    if not index.is_dir():
        _run("build_index.py", f"--corpus={corpus}", "--encoder=hashing", f"--out={index}")
    for policy, model in policies.items():
        arguments = (f"--benchmark=multihoprag:{questions}", f"--index={index}", *ROOM)
        add("MultiHop-RAG files", policy, scores(f"{policy}-multihoprag", model, *arguments)["multihoprag"])
    return rows


def _cross_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The policy before training, and the mean of the trained ones."""
    rows = [["world", "policy", "questions", "EM", "F1", "split", "turns", "valid"]]
    keys = list(dict.fromkeys((row["world"], row["policy"] == "toy", row["kind"]) for row in found))
    for world, toy, kind in keys:
        group = [r for r in found if (r["world"], r["policy"] == "toy", r["kind"]) == (world, toy, kind)]
        means = {
            key: mean(row[key] for row in group)
            for key in ("em", "f1", "decomposition_ratio", "turns", "valid_format")
        }
        shares = [share(means[key]) for key in ("em", "f1", "decomposition_ratio")]
        policy = "before" if toy else f"after, mean of {len(group)}"
        rows.append([world, policy, kind, *shares, f"{means['turns']:.2f}", share(means["valid_format"])])
    return table(rows)


def _train(workdir: Path, method: str, seed: int, steps: int) -> None:
    if (workdir / "summary.json").is_file():
        return
    settings = {"method": method, "seed": seed, "train.steps": steps, "train.checkpoint_every_steps": steps}
    settings |= {"eval.questions_per_kind": 0}  # evaluated below, on the same questions for all
    arguments = [f"--config.{name}={value}" for name, value in settings.items()]
    _run("train.py", "--config=configs/smoke.py", *arguments, f"--workdir={workdir}")


def _evaluate(out: Path, model: str | Path, *arguments: str) -> dict[str, list[Score]]:
    if not (out / "results.json").is_file():
        _run("eval.py", f"--model={model}", "--config=configs/smoke.py", *arguments, f"--out={out}", *_method(model))
    return read_scores(out)


def _method(model: str | Path) -> list[str]:
    """A trained policy is evaluated by the method that trained it."""
    return [] if model == "toy" else [f"--method={Path(model).name.rpartition('-')[0]}"]


def _run(program: str, *arguments: str) -> None:
    print(" ".join([program, *arguments]), file=sys.stderr, flush=True)
    command = [sys.executable, str(ROOT / "launch" / program), *arguments]
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench baselines", description=__doc__)
    parser.add_argument("--out", required=True, help="directory for the runs, their evaluations and the tables")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--count", type=int, default=400, help="questions per set")
    return parser.parse_args(argv)
